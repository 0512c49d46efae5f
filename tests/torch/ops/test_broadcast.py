"""Broadcast, barrier and joining."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.core.errors import HorovodInternalError
from tests.harness import on_ranks
from tests.torch.ops.reference import DTYPES, SIZES, mine, tensor_of


@on_ranks
def test_broadcast_from_every_root() -> None:
    for numel in SIZES.values():
        for dtype in DTYPES:
            for root in range(hvd.size()):
                expected = tensor_of(root, numel, dtype)
                tensor = mine(numel, dtype)
                assert torch.equal(hvd.broadcast(tensor, root), expected)
                assert torch.equal(tensor, mine(numel, dtype))
                assert torch.equal(hvd.synchronize(hvd.broadcast_async(tensor, root, name="b")), expected)
                assert hvd.broadcast_(tensor, root) is tensor
                assert torch.equal(tensor, expected)
        tensor = mine(numel * 2)[::2]
        hvd.synchronize(hvd.broadcast_async_(tensor, 1))
        assert torch.equal(tensor, tensor_of(1, numel * 2)[::2])
    assert hvd.broadcast(torch.tensor(hvd.rank()), 1).item() == 1
    assert hvd.broadcast(torch.empty(0, 2), 0).shape == (0, 2)
    with pytest.raises(ValueError, match="invalid root rank 9"):
        hvd.broadcast(torch.ones(1), 9)


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("of_set", [False, True])
@on_ranks
def test_a_barrier_waits_for_a_rank_that_comes_late(late: int, of_set: bool, tmp_path: Path) -> None:
    arguments = {"process_set": hvd.global_process_set} if of_set else {}
    waits = [tmp_path / f"rank {rank} waits" for rank in range(hvd.size())]
    for pipe in waits:
        with contextlib.suppress(FileExistsError):
            os.mkfifo(pipe)
    if hvd.rank() == late:  # comes when all others have said that they still wait
        for rank in range(hvd.size()):
            if rank != late:
                waits[rank].read_bytes()
        hvd.barrier(**arguments)
        return
    waiting = threading.Thread(target=hvd.barrier, kwargs=arguments)
    waiting.start()
    waiting.join(0.3)
    is_waiting = waiting.is_alive()
    waits[hvd.rank()].write_bytes(b"")
    waiting.join()
    assert is_waiting, "the barrier was over before all ranks had come"


@on_ranks
def test_ranks_with_less_data_join_and_count_as_zeros() -> None:
    rank, size = hvd.rank(), hvd.size()
    for _ in range(2):
        for step in range(rank + 1):
            still_there = range(step, size)
            total = hvd.allreduce(torch.full((5000,), rank + 1.0), op=hvd.Sum, name="steps")
            assert total[0].item() == sum(r + 1 for r in still_there)
            mean = hvd.allreduce(torch.tensor(rank + 1.0))
            assert mean.item() == pytest.approx(sum(r + 1 for r in still_there) / size)
            group = hvd.grouped_allreduce([torch.ones(3), torch.ones(2, dtype=torch.int64)], op=hvd.Sum)
            assert [tensor[0].item() for tensor in group] == [len(still_there)] * 2
        assert hvd.join() == size - 1
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [size, size]


@on_ranks
def test_only_allreduce_is_possible_while_ranks_have_joined() -> None:
    if hvd.rank() != 0:
        for operation in (
            lambda: hvd.allgather(torch.ones(2)),
            lambda: hvd.broadcast(torch.ones(2), 1),
            lambda: hvd.alltoall(torch.ones(hvd.size())),
            lambda: hvd.reducescatter(torch.ones(hvd.size())),
        ):
            with pytest.raises(HorovodInternalError, match=r"joined.*rank 0|rank 0.*joined"):
                operation()
    hvd.join()
    hvd.barrier()
