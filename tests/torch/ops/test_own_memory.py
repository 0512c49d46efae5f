"""Tensors that a script keeps, given to the daemon by their addresses; and a worker that dies meanwhile."""

from __future__ import annotations

import os
import signal

import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt import wire
from fusion_rt.client import own_memory
from fusion_rt.core.errors import HorovodInternalError
from fusion_rt.torch.core.runtime import runtime
from tests.harness import Job, on_ranks
from tests.torch.conftest import START
from tests.torch.ops.reference import DTYPES, OPS, can, combined, everybodys, mine

STEPS = 15
NUMEL = 600_003  # of one byte each: enough for several blocks
pytestmark = pytest.mark.multiprocess


def give_addresses(patch: pytest.MonkeyPatch) -> None:
    """Has every tensor that is not in a message given by its address, whatever pages it has."""
    patch.setattr(own_memory, "LEAST_BY_ADDRESS", wire.MAX_INLINE + 1)
    patch.setattr(own_memory._Lasting, "has_huge_pages", True)


@on_ranks
def test_every_dtype_with_every_op_in_place() -> None:
    with pytest.MonkeyPatch.context() as patch:
        give_addresses(patch)
        for dtype in DTYPES:
            for op in (op for op in OPS if can(op, dtype)):
                tensor = mine(NUMEL, dtype)
                assert hvd.allreduce_(tensor, op=op) is tensor
                torch.testing.assert_close(tensor, combined(op, everybodys(NUMEL, dtype)), rtol=0, atol=0)
        tensor = mine(NUMEL)
        hvd.broadcast_(tensor, root_rank=hvd.size() - 1)
        assert torch.equal(tensor, everybodys(NUMEL)[-1])


@on_ranks
def test_a_tensor_that_is_kept_gets_huge_pages_and_keeps_its_values() -> None:
    memory, sent = runtime().client.own_memory, []
    tensor = mine(6 * own_memory.HUGE_PAGE // 4)
    own, total = tensor.clone(), combined(hvd.Sum, everybodys(len(tensor)))
    address = memory.address

    def noted(*arguments: object) -> wire.Address | None:
        sent.append(address(*arguments))  # type: ignore[arg-type]
        return sent[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "address", noted)
        for _ in range(STEPS):
            tensor.copy_(own)
            hvd.allreduce_(tensor, op=hvd.Sum)
            torch.testing.assert_close(tensor, total)
    if memory.by_address:
        assert len(sent) == STEPS
        assert sent[0] is None


@on_ranks
def test_a_wrong_address_fails_on_all_ranks_and_the_job_goes_on() -> None:
    client = runtime().client
    if not client.own_memory.by_address:
        return  # the kernel does not let one process read another one
    tensor = torch.ones(100_000)
    there = 4096 if hvd.rank() == 0 else tensor.data_ptr()
    signature = wire.Signature("allreduce", "float32", (100_000,))
    with pytest.raises(HorovodInternalError, match=r"of rank 0 \(pid \d+\) cannot be read: not all of them are memory"):
        client.wait(client.submit("wrong", signature, place=wire.Address(there), keeps=tensor))
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [hvd.size()] * 3


def all_reduce_until_one_dies() -> None:
    with pytest.MonkeyPatch.context() as patch:
        give_addresses(patch)
        tensor = torch.ones(20_000_000)
        handles = [hvd.allreduce_async_(tensor.clone(), name=f"x{i}", op=hvd.Sum) for i in range(4)]
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(HorovodInternalError, match="rank 1"):
            list(map(hvd.synchronize, handles))


def test_a_worker_that_dies_while_its_memory_is_read_ends_the_job_by_a_sentence() -> None:
    with Job((2,), START) as job:
        job.start(all_reduce_until_one_dies)
        job.results(ranks=[0])
