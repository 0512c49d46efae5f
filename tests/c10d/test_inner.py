"""Inner groups of the backend fusion: gloo takes the place of NCCL, and what comes out is that of the way through the
daemon, bit by bit."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fusion_rt.c10d.failing import CollectiveError
from fusion_rt.torch.node.groups import Gloo
from tests.harness import Job

pytestmark = pytest.mark.multiprocess

TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8]
LENGTHS = (1, 6, 8, 9001, 40_000)


def _in_groups(store: str, body: Callable[..., Any]) -> Any:
    """Runs a function with a group that has an inner one, which is the default, and one that has none."""
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSION_NODE_REDUCTION", "gloo")
        dist.init_process_group("fusion", init_method=f"file://{store}", rank=rank, world_size=size)
        try:
            patch.setenv("FUSION_NODE_REDUCTION", "daemon")
            plain = dist.new_group()
            patch.setenv("FUSION_NODE_REDUCTION", "gloo")
            return body(rank, size, plain)
        finally:
            dist.destroy_process_group()


def _given(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, of which sums are exact in all types."""
    return torch.randint(0, 4, (length,), generator=torch.Generator().manual_seed(rank)).to(dtype)


def _results(rank: int, size: int, length: int, dtype: torch.dtype, group: Any) -> list[torch.Tensor]:
    found = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT, dist.ReduceOp.AVG):
        if op != dist.ReduceOp.AVG or dtype.is_floating_point:
            found.append(_given(rank, length, dtype))
            dist.all_reduce(found[-1], op, group)
    tensor = _given(rank, length, dtype)
    dist.broadcast(tensor, size - 1, group)
    found.append(tensor.clone())
    dist.reduce(tensor, 1, dist.ReduceOp.SUM, group)
    found.append(tensor if rank == 1 else tensor[:0])
    whole, part = _given(rank, length * size, dtype), torch.empty(length, dtype=dtype)
    dist.reduce_scatter_tensor(part, whole, group=group)
    gathered, dealt = torch.empty_like(whole), torch.empty_like(whole)
    dist.all_gather_into_tensor(gathered, part, group=group)
    dist.all_to_all_single(dealt, whole, group=group)
    return [*found, part, gathered, dealt]


def _ways(rank: int, size: int, plain: Any) -> str:
    for dtype in TYPES:
        for length in LENGTHS:
            ours, daemons = (_results(rank, size, length, dtype, group) for group in (None, plain))
            for number, (mine, expected) in enumerate(zip(ours, daemons, strict=True)):
                assert torch.equal(mine, expected), (dtype, length, number)
    inner = dist.group.WORLD._inner  # type: ignore[union-attr]
    assert plain._inner._whole is plain._inner._lane is None
    return "node" if inner._whole is not None else "lane" if inner._lane is not None else "none"


def test_results_have_the_bits_of_the_way_through_the_daemon(job: Job, tmp_path: Path) -> None:
    expected = "node" if len(job.topology.hosts) == 1 else "lane"
    assert job.run(_in_groups, str(tmp_path / "store"), _ways) == [expected] * 4


def _again(done: Any) -> torch.Tensor:
    """Combines a result once more, and waits for that, as PowerSGD's hook does."""
    again = dist.all_reduce(done.value()[0].clone(), async_op=True)
    assert again is not None
    found: torch.Tensor = again.get_future().wait()[0]
    return found


def _several_at_once(rank: int, size: int, plain: Any) -> None:
    tensors = [_given(rank, 5000 + n, torch.float32) for n in range(6)]
    expected = [tensor.clone() for tensor in tensors]
    for tensor in expected:
        dist.all_reduce(tensor, group=plain)
    works: list[Any] = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    called = works[1].get_future().then(_again)
    for n in (5, 0, 3) if rank % 2 else (4, 2):  # in an order of each rank's own
        works[n].wait()
    assert torch.equal(called.wait(), expected[1] * size)
    for work, tensor, right in zip(works, tensors, expected, strict=True):
        work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert torch.equal(tensor, right)


def test_operations_that_are_under_way_together_end_whoever_waits_in_whatever_order(job: Job, tmp_path: Path) -> None:
    job.run(_in_groups, str(tmp_path / "store"), _several_at_once)


def _models(rank: int, size: int, plain: Any) -> None:
    trained = []
    for group in (None, plain):
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3000, 3, bias=False), process_group=group)
        for _ in range(3):
            model(torch.full((1, 3000), rank + 1.0)).sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= parameter.grad  # type: ignore[operator]
                    parameter.grad = None
        trained.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(mine, others) for mine, others in zip(*trained, strict=True))


def test_ddp_trains_alike(job: Job, tmp_path: Path) -> None:
    job.run(_in_groups, str(tmp_path / "store"), _models)


def _warned(patch: pytest.MonkeyPatch, identity: str, group: Any = None) -> str:
    """What is warned of where this rank's device has such an identity; the result is right all the same."""
    patch.setattr(Gloo, "device_of", lambda *_: identity)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            tensor = torch.ones(5)
            dist.all_reduce(tensor, group=group)
            assert tensor.eq(dist.get_world_size(group)).all()
    (told,) = [str(each.message) for each in caught if "FUSION" in str(each.message)]
    return told.partition("all the same: ")[2]


def _refused(rank: int, size: int, plain: Any) -> list[str]:
    found = []
    with pytest.MonkeyPatch.context() as patch:
        found.append(_warned(patch, "" if rank == 3 else f"{rank}"))
        found.append(_warned(patch, "the same", dist.new_group()))
        three = dist.new_group([0, 1, 2])
        found.append(_warned(patch, f"{rank}", three) if rank < 3 else "")
    return found


def test_what_cannot_be_goes_through_the_daemon_and_is_told(job: Job, tmp_path: Path) -> None:
    if len(job.topology.hosts) == 1:
        pytest.skip("one node has one number of members")
    found = job.run(_in_groups, str(tmp_path / "store"), _refused)
    assert {told[0] for told in found} == {"torch has no gloo for the tensors of rank 3"}
    assert {told[1] for told in found} == {"some of ranks 0, 1 share a GPU"}
    assert {told[2] for told in found[:3]} == {"its nodes have unequal numbers of members, 2, 1"}


def _alone(rank: int, size: int, plain: Any) -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        with pytest.raises(
            CollectiveError, match=r"rank 1 did not come to the group's first operation on a GPU within 1 s"
        ):
            dist.all_reduce(torch.ones(3), group=group)
    with pytest.raises(ValueError, match="have to be contiguous where gloo combines them"):
        dist.all_reduce(torch.ones(4, 4).t()[1:])
    dist.barrier()


def test_who_does_not_come_and_what_is_not_contiguous_is_told(job: Job, tmp_path: Path) -> None:
    job.run(_in_groups, str(tmp_path / "store"), _alone)
