"""A worker of an elastic job that builds its model while the others train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.core.errors import FusionError
from fusion_rt.core.topology import Topology
from fusion_rt.launchers.environment import Environment
from fusion_rt.settings import Settings
from fusion_rt.torch.core.process_sets import register
from fusion_rt.torch.core.provisional import provisional
from fusion_rt.torch.core.runtime import enter, leave
from tests.for_each import for_each

WHERE = Environment(2, 3, 0, "job", 1, "/nowhere/sock")


@pytest.fixture(autouse=True)
def member() -> Iterator[None]:
    enter(provisional(WHERE, Topology(("a", "b"), ((0, 1), (2,))), Settings()))
    register(())
    yield
    leave()


def test_it_has_the_ranks_that_it_is_to_have() -> None:
    assert hvd.is_initialized()
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (
        *(2, 3, 0, 1),
        *(1, 2),
    )
    assert not hvd.is_homogeneous()
    assert hvd.global_process_set.included()
    hvd.init()  # once more


@for_each(
    "options", [{}, {"compression": "topk(density=0.1)"}, {"algorithm": "bsp"}, {"algorithm": "local_sgd(steps=4)"}]
)
def test_everything_is_built_and_the_state_is_saved(options: dict[str, Any]) -> None:
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)
    assert str(optimizer._sync.options.algorithm).startswith(options.get("algorithm", "allreduce"))
    sampler = hvd.elastic.ElasticSampler(list(range(10)))
    assert len(sampler) == 4
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)
    state.save()
    state.restore()
    assert state.epoch == 0  # type: ignore[attr-defined]
    optimizer.load_state_dict(optimizer.state_dict())


def test_operations_are_refused_with_what_to_do() -> None:
    words = r"rank 2 is a new worker .* operations of all ranks belong into the function of hvd\.elastic\.run"
    for call in (
        lambda: hvd.allreduce(torch.ones(2)),
        lambda: hvd.broadcast_parameters(torch.nn.Linear(2, 1).state_dict(), root_rank=0),
        lambda: hvd.allgather_object("x"),
        hvd.barrier,
        hvd.join,
        lambda: hvd.add_process_set([0, 2]),
    ):
        with pytest.raises(FusionError, match=words):
            call()
