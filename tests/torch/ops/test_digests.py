"""Digests: ranks whose parameters differ are named, and nobody is where they do not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt import algorithms
from fusion_rt.torch.ops.digests import differences, digest
from tests.for_each import for_each
from tests.harness import on_ranks

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.bool, torch.complex64]


@for_each("dtype", DTYPES)
@for_each("count", [1, 2, 3, 4, 8, 13, 1024])
def test_a_digest_changes_with_each_element(dtype: torch.dtype, count: int) -> None:
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(count)).mul(9).to(dtype)
    before = int(digest(tensor))
    assert int(digest(tensor.clone())) == before
    for index in {0, count // 2, count - 1}:
        other = tensor.clone()
        other[index] = 0 if other[index] else 1
        assert int(digest(other)) != before


def test_a_digest_is_that_of_the_values_wherever_they_lie() -> None:
    tensor = torch.randn(7, 4, 3)
    padded = torch.zeros(8 * 12)[1:85].view(7, 4, 3).copy_(tensor)
    assert int(digest(padded)) == int(digest(tensor))
    apart = torch.zeros(7, 4, 6)[:, :, ::2].copy_(tensor)
    assert int(digest(apart)) == int(digest(tensor))


def test_the_ranks_that_differ_from_most_are_named_with_the_first_tensor() -> None:
    rows = torch.tensor([[0, 1, 2, 3], [1, 1, 2, 3], [4, 1, 5, 4], [5, 1, 2, 3]])  # the others have joined
    assert differences(rows, ["a", "b", "c"]) == "rank 4 (in 'b')"
    assert differences(rows[:2], ["a", "b", "c"]) == ""


@on_ranks
def test_a_rank_that_sets_a_parameter_by_itself_is_noticed_once() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSION_CHECK_PARAMETERS", "2")
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    said: list[str] = []
    for step in range(10):
        if step == 4 and hvd.rank() == 1:
            with torch.no_grad():
                model[1].bias.add_(1)
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            optimizer.step()
        said += [str(warning.message) for warning in heard]
    assert len(said) == 1
    assert "a step between 4 and 6" in said[0]
    assert "rank 1 (in '1.bias') from most ranks" in said[0]


@on_ranks
def test_models_that_begin_with_other_parameters_are_noticed_by_default() -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        _train(seed=1 if hvd.rank() == 1 else 0, steps=200)
    (said,) = [str(warning.message) for warning in heard]
    assert "between 0 and 1 of this membership: rank 1 (in 'weight') from most ranks" in said


@on_ranks
def test_ranks_that_have_joined_keep_nobody_from_comparing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _train(seed=0, steps=405 if hvd.rank() == 0 else 199)
        hvd.join()


@pytest.mark.parametrize("options", [{}, {"overlap": "forward"}, {"algorithm": "local_sgd(steps=2)"}])
@on_ranks
def test_after_a_join_ranks_compare_what_they_have_after_the_same_step(options: dict[str, Any]) -> None:
    model = torch.nn.Linear(3, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSION_CHECK_PARAMETERS", "4")
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), **options)
    hvd.broadcast_parameters(model.state_dict(), 0)
    said = []
    for epoch in range(3):
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            for step in range(10 if epoch == 2 else 11 if hvd.rank() == 0 else 6):
                optimizer.zero_grad()
                model(torch.full((2, 3), 0.1 * step)).sum().backward()
                optimizer.step()
            hvd.synchronize_parameters()
            last = hvd.join()
        said.append([str(warning.message) for warning in heard])
        if epoch == 0:
            hvd.broadcast_parameters(model.state_dict(), last)
            hvd.broadcast_optimizer_state(optimizer, last)
    hvd.barrier()
    assert said[:2] == [[], []]
    if not options:  # after the second epoch nobody has made the parameters equal
        assert ["between 0 and 1 since the last join: rank " in words for words in said[2]] == [True]


def _train(seed: int, steps: int) -> None:
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()


@on_ranks
def test_by_default_nothing_is_said_of_algorithms_whose_ranks_are_never_alike() -> None:
    model = torch.nn.Linear(3, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hvd.DistributedOptimizer(plain, model.named_parameters(), algorithm="asp")


ALIKE = [
    {},
    {"op": hvd.Adasum},
    {"overlap": "forward"},
    {"overlap": "stale"},
    {"compression": hvd.Compression.topk(0.5)},
    {"algorithm": "bsp"},
    {"algorithm": "local_sgd(steps=2)"},
    {"algorithm": "local_sgd(steps=3,after=4)"},
    {"algorithm": "diloco(steps=2)"},
    {"algorithm": "diloco(steps=2,fragments=2)"},
    {"algorithm": "diloco(steps=4,delay=1,mix=0.5)"},
    {"algorithm": "diloco(steps=4,fragments=2,delay=2)"},
    {"algorithm": "sparseloco(steps=2)"},
]
APART = [
    "asp",
    "ssp(staleness=0)",
    "softsync",
    "dc_asgd",
    "hogwild",
    "partial",
    "collaborative(samples=2)",
    "easgd(steps=2)",
    "easgd(synchronous_home=True)",
    "ea_wild",
    "decoupled(steps=2)",
    "dpsgd",
    "adpsgd",
    "sgp",
    "choco",
    "noloco(steps=2)",
]


@pytest.mark.parametrize("options", ALIKE, ids=lambda options: "-".join(map(str, options.values())) or "plain")
@on_ranks
def test_a_bit_that_flips_on_one_rank_is_found_whatever_makes_ranks_alike(options: dict[str, Any]) -> None:
    assert _said(options, flips_at=-1) == []
    found = _said(options, flips_at=9)
    assert len(found) == 1, found
    assert "rank 1 (in " in found[0]


@pytest.mark.parametrize("overlap", ["forward", "stale"])
@on_ranks
def test_with_overlap_a_rank_that_looks_at_gradients_and_a_pass_that_fails_raise_no_alarm(overlap: str) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(hvd.rank())
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as heard:
        patch.setenv("FUSION_CHECK_PARAMETERS", "1")
        warnings.simplefilter("always")
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), overlap=overlap)
        for step in range(12):
            optimizer.zero_grad()
            loss = model(torch.randn(2, 3, generator=data)).sum()
            if step == 7 and hvd.rank() == 1:
                loss.register_hook(_fail)
            try:
                loss.backward()
                if step % 3 == 0 and hvd.rank() == 0:
                    float(sum(parameter.grad.norm() for parameter in model.parameters()))
                optimizer.step()
            except (RuntimeError, hvd.HorovodInternalError):
                assert step == 7
                optimizer.zero_grad()
        optimizer.synchronize_parameters()
    hvd.barrier()
    assert [warning for warning in heard if "differ" in str(warning.message)] == []


def _fail(gradient: torch.Tensor) -> None:
    raise RuntimeError("this batch is no good")


@on_ranks
def test_shards_that_tell_hosts_less_than_they_have_are_not_compared() -> None:
    found = _said({"algorithm": "bsp", "compression": hvd.Compression.fp16}, flips_at=-1)
    assert [("by the codec fp16" in words) for words in found] == [True] * (hvd.rank() == 0)


@pytest.mark.parametrize("algorithm", APART)
def test_algorithms_whose_ranks_are_never_alike_say_why(algorithm: str) -> None:
    assert "at any time" in algorithms.parse(algorithm).apart


@pytest.mark.parametrize("algorithm", ["asp", "dpsgd"])
@on_ranks
def test_where_ranks_are_never_alike_the_first_says_so_and_nothing_is_compared(algorithm: str) -> None:
    found = _said({"algorithm": algorithm}, flips_at=-1)
    assert len(found) == (hvd.rank() == 0), found
    for words in found:
        assert words.startswith(f"FUSION_CHECK_PARAMETERS compares nothing with {algorithm}")


def _said(options: dict[str, Any], flips_at: int) -> list[str]:
    """Trains for 20 steps, and returns what is warned of.

    Args:
        options: of the optimizer.
        flips_at: in which step a bit flips on rank 1.
    """
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Tanh(), torch.nn.Linear(40, 2))
    plain = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(hvd.rank())
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as heard:
        patch.setenv("FUSION_CHECK_PARAMETERS", "2")
        warnings.simplefilter("always")
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), **options)
        for step in range(20):
            if step == flips_at and hvd.rank() == 1:
                _flip(optimizer, model[2].weight, options.get("algorithm", ""))
            optimizer.zero_grad()
            model(torch.randn(4, 30, generator=data)).square().sum().backward()
            optimizer.step()
        if "overlap" in options:
            optimizer.synchronize_parameters()
    hvd.barrier()
    return [str(warning.message) for warning in heard]


def _flip(optimizer: Any, parameter: torch.Tensor, algorithm: str) -> None:
    """Flips a bit of what is to be the same on all ranks."""
    sync = optimizer._sync
    optimizer._schedule.finish()
    slot = next(slot for slot in sync.slots if slot.parameter is parameter)
    if slot.start is not None and "loco" in algorithm:
        flip_bit(slot.start)  # one of the parameter would be taken for this rank's local step
    elif algorithm.startswith(("bsp", "local_sgd")):  # what comes next replaces all of a rank's parameters
        receive = sync.receive

        def received(*arguments: Any) -> None:
            receive(*arguments)
            flip_bit(parameter)
            sync.receive = receive

        sync.receive = received
    else:
        flip_bit(parameter)


def flip_bit(tensor: torch.Tensor) -> None:
    tensor.detach().numpy().reshape(-1)[3:4].view("int32")[0] ^= 1 << 22
