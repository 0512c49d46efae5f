"""Local SGD and DiLoCo over DDP and FSDP2, on two nodes of two ranks, beside replicas trained in one process."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fusion_rt.torch as hvd
from fusion_rt.c10d import local_steps
from tests.c10d.script import START, backward, bits, loss_of, make_model, process_group
from tests.harness import Job, on_ranks


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with Job((2, 2), START) as running:
        yield running


class Replicas:
    """Replicas in one process, each with the ranks that share its work.

    Args:
        ranks: of each replica, whose gradients are averaged.
        period: steps from one exchange to the next.
        outer: makes the outer optimizer, of SGD; None: parameters are averaged.
    """

    def __init__(self, ranks: list[list[int]], period: int, outer: dict[str, Any] | None = None) -> None:
        self.models = [make_model() for _ in ranks]
        self._ranks, self._period = ranks, period
        self._optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in self.models]
        self._common = copy.deepcopy(self.models[0])
        self._outer = None if outer is None else torch.optim.SGD(self._common.parameters(), **outer)
        self._taken = 0

    def step(self, step: int) -> None:
        for model, optimizer, ranks in zip(self.models, self._optimizers, self._ranks, strict=True):
            optimizer.zero_grad()
            for rank in ranks:
                backward(loss_of(model, step, rank) / len(ranks))
            optimizer.step()
        self._taken += 1
        if self._taken % self._period == 0:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        replicas = zip(*(model.parameters() for model in self.models), strict=True)
        for common, each in zip(self._common.parameters(), replicas, strict=True):
            mean = torch.stack(list(each)).mean(0)
            common.grad = common - mean
            if self._outer is None:
                common.copy_(mean)
        if self._outer is not None:
            self._outer.step()
        for model in self.models:
            model.load_state_dict(self._common.state_dict())


ALGORITHMS = [
    ("local_sgd(steps=2)", 2, None),
    ("diloco(steps=2, outer_rate=0.7, outer_momentum=0.9)", 2, {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
]


def train(model: torch.nn.Module, optimizer: Any, steps: Iterable[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(loss_of(model, step))
        optimizer.step()


def assert_like(model: torch.nn.Module, expected: torch.nn.Module) -> None:
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        value = parameter.detach()
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        torch.testing.assert_close(value, other.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("algorithm", "period", "outer"), ALGORITHMS)
@on_ranks
def test_ranks_of_ddp_take_local_steps(algorithm: str, period: int, outer: dict[str, Any] | None) -> None:
    with process_group():
        torch.manual_seed(hvd.rank())
        model = DistributedDataParallel(make_model())
        optimizer = local_steps(torch.optim.Adam(model.parameters(), lr=0.01), model, algorithm)
        expected = Replicas([[0], [1], [2], [3]], period, outer)
        for step in range(5):  # the last one is local
            train(model, optimizer, [step])
            expected.step(step)
            assert_like(model.module, expected.models[hvd.rank()])


@on_ranks
def test_ranks_of_ddp_have_models_of_their_own_until_they_are_averaged_or_agree() -> None:
    """As docs/from-ddp.md says, which names no optimizer."""
    with process_group():
        model = DistributedDataParallel(make_model())
        optimizer = local_steps(torch.optim.Adam(model.parameters(), lr=0.01), model, "diloco(steps=100)")
        replicas = Replicas([[0], [1], [2], [3]], 100, {"lr": 0.7, "momentum": 0.9, "nesterov": True})
        for step in range(3):
            train(model, optimizer, [step])
            replicas.step(step)
        own = bits(model)
        assert len(set(hvd.allgather_object(own))) == 4, "what rank 0 would save is no model of the job"
        each = zip(*(replica.parameters() for replica in replicas.models), strict=True)
        means = [torch.stack([parameter.detach() for parameter in of_ranks]).mean(0) for of_ranks in each]
        with hvd.averaged(model=model):
            averaged = bits(model)
            for parameter, mean in zip(model.parameters(), means, strict=True):
                torch.testing.assert_close(parameter.detach(), mean, rtol=1e-4, atol=1e-6)
        assert set(hvd.allgather_object(averaged)) == {averaged}
        assert bits(model) == own, "the training goes on as if nothing had been averaged"
        hvd.consensus(model=model)
        assert set(hvd.allgather_object(bits(model))) == {averaged}


@pytest.mark.parametrize(("algorithm", "period", "outer"), ALGORITHMS)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@on_ranks
def test_a_replica_on_each_node(kind: str, algorithm: str, period: int, outer: dict[str, Any] | None) -> None:
    with process_group():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        node = hvd.rank() // 2
        model: Any = make_model()
        with torch.no_grad():
            model[0].weight += node  # which the first replica's values replace
        if kind == "ddp":
            model = DistributedDataParallel(model, process_group=mesh["shard"].get_group())
        else:
            fully_shard(model[0], mesh=mesh["shard"])
            fully_shard(model, mesh=mesh["shard"])
        optimizer = local_steps(torch.optim.Adam(model.parameters(), lr=0.01), model, algorithm, mesh["replicate"])
        expected = Replicas([[0, 1], [2, 3]], period, outer)
        for step in range(5):
            train(model, optimizer, [step])
            expected.step(step)
            assert_like(model, expected.models[node])
        hvd.consensus(optimizer)
        means = [
            torch.stack(list(each)).mean(0) for each in zip(*(m.parameters() for m in expected.models), strict=True)
        ]
        for parameter, mean in zip(model.parameters(), means, strict=True):
            value = parameter.detach()
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            torch.testing.assert_close(value, mean.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("algorithm", [algorithm for algorithm, _, _ in ALGORITHMS])
@on_ranks
def test_a_restored_training_of_shards_goes_on_bit_by_bit(algorithm: str) -> None:
    with process_group():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

        def make() -> tuple[Any, Any]:
            model = make_model()
            fully_shard(model, mesh=mesh["shard"])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            return model, local_steps(optimizer, model, algorithm, mesh["replicate"])

        model, optimizer = make()
        train(model, optimizer, range(3))  # one step after an exchange
        file = io.BytesIO()
        own = optimizer.own_state()
        shards = [parameter.to_local().clone() for parameter in model.parameters()]
        torch.save({"own": own, "shards": shards}, file)
        train(model, optimizer, range(3, 7))
        expected = [parameter.to_local().clone() for parameter in model.parameters()]
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        model, optimizer = make()
        with torch.no_grad():
            for parameter, shard in zip(model.parameters(), saved["shards"], strict=True):
                parameter.to_local().copy_(shard)
        optimizer.load_own_state(saved["own"])
        train(model, optimizer, range(3, 7))
        for parameter, shard in zip(model.parameters(), expected, strict=True):
            assert torch.equal(parameter.to_local(), shard)


@on_ranks
def test_what_makes_no_sense_is_refused_by_a_sentence() -> None:
    with process_group():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model: Any = DistributedDataParallel(make_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"allreduce.*DDP and FSDP2"):
            local_steps(optimizer, model, "allreduce")
        with pytest.raises(ValueError, match=r"DDP reduces gradients over.*local steps"):
            local_steps(optimizer, model, "local_sgd", mesh["replicate"])
        with pytest.raises(ValueError, match=r"local_sgd.*codec topk"):
            local_steps(optimizer, model, "local_sgd", dist.group.WORLD, "topk(density=0.01)")
        optimizer = local_steps(optimizer, model, "local_sgd")  # what was refused has left nothing behind
        model = make_model()
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"several of the ranks.*local steps"):
            local_steps(optimizer, model, "local_sgd", mesh["replicate"])
        with pytest.raises(ValueError, match=r"sharded.*allreduce"):
            hvd.DistributedOptimizer(optimizer)
