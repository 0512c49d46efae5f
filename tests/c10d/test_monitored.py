"""The barrier that says who is missing, on the ranks of one node and of two."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.harness import Job

pytestmark = pytest.mark.multiprocess

LATE = (1, 3)
LIMIT = timedelta(seconds=3.0)  # in which a rank that is not late has to come


def _meet(store: str, late: tuple[int, ...], name_all: bool) -> str:
    """Comes to a barrier, unless this rank is late, and to an ordinary one; returns what the first one has said."""
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    dist.init_process_group("fusion", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        said = ""
        if rank not in late:
            try:
                dist.group.WORLD.monitored_barrier(LIMIT, name_all)
            except dist.DistBackendError as error:
                said = str(error)
        dist.barrier()
        return said
    finally:
        dist.destroy_process_group()


def test_all_pass_when_all_have_come(job: Job, tmp_path: Path) -> None:
    assert job.run(_meet, str(tmp_path / "store"), (), False) == [""] * 4


@pytest.mark.parametrize(("name_all", "who"), [(False, "Rank 1"), (True, "Ranks 1, 3")])
def test_the_first_rank_says_who_is_missing(job: Job, tmp_path: Path, name_all: bool, who: str) -> None:
    first, _, other, _ = job.run(_meet, str(tmp_path / "store"), LATE, name_all)
    assert first == f"{who} failed to pass monitoredBarrier in 3000 ms"
    assert other.startswith("Rank 2 successfully reached monitoredBarrier, but received errors")
