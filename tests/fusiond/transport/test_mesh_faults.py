"""Real daemons that add up without a pause, while their connections are reset, one of them stands still or is killed,
and strangers knock."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from fusion_rt import wire
from fusion_rt.host.bootstrap import Endpoint
from fusiond.transport import reception
from tests.faults.jobs import FAST, Workers
from tests.fusiond.processes import NO_LIMITS, TIMEOUT_S, Daemons, kill

pytestmark = pytest.mark.multiprocess
MakeDaemons = Callable[..., Daemons]
COUNT = 60_000  # elements of a step: 480 KB
SMALL_CHUNKS = {"FUSION_CHUNK_BYTES": "64KiB"}


def peer(job: Daemons, node: int) -> dict[str, Any]:
    """What a node of two says of the other."""
    found: dict[str, Any] = job.status(node)["mesh"]["peers"][0]
    return found


def descriptors(process: subprocess.Popen[bytes]) -> int:
    return len(os.listdir(f"/proc/{process.pid}/fd"))


# --- connections ------------------------------------------------------------------------------------------------------


def resets_sockets() -> bool:
    """Whether `ss -K` works here: it needs root and a kernel that was built for it."""
    if os.geteuid() != 0 or shutil.which("ss") is None:
        return False
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(server.getsockname()) as client:
            reset(port)
            client.setblocking(False)
            try:
                client.recv(1)
            except BlockingIOError:
                return False
            except OSError:
                return True
    return False


def reset(port: int) -> None:
    """Resets all connections to a port of this machine."""
    subprocess.run(["ss", "-K", "dport", "=", str(port)], check=False, capture_output=True)


@pytest.mark.root
@pytest.mark.skipif(not resets_sockets(), reason="`ss -K` does not work here")
@pytest.mark.parametrize("encryption", ["all", "control"])
def test_sums_are_exact_while_the_kernel_resets_connections(daemons: MakeDaemons, encryption: str) -> None:
    job = daemons(1, 1, FUSION_ENCRYPTION=encryption, FUSION_CONNECTIONS="2", **SMALL_CHUNKS).start()
    workers = Workers(job.join(), COUNT, range(2))
    workers.go_on(1)
    before = [descriptors(process) for process in job.processes]
    for round_ in range(4):
        for endpoint in job.endpoints:
            reset(endpoint.control_port if round_ % 2 else endpoint.payload_port)
            workers.go_on(1)
    workers.go_on(2)
    workers.stop()
    assert (workers.errors, workers.wrong) == ({}, [])
    for node in (0, 1):
        job.wait_until(lambda status: status["mesh"]["peers"][0]["unacknowledged_messages"] == 0, node)
        assert peer(job, node)["reconnections"] >= 4
        assert peer(job, node)["flapping"] >= 1  # again only where a minute went by without a break
        assert job.log(node).count("break again and again") == peer(job, node)["flapping"]
        mesh = job.status(node)["mesh"]
        assert (mesh["refused"], mesh["dropped"]) == (0, 0)
        assert descriptors(job.processes[node]) <= before[node] + 4  # segments of the arena among them


def test_a_daemon_that_stood_still_is_fenced_when_it_goes_on(daemons: MakeDaemons) -> None:
    job = daemons(1, 1, **FAST).start()
    workers = Workers(job.join(), COUNT, range(2))
    workers.go_on()
    job.processes[1].send_signal(signal.SIGSTOP)
    job.wait_until(lambda status: status["state"] == "failed")
    steps = workers.steps[0]
    received = peer(job, 0)["received_chunks"]
    job.processes[1].send_signal(signal.SIGCONT)
    workers.join()
    status = job.wait_until(lambda status: status["mesh"]["peers"][0]["fenced"] > 0)
    assert status["mesh"]["peers"][0]["lost"]
    assert status["mesh"]["peers"][0]["received_chunks"] == received
    assert workers.steps[0] == steps
    assert re.fullmatch(r"node 1 \(host host1\) is lost: its daemon has been silent for [0-9.]+ s", workers.errors[0])
    assert workers.errors[1].startswith("node 0 (host host0) is lost: it has declared this node dead")
    assert workers.wrong == []


def test_a_daemon_that_is_killed_is_noticed_without_waiting_for_a_limit(daemons: MakeDaemons) -> None:
    job = daemons(1, 1, **NO_LIMITS).start()
    workers = Workers(job.join(), COUNT, range(2))
    workers.go_on()
    kill(job.processes[1])
    workers.join()
    assert workers.errors[0] == "node 1 (host host1) is lost: its connection was closed"


# --- strangers --------------------------------------------------------------------------------------------------------


class Recorder:
    """A relay in front of a port that remembers what the first connection through it said."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(TIMEOUT_S)
        self._sockets: list[socket.socket] = []
        self.port: int = self._server.getsockname()[1]
        self.said: list[bytes] = []
        self._thread = threading.Thread(target=self._relay)
        self._thread.start()

    def _relay(self) -> None:
        here = self._server.accept()[0]
        there = socket.create_connection(("127.0.0.1", self._target))
        self._sockets += [here, there]
        back = threading.Thread(target=self._copy, args=(there, here, []))
        back.start()
        self._copy(here, there, self.said)
        back.join()

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket, said: list[bytes]) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                said.append(data)
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(TIMEOUT_S)
        for sock in (*self._sockets, self._server):
            sock.close()


class RecordedDaemons(Daemons):
    """The daemons of two nodes with a worker each; what node 0 says to node 1 is recorded.

    `recorders`: of its connections for control and for payloads, once it has been told of its peer.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, [1, 1])
        self.recorders: list[Recorder] = []

    def tell(self, node: int) -> None:
        target = self.endpoints[1]
        if node == 0:
            self.recorders = [Recorder(target.control_port), Recorder(target.payload_port)]
            ports = [recorder.port for recorder in self.recorders]
            self.endpoints[1] = Endpoint(1, target.pid, target.address, ports[0], ports[1], target.public_key)
        super().tell(node)
        self.endpoints[1] = target

    def close(self) -> None:
        super().close()
        for recorder in self.recorders:
            recorder.close()


@contextmanager
def recorded(directory: Path) -> Iterator[RecordedDaemons]:
    job = RecordedDaemons(directory)
    try:
        yield job
    finally:
        job.close()


def knock(port: int, says: bytes) -> None:
    """Connects, says something and that this was all, and waits until the other end closes the connection."""
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as sock, suppress(ConnectionError):
        sock.sendall(says)
        try:
            sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            if error.errno != errno.ENOTCONN:  # closed there already
                raise
        while sock.recv(4096):
            pass


def knock_with_another_key(public_key: str, port: int) -> None:
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.linger = 0
    stranger.curve_serverkey = public_key.encode()
    stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
    monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    stranger.connect(f"tcp://127.0.0.1:{port}")
    stranger.send(wire.encode(wire.Abort("I am nobody")))
    told = monitor.poll(round(1000 * TIMEOUT_S))
    context.destroy(linger=0)
    assert told


TLS_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(range(200))
HTTP = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + bytes(100)


def test_strangers_change_nothing_and_are_counted(runtime_dir: Path) -> None:
    with recorded(runtime_dir) as job:
        job.start()
        workers = Workers(job.join(), COUNT, range(2), computing=0.05)
        workers.go_on()
        target = job.endpoints[1]
        before = job.status(1)["mesh"]
        assert (before["strangers"], before["refused"], before["dropped"], before["stale"]) == (0, 0, 0, 0)
        usual = descriptors(job.processes[1])

        ports = target.control_port, target.payload_port
        for port in ports:
            socket.create_connection(("127.0.0.1", port)).close()  # a port scan
            knock(port, HTTP)
            knock(port, TLS_HELLO)
        knock_with_another_key(target.public_key, target.control_port)
        control, payload = job.recorders
        knock(target.control_port, b"".join(control.said))  # replayed: the handshake and all that followed
        status = job.wait_until(lambda status: status["mesh"]["strangers"] >= 8, 1)
        assert status["mesh"]["refused"] == 1

        half_open = [socket.create_connection(("127.0.0.1", ports[number % 2])) for number in range(300)]
        with socket.create_connection(("127.0.0.1", target.payload_port)) as replay:  # its token is in use
            replay.sendall(b"".join(payload.said[:3]))
            job.wait_until(lambda status: status["mesh"]["accepted"] >= before["accepted"] + 309, 1)
            workers.go_on()
            most = usual + 2 * (reception._STRANGERS_OF_HOST + 4) + 20  # at both ports; and the job opens some
            job.wait_until(lambda _: descriptors(job.processes[1]) <= most, 1)
        # Nobody closes them but the daemon: most at once, the last ones after the time that a handshake may take.
        for sock in half_open:
            sock.settimeout(TIMEOUT_S)
            with suppress(ConnectionError):
                while sock.recv(4096):
                    pass
            sock.close()
        job.wait_until(lambda status: status["mesh"]["strangers"] >= 309, 1)
        assert descriptors(job.processes[1]) < usual + 20
        workers.go_on()
        workers.stop()
        assert (workers.errors, workers.wrong) == ({}, [])
        found = peer(job, 1)
        assert (found["reconnections"], found["repeated"], found["lost"]) == (0, 0, False)
