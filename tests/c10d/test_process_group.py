"""Operations of c10d on the backend "fusion", on the ranks of one node and of two, beside the same in one process."""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import Job

pytestmark = pytest.mark.multiprocess

SMALL, LARGE = (3, 5), (300, 70)  # inline, and through memory
TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]


def _in_group(store: str, body: Callable[..., Any]) -> Any:
    """Runs a function in a process group of all ranks."""
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    dist.init_process_group("fusion", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        return body(rank, size)
    finally:
        dist.destroy_process_group()


def _given(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of small whole numbers, another one on each rank: sums of them are exact in all types."""
    made = torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(rank))
    return made.to(dtype)


def _reductions(rank: int, size: int) -> None:
    for dtype in TYPES:
        for shape in (SMALL, LARGE, (), (0, 3)):
            everyone = [_given(other, shape, dtype) for other in range(size)]
            whole = torch.stack([each.double() for each in everyone])
            expected = {
                dist.ReduceOp.SUM: whole.sum(0),
                dist.ReduceOp.PRODUCT: whole.prod(0),
                dist.ReduceOp.MIN: whole.amin(0),
                dist.ReduceOp.MAX: whole.amax(0),
            }
            for op, result in expected.items():
                tensor = everyone[rank].clone()
                dist.all_reduce(tensor, op)
                assert torch.equal(tensor, result.to(dtype)), (dtype, shape, op)
                tensor = everyone[rank].clone()
                dist.reduce(tensor, 1, op)
                assert torch.equal(tensor, result.to(dtype) if rank == 1 else everyone[rank])
    for shape in (SMALL, LARGE):
        bits = [_given(other, shape, torch.int32) for other in range(size)]
        for op, combine in ((dist.ReduceOp.BAND, torch.bitwise_and), (dist.ReduceOp.BXOR, torch.bitwise_xor)):
            tensor = bits[rank].clone()
            dist.all_reduce(tensor, op)
            assert torch.equal(tensor, functools.reduce(combine, bits))
    turned = _given(rank, LARGE, torch.float32).t()  # not contiguous
    dist.all_reduce(turned)
    assert torch.equal(turned, sum(_given(other, LARGE, torch.float32) for other in range(size)).t())
    pairs = _given(rank, SMALL, torch.complex64) * (1 + 1j)
    dist.all_reduce(pairs)
    assert torch.equal(pairs, sum(_given(other, SMALL, torch.complex64) for other in range(size)) * (1 + 1j))
    average = torch.full(SMALL, float(rank))
    dist.all_reduce(average, dist.ReduceOp.AVG)
    assert torch.equal(average, torch.full(SMALL, (size - 1) / 2))


def _moves(rank: int, size: int) -> None:
    for dtype in (*TYPES, torch.bool, torch.complex64, torch.float8_e4m3fn):
        for shape in (SMALL, LARGE, ()):
            everyone = [_given(other, shape, dtype) for other in range(size)]
            tensor = everyone[rank].clone()
            dist.broadcast(tensor, 2)
            assert _same(tensor, everyone[2])
            taken = [torch.empty_like(tensor) for _ in range(size)]
            dist.all_gather(taken, everyone[rank])
            assert all(map(_same, taken, everyone))
            taken = [torch.empty_like(tensor) for _ in range(size)]
            dist.gather(everyone[rank], taken if rank == 3 else None, 3)
            assert rank != 3 or all(map(_same, taken, everyone))
            dist.scatter(tensor, [each.flip(0) if shape else each for each in everyone] if rank == 1 else None, 1)
            assert _same(tensor, everyone[rank].flip(0) if shape else everyone[rank])
            if shape:
                one = torch.empty(size * shape[0], *shape[1:], dtype=dtype)
                dist.all_gather_into_tensor(one, everyone[rank])
                assert _same(one, torch.cat(everyone))


def _negative(values: torch.Tensor) -> torch.Tensor:
    """Values as a view of their negatives, whose bytes are not its elements. (Torch itself refuses conjugate views.)"""
    return torch._neg_view(-values)


def _views(rank: int, size: int) -> None:
    for shape in (SMALL, LARGE):
        for dtype, unit in ((torch.float32, 1), (torch.complex64, 1 + 1j)):
            everyone = [_given(other, shape, dtype) * unit for other in range(size)]
            own = _negative(everyone[rank])
            assert own.is_neg()
            dist.all_reduce(own)
            assert torch.equal(own, sum(everyone))
            own = _negative(everyone[rank])
            dist.broadcast(own, 2)
            assert torch.equal(own, everyone[2])
            taken = [_negative(torch.zeros_like(own)) for _ in range(size)]
            dist.all_gather(taken, _negative(everyone[rank]))
            assert all(map(torch.equal, taken, everyone))
            own = _negative(torch.zeros(shape, dtype=dtype))
            dist.scatter(own, [_negative(each) for each in everyone] if rank == 1 else None, 1)
            assert torch.equal(own, everyone[rank])
            if rank < 2:
                own = _negative(torch.zeros(shape, dtype=dtype))
                waited = dist.irecv(own, 1 - rank)
                dist.send(_negative(everyone[rank]), 1 - rank)
                waited.wait()
                assert torch.equal(own, everyone[1 - rank])


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tells whether two tensors are equal; types without comparison are compared as bytes."""
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def _dealt(rank: int, size: int) -> None:
    for rows in (2, 3000):
        everyone = [_given(other, (size * rows, 3), torch.float32) for other in range(size)]
        part = torch.empty(rows, 3)
        dist.reduce_scatter_tensor(part, everyone[rank])
        assert torch.equal(part, sum(everyone)[rank * rows : (rank + 1) * rows])
        part = torch.empty(rows, 3)
        dist.reduce_scatter(part, list(everyone[rank].chunk(size)), dist.ReduceOp.MAX)
        assert torch.equal(part, torch.stack(everyone).amax(0)[rank * rows : (rank + 1) * rows])
        mine = slice(rank * rows, (rank + 1) * rows)
        dealt = torch.empty(size * rows, 3)
        dist.all_to_all_single(dealt, everyone[rank])
        assert torch.equal(dealt, torch.cat([each[mine] for each in everyone]))
        taken = [torch.empty(rows, 3) for _ in range(size)]
        dist.all_to_all(taken, list(everyone[rank].chunk(size)))
        assert torch.equal(torch.cat(taken), torch.cat([each[mine] for each in everyone]))
        # Uneven: rank i gives rank j i + j rows, or that many times as many.
        scale = rows // 2
        counts = [[scale * (i + j) for j in range(size)] for i in range(size)]
        sent = [_given(i, (sum(counts[i]), 3), torch.float32) for i in range(size)]
        uneven = torch.empty(sum(counts[i][rank] for i in range(size)), 3)
        dist.all_to_all_single(uneven, sent[rank], [counts[i][rank] for i in range(size)], counts[rank])
        assert torch.equal(uneven, torch.cat([sent[i].split(counts[i])[rank] for i in range(size)]))


def _lasting(rank: int, size: int) -> None:
    """Large tensors that are used again and again are given by their addresses, once their memory has huge pages."""
    count = 1 << 21  # elements: two huge pages for each member's part
    ours = torch.empty(count)
    whole = torch.empty(size * count)
    for step in range(6):
        ours.fill_(rank + step)
        dist.all_reduce(ours)
        assert torch.all(ours == 6 + size * step)
        ours.fill_(rank + step)
        dist.all_gather_into_tensor(whole, ours)
        assert all(torch.all(part == other + step) for other, part in enumerate(whole.chunk(size)))
        dist.reduce_scatter_tensor(ours, whole)
        assert torch.all(ours == size * (rank + step))
        mine = whole.chunk(size)[rank]
        mine.fill_(rank - step)
        dist.all_gather_into_tensor(whole, mine)  # in place
        assert all(torch.all(part == other - step) for other, part in enumerate(whole.chunk(size)))
        dist.reduce_scatter_tensor(mine, whole)  # in place
        assert torch.all(mine == size * (rank - step))
        ours.fill_(rank)
        dist.broadcast(ours, 1)
        dist.reduce(ours, 2)
        assert torch.all(ours == (size if rank == 2 else 1))


def _messages(rank: int, size: int) -> None:
    after, before = (rank + 1) % size, (rank - 1) % size
    for shape in (SMALL, LARGE, (0, 3)):
        tensors = {
            (source, tag): _given(10 * source + tag, shape, torch.float32) for source in range(size) for tag in (0, 7)
        }
        taken = {tag: torch.empty(shape) for tag in (0, 7)}
        works = [dist.irecv(taken[tag], before, tag=tag) for tag in (7, 0)]
        works += [dist.isend(tensors[rank, tag], after, tag=tag) for tag in (0, 7)]
        for work in works:
            assert work is not None
            assert work.wait()
        assert all(torch.equal(taken[tag], tensors[before, tag]) for tag in (0, 7))
        turned = torch.empty(shape).t()
        if rank == 0:
            froms = []
            for _ in range(size - 1):
                froms.append(dist.recv(turned, tag=3))
                assert torch.equal(turned, tensors[froms[-1], 0].t())
            assert sorted(froms) == list(range(1, size))
        else:
            dist.send(tensors[rank, 0].t(), 0, tag=3)
        dist.barrier()  # what comes first, from whoever, is of this turn
    ours = torch.empty(3, dtype=torch.bool)
    work = dist.irecv(ours, rank, tag=1)
    dist.isend(torch.tensor([True, False, True]), rank, tag=1)
    assert work is not None
    work.wait()
    assert ours.tolist() == [True, False, True]
    ring = [
        dist.P2POp(dist.isend, torch.full((2,), float(rank)), after),
        dist.P2POp(dist.irecv, torch.empty(2), before),
    ]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    assert ring[1].tensor.tolist() == [before, before]
    said = ["x" * 20000, rank]
    if rank == 0:
        dist.send_object_list(said, 1)
    elif rank == 1:
        dist.recv_object_list(said, 0)
        assert said == ["x" * 20000, 0]
    # What was sent before its sender has left the group is received.
    pair = dist.new_group([0, 1])
    if rank == 0:
        dist.send(torch.tensor([4.0]), 1, group=pair)
        dist.destroy_process_group(pair)
    dist.barrier()
    if rank == 1:
        last = torch.empty(1)
        dist.recv(last, 0, group=pair)
        assert last.item() == 4.0
    dist.barrier()


def _subgroups(rank: int, size: int) -> None:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = pairs[rank % 2]
    tensor = torch.full(LARGE, float(rank))
    dist.all_reduce(tensor, group=mine)
    assert torch.equal(tensor, torch.full(LARGE, float(2 + 2 * (rank % 2))))
    order = [2, 0, 3] if "sort_ranks" in inspect.signature(dist.new_group).parameters else [0, 2, 3]  # not in torch 2.5
    turned = dist.new_group(order, **({"sort_ranks": False} if order[0] else {}))
    if rank in order:
        for shape in (SMALL, LARGE):
            given = _given(rank, shape, torch.float32)
            taken = [torch.empty(shape) for _ in order]
            dist.all_gather(taken, given, group=turned)
            assert all(map(torch.equal, taken, [_given(other, shape, torch.float32) for other in order]))
            one = torch.empty(3 * shape[0], shape[1])
            dist.all_gather_into_tensor(one, given, group=turned)
            assert torch.equal(one, torch.cat(taken))
            part = torch.empty(shape)
            dist.reduce_scatter_tensor(part, one * (rank + 1), group=turned)
            assert torch.equal(part, taken[order.index(rank)] * 8)
            dealt = torch.empty_like(one)
            dist.all_to_all_single(dealt, one * (rank + 1), group=turned)
            mine_of_each = [taken[order.index(rank)] * (other + 1) for other in order]
            assert torch.equal(dealt, torch.cat(mine_of_each))
            dist.broadcast(given, 3, group=turned)
            assert torch.equal(given, taken[2])
        dist.destroy_process_group(turned)
    local = dist.new_group([rank - rank % 2, rank - rank % 2 + 1], use_local_synchronization=True)
    found: list[Any] = [None, None]
    dist.all_gather_object(found, rank, group=local)
    assert found == [rank - rank % 2, rank - rank % 2 + 1]
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=mesh["replicate"].get_group())
    assert tensor.item() == 2 * (rank % 2) + 2
    # Two groups that overlap, each used by a thread of its own.
    whole = dist.new_group()
    sums: dict[str, torch.Tensor] = {}

    def work(name: str, group: dist.ProcessGroup) -> None:
        for shape in (SMALL, LARGE) * 20:
            sums[name] = torch.full(shape, float(rank))
            dist.all_reduce(sums[name], group=group)

    threads = [threading.Thread(target=work, args=each) for each in (("pair", mine), ("whole", whole))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(sums["pair"], torch.full(LARGE, float(2 + 2 * (rank % 2))))
    assert torch.equal(sums["whole"], torch.full(LARGE, 6.0))


def _chained(tensor: torch.Tensor, size: int) -> Any:
    """A future of the sum, and of that sum's average, both of which are operations."""
    first = dist.all_reduce(tensor, async_op=True).get_future()
    other = dist.all_reduce(torch.ones(1), async_op=True).get_future()

    def again(done: Any) -> torch.Tensor:
        assert other.then(lambda ended: ended.value()[0]).wait().item() == size
        return dist.all_reduce(done.value()[0] / size, async_op=True).get_future().wait()[0]

    return first.then(again)


def _works(rank: int, size: int) -> None:
    for shape in (SMALL, LARGE):
        total = torch.full(shape, 6.0)
        tensors = [torch.full(shape, float(rank)) for _ in range(5)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        while not works[-1].is_completed():
            pass
        assert works[-1].is_success()
        futures = [work.get_future() for work in works]
        assert all(torch.equal(future.wait()[0], total) for future in futures)
        assert torch.equal(works[0].result()[0], total)
        # A function that is called back may wait for another operation, whose future it has asked for itself or not.
        for _ in range(3):  # one after the other: operations of a group are in one order on all ranks
            assert torch.equal(_chained(torch.full(shape, float(rank)), size).wait(), total)


def _functional(rank: int, size: int) -> None:
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD
    given = torch.full(SMALL, float(rank))
    assert torch.equal(functional.all_reduce(given, "sum", group), torch.full(SMALL, 6.0))
    assert functional.all_gather_tensor(given, 0, group).shape == (size * SMALL[0], SMALL[1])
    summed = functional.reduce_scatter_tensor(torch.full((size, 3), float(rank)), "sum", 0, group)
    assert torch.equal(summed, torch.full((1, 3), 6.0))
    dealt = functional.all_to_all_single(torch.arange(4.0) + 10 * rank, None, None, group)
    assert torch.equal(dealt, torch.arange(4.0) * 10 + rank)
    assert torch.equal(functional.broadcast(given, 2, group), torch.full(SMALL, 2.0))


def _errors(rank: int, size: int) -> None:
    from fusion_rt.c10d.failing import CollectiveError

    group = dist.group.WORLD
    assert group is not None
    for call in (
        lambda: group.allreduce([]),
        lambda: group.broadcast([torch.ones(1)], 7),
        lambda: dist.all_gather([torch.ones(1)], torch.ones(1)),
        lambda: dist.all_to_all_single(torch.empty(5), torch.empty(5)),
        lambda: group.send([torch.ones(1)], 9, 0),
        lambda: dist.reduce_scatter_tensor(torch.empty(2), torch.empty(3)),
    ):
        with pytest.raises((ValueError, RuntimeError)):
            call()
    dist.barrier()
    late = dist.new_group()
    if rank == 0:
        work = dist.all_reduce(torch.ones(1), group=late, async_op=True)
        with pytest.raises(CollectiveError, match=r"0\.2 s"):
            work.wait(timedelta(seconds=0.2))
        group.barrier().wait()
        work.wait()
    else:
        group.barrier().wait()
        dist.all_reduce(torch.ones(1), group=late)
    mixed = dist.new_group()
    with pytest.raises(CollectiveError, match="rank 0"):
        dist.all_reduce(torch.ones(3 if rank else 4), group=mixed)


def _objects_and_models(rank: int, size: int) -> None:
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    assert gathered == [{"rank": other, "text": "x" * other} for other in range(size)]
    said = [("from", rank), rank] if rank == 1 else [None, None]
    dist.broadcast_object_list(said, 1)
    assert said == [("from", 1), 1]
    torch.manual_seed(0)
    model, alone = torch.nn.Linear(50, 60), torch.nn.Linear(50, 60)
    alone.load_state_dict(model.state_dict())
    parallel = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.005)
    inputs = [torch.randn(7, 50, generator=torch.Generator().manual_seed(other)) for other in range(size)]
    for _ in range(3):
        for each in (model, alone):
            each.zero_grad()
        parallel(inputs[rank]).square().mean().backward()
        sum(alone(each).square().mean() for each in inputs).backward()  # type: ignore[union-attr]
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad / size)


def _uneven(rank: int, size: int) -> None:
    """Ranks leave the training one after the other; gradients are divided by the number of those that are there."""
    torch.manual_seed(0)
    model, alone = torch.nn.Linear(5, 6), torch.nn.Linear(5, 6)
    alone.load_state_dict(model.state_dict())
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    inputs = [torch.randn(7, 5, generator=torch.Generator().manual_seed(other)) for other in range(size)]
    with parallel.join(divide_by_initial_world_size=False):
        for step in range(rank + 1):
            alone.zero_grad()
            model.zero_grad()
            parallel(inputs[rank]).square().mean().backward()
            there = inputs[step:]
            sum(alone(each).square().mean() for each in there).backward()  # type: ignore[union-attr]
            for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad / len(there))


def test_reductions_give_what_one_process_computes(job: Job, tmp_path: Path) -> None:
    job.run(_in_group, str(tmp_path / "store"), _reductions)


def test_moved_elements_arrive_whatever_their_type(job: Job, tmp_path: Path) -> None:
    job.run(_in_group, str(tmp_path / "store"), _moves)


def test_views_that_are_not_what_their_bytes_are(job: Job, tmp_path: Path) -> None:
    job.run(_in_group, str(tmp_path / "store"), _views)


def test_parts_of_tensors_come_to_those_they_are_meant_for(job: Job, tmp_path: Path) -> None:
    job.run(_in_group, str(tmp_path / "store"), _dealt)


def test_large_tensors_may_stay_where_they_are(job: Job, tmp_path: Path) -> None:
    job.run(_in_group, str(tmp_path / "store"), _lasting)


def test_messages_are_matched_by_source_and_tag(job: Job, tmp_path: Path) -> None:
    job.run(_in_group, str(tmp_path / "store"), _messages)


def test_groups_of_some_ranks_run_beside_each_other(job: Job, tmp_path: Path) -> None:
    job.run(_in_group, str(tmp_path / "store"), _subgroups)


def test_works_and_futures_complete_whoever_waits(job: Job, tmp_path: Path) -> None:
    job.run(_in_group, str(tmp_path / "store"), _works)


def test_functional_collectives_give_tensors_that_are_waited_for(job: Job, tmp_path: Path) -> None:
    job.run(_in_group, str(tmp_path / "store"), _functional)


def test_what_cannot_be_is_refused_and_who_is_missing_is_named(job: Job, tmp_path: Path) -> None:
    job.run(_in_group, str(tmp_path / "store"), _errors)


def test_ddp_divides_by_the_number_of_ranks_that_have_not_joined(job: Job, tmp_path: Path) -> None:
    job.run(_in_group, str(tmp_path / "store"), _uneven)


def test_objects_travel_and_ddp_trains_as_one_process_does(job: Job, tmp_path: Path) -> None:
    job.run(_in_group, str(tmp_path / "store"), _objects_and_models)
