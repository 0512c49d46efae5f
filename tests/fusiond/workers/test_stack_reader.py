"""Asking processes where they are: they sleep, hold the GIL, are stopped, have ended, or do not want to be asked."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusion_rt import wire
from fusion_rt.core.errors import WireError
from fusion_rt.host import stacks
from fusion_rt.local import packets
from fusiond.host.loop import EventLoop
from fusiond.workers.stack_reader import Source, StackReader

pytestmark = pytest.mark.multiprocess
TIMEOUT_S = 60.0
# What a worker does: it says where its stacks are to be seen, says that it is ready, and does the rest.
OFFER = """\
import ctypes, os, signal, socket, sys, time
from fusion_rt import wire
from fusion_rt.local import packets
from fusion_rt.host import stacks

sock = socket.socket(fileno=int(sys.argv[1]))
fd, number = stacks.offer()
packets.Packet(wire.encode(wire.Hello(1, "job", 3, os.getpid(), number)), fd).send(sock)

def slow():
    {body}

def ready():
    sock.send(b"ready")

slow()
"""


class Asked:
    """A process, and what a daemon has of it."""

    def __init__(self, directory: Path, body: str) -> None:
        script = directory / "train.py"
        script.write_text(OFFER.format(body=body))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock = ours
        self.sock.settimeout(TIMEOUT_S)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "train.py", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,
                cwd=directory,
            )
        data, memfd = packets.receive(self.sock)
        hello = wire.decode_worker_message(data)
        assert isinstance(hello, wire.Hello)
        self.source = Source.open(self.process.pid, hello, memfd)

    def ready(self) -> None:
        assert self.sock.recv(100) == b"ready"

    def close(self) -> None:
        self.sock.close()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.kill()
        self.process.wait()
        self.source.close()


class Daemon:
    """What asks."""

    def __init__(self) -> None:
        self.loop = EventLoop()
        self.reader = StackReader(self.loop)

    def ask(self, *asked: Asked) -> list[wire.Whereabouts]:
        found: list[list[wire.Whereabouts]] = []
        self.reader.locate({rank: each.source for rank, each in enumerate(asked)}, found.append)
        self.turn_until(lambda: bool(found))
        return found[0]

    def turn_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline
            self.loop.call_later(0.01, lambda: None)
            self.loop.turn()

    def close(self) -> None:
        self.reader.close()
        self.loop.close()


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    # Workers may be slow to answer on a busy machine.
    monkeypatch.setattr("fusiond.workers.stack_reader.PATIENCE", TIMEOUT_S)
    daemon = Daemon()
    yield daemon
    daemon.close()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Callable[[str], Asked]]:
    made: list[Asked] = []

    def make(body: str) -> Asked:
        made.append(Asked(tmp_path, body))
        return made[-1]

    yield make
    for each in made:
        each.close()


def sleeps(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process is in the state S, so that what it does last is what it waits in."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


Worker = Callable[[str], Asked]


def test_a_worker_that_sleeps_is_shown_with_the_line(daemon: Daemon, worker: Worker, tmp_path: Path) -> None:
    asked = worker("ready(); time.sleep(300)")
    asked.ready()
    daemon.turn_until(lambda: sleeps(asked.process))
    (found,) = daemon.ask(asked)
    assert (found.rank, found.pid, found.state, found.why_not) == (0, asked.process.pid, "sleeping (S)", "")
    where = wire.Frame(str(tmp_path / "train.py"), 11, "slow", "ready(); time.sleep(300)")
    assert found.stack.frames[0] == where
    assert [frame.function for frame in found.stack.frames] == ["slow", "<module>"]
    daemon.turn_until(lambda: sleeps(asked.process))
    assert daemon.ask(asked) == [found]  # it can be asked again, and goes on as before
    assert asked.process.poll() is None


def test_a_stack_is_shown_at_the_limit_of_processes(
    daemon: Daemon, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lines of source are read by a thread, which cannot be started then."""
    asked = worker("ready(); time.sleep(300)")
    asked.ready()
    daemon.turn_until(lambda: sleeps(asked.process))
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    (found,) = daemon.ask(asked)
    assert [(frame.function, frame.source) for frame in found.stack.frames] == [("slow", ""), ("<module>", "")]


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_worker_that_holds_the_gil_in_c_is_shown(daemon: Daemon, worker: Worker) -> None:
    body = "ready(); ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1); ready()"
    asked = worker(body)
    asked.ready()
    daemon.turn_until(lambda: sleeps(asked.process))
    (found,) = daemon.ask(asked)
    assert found.stack.frames[0].function == "slow"
    assert found.stack.frames[0].source == body
    assert asked.process.stdin is not None
    asked.process.stdin.write(b"x")
    asked.process.stdin.flush()
    asked.ready()  # the system call went on, as if nothing had been


def test_a_worker_that_computes_is_shown(daemon: Daemon, worker: Worker) -> None:
    asked = worker("ready()\n    while True: pass")
    asked.ready()
    (found,) = daemon.ask(asked)
    assert found.stack.frames[0].source in ("while True: pass", "ready()", 'sock.send(b"ready")')


def test_a_worker_that_is_stopped_is_not_asked(daemon: Daemon, worker: Worker) -> None:
    asked = worker("ready(); time.sleep(300)")
    asked.ready()
    asked.process.send_signal(signal.SIGSTOP)
    daemon.turn_until(lambda: Path(f"/proc/{asked.process.pid}/stat").read_text().split()[2] == "T")
    (found,) = daemon.ask(asked)
    assert found.why_not == "no answer: the process is stopped (state T in /proc)"
    assert found.state == "stopped (T)"
    asked.process.send_signal(signal.SIGCONT)
    daemon.turn_until(lambda: sleeps(asked.process))
    assert daemon.ask(asked)[0].stack.frames[0].function == "slow"


def test_a_worker_that_has_ended_is_gone_and_nobody_else_is_asked(daemon: Daemon, worker: Worker) -> None:
    asked = worker("pass")
    asked.process.wait(TIMEOUT_S)
    (found,) = daemon.ask(asked)
    assert (found.state, found.why_not) == ("gone", "no stack: the process is gone")


def test_a_worker_that_no_longer_handles_the_signal_is_not_killed_by_it(daemon: Daemon, worker: Worker) -> None:
    asked = worker("signal.signal(stacks.STACK_SIGNAL, signal.SIG_DFL); ready(); time.sleep(300)")
    asked.ready()
    (found,) = daemon.ask(asked)
    assert found.why_not == "no stack: the script handles the signal that would show it"
    assert asked.process.poll() is None


def test_a_worker_with_a_handler_of_its_own_is_left_alone(daemon: Daemon, tmp_path: Path) -> None:
    hello = wire.Hello(1, "job", 3, os.getpid())
    source = Source.open(os.getpid(), hello, -1)
    found: list[list[wire.Whereabouts]] = []
    daemon.reader.locate({3: source, 4: None}, found.append)
    daemon.turn_until(lambda: bool(found))
    assert [each.rank for each in found[0]] == [3, 4]
    assert found[0][0].why_not == "no stack: the script handles the signal that would show it"
    assert found[0][1].why_not == "it is not connected to its daemon"
    source.close()


def test_a_worker_that_blocks_the_signal_is_sent_one_only(
    daemon: Daemon, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusiond.workers.stack_reader.PATIENCE", 1.0)
    block = "signal.pthread_sigmask(signal.SIG_BLOCK, [stacks.STACK_SIGNAL])"
    unblock = "signal.pthread_sigmask(signal.SIG_UNBLOCK, [stacks.STACK_SIGNAL])"
    asked = worker(f"{block}; ready(); os.read(0, 1); {unblock}; ready(); time.sleep(300)")
    asked.ready()
    daemon.turn_until(lambda: sleeps(asked.process))
    for _ in range(2):
        (found,) = daemon.ask(asked)
        assert found.why_not == "no answer within 1 s: the process is sleeping (S)"
    assert asked.process.stdin is not None
    asked.process.stdin.write(b"x")
    asked.process.stdin.flush()
    asked.ready()
    monkeypatch.setattr("fusiond.workers.stack_reader.PATIENCE", TIMEOUT_S)
    text = os.pread(asked.source.memfd, asked.source.written, 0).decode()
    assert text.count("Stack (") == 1
    daemon.turn_until(lambda: sleeps(asked.process))
    assert daemon.ask(asked)[0].stack.frames[0].function == "slow"


def test_who_asks_at_the_same_time_gets_the_same_answer(daemon: Daemon, worker: Worker) -> None:
    asked, other = worker("ready(); time.sleep(300)"), worker("ready(); time.sleep(200)")
    found: list[list[wire.Whereabouts]] = []
    for _ in range(3):
        daemon.reader.locate({1: asked.source, 0: other.source}, found.append)
    daemon.turn_until(lambda: len(found) == 3)
    assert found[0] == found[1] == found[2]
    assert [each.pid for each in found[0]] == [other.process.pid, asked.process.pid]
    assert os.lseek(asked.source.memfd, 0, os.SEEK_CUR) < 10_000  # written once


def test_a_worker_that_leaves_while_it_is_asked_keeps_nobody_waiting(daemon: Daemon, worker: Worker) -> None:
    asked = worker("ready(); time.sleep(300)")
    found: list[list[wire.Whereabouts]] = []
    daemon.reader.locate({0: asked.source}, found.append)
    asked.source.close()
    daemon.turn_until(lambda: bool(found))
    assert found[0][0].why_not == "it has left the job"


def test_nobody_is_nobody(daemon: Daemon) -> None:
    assert daemon.ask() == []


def test_what_is_no_memory_for_stacks_is_refused() -> None:
    before = os.listdir("/proc/self/fd")
    hello = wire.Hello(1, "job", 3, os.getpid(), stacks.STACK_SIGNAL)
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, stacks.STACK_BYTES)
    reader, writer = os.pipe()
    os.close(writer)
    for fd in (unsealed, reader, -1):
        with pytest.raises(WireError, match="no memory for stacks"):
            Source.open(os.getpid(), hello, fd)
    with pytest.raises(WireError, match="no memory for stacks"):
        Source.open(os.getpid(), wire.Hello(1, "job", 3, os.getpid()), stacks.offer().fd)
    assert os.listdir("/proc/self/fd") == before
