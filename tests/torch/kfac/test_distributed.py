"""K-FAC on two ranks against K-FAC in one process on everybody's batches."""

from __future__ import annotations

import torch

import fusion_rt.torch as hvd
from fusion_rt.torch.core.process_sets import ProcessSet
from fusion_rt.torch.kfac import KFAC
from tests.harness import on_ranks
from tests.torch.training import assert_same

OPTIONS = {"lr": 0.2, "damping": 0.01, "factor_update_steps": 2, "inverse_update_steps": 4}


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3, padding=1),
        torch.nn.ReLU(inplace=True),
        torch.nn.Flatten(),
        torch.nn.Linear(4 * 5 * 5, 12),
        torch.nn.Tanh(),
        torch.nn.Linear(12, 12, bias=False),
        torch.nn.Tanh(),
        torch.nn.Linear(12, 3),
    ).double()


def batch_of(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(6, 2, 5, 5, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (6,), generator=generator)


def loss_of(model: torch.nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(inputs), labels)


def alone(model: torch.nn.Module) -> KFAC:
    """A preconditioner of this process alone."""
    return KFAC(model, process_set=ProcessSet([]), **OPTIONS)  # type: ignore[arg-type]


@on_ranks
def test_training_is_that_of_one_process_and_each_rank_decomposes_its_share() -> None:
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2), model.named_parameters())
    kfac = KFAC(model, **OPTIONS)  # type: ignore[arg-type]
    plain, plain_kfac = torch.optim.SGD(reference.parameters(), lr=0.2), alone(reference)
    sent_in_backward = []
    for step in range(10):
        optimizer.zero_grad()
        loss_of(model, *batch_of(hvd.rank(), step)).backward()
        sent_in_backward.append(kfac._exchange._open and len(kfac._exchange._under_way))
        optimizer.synchronize()
        kfac.step()
        with optimizer.skip_synchronize():
            optimizer.step()

        plain.zero_grad()
        inputs, labels = zip(*(batch_of(rank, step) for rank in range(hvd.size())), strict=True)
        loss_of(reference, torch.cat(inputs), torch.cat(labels)).backward()
        plain_kfac.step()
        plain.step()
    assert_same(model, reference, rtol=1e-5, atol=1e-8)

    assert sent_in_backward[:4] == [0, False, 1, False], "the first update only counts, the next goes out early"
    owners = kfac.owners()
    shares = [[name for name, owner in owners.items() if owner == rank] for rank in range(hvd.size())]
    assert shares == [["3"], ["0", "5", "7"]]
    statistics = kfac.statistics()
    assert (statistics.steps, statistics.factor_updates, statistics.inverse_updates) == (10, 5, 3)
    assert statistics.decompositions == 3 * len(shares[hvd.rank()])
    assert plain_kfac.statistics().decompositions == 3 * 4
    triangles = [(19, 4), (101, 12), (12, 12), (13, 3)]
    assert statistics.factor_nbytes == 8 * sum(n * (n + 1) // 2 for sizes in triangles for n in sizes)


@on_ranks
def test_ranks_without_a_layer_do_not_count_and_one_rank_may_save_alone() -> None:
    """Factors of a layer are the averages over the ranks where it ran, those of all layers are bitwise equal."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"all": torch.nn.Linear(4, 2), "first": torch.nn.Linear(4, 2)}).double()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    kfac = KFAC(model, lr=0.1, inverse_update_steps=10, name="kfac.partial")
    for step in range(3):
        inputs = [torch.full((3, 4), 1.0 + rank + step, dtype=torch.float64) for rank in range(hvd.size())]
        outputs = model["all"](inputs[hvd.rank()])
        if hvd.rank() == 0:
            outputs = outputs + model["first"](inputs[0])
        optimizer.zero_grad()
        outputs.square().sum(1).mean().backward()
        optimizer.synchronize()
        kfac.step()
        with optimizer.skip_synchronize():
            optimizer.step()
        if hvd.rank() == 0:
            kfac.state_dict()
    layers = kfac.state_dict()["layers"]
    ones = torch.ones((), dtype=torch.float64)
    torch.testing.assert_close(layers["first"]["a"][0, 0], ones * (1 + 4 + 9) / 3)
    torch.testing.assert_close(layers["all"]["a"][0, 0], ones * (1 + 4 + 4 + 9 + 9 + 16) / 6)
    everybodys = hvd.allgather_object(
        {name: [own["a"], own["g"], own["decomposition"]] for name, own in layers.items()}
    )
    for name in layers:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(*(one[name] for one in everybodys), strict=True))
