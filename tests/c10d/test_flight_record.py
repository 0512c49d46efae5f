"""The last operations of each rank, as torch's own analyser reads them, on the ranks of one node and of two."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusion_rt.c10d
from fusion_rt.c10d.flight_record import FlightDumps
from fusion_rt.core.errors import FusionError
from tests import forks
from tests.harness import Job

MISSES, SAMPLES = 2, 5
LIMIT = timedelta(seconds=1.0)

pytestmark = pytest.mark.multiprocess
analyser = pytest.mark.skipif(
    not hasattr(dist.Store, "clone"), reason="this torch has no such analyser, or no such store"
)


def _begin(directory: str) -> tuple[int, int, dist.Store]:
    """Begins with a store that rank 0 serves, and returns rank, size, and another store that outlives it."""
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    files = dist.FileStore(f"{directory}/store", size)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        files.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(files.get("port")))
    dist.init_process_group("fusion", store=store, rank=rank, world_size=size)
    return rank, size, files


def _all_operations(rank: int, size: int) -> None:
    """Runs every operation there is, also with sizes that differ by rank, and messages that cross."""
    ones = torch.ones(6, 4)
    dist.all_reduce(ones)
    dist.all_reduce_coalesced([torch.ones(3), torch.ones(2)])
    dist.all_reduce(torch.eye(5).to_sparse())
    dist.reduce(ones, 1)
    dist.broadcast(ones, 1)
    dist.all_gather([torch.empty(3) for _ in range(size)], torch.ones(3))
    dist.all_gather([torch.empty(other + 1) for other in range(size)], torch.ones(rank + 1))
    dist.all_gather_into_tensor(torch.empty(size * 3), torch.ones(3))
    dist.all_gather_object([None] * size, "object" * rank)
    dist.reduce_scatter(torch.empty(2), [torch.ones(2) for _ in range(size)])
    dist.reduce_scatter(torch.empty(rank + 1), [torch.ones(other + 1) for other in range(size)])
    dist.reduce_scatter_tensor(torch.empty(3), torch.ones(size * 3))
    dist.gather(torch.ones(3), [torch.empty(3) for _ in range(size)] if rank == 1 else None, 1)
    dist.scatter(torch.empty(3), [torch.ones(3) for _ in range(size)] if rank == 1 else None, 1)
    dist.all_to_all_single(torch.empty(size, 2), torch.ones(size, 2))
    dist.all_to_all([torch.empty(rank + 1) for _ in range(size)], [torch.ones(other + 1) for other in range(size)])
    dist.barrier()
    dist.group.WORLD.monitored_barrier()
    right, left = (rank + 1) % size, (rank - 1) % size
    sent = [dist.isend(torch.ones(n), right) for n in (3, 5000)]
    for n in (3, 5000):
        dist.recv(torch.empty(n), left)
    for work in sent:
        work.wait()
    if rank == 0:
        for _ in range(1, size):
            dist.recv(torch.empty(4))
    else:
        dist.send(torch.ones(4), 0)
    half = dist.new_group([0, 3] if rank in (0, 3) else [1, 2], use_local_synchronization=True, group_desc="half")
    for _ in range(rank % 3 + 1, 2):
        dist.barrier(half)  # more often on some groups than on others
    dist.all_reduce(torch.ones(2), group=half)


def _dump_of_all_operations(directory: str) -> dict[str, Any]:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    rank, size, _ = _begin(directory)
    try:
        _all_operations(rank, size)
        path = fusion_rt.c10d.dump_flight_record(f"{directory}/dumps/rank_{rank}")
        dist.barrier()  # rank 0 serves the store, in which others may still open their half
        return dict(pickle.loads(path.read_bytes()))
    finally:
        dist.destroy_process_group()
        del os.environ["TORCH_FR_BUFFER_SIZE"]


def _miss_one(directory: str) -> str:
    """Leaves out one operation on one rank, which then computes until the others have seen that they are stuck."""
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{directory}/dumps/rank_"
    try:
        rank, _, files = _begin(directory)
        dist.all_reduce(torch.ones(3))
        said = ""
        if rank == MISSES:
            files.wait([f"stuck.{other}" for other in range(4) if other != MISSES])
        else:
            dist.group.WORLD.set_timeout(LIMIT)
            try:
                dist.all_reduce(torch.ones(SAMPLES))
            except dist.DistBackendError as error:
                said = str(error)
            files.set(f"stuck.{rank}", "yes")
        return said
    finally:
        dist.destroy_process_group()
        del os.environ["TORCH_FR_DUMP_TEMP_FILE"]


def _abort(directory: str) -> None:
    """Aborts the group on one rank, while the others do something else."""
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{directory}/dumps/rank_"
    try:
        rank, _, files = _begin(directory)
        dist.barrier()
        if rank == MISSES:
            dist.group.WORLD.abort()
            files.set("aborted", "yes")
        else:
            files.wait(["aborted"])
    finally:
        dist.destroy_process_group()
        del os.environ["TORCH_FR_DUMP_TEMP_FILE"]


def _analysed(dumps: Path) -> tuple[list[Any], str]:
    """What torch's analyser makes of dumps: the collectives, and what it says about them."""
    found = dumps.parent / "analysed"
    module = "torch.distributed.flight_recorder.fr_trace"
    done = forks.popen(
        [sys.executable, "-m", module, str(dumps), "-o", str(found)],
        forks.WORKER,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said, _ = done.communicate()
    assert done.returncode == 0, said
    _, database = pickle.loads(found.read_bytes())
    return database.collectives, said


@analyser
def test_the_analyser_finds_nothing_wrong_with_any_operation(job: Job, tmp_path: Path) -> None:
    dumps = job.run(_dump_of_all_operations, str(tmp_path))
    collectives, said = _analysed(tmp_path / "dumps")
    assert [each for each in collectives if not each.pass_check or each.missing_ranks] == [], said
    assert {each.collective_state for each in collectives} == {"completed"}
    entries = [entry for dump in dumps for entry in dump["entries"]]
    assert {entry["profiling_name"].removeprefix("gloo:").partition(" ")[0] for entry in entries} == {
        *("all_reduce", "allreduce_coalesced", "reduce", "broadcast", "barrier"),
        *("all_gather", "all_gather_v", "_all_gather_base", "all_gather_into_tensor_coalesced", "gather"),
        *("reduce_scatter", "reduce_scatter_v", "_reduce_scatter_base", "scatter", "all_to_all", "send", "recv"),
    }
    assert {entry["process_group"][1] for entry in entries} == {"default_pg", "half"}
    assert all(entry["frames"][0]["name"] for entry in entries)
    assert "_all_operations" in {frame["name"] for frame in entries[0]["frames"]}


@analyser
def test_the_analyser_names_the_rank_that_missed_an_operation_and_the_operation(job: Job, tmp_path: Path) -> None:
    said = job.run(_miss_one, str(tmp_path))
    assert [bool(text) for text in said] == [rank != MISSES for rank in range(4)]
    collectives, words = _analysed(tmp_path / "dumps")
    healthy, missed = collectives
    assert (healthy.missing_ranks, healthy.collective_state) == (None, "completed")
    assert missed.missing_ranks == {MISSES}
    assert (missed.collective_name, missed.input_sizes) == ("gloo:all_reduce", [[SAMPLES]])
    assert missed.collective_state == "scheduled"
    assert "Not all ranks joining collective, sequence number: 2" in words
    assert f"missing ranks: {{{MISSES}}}" in words
    assert "_miss_one at " in words


@analyser
def test_all_ranks_write_what_they_have_done_when_one_aborts_a_group(job: Job, tmp_path: Path) -> None:
    job.run(_abort, str(tmp_path))
    (barrier,), _ = _analysed(tmp_path / "dumps")
    assert (barrier.collective_name, barrier.missing_ranks) == ("gloo:barrier", None)
    assert {path.name for path in (tmp_path / "dumps").iterdir()} == {f"rank_{rank}" for rank in range(4)}


def _recorded(dumps: FlightDumps, times: int) -> None:
    group = dumps.recorder.open_group("0", [0])
    for _ in range(times):
        operation = group.record("all_reduce", (), [torch.ones(2)], [torch.ones(2)])
        assert operation is not None
        operation.end(failed=False)


def _numbers(path: Path) -> list[int]:
    return [entry["record_id"] for entry in pickle.loads(path.read_bytes())["entries"]]


def test_the_last_operations_are_written_when_a_pipe_or_a_failure_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place, pipe = tmp_path / "dumps" / "rank_", tmp_path / "pipe_"
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "3")
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(place))
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", str(pipe))
    dumps = FlightDumps(dist.HashStore(), "job", 7, 8)
    _recorded(dumps, 5)
    (tmp_path / "pipe_7.pipe").write_text("1\n")
    dumps.close()
    assert not (tmp_path / "pipe_7.pipe").exists()
    written = place.with_name("rank_7")
    assert _numbers(written) == [2, 3, 4]
    written.unlink()
    failing = dumps.recorder.open_group("1", [0, 7]).record("barrier", (), (), ())
    assert failing is not None
    failing.end(failed=True)
    assert _numbers(written) == [3, 4, 5]
    assert [path.name for path in written.parent.iterdir()] == ["rank_7"]


def test_a_rank_that_fails_goes_on_when_all_have_been_told_by_whoever_failed_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It may be the one that serves the store, and end then."""
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "rank_"))
    store = dist.HashStore()
    dumps = FlightDumps(store, "job", 0, 2)
    store.add("fusion/job/flight.failures", 1)  # the other one has only begun to tell
    fails = threading.Thread(target=dumps.write_everywhere)
    fails.start()
    fails.join(0.2)
    assert fails.is_alive()
    store.set("fusion/job/flight.told", "")
    fails.join(60)
    assert not fails.is_alive()
    dumps.close()


def test_nothing_is_recorded_unless_a_variable_asks_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dumps = FlightDumps(dist.HashStore(), "job", 0, 1)
    assert dumps.recorder.open_group("0", [0]).record("barrier", (), (), ()) is None
    with pytest.raises(FusionError, match="nothing is recorded: set TORCH_FR_BUFFER_SIZE"):
        dumps.write(tmp_path / "dump")
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "many")
    with pytest.raises(FusionError, match=r"TORCH_FR_BUFFER_SIZE.* has to be a number of operations, not 'many'"):
        FlightDumps(dist.HashStore(), "job", 0, 1)


def test_a_record_is_not_written_through_a_link_that_somebody_planted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch's default place is in /tmp, and the name can be guessed."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "10")
    dumps = FlightDumps(dist.HashStore(), "job", 0, 1)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in ("dump", ".dump.part"):
        (tmp_path / name).symlink_to(victim)
    assert dumps.write(tmp_path / "dump").stat().st_size
    assert not (tmp_path / "dump").is_symlink()
    assert victim.read_text() == "precious"
