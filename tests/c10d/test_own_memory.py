"""Operations of c10d on tensors that stay where they are, beside the same in one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fusion_rt import wire
from fusion_rt.client import own_memory
from fusion_rt.client.adoption import Adoptions
from tests.harness import Job

pytestmark = pytest.mark.multiprocess


def _operations(store: str, way: str) -> None:
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    os.environ["FUSION_MEMORY"] = way
    dist.init_process_group("fusion", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(own_memory, "LEAST_BY_ADDRESS", wire.MAX_INLINE + 1)
            patch.setattr(own_memory._Lasting, "has_huge_pages", True)
            if way == "adopt":
                patch.setattr(Adoptions, "lasts", lambda *_: True)  # at once
            adopted = _count(patch)
            for step in range(2):
                _reductions(rank, size, step)
                _moves(rank, size, step)
            assert len(adopted) > 10 if way == "adopt" else not adopted
    finally:
        dist.destroy_process_group()


def _count(patch: pytest.MonkeyPatch) -> list[bool]:
    """Returns a list to which something is added whenever a tensor is adopted."""
    adopted: list[bool] = []
    adopt = Adoptions.adopt

    def counted(self: Adoptions, address: int, nbytes: int, allocation: Any) -> bool:
        if adopt(self, address, nbytes, allocation):
            adopted.append(True)
            return True
        return False

    patch.setattr(Adoptions, "adopt", counted)
    return adopted


def _given(rank: int, size: int, step: int) -> torch.Tensor:
    """Whole numbers whose sums are exact, another tensor on each rank."""
    return torch.arange(30_000 * size, dtype=torch.float32) * (rank + 1) + step


def _reductions(rank: int, size: int, step: int) -> None:
    everyone = [_given(other, size, step) for other in range(size)]
    total = torch.stack(everyone).sum(0)
    tensor = everyone[rank].clone()
    dist.all_reduce(tensor)
    assert torch.equal(tensor, total)
    pairs = torch.view_as_complex(everyone[rank].clone().view(-1, 2))
    dist.all_reduce(pairs)
    assert torch.equal(torch.view_as_real(pairs).flatten(), total)
    tensor = everyone[rank].clone()
    dist.reduce(tensor, 1)
    assert torch.equal(tensor, total if rank == 1 else everyone[rank])
    output = torch.empty(len(total) // size)
    tensor = everyone[rank].clone()
    dist.reduce_scatter(output, list(tensor.chunk(size)))
    assert torch.equal(output, total.chunk(size)[rank])
    assert torch.equal(tensor, everyone[rank])


def _moves(rank: int, size: int, step: int) -> None:
    everyone = [_given(other, size, step) for other in range(size)]
    tensor = everyone[rank].clone()
    dist.broadcast(tensor, 1)
    assert torch.equal(tensor, everyone[1])
    for in_place in (False, True):
        output = torch.empty(len(tensor) * size)
        mine = output.chunk(size)[rank].copy_(everyone[rank]) if in_place else everyone[rank]
        dist.all_gather(list(output.chunk(size)), mine)
        assert torch.equal(output, torch.cat(everyone))
        output.zero_()
        dist.distributed_c10d._get_default_group()._allgather_base(output, everyone[rank]).wait()
        assert torch.equal(output, torch.cat(everyone))
    output = torch.empty(len(tensor))
    dist.all_to_all_single(output, everyone[rank])
    assert torch.equal(output, torch.cat([other.chunk(size)[rank] for other in everyone]))
    output.zero_()
    sending = dist.isend(everyone[rank], (rank + 1) % size)
    dist.recv(output, (rank - 1) % size)
    sending.wait()
    assert torch.equal(output, everyone[(rank - 1) % size])


@pytest.mark.parametrize("way", ["auto", "adopt"])
def test_what_stays_where_it_is_gives_the_same_as_copies(job: Job, tmp_path: Path, way: str) -> None:
    job.run(_operations, str(tmp_path / "store"), way)
