"""A worker's side of the local channel, with a daemon that says what the test wants it to say."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fusion_rt import local, stacks, wire
from fusion_rt.arena import Segment
from fusion_rt.client import Client, Operation
from fusion_rt.errors import FusionError, HorovodInternalError, WireError
from fusion_rt.topology import Topology

SUM = wire.Signature("allreduce", "float32", (2,))
WELCOME = wire.Welcome(Topology(("a",), ((0, 1),)), 0, 1 << 20, "allreduce", "dense")
TIMEOUT_S = 10.0


class Daemon:
    """Listens, and is then one end of the channel, in the test's own thread."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen()
        self._listener.settimeout(TIMEOUT_S)
        self.sock: socket.socket
        self.hello: wire.WorkerMessage
        self.stacks: os.stat_result  # of what came with it

    def connect(self, answer: wire.DaemonMessage | None = WELCOME, timeout: float = TIMEOUT_S) -> Client:
        """A client that this daemon welcomes, or answers otherwise; None closes the connection."""

        def greet() -> None:
            self.sock, _ = self._listener.accept()
            self.sock.settimeout(TIMEOUT_S)
            self.hello, fd = self.receive_with_descriptor()
            self.stacks = os.fstat(fd)
            os.close(fd)
            if answer is None:
                self.sock.close()
            else:
                self.send(answer)

        thread = threading.Thread(target=greet)
        thread.start()
        try:
            return Client(self.path, "job", 1, timeout)
        finally:
            thread.join()

    def receive(self) -> wire.WorkerMessage:
        return self.receive_with_descriptor()[0]

    def receive_with_descriptor(self) -> tuple[wire.WorkerMessage, int]:
        data, fd = local.receive(self.sock)
        return wire.decode_worker_message(data), fd

    def send(self, message: wire.DaemonMessage, fd: int = -1) -> None:
        local.Packet(wire.encode(message), fd).send(self.sock)

    def close(self) -> None:
        self._listener.close()
        if hasattr(self, "sock"):
            self.sock.close()


@pytest.fixture
def daemon(runtime_dir: Path) -> Iterator[Daemon]:
    daemon = Daemon(runtime_dir / "sock")
    yield daemon
    daemon.close()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    client = daemon.connect()
    yield client
    client.close()


def failure(client: Client, operation: Operation) -> str:
    with pytest.raises(HorovodInternalError) as raised:
        client.wait(operation)
    return str(raised.value)


# --- coming and going -------------------------------------------------------------------------------------------------


def test_a_client_says_who_it_is_and_learns_who_is_where(daemon: Daemon, client: Client) -> None:
    assert daemon.hello == wire.Hello(wire.PROTOCOL_VERSION, "job", 1, os.getpid(), stacks.STACK_SIGNAL)
    assert daemon.stacks.st_size == stacks.STACK_BYTES
    assert client.topology == WELCOME.topology
    assert client.process_sets[0].ranks == (0, 1)


def test_no_daemon(tmp_path: Path) -> None:
    with pytest.raises(FusionError, match=r"no daemon listens at .*nowhere after 0.01 s .*was it started"):
        Client(str(tmp_path / "nowhere"), "job", 0, 0.01)


def test_a_daemon_that_comes_up_late(daemon: Daemon) -> None:
    there, daemon.path = daemon.path, daemon.path + "2"
    timer = threading.Timer(0.02, os.link, [there, daemon.path])
    timer.start()
    daemon.connect().close()
    timer.join()


def test_a_daemon_that_has_listened_and_does_not_any_more_is_not_waited_for(daemon: Daemon, tmp_path: Path) -> None:
    daemon.close()
    for path in (daemon.path, str(tmp_path / "nowhere")):
        began = time.monotonic()
        with pytest.raises(
            FusionError, match=r"the daemon that listened at .* is gone \(.*\): it has ended with its job"
        ):
            Client(path, "job", 0, 600.0, listened=True)
        assert time.monotonic() - began < 300


def test_a_daemon_that_ends_without_having_looked_who_is_there(daemon: Daemon) -> None:
    """The kernel then tells the client of a reset, not of an end."""
    before = len(os.listdir("/proc/self/fd"))
    found: list[str] = []

    def connect() -> None:
        try:
            Client(daemon.path, "job", 1, TIMEOUT_S)
        except FusionError as error:
            found.append(str(error))

    thread = threading.Thread(target=connect)
    thread.start()
    sock, _ = daemon._listener.accept()
    while not sock.recv(1, socket.MSG_PEEK):
        pass
    sock.close()
    thread.join()
    (error,) = found
    assert "the daemon of rank 1's node" in error
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_job_that_does_not_come_up_in_time(daemon: Daemon) -> None:
    with pytest.raises(FusionError, match=r"rank 1 waited 0.05 s for the other processes"):
        Client(daemon.path, "job", 1, 0.05)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (wire.JobFailed("rank 1 is taken"), "^rank 1 is taken$"),
        (None, "the daemon of rank 1's node .* is gone"),
        (wire.Failed(0, "x"), "answered Hello with Failed"),
    ],
)
def test_a_client_that_is_not_welcome(daemon: Daemon, answer: wire.DaemonMessage | None, why: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FusionError, match=why):
        daemon.connect(answer)
    daemon.sock.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_client_that_leaves_says_so(daemon: Daemon) -> None:
    client = daemon.connect()
    operation = client.submit("x", SUM, inline=bytes(8))
    client.close("it raised ValueError")
    assert isinstance(daemon.receive(), wire.Submit)
    assert daemon.receive() == wire.Bye("it raised ValueError")
    assert local.receive(daemon.sock) == (b"", -1)
    assert "has been shut down on this rank" in failure(client, operation)
    with pytest.raises(HorovodInternalError, match="has been shut down"):
        client.submit("y", SUM, inline=bytes(8))


def test_leaving_after_the_daemon_is_no_error(daemon: Daemon) -> None:
    client = daemon.connect()
    daemon.sock.close()
    client.close()


def test_leaving_wakes_a_thread_that_waits(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    client = daemon.connect()
    operation = client.submit("x", SUM, inline=bytes(8))
    failures: list[str] = []
    reads = threading.Event()
    receive = local.receive

    def announced(sock: socket.socket, flags: int = 0) -> tuple[bytes, int]:
        reads.set()  # and then the interpreter is this thread's until the system call gives it away
        return receive(sock, flags)

    monkeypatch.setattr(local, "receive", announced)
    thread = threading.Thread(target=lambda: failures.append(failure(client, operation)))
    thread.start()
    assert reads.wait(TIMEOUT_S)
    client.close()
    thread.join(TIMEOUT_S)
    assert failures == ["fusion_rt has been shut down on this rank"]


def test_a_forked_child_does_not_say_goodbye(daemon: Daemon, client: Client) -> None:
    client._pid += 1  # as a child sees it
    client.close()
    assert local.receive(daemon.sock) == (b"", -1)


def test_an_abandoned_connection_cannot_be_used(client: Client) -> None:
    client.abandon()
    with pytest.raises(HorovodInternalError, match="belongs to the parent of this forked process"):
        client.submit("x", SUM, inline=bytes(8))


# --- operations -------------------------------------------------------------------------------------------------------


def test_an_operation_is_submitted_once_and_completed(daemon: Daemon, client: Client) -> None:
    operation = client.submit("x", SUM, inline=b"12345678")
    assert daemon.receive() == wire.Submit(operation.handle, "x", 0, SUM, None, b"12345678")
    assert not client.poll(operation)
    daemon.send(wire.Done(operation.handle, b"87654321"))
    assert client.poll(operation)
    assert client.wait(operation).inline == b"87654321"


def test_the_clock_counts_operations_of_a_name(daemon: Daemon, client: Client) -> None:
    for name, clock in [("x", 0), ("x", 1), ("y", 0), ("x", 2), ("y", 1)]:
        operation = client.submit(name, SUM, inline=bytes(8))
        submitted = daemon.receive()
        assert isinstance(submitted, wire.Submit)
        assert (submitted.name, submitted.clock) == (name, clock)
        daemon.send(wire.Done(operation.handle, bytes(8)))
        client.wait(operation)


def test_a_name_can_be_under_way_once(daemon: Daemon, client: Client) -> None:
    first = client.submit("x", SUM, inline=bytes(8))
    with pytest.raises(ValueError, match=r"'x' was submitted on rank 1 while an earlier one"):
        client.submit("x", SUM, inline=bytes(8))
    daemon.send(wire.Failed(first.handle, "no"))
    assert failure(client, first) == "no"
    second = client.submit("x", SUM, inline=bytes(8))
    daemon.send(wire.Done(second.handle, bytes(8)))
    client.submit("x", SUM, inline=bytes(8))  # nobody has waited for the second, but it has ended


def test_operations_without_a_name_are_paired_by_order(daemon: Daemon, client: Client) -> None:
    operations = [client.submit(None, SUM, inline=bytes(8)) for _ in range(3)]
    submitted = [daemon.receive() for _ in operations]
    assert [(s.name, s.clock) for s in submitted if isinstance(s, wire.Submit)] == [
        ("allreduce.noname", 0),
        ("allreduce.noname", 1),
        ("allreduce.noname", 2),
    ]
    for operation in reversed(operations):
        daemon.send(wire.Done(operation.handle, bytes(8)))
    for operation in operations:
        client.wait(operation)


def test_a_failed_operation_leaves_the_others_alone(daemon: Daemon, client: Client) -> None:
    bad = client.submit("bad", SUM, inline=bytes(8))
    good = client.submit("good", SUM, inline=bytes(8))
    daemon.send(wire.Failed(bad.handle, "the ranks do not agree"))
    daemon.send(wire.Done(good.handle, b"87654321"))
    assert client.wait(good).inline == b"87654321"
    assert failure(client, bad) == "the ranks do not agree"


def test_a_failed_job_fails_everything(daemon: Daemon, client: Client) -> None:
    operations = [client.submit(name, SUM, inline=bytes(8)) for name in "xy"]
    daemon.send(wire.JobFailed("rank 0 died"))
    assert [failure(client, operation) for operation in operations] == ["rank 0 died"] * 2
    with pytest.raises(HorovodInternalError, match=r"^rank 0 died$"):
        client.submit("z", SUM, inline=bytes(8))


def test_a_daemon_that_is_killed(daemon: Daemon, client: Client) -> None:
    operation = client.submit("x", SUM, inline=bytes(8))
    daemon.sock.close()
    assert "the daemon of rank 1's node" in failure(client, operation)


def test_the_reason_is_read_when_the_daemon_is_gone_before_a_submission(daemon: Daemon, client: Client) -> None:
    daemon.send(wire.JobFailed("rank 0 died"))
    daemon.sock.close()
    with pytest.raises(HorovodInternalError, match=r"^rank 0 died$"):
        client.submit("x", SUM, inline=bytes(8))


def test_a_daemon_that_talks_nonsense(daemon: Daemon, client: Client) -> None:
    operation = client.submit("x", SUM, inline=bytes(8))
    daemon.sock.send(b"nonsense")
    with pytest.raises(WireError):
        client.wait(operation)
    daemon.send(WELCOME)
    with pytest.raises(FusionError, match="which nobody asked for"):
        client.wait(operation)
    daemon.send(wire.Done(operation.handle, bytes(8)))
    client.wait(operation)


def test_a_result_of_its_own_is_a_private_mapping(daemon: Daemon, client: Client) -> None:
    operation = client.submit("x", wire.Signature("allgather", "uint8", (2, 4096)), place=(1, 0))
    segment = Segment.create(8192)
    segment.view[:3] = b"abc"
    daemon.send(wire.Done(operation.handle, None, (1, 1), 8192), os.dup(segment.fd))
    before = len(os.listdir("/proc/self/fd"))
    output = client.wait(operation).output
    assert output is not None
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert operation.sizes == (1, 1)
    output.view[0] = ord("x")
    assert bytes(output.view[:3]) == b"xbc"
    assert bytes(segment.view[:3]) == b"abc"
    output.close()
    segment.close()


def test_a_proposal_is_answered_with_a_plan(daemon: Daemon, client: Client) -> None:
    proposal = wire.Proposal("opt", 0, 0, wire.Reduction(), (wire.TensorSpec("w", "float32", (4,)),))
    operation = client.propose(proposal)
    assert daemon.receive() == wire.Propose(operation.handle, proposal)
    plan = wire.Plan(1, "opt", 0, wire.Reduction(), (), 64)
    daemon.send(wire.Planned(operation.handle, plan))
    assert client.wait(operation).plan == plan
    segment_id, segment = client.plan_segment(plan)
    offered, fd = daemon.receive_with_descriptor()
    assert offered == wire.AddSegment(segment_id, 64, 1)
    theirs = Segment.open(fd, 64)
    segment.view[3] = 9
    assert theirs.view[3] == 9
    theirs.close()
    ready = client.ready("opt.0", 1, 0)
    assert daemon.receive() == wire.Ready(ready.handle, 1, 0, 0)


def test_regions_of_the_arena_are_shared_with_the_daemon(daemon: Daemon, client: Client) -> None:
    region = client.allocate(8)
    np.frombuffer(region.view, np.float32)[:2] = [1.5, 2.5]
    offered, fd = daemon.receive_with_descriptor()
    assert isinstance(offered, wire.AddSegment)
    theirs = Segment.open(fd, offered.nbytes)
    assert offered.segment == region.segment
    np.testing.assert_array_equal(np.frombuffer(theirs.view, np.float32)[:2], [1.5, 2.5])
    theirs.close()
    client.arena.drop_segment(region.segment)
    assert daemon.receive() == wire.DropSegment(region.segment)


def test_threads_may_wait_for_operations_of_their_own(daemon: Daemon, client: Client) -> None:
    operations = {name: client.submit(name, SUM, inline=bytes(8)) for name in "abcd"}
    results: dict[str, bytes | None] = {}

    def wait(name: str) -> None:
        results[name] = client.wait(operations[name]).inline

    threads = [threading.Thread(target=wait, args=name) for name in operations]
    for thread in threads:
        thread.start()
    for name in "dbca":
        daemon.send(wire.Done(operations[name].handle, name.encode()))
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert results == {name: name.encode() for name in operations}


def test_a_thread_is_woken_when_another_one_reads_its_answer(daemon: Daemon, client: Client) -> None:
    mine = client.submit("mine", SUM, inline=bytes(8))
    other = client.submit("other", SUM, inline=bytes(8))
    threads = [threading.Thread(target=client.wait, args=(operation,)) for operation in (other, mine)]
    threads[0].start()
    while not client._reading:  # until it reads
        time.sleep(0)
    threads[1].start()
    daemon.send(wire.Done(mine.handle, bytes(8)))  # read by the first thread, which goes on waiting for its own
    threads[1].join(TIMEOUT_S)
    assert not threads[1].is_alive()
    assert threads[0].is_alive()
    daemon.send(wire.Done(other.handle, bytes(8)))
    threads[0].join(TIMEOUT_S)


def test_a_worker_that_leaves_with_answers_unread_still_says_bye(daemon: Daemon) -> None:
    client = daemon.connect()
    operation = client.submit("t", SUM, inline=bytes(8))
    assert isinstance(daemon.receive(), wire.Submit)
    daemon.send(wire.Done(operation.handle, bytes(8)))
    client.close()
    assert daemon.receive() == wire.Bye("")
