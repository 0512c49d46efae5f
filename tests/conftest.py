"""What all tests have: fixtures, a limit of time, their order, and the leak check of those marked `multiprocess`.

A process that outlives its test is found even when its parent is gone: the check puts a random word into the
environment, which every descendant inherits, and afterwards looks for that word in all processes of the machine. Names
of commands would not do: other test runs, and real jobs, may be running beside this one.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

from fusion_rt.host import stacks
from tests import forks, time_limit

pytest_plugins = ["pytester"]

# Seeded, as all tests are: what one run finds, every run finds. `--hypothesis-profile default` looks further. No limit:
# the time that an example takes tells how busy the machine is.
hypothesis.settings.register_profile(
    "seeded",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("seeded")

LEAK_MARK = "FUSION_TEST_LEAK_MARK"
LONG_S = 3600.0  # limit of a test that only `-m long` runs
os.environ["PYTHONFAULTHANDLER"] = "1"  # every Python that a test starts can show where it is
# With PYTHONDONTWRITEBYTECODE, which containers set, each of the hundreds of interpreters that tests start, and each
# process of pytest-xdist, compiles all that it imports: a third of what a daemon needs to start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Before torch is imported, here or in what tests start: several of these share the cores, and threads of OpenMP that
# wait for each other spin, which took three quarters of the time of tests that train in their own process.
os.environ["OMP_NUM_THREADS"] = "1"
# A shell starts what it runs in the background with SIGINT ignored, nohup with SIGHUP, and what that starts inherits
# it; tests that end a job by these could only wait then. What has a handler here is at its default in children.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda number, frame: None)

os.close(stacks.offer().fd)  # the first client in this process makes it and keeps it: not that test's leak

GRACE_S = 10.0  # for what is on its way out: init has to reap an orphan, a killed process to unmap its memory


_failed = pytest.StashKey[bool]()
_limit = pytest.StashKey[contextlib.ExitStack]()
_output = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_output] = os.dup(2)  # before pytest captures it


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps the garbage collector from looking through modules and tests, which stay: the leak check runs it after each
    test that starts processes, and would take a third of a second for these."""
    gc.disable()
    try:
        result = yield
    finally:
        gc.enable()
    gc.collect()
    gc.freeze()
    return result


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Gives long tests their limit. Under pytest-xdist, those that use the machine come first, then the files that
    start most processes: they take longest."""
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_S))
    if hasattr(config, "workerinput"):
        from tests.distribution import group_of

        groups = {item: group_of(item.nodeid.partition("::")[0]) for item in items}
        starting = Counter(groups[item] for item in items if item.get_closest_marker("multiprocess"))
        items.sort(key=lambda item: (groups[item] != "machine", -starting[groups[item]]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.distribution import ByGroup

    config.option.loadscopereorder = False  # by number of tests; they are in order
    return ByGroup(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Has `time_limit` watch the test, and how it is cleaned up, instead of pytest-timeout, which says how long."""

    def others() -> set[psutil.Process]:
        mark = os.environ.get(LEAK_MARK)
        found = set(psutil.Process().children(recursive=True)) | (_processes_of(mark) if mark else set())
        kept = {*forks.pids(), resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]
        return {process for process in found if process.pid not in kept}

    if not item.config.getoption("usepdb"):
        item.stash[_limit].enter_context(time_limit.alarm(settings.timeout, item.config.stash[_output], others))
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with contextlib.ExitStack() as item.stash[_limit]:
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_failed] = report.failed or item.stash.get(_failed, False)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """After a test that failed, ends all that tests share: the next one gets jobs that nothing has happened to."""
    if item.stash.get(_failed, False):
        item.session._setupstate.teardown_exact(None)


@pytest.fixture
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short directory with mode 0700, exported as FUSION_RUNTIME_DIR; records are beside it, with -traces behind it.

    Not `tmp_path`: the path of a Unix socket has at most 107 bytes, and pytest's directories eat most of them.
    """
    path = Path(tempfile.mkdtemp(prefix="frt", dir="/tmp"))
    monkeypatch.setenv("FUSION_RUNTIME_DIR", str(path))
    monkeypatch.setenv("FUSION_TRACE_DIR", f"{path}-traces")
    yield path
    shutil.rmtree(path)
    shutil.rmtree(f"{path}-traces", ignore_errors=True)  # nobody has recorded, perhaps


@pytest.fixture(autouse=True)
def leak_check(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test marked `multiprocess` that leaves a process, a thread, a /dev/shm file, a descriptor (a socket, an
    arena) or a lab of network namespaces behind; kills and removes what was left where that can be done, so that the
    next test starts clean."""
    if request.node.get_closest_marker("multiprocess") is None:
        yield
        return
    resource_tracker.ensure_running()  # multiprocessing starts it on first use and keeps it: not this test's leak
    mark = f"{os.getpid()}-{secrets.token_hex(8)}"
    os.environ[LEAK_MARK] = mark
    children = set(psutil.Process().children(recursive=True))
    shm = _shm_files()
    descriptors = _descriptors()
    threads = _threads()
    labs = _labs()
    try:
        yield
    finally:
        del os.environ[LEAK_MARK]

    left: list[str] = []
    processes = _processes_of(mark) | (set(psutil.Process().children(recursive=True)) - children)
    processes = {process for process in processes if process.pid not in forks.pids()}
    _, alive = psutil.wait_procs(processes, timeout=GRACE_S)
    for process in alive:
        left.append(f"process {_describe(process)}")
        process.kill()
    psutil.wait_procs(alive, timeout=GRACE_S)

    for name in sorted(_settled(lambda: {file for file in _shm_files() - shm if not _used_elsewhere(file)})):
        left.append(f"shared memory /dev/shm/{name}")
        Path("/dev/shm", name).unlink(missing_ok=True)

    for name in sorted(_settled(lambda: _threads() - threads)):
        left.append(f"thread {name}")
    for name in sorted(_labs() - labs):
        left.append(f"network namespaces of lab {name}; `python -m benchmarks.netlab clean --all` removes them")

    gc.collect()
    descriptors.update((fd, target) for fd, target in _descriptors().items() if fd in forks.descriptors())
    for fd, target in sorted(_descriptors().items() - descriptors.items()):
        left.append(f"descriptor {fd} ({target})")
        os.close(fd)

    if left:
        pytest.fail(f"{request.node.name} left behind: " + "; ".join(left), pytrace=False)


def _processes_of(mark: str) -> set[psutil.Process]:
    """Live processes whose environment holds this test's mark, this process excepted."""
    found = set()
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(LEAK_MARK) == mark:
                found.add(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # ended meanwhile, or another user's: neither can be this test's leftover
    return found


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} ({process.status()}): {' '.join(process.cmdline()) or process.name()}"
    except psutil.NoSuchProcess:
        return f"{process.pid} (ended meanwhile)"


def _shm_files() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def _used_elsewhere(name: str) -> bool:
    """Whether a process that is none of this test run's has a /dev/shm file mapped; another run may be under way."""
    mine = {os.getpid(), *(process.pid for process in psutil.Process().children(recursive=True))}
    for process in psutil.process_iter():
        try:
            if process.pid not in mine and not process.environ().get(LEAK_MARK, "").startswith(f"{os.getpid()}-"):
                with open(f"/proc/{process.pid}/maps") as maps:
                    if f"/dev/shm/{name}" in maps.read():
                        return True
        except (psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # ended meanwhile, or another user's
    return False


def _settled(leftovers: Callable[[], set[str]]) -> set[str]:
    """Polls `leftovers()` until it is empty or the grace is over, and returns what is still there."""
    deadline = time.monotonic() + GRACE_S
    while (left := leftovers()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _threads() -> set[str]:
    """Threads of this process that would keep it from ending, by name and number."""
    return {f"{each.name} ({each.ident})" for each in threading.enumerate() if not each.daemon}


def _labs() -> set[str]:
    """Numbers of the labs (benchmarks/netlab) that this process has made."""
    found = set()
    for record in Path("/run/netlab").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # just removed by its owner, or being written
            if json.loads(record.read_text())["pid"] == os.getpid():
                found.add(record.name)
    return found


def _descriptors() -> dict[int, str]:
    """Open descriptors of this process and what they point to."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the one that listed the directory
    return found
