"""When something runs out - shared memory, disk, descriptors, memory - and what dead daemons leave behind."""

from __future__ import annotations

import array
import contextlib
import fcntl
import logging
import os
import re
import resource
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from typer.testing import CliRunner

from fusion_rt import wire
from fusion_rt.core.errors import ArenaError, FusionError, HorovodInternalError
from fusion_rt.core.topology import Topology
from fusion_rt.host.arena import Segment
from fusion_rt.host.bootstrap import RANKS_DIRECTORY, DaemonConfig
from fusion_rt.host.private_files import replacing
from fusion_rt.local import packets
from fusiond.app.cli import app
from fusiond.engine.snapshots import SnapshotError, SnapshotFiles
from fusiond.host import leftovers
from fusiond.host.leftovers import remove_dead
from fusiond.host.loop import EventLoop
from fusiond.host.runtime_directory import Directory, listen
from fusiond.workers.connections import WorkerLink, Workers
from tests import forks
from tests.fusiond.algorithms.training import Workers as TrainingWorkers
from tests.fusiond.processes import Daemons, kill, together
from tests.fusiond.simulation import SimulatedJob

MakeDaemons = Callable[..., Daemons]
ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
CONFIG = DaemonConfig("job", 0, Topology(("a",), ((0,),)))
JOB_S = 120.0  # for a whole job, on however slow a machine


@contextlib.contextmanager
def limited(what: int, value: int) -> Iterator[None]:
    """This process's soft limit of a resource."""
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))


def fusionrun(*arguments: str, wrapper: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """A whole job, with real daemons."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "daemon"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [*wrapper, sys.executable, "-m", "fusion_rt.runner", *arguments],
        env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=JOB_S,
    )


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


# --- shared memory ----------------------------------------------------------------------------------------------------

TOO_LARGE = """
import resource, torch
import fusion_rt.torch as hvd
hvd.init()
hvd.allreduce(torch.ones(2), name="small")
if hvd.rank() == 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # bytes of any file, shared memory among them
hvd.allreduce(torch.ones(1 << 20), name="large")
print("went on", flush=True)
"""


def test_shared_memory_that_cannot_be_allocated_is_a_sentence_and_leaves_nothing() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with (
        limited(resource.RLIMIT_FSIZE, MIB),
        pytest.raises(ArenaError, match="bytes of shared memory cannot be allocated"),
    ):
        Segment.create(2 * MIB)
    assert len(os.listdir("/proc/self/fd")) == before
    Segment.create(2 * MIB).close()


@pytest.mark.multiprocess
def test_a_worker_without_shared_memory_says_so_and_its_job_fails(runtime_dir: Path) -> None:
    result = fusionrun("-np", "2", *forks.interpreter(forks.WORKER), "-c", TOO_LARGE)
    assert result.returncode == 1
    assert "went on" not in result.stdout
    assert re.search(r"fusionrun: rank 1 on host localhost failed first: .*ArenaError: \d+ bytes of shared memory "
                     r"cannot be allocated on this host \(.*File too large\)", last_line(result.stderr))  # fmt: skip
    assert os.listdir(runtime_dir) == []


@pytest.mark.multiprocess
def test_a_daemon_without_shared_memory_for_a_result_fails_the_operation_and_goes_on(daemons: MakeDaemons) -> None:
    job = daemons(2).start()
    job.join()
    resource.prlimit(job.processes[0].pid, resource.RLIMIT_FSIZE, (MIB, MIB))
    gather = wire.Signature("allgather", "uint8", (MIB,))

    def work(rank: int) -> str:
        client = job.clients[rank]
        region = client.allocate(MIB)
        with pytest.raises(HorovodInternalError) as raised:
            client.wait(client.submit("large", gather, place=(region.segment, region.offset)))
        return str(raised.value)

    told = together({rank: partial(work, rank) for rank in job.clients})
    assert all("bytes of shared memory cannot be allocated on this host" in text for text in told.values()), told
    assert add(job) == {0: 3.0, 1: 3.0}


IN_GROUP = """
import os, sys
import numpy as np
from fusion_rt import wire
from fusion_rt.client import Client, client as module
from fusion_rt.client.channel import Completion

COUNT, NBYTES = 24, 32 << 20
rank, short = int(os.environ["HOROVOD_RANK"]), sys.argv[1]
client = Client(os.environ["FUSION_SOCKET"], os.environ["FUSION_JOB_ID"], rank, 60.0)
signature = wire.Signature("allreduce", "float32", (NBYTES // 4,), process_set=client.open_group("all", (0, 1)))
ended = []

def begin():
    region = client.allocate(NBYTES)
    values = np.frombuffer(region.view, np.float32)
    values[:] = rank + 1

    def end(operation):
        ended.append(bool((values == 3).all()))
        client.arena.free(region)

    completion = Completion(release=end, lent=NBYTES)
    return client.submit_in_group(signature, place=(region.segment, region.offset), completion=completion)

def warned(record):
    open(short, "w").close()
    return True

if rank == 0:
    module._log.addFilter(warned)
else:
    open(short).close()  # a pipe: until rank 0 is short of memory
for operation in [begin() for _ in range(COUNT)]:
    client.wait(operation)
assert ended == [True] * COUNT
print("all", flush=True)
client.close()
"""


@pytest.fixture
def control_group() -> Iterator[Path]:
    """A control group with 800 MiB of memory."""
    found = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    first = [name for _, controllers, name in found if controllers == "memory"]
    root = Path("/sys/fs/cgroup/memory") if first else Path("/sys/fs/cgroup")
    group = root / f"fusion_test.{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(800 * MIB))
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"no control group with a limit of memory can be made here: {error.strerror}")
    yield group
    group.rmdir()


@pytest.mark.multiprocess
def test_a_job_in_a_control_group_that_is_full_waits_for_its_operations(
    control_group: Path, runtime_dir: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(IN_GROUP)
    os.mkfifo(tmp_path / "short")
    enter = ("sh", "-c", f'echo $$ > {control_group}/cgroup.procs && exec "$@"', "sh")
    result = fusionrun("-np", "2", sys.executable, str(script), str(tmp_path / "short"), wrapper=enter)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("all") == 2
    assert f"within the limit of the control group {control_group})" in result.stderr


def test_an_arena_cannot_be_truncated_by_anybody_who_has_it() -> None:
    segment = Segment.create(2 * MIB)
    fd = os.dup(segment.fd)  # as another process gets it
    try:
        for nbytes in (0, MIB, 4 * MIB):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, nbytes)
        with pytest.raises(OSError, match="not permitted"):
            os.posix_fallocate(fd, 0, 4 * MIB)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)  # under which the daemon could not write results
        assert os.fstat(fd).st_size == 2 * MIB
        segment.view[-1] = 1  # still there
    finally:
        os.close(fd)
        segment.close()


# --- disk -------------------------------------------------------------------------------------------------------------


def add(job: Daemons) -> dict[int, Any]:
    """The first element of an operation of all workers, by rank."""

    def work(rank: int) -> float:
        client = job.clients[rank]
        data = np.full(4, rank + 1.0, np.float32).tobytes()
        inline = client.wait(client.submit("x", wire.Signature("allreduce", "float32", (4,)), inline=data)).inline
        return float(np.frombuffer(inline or b"", np.float32)[0])

    return together({rank: partial(work, rank) for rank in job.clients})


@pytest.mark.multiprocess
def test_a_daemon_whose_log_does_not_fit_on_the_disk_goes_on(daemons: MakeDaemons) -> None:
    job = daemons(2, HOROVOD_LOG_LEVEL="DEBUG")
    job.log_path(0).symlink_to("/dev/full")
    job.start()
    job.join()
    assert add(job) == {0: 3.0, 1: 3.0}
    assert job.status()["state"] == "running"


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it makes a device")
@pytest.mark.multiprocess
def test_a_file_of_output_that_does_not_fit_on_the_disk_is_told_and_the_job_goes_on(
    tmp_path: Path, runtime_dir: Path
) -> None:
    for rank in range(2):
        (tmp_path / f"rank.{rank}").mkdir()
    os.mknod(tmp_path / "rank.1" / "stdout", stat.S_IFCHR | 0o600, os.stat("/dev/full").st_rdev)
    code = "import os; print('hello of', os.environ['HOROVOD_RANK'], flush=True)"
    result = fusionrun("-np", "2", "--output-filename", str(tmp_path), sys.executable, "-c", code)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.split("\n")[:2]) == ["[0]<stdout>:hello of 0", "[1]<stdout>:hello of 1"]
    assert (tmp_path / "rank.0" / "stdout").read_text() == "[0]<stdout>:hello of 0\n"
    told = "fusionrun: some output was lost: a file of --output-filename: No space left on device"
    assert told in result.stderr.splitlines()


def snapshots(directory: Path) -> TrainingWorkers:
    job = SimulatedJob((1, 1), snapshot_directory=str(directory))
    workers = TrainingWorkers((1, 1), "asp", np.ones(30_000), 0.1, job=job)
    take(workers)
    assert not job.warnings
    return workers


def take(workers: TrainingWorkers) -> None:
    for node in workers.job.nodes:
        node.engine.snapshots.take()
    workers.job.settle()


def check_a_snapshot_that_did_not_fit(
    workers: TrainingWorkers, directory: Path, before: dict[str, bytes], why: str
) -> None:
    assert workers.job.warnings
    assert all(
        "no snapshot could be written" in w and why in w and "the one before is left" in w for w in workers.job.warnings
    )
    assert {path.name: path.read_bytes() for path in directory.glob("*.snapshot*")} == before
    workers.post(0, np.ones(30_000))
    workers.collect(0)  # training goes on


def test_a_snapshot_beyond_the_limit_of_files_is_a_warning_and_the_one_before_stays(tmp_path: Path) -> None:
    workers = snapshots(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.snapshot*")}
    assert before
    with limited(resource.RLIMIT_FSIZE, 4096):
        take(workers)
    check_a_snapshot_that_did_not_fit(workers, tmp_path, before, "File too large")


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it mounts a small tmpfs")
def test_a_snapshot_on_a_full_disk_is_a_warning_and_the_one_before_stays(tmp_path: Path) -> None:
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)], capture_output=True, text=True
    )
    if mount.returncode:
        pytest.skip(f"no file system can be mounted here: {mount.stderr.strip()}")
    try:
        workers = snapshots(tmp_path)
        before = {path.name: path.read_bytes() for path in tmp_path.glob("*.snapshot*")}
        with contextlib.suppress(OSError), open(tmp_path / "filler", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        take(workers)
        check_a_snapshot_that_did_not_fit(workers, tmp_path, before, "No space left on device")
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_snapshot_is_written_through_no_link_and_for_this_user_alone(tmp_path: Path) -> None:
    snapshots(tmp_path / "snapshots")
    path = min((tmp_path / "snapshots").glob("*.snapshot"))
    assert path.stat().st_mode & 0o777 == 0o600
    precious = tmp_path / "precious"
    precious.write_text("mine")
    path.with_name(path.name + ".new").symlink_to(precious)
    with replacing(str(path), f"{path}.new") as file:
        file.write(b"snapshot")
    assert precious.read_text() == "mine"
    assert path.read_bytes() == b"snapshot"
    assert not path.is_symlink()


def test_a_snapshot_that_others_may_have_written_is_not_believed(tmp_path: Path) -> None:
    workers = snapshots(tmp_path)
    for path in tmp_path.glob("*.snapshot"):
        path.chmod(0o666)
    plan = next(iter(workers.job.nodes[0].engine._plans)).plan
    files = SnapshotFiles(str(tmp_path), 0)
    with pytest.raises(SnapshotError, match="can be written by others, and is not believed"):
        files.read(plan, files.numbers(plan)[-1])


# --- descriptors ------------------------------------------------------------------------------------------------------


class Handler:
    """Accepts everybody."""

    def __init__(self) -> None:
        self.messages: list[object] = []
        self.handlers = dict.fromkeys(get_args(wire.WorkerMessage), self.take)

    def worker_joined(self, link: WorkerLink, hello: wire.Hello) -> None:
        link.rank = hello.rank

    def take(self, link: WorkerLink, message: object) -> None:
        self.messages.append(message)

    def worker_left(self, rank: int, bye: wire.Bye) -> None:
        self.messages.append(bye)

    def worker_lost(self, rank: int, pid: int, why: str) -> None:
        self.messages.append(why)

    def connection_ended(self) -> None:
        pass


class Clock:
    """Time that passes when it is told to, as far as timers are concerned."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_without_descriptors_nobody_new_comes_and_those_who_are_there_notice_nothing(
    runtime_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, handler = Clock(), Handler()
    loop = EventLoop(clock)
    workers = Workers(loop, listen(str(runtime_dir / "sock")), handler)

    def turn() -> None:
        loop.call_soon(lambda: None)  # so that it does not wait
        loop.turn()

    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) for _ in range(2))
        stack.callback(loop.close)
        stack.callback(workers.close)
        first.connect(workers._path)
        turn()
        second.connect(workers._path)
        packets.Packet(wire.encode(wire.Hello(1, "job", 0, os.getpid()))).send(first)
        with caplog.at_level(logging.WARNING), limited(resource.RLIMIT_NOFILE, lowest_free_descriptor()):
            for _ in range(20):
                for _ in range(5):  # turns between two attempts find nothing to do: the loop does not spin
                    turn()
                    packets.Packet(wire.encode(wire.StatusRequest())).send(first)
                    turn()
                clock.now += 1.0
            assert workers.statistics()["connections"] == 1
            assert workers.statistics()["not_accepted"] == 20
            assert loop._epoll.poll(0) == []
            assert handler.messages == [wire.StatusRequest()] * 100
        (said,) = (record.getMessage() for record in caplog.records)
        assert said.startswith("no connection can be accepted for now: Too many open files")
        clock.now += 1.0
        turn()
        turn()
        assert workers.statistics()["connections"] == 2


def test_an_arena_for_which_there_is_no_descriptor_is_an_error_that_says_so() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    segment = Segment.create(4096)
    with ours, theirs:
        theirs.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [segment.fd]))])
        with limited(resource.RLIMIT_NOFILE, lowest_free_descriptor()), pytest.raises(FusionError, match="ulimit -n"):
            packets.receive(ours)
    segment.close()


def lowest_free_descriptor() -> int:
    fd = os.dup(0)
    os.close(fd)
    return fd


# --- memory -----------------------------------------------------------------------------------------------------------

GREEDY = """
import os
if os.environ["HOROVOD_RANK"] == "1":
    taken = []
    while True:
        taken.append(b"x" * (32 << 20))
import time; time.sleep(60)
"""


@pytest.fixture
def small_group() -> Iterator[tuple[str, ...]]:
    """A command that runs another one in a control group with little memory."""
    if os.geteuid() != 0:
        pytest.skip("needs root: it makes a control group")
    with open("/proc/self/cgroup") as file:
        groups = dict(line.rstrip("\n").split(":", 2)[1:] for line in file)
    name = f"fusion-test-{os.getpid()}"
    if "memory" in groups:
        group, limit = Path(f"/sys/fs/cgroup/memory/{groups['memory'].lstrip('/')}", name), "memory.limit_in_bytes"
    else:
        group, limit = Path(f"/sys/fs/cgroup/{groups.get('', '/').lstrip('/')}", name), "memory.max"
    try:
        group.mkdir()
        (group / limit).write_text(str(512 * MIB))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no control group with a limit can be made here: {error}")
    yield ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")
    deadline = time.monotonic() + 10
    while True:
        try:
            group.rmdir()
            return
        except OSError:  # its last process is on its way out
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


@pytest.mark.root
@pytest.mark.multiprocess
def test_the_launcher_says_that_the_kernel_has_killed_a_worker_for_lack_of_memory(
    small_group: tuple[str, ...], runtime_dir: Path
) -> None:
    result = fusionrun("-np", "2", sys.executable, "-c", GREEDY, wrapper=small_group)
    assert result.returncode == 1
    assert re.fullmatch(
        r"fusionrun: rank 1 on host localhost was killed by SIGKILL \(by the kernel: the memory limit of its control "
        r"group was met \(oom_kill in /sys/fs/cgroup/.*\)\)",
        last_line(result.stderr),
    )


# --- what is left of dead daemons -------------------------------------------------------------------------------------


def left_by_a_dead_daemon(root: Path, name: str, log: str = "") -> Path:
    path = root / name
    path.mkdir(mode=0o700)
    (path / "lock").write_text("4194305\n")  # beyond the largest pid
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(path / "sock"))
    (path / "log").write_text(log)
    (path / RANKS_DIRECTORY).mkdir(mode=0o700)
    (path / RANKS_DIRECTORY / "0-1-0").write_text("")  # of its workers, which were killed as well
    return path


def fusiond(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def make_old(*paths: Path, seconds: float = leftovers._OLD + 60) -> None:
    for path in paths:
        os.utime(path, (time.time() - seconds,) * 2)


def test_a_new_daemon_removes_what_dead_ones_have_left(runtime_dir: Path) -> None:
    silent, told = left_by_a_dead_daemon(runtime_dir, "a.0"), left_by_a_dead_daemon(runtime_dir, "b.1", "why\n")
    foreign = runtime_dir / "c.0"
    foreign.mkdir()
    (foreign / "lock").write_text("4194305\n")
    (foreign / "precious").write_text("")
    (runtime_dir / "notes").mkdir()
    directory = Directory(str(runtime_dir), CONFIG)
    assert not silent.exists()
    assert os.listdir(told) == ["log"]  # for `fusiond logs`
    assert os.listdir(foreign) == ["precious"]
    assert (runtime_dir / "notes").is_dir()
    directory.release()
    assert sorted(os.listdir(runtime_dir)) == ["b.1", "c.0", "notes"]


def test_daemons_that_start_at_once_remove_the_same_without_a_warning(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, other = left_by_a_dead_daemon(runtime_dir, "a.0"), left_by_a_dead_daemon(runtime_dir, "b.0")
    unlink = os.unlink

    def unlink_after_another(name: str) -> None:
        monkeypatch.setattr(os, "unlink", unlink)
        shutil.rmtree(path)
        unlink(name)

    monkeypatch.setattr(os, "unlink", unlink_after_another)
    assert remove_dead(str(runtime_dir)) == [str(other)]
    assert not path.exists()
    assert not caplog.records


def test_logs_of_dead_daemons_go_when_they_are_old(runtime_dir: Path) -> None:
    path = left_by_a_dead_daemon(runtime_dir, "a.0", "why\n")
    ended = runtime_dir / "b.0"  # in good order: without a lock
    ended.mkdir(mode=0o700)
    (ended / "log").write_text("a warning\n")
    make_old(path / "log", ended / "log", ended)
    assert remove_dead(str(runtime_dir)) == [str(path), str(ended)]
    assert os.listdir(runtime_dir) == []


def test_what_may_belong_to_a_daemon_that_is_starting_is_left_alone(runtime_dir: Path) -> None:
    starting = runtime_dir / "a.0"  # its lock comes later
    starting.mkdir(mode=0o700)
    (starting / "log").write_text("")
    assert remove_dead(str(runtime_dir), logs=True) == []
    (starting / "lock").write_text("")  # made, and not taken yet
    assert remove_dead(str(runtime_dir), logs=True) == []
    assert sorted(os.listdir(starting)) == ["lock", "log"]
    make_old(starting, seconds=leftovers._STARTING + 60)
    assert remove_dead(str(runtime_dir)) == [str(starting)]


def test_the_lock_of_a_daemon_that_lives_protects_its_files(runtime_dir: Path) -> None:
    directory = Directory(str(runtime_dir), CONFIG)
    make_old(runtime_dir / "job.0", runtime_dir / "job.0" / "lock")
    assert remove_dead(str(runtime_dir), logs=True) == []
    with pytest.raises(FusionError, match=rf"runs on this host already \(pid {os.getpid()}\)"):
        Directory(str(runtime_dir), CONFIG)
    directory.release()


def test_a_daemon_waits_while_its_predecessor_is_cleaned_up(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = left_by_a_dead_daemon(runtime_dir, "job.0")
    cleaner = os.open(path / "lock", os.O_RDWR)
    fcntl.flock(cleaner, fcntl.LOCK_EX)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            shutil.rmtree(path)
            os.close(cleaner)

    monkeypatch.setattr(time, "sleep", pause)
    directory = Directory(str(runtime_dir), CONFIG)
    assert len(pauses) == 3
    assert (path / "lock").read_text() == f"{os.getpid()}\n"
    directory.release()


def test_a_lock_that_was_removed_before_it_was_taken_is_no_lock(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = left_by_a_dead_daemon(runtime_dir, "job.0")
    flock = fcntl.flock

    def clean_up_first(fd: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        shutil.rmtree(path)
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", clean_up_first)
    directory = Directory(str(runtime_dir), CONFIG)
    other = os.open(path / "lock", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
    directory.release()


def test_fusiond_clean_removes_logs_too_and_says_what_it_did(runtime_dir: Path) -> None:
    path = left_by_a_dead_daemon(runtime_dir, "a.0", "why\n")
    result = fusiond("clean")
    assert result.exit_code == 0
    assert result.stdout == f"removed leftovers in {path}\n"
    assert os.listdir(runtime_dir) == []
    assert fusiond("clean").stdout == ""


@pytest.mark.multiprocess
def test_what_a_killed_daemon_left_is_gone_when_the_next_one_of_any_job_starts(
    daemons: MakeDaemons, runtime_dir: Path
) -> None:
    job = daemons(1).start()
    assert job.status()["state"] == "starting"
    kill(job.processes[0])
    (left,) = (path for path in runtime_dir.iterdir() if path.is_dir())
    assert (left / "sock").exists()
    directory = Directory(str(runtime_dir), CONFIG)
    assert not left.exists()
    directory.release()
