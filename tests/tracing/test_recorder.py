"""The recorder: what is written can be read, whatever becomes of the writer, and the file has a size."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusion_rt.settings import Settings
from fusion_rt.tracing import files, reader
from fusion_rt.tracing.format import COMMAND_NBYTES, HEADER_NBYTES, NAMES_NBYTES, NOBODY, RECORD, Flush, Kind, Role
from fusion_rt.tracing.recorder import NULL, Owner, Recorder, open_recorder

OWNER = Owner("job", Role.WORKER, 3, 1, 2)


def nbytes_for(records: int) -> int:
    return HEADER_NBYTES + NAMES_NBYTES + records * RECORD.size


def ring_at(path: Path, records: int = 1000) -> Recorder:
    return Recorder(str(path / "rank-3.ring"), OWNER, nbytes_for(records))


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    made = ring_at(tmp_path)
    yield made
    made.close()


def test_what_is_recorded_is_read_while_it_is_written(recorder: Recorder) -> None:
    recorder.record(Kind.SUBMITTED, "bucket 3", 4096, 17, 2, Flush.FULL)
    recorder.record(Kind.SENT, "bucket 3", 100, 1 << 40, 2, 5, peer=1)
    recorder.record(Kind.CLOCK, value=-12, extra=9, peer=1)
    ring = reader.read(recorder.path)
    assert (ring.role, ring.rank, ring.node, ring.nodes, ring.job) == (Role.WORKER, 3, 1, 2, "job")
    assert ring.pid == os.getpid()
    found = [
        (Kind(r["kind"]), ring.names[r["name"]], *(int(r[key]) for key in ("value", "clock", "plan", "extra", "peer")))
        for r in ring.records
    ]
    assert found == [
        (Kind.SUBMITTED, "bucket 3", 4096, 17, 2, Flush.FULL, NOBODY),
        (Kind.SENT, "bucket 3", 100, 1 << 40, 2, 5, 1),
        (Kind.CLOCK, "", -12, 0, 0, 9, 1),
    ]
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        assert ring.machine == file.read().strip().replace("-", "")
    assert 0 < ring.processors <= len(os.sched_getaffinity(0))
    assert all(ring.created <= time_ <= time.monotonic_ns() for time_ in ring.records["time"])
    assert not ring.problems


def test_the_command_line_is_recorded_as_far_as_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, expected in (
        (["python", "train.py", "a b"], "python train.py 'a b'"),
        (["python", "é" * 5000], f"python '{'é' * ((COMMAND_NBYTES - 8) // 2)}"),
        (["\udcff"], "'?'"),
    ):
        monkeypatch.setattr(sys, "orig_argv", arguments)
        made = Recorder(str(tmp_path / "rank-0.ring"), Owner("job", Role.WORKER, 0, 0, 1))
        assert reader.read_header(made.path).command == expected
        made.close()


def test_the_oldest_are_overwritten_and_counted(recorder: Recorder) -> None:
    for number in range(2500):
        recorder.record(Kind.GRADIENT, f"weight {number % 7}", number)
    ring = reader.read(recorder.path)
    assert ring.written == 2500
    assert 1500 <= ring.overwritten < 1600  # a reader leaves alone what may be overwritten while it reads
    assert list(ring.records["value"]) == list(range(ring.overwritten, 2500))


def test_a_number_that_has_no_place_is_cut_off_and_nothing_raises(recorder: Recorder) -> None:
    recorder.record(Kind.CLOCK, "x", 7, 3, 1 << 40, 1 << 33, peer=1 << 20)
    recorder.record(Kind.CLOCK, "x", -7, extra=-5)
    recorder.record(Kind.CLOCK, "x", 1 << 80, -1)
    recorder.record(Kind.CLOCK, "x", -(1 << 80))
    ring = reader.read(recorder.path)
    first, second = ring.records  # the reader believes no time of nine years
    assert (first["value"], first["extra"], first["peer"]) == (7, (1 << 32) - 1, NOBODY)
    assert (second["value"], second["extra"]) == (-7, 0)
    assert "2 records" in ring.problems[0]


def test_names_are_bounded_and_those_without_room_are_counted(recorder: Recorder) -> None:
    for number in range(1100):
        recorder.record(Kind.GRADIENT, f"{number:05}" + "ü" * 2000)
    ring = reader.read(recorder.path)
    assert ring.lost_names == 1100 - (len(ring.names) - 1)
    assert NAMES_NBYTES - 1100 < sum(2 + len(name.encode()) for name in ring.names[1:]) <= NAMES_NBYTES
    assert {int(r["name"]) for r in ring.records[-10:]} == {0}
    recorder.record(Kind.GRADIENT, "00500" + "ü" * 2000)
    assert reader.read(recorder.path).names[reader.read(recorder.path).records[-1]["name"]].startswith("00500")


def test_threads_record_side_by_side(recorder: Recorder) -> None:
    def work(number: int) -> None:
        for value in range(200):
            recorder.record(Kind.REDUCE_BEGIN, f"thread {number}", value)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ring = reader.read(recorder.path)
    assert ring.written == 800
    for number in range(4):
        mine = [int(r["value"]) for r in ring.records if ring.names[r["name"]] == f"thread {number}"]
        assert sorted(mine) == list(range(200))


def test_the_file_is_private_sparse_and_complete_when_it_appears(tmp_path: Path) -> None:
    recorder = Recorder(str(tmp_path / "rank-3.ring"), OWNER, 16 << 20)
    try:
        status = os.stat(recorder.path)
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_size <= 16 << 20
        assert status.st_blocks * 512 < 2 << 20
        assert os.listdir(tmp_path) == ["rank-3.ring"]
    finally:
        recorder.close()


def test_one_hour_at_a_hundred_steps_a_second_is_bounded(tmp_path: Path) -> None:
    """A sixtieth of it: 6000 steps of 150 events each, in a ring of a sixtieth of the default size."""
    limit = nbytes_for((Settings.trace_buffer - nbytes_for(0)) // RECORD.size // 60)
    recorder = Recorder(str(tmp_path / "rank-3.ring"), OWNER, limit)
    try:
        resident = _resident()
        for step in range(6000):
            for event in range(150):
                recorder.record(Kind.GRADIENT, NAMES[event], 1024, step)
        status = os.stat(recorder.path)
        assert status.st_size <= limit
        assert status.st_blocks * 512 <= limit + 65536
        assert _resident() - resident < 4 << 20
        ring = reader.read(recorder.path)
        assert ring.written == 900_000
        assert ring.records["clock"][-1] == 5999
    finally:
        recorder.close()


NAMES = [f"layers.{number}.weight" for number in range(150)]


def _resident() -> int:
    """Bytes of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_full_disk_ends_the_growth_and_not_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = ring_at(tmp_path, 100_000)
    real = os.posix_fallocate

    def full(fd: int, offset: int, nbytes: int) -> None:
        if offset + nbytes > nbytes_for(40_000):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", full)
    try:
        for number in range(50_000):
            recorder.record(Kind.GRADIENT, "w", number)
        ring = reader.read(recorder.path)
        kept = len(ring.records)
        assert 16_384 <= kept <= 40_000  # as many as there was room for
        assert list(ring.records["value"]) == list(range(50_000 - kept, 50_000))
    finally:
        recorder.close()


def test_a_closed_recorder_records_nothing_and_leaves_no_descriptor(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    recorder = ring_at(tmp_path)
    kept = recorder.record
    recorder.record(Kind.GRADIENT, "w")
    recorder.close()
    recorder.close()
    recorder.record(Kind.GRADIENT, "w")
    kept(Kind.GRADIENT, "w")  # of a thread that was about to
    assert reader.read(recorder.path).written == 1
    assert set(os.listdir("/proc/self/fd")) == before
    assert recorder.path not in Path("/proc/self/maps").read_text()


def test_a_forked_child_records_nothing(recorder: Recorder) -> None:
    recorder.record(Kind.GRADIENT, "parent")
    child = os.fork()
    if not child:
        recorder.record(Kind.GRADIENT, "child")
        os._exit(0)
    os.waitpid(child, 0)
    assert reader.read(recorder.path).written == 1


WRITER = """
import itertools, sys
from fusion_rt.tracing.recorder import Owner, Recorder
from fusion_rt.tracing.format import Kind, Role
recorder = Recorder(sys.argv[1], Owner("job", Role.WORKER, 0, 0, 1), 2 << 20)
for number in itertools.count():
    recorder.record(Kind.GRADIENT, f"w{number % 100}", number, number)
    if number == 1000:
        print(flush=True)
"""


def test_after_a_sigkill_every_record_is_there(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.ring"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    with writer.stdout:
        writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    ring = reader.read(str(path))
    assert ring.written > 1000
    assert len(ring.records) >= min(ring.written, 26_000)
    values = [int(value) for value in ring.records["value"]]
    assert values == list(range(values[0], values[0] + len(values)))
    assert all(ring.names[r["name"]] == f"w{r['value'] % 100}" for r in ring.records)


# --- where ------------------------------------------------------------------------------------------------------------


def test_without_a_directory_nothing_is_recorded_and_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told: list[str] = []
    settings = Settings(trace_dir=str(tmp_path / "file"))
    assert open_recorder(settings, OWNER, told.append) is NULL
    assert len(told) == 1
    assert "rank 3" in told[0]
    assert "--no-trace" in told[0]


def test_a_directory_of_others_is_not_used(tmp_path: Path) -> None:
    told: list[str] = []
    (tmp_path / "job").mkdir(mode=0o755)
    (tmp_path / "job").chmod(0o755)
    assert open_recorder(Settings(trace_dir=str(tmp_path)), OWNER, told.append) is NULL
    assert "FUSION_TRACE_DIR" in told[0]


def test_a_link_at_the_place_of_a_ring_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "rank-3.ring").symlink_to(tmp_path / "precious")
    ring_at(tmp_path).close()
    assert (tmp_path / "precious").read_text() == "precious"
    assert reader.read(str(tmp_path / "rank-3.ring")).rank == 3


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    settings = Settings.from_env({"FUSION_TRACE": "0", "FUSION_TRACE_DIR": str(tmp_path)})
    recorder = open_recorder(settings, OWNER, lambda why: pytest.fail(why))
    recorder.record(Kind.GRADIENT, "w", 1)
    recorder.close()
    assert os.listdir(tmp_path) == []


def test_only_the_latest_jobs_are_kept_and_those_that_run(tmp_path: Path) -> None:
    recorders = {}
    for number in range(6):
        job = f"job{number}"
        (tmp_path / job).mkdir(mode=0o700)
        recorders[job] = Recorder(str(tmp_path / job / "node-0.ring"), OWNER._replace(job=job), nbytes_for(1))
        os.utime(tmp_path / job, ns=(number, number))
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "thesis.tex").write_text("")
    for job in ("job0", "job2", "job3", "job4", "job5"):
        recorders[job].close()
    gone = files.begin_job(str(tmp_path), "job6", keep=3)
    assert sorted(gone) == [str(tmp_path / job) for job in ("job0", "job2", "job3")]
    assert sorted(os.listdir(tmp_path)) == ["else", "job1", "job4", "job5"]
    recorders["job1"].close()
    assert sorted(files.remove_dead(str(tmp_path))) == [str(tmp_path / job) for job in ("job1", "job4", "job5")]
    assert files.remove_dead(str(tmp_path / "nowhere")) == []


def test_a_job_of_the_same_name_begins_without_what_the_last_one_left(tmp_path: Path) -> None:
    directory = tmp_path / "job"
    directory.mkdir(mode=0o700)
    ring_at(directory).close()
    files.begin_job(str(tmp_path), "job", keep=5)
    assert os.listdir(directory) == []
    recorder = ring_at(directory)
    files.begin_job(str(tmp_path), "job", keep=5)  # of another daemon of the job on this host
    assert os.listdir(directory) == ["rank-3.ring"]
    recorder.close()


def test_a_ring_that_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another daemon of the job on this host takes it for one of a writer that is gone."""
    directory = tmp_path / "job"
    directory.mkdir(mode=0o700)
    real, removals = fcntl.flock, [files.begin_job]

    def flock(fd: int, how: int) -> None:
        if removals:
            removals.pop()(str(tmp_path), "job", keep=5)
            assert os.listdir(directory) == []
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    recorder = ring_at(directory)
    recorder.record(Kind.GRADIENT, "w", 1)
    assert reader.read(recorder.path).written == 1
    assert os.listdir(directory) == ["rank-3.ring"]
    recorder.close()
