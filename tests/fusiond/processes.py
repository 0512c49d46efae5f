"""Real daemons on this machine, and clients of theirs, for tests that need processes."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from fusion_rt import wire
from fusion_rt.client import Client
from fusion_rt.core.topology import Topology
from fusion_rt.host.bootstrap import (
    DaemonConfig,
    Endpoint,
    PeerTable,
    StartError,
    decode_line,
    encode_line,
    job_directory,
    socket_path,
)
from fusion_rt.local import packets
from tests import forks

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "fusiond", "start", "--foreground", "--config-stdin"]
TIMEOUT_S = 60.0  # for anything that has to happen, on however slow a machine
JOB = "test"
# What is noticed in a job with these was noticed without waiting for a limit: the test's own would come first.
NO_LIMITS = {"FUSION_HEARTBEAT_TIMEOUT": "600s", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "600s"}


class Daemons:
    """The daemons of a job of `len(local_sizes)` nodes, all on loopback.

    Args:
        directory: FUSION_RUNTIME_DIR.
        local_sizes: workers of each node.
        attached: whether they end with their standard input.
        environment: variables besides this process's.
    """

    def __init__(self, directory: Path, local_sizes: Sequence[int], attached: bool = True, **environment: str) -> None:
        starts = [sum(local_sizes[:node]) for node in range(len(local_sizes))]
        ranks = tuple(tuple(range(start, start + n)) for start, n in zip(starts, local_sizes, strict=True))
        self.topology = Topology(tuple(f"host{node}" for node in range(len(local_sizes))), ranks)
        self.directory = directory
        self.attached = attached
        paths = [str(ROOT), str(ROOT / "daemon"), os.environ.get("PYTHONPATH", "")]
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "FUSION_RUNTIME_DIR": str(directory),
            "FUSION_TRACE_DIR": f"{directory}-traces",
            "FUSION_KERNEL_THREADS": "1",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "30s",  # so that what hangs ends with a sentence
            **environment,
        }
        self.launch_options: dict[int, list[str]] = {}  # by node: further arguments of the command
        self.commands: dict[int, list[str]] = {}  # by node: the command instead of `COMMAND`
        self.addresses: dict[int, str] = {}  # by node: where it listens, if not on loopback
        self.processes: list[subprocess.Popen[bytes]] = []
        self.others: list[subprocess.Popen[bytes]] = []
        self.clients: dict[int, Client] = {}
        self.endpoints: list[Endpoint] = []

    # --- daemons ------------------------------------------------------------------------------------------------------

    def launch(self, node: int) -> subprocess.Popen[bytes]:
        """Starts a daemon and sends its configuration; its standard error goes to a file."""
        address = self.addresses.get(node, "127.0.0.1")
        return self.launch_as(DaemonConfig(JOB, node, self.topology, address, attached=self.attached))

    def launch_as(self, config: DaemonConfig) -> subprocess.Popen[bytes]:
        """Starts a daemon with any configuration."""
        log = open(self.log_path(config.node), "ab")  # noqa: SIM115
        process = forks.popen(
            [*self.commands.get(config.node, COMMAND), *self.launch_options.get(config.node, [])],
            forks.DAEMON,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=self.environment,
        )
        log.close()
        self.others.append(process)
        assert process.stdin is not None
        process.stdin.write(encode_line(config))
        process.stdin.flush()
        return process

    def start(self, tell_peers: bool = True) -> Daemons:
        """Starts all daemons and, in a job of several nodes, sends them the table of peers."""
        self.processes = [self.launch(node) for node in range(len(self.topology.hosts))]
        for process in self.processes:
            answer = self.answer_of(process)
            assert isinstance(answer, Endpoint), answer
            self.endpoints.append(answer)
        if tell_peers and len(self.processes) > 1:
            for node in range(len(self.processes)):
                self.tell(node)
        return self

    def tell(self, node: int) -> None:
        """Sends a daemon the table of its peers."""
        stdin = self.processes[node].stdin
        assert stdin is not None
        stdin.write(encode_line(PeerTable(tuple(self.endpoints))))
        stdin.flush()

    @staticmethod
    def answer_of(process: subprocess.Popen[bytes]) -> Endpoint | StartError:
        assert process.stdout is not None
        line = process.stdout.readline()
        answer: Endpoint | StartError = decode_line(line, Endpoint | StartError)  # type: ignore[arg-type]
        return answer

    def log_path(self, node: int) -> Path:
        return self.directory / f"stderr.{node}"

    def log(self, node: int) -> str:
        """Returns a daemon's standard error."""
        return self.log_path(node).read_text()

    def status(self, node: int = 0) -> dict[str, Any]:
        """Asks for a daemon's statistics."""
        return self.ask(node, wire.StatusRequest())

    def ask(self, node: int, request: wire.StatusRequest | wire.StopRequest) -> dict[str, Any]:
        with self.connection(node) as sock:
            packets.Packet(wire.encode(request)).send(sock)
            answer = wire.decode_daemon_message(packets.receive(sock)[0])
        assert isinstance(answer, wire.Status)
        found: dict[str, Any] = json.loads(answer.json)
        return found

    def wait_until(self, condition: Callable[[dict[str, Any]], bool], node: int = 0) -> dict[str, Any]:
        """Asks for the status until it satisfies a condition."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition(status := self.status(node)):
            assert time.monotonic() < deadline, f"{status}\n{self.log(node)}"
            time.sleep(0.02)  # the daemon cannot notify tools of a new status
        return status

    def end(self, node: int) -> int:
        """Closes a daemon's standard input and waits for its end; returns the exit code."""
        process = self.processes[node]
        assert process.stdin is not None
        process.stdin.close()
        return process.wait(TIMEOUT_S)

    # --- workers ------------------------------------------------------------------------------------------------------

    def path(self, node: int) -> str:
        """Returns the path of a daemon's local socket."""
        return socket_path(str(self.directory), JOB, node)

    def files(self, node: int) -> set[str]:
        """Returns the names in a daemon's directory; empty when there is none."""
        directory = job_directory(str(self.directory), JOB, node)
        return set(os.listdir(directory)) if os.path.isdir(directory) else set()

    def connection(self, node: int = 0) -> socket.socket:
        """Opens a connection to a daemon, once it listens, on which nothing has been sent."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.settimeout(TIMEOUT_S)
            try:
                sock.connect(self.path(node))
                return sock
            except (FileNotFoundError, ConnectionRefusedError):
                sock.close()
                assert time.monotonic() < deadline, self.log(node)
                time.sleep(0.01)

    def say(self, message: wire.WorkerMessage | bytes, node: int = 0) -> list[wire.DaemonMessage]:
        """Sends one message on a new connection, and reads until the daemon closes it, or answers."""
        with self.connection(node) as sock:
            packets.Packet(message if isinstance(message, bytes) else wire.encode(message)).send(sock)
            try:
                data, _ = packets.receive(sock)
            except ConnectionResetError:
                data = b""
        return [wire.decode_daemon_message(data)] if data else []

    def join(self, ranks: Iterable[int] | None = None) -> dict[int, Client]:
        """Makes clients of these ranks, or of all, which come up together."""
        wanted = list(range(self.topology.size) if ranks is None else ranks)

        def connect(rank: int) -> Client:
            return Client(self.path(self.topology.node_of(rank)), JOB, rank, TIMEOUT_S)

        self.clients.update(together({rank: lambda rank=rank: connect(rank) for rank in wanted}))  # type: ignore[misc]
        return self.clients

    def on_clients(self, action: Callable[[Client], Any]) -> dict[int, Any]:
        """Runs an action with all clients at the same time; returns the results, or errors, by rank."""
        return together({rank: lambda client=client: action(client) for rank, client in self.clients.items()}, False)  # type: ignore[misc]

    def worker_process(self, rank: int, code: str) -> subprocess.Popen[bytes]:
        """Starts a process that joins as `rank` and runs code with `client`, `wire` and `np`."""
        script = (
            "import sys, numpy as np\nfrom fusion_rt import wire\nfrom fusion_rt.client import Client\n"
            f"client = Client({self.path(self.topology.node_of(rank))!r}, {JOB!r}, {rank}, {TIMEOUT_S})\n"
            f"{code}\n"
        )
        process = forks.popen(
            [sys.executable, "-c", script],
            forks.DAEMON,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.environment,
        )
        self.others.append(process)
        return process

    def close(self) -> None:
        """Ends all clients and processes, by force if they do not end by themselves."""
        for client in self.clients.values():
            client.close()
        for process in self.others:
            if process.stdin is not None and not process.stdin.closed:
                process.stdin.close()
        for process in self.others:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


def together(actions: dict[int, Callable[[], Any]], raising: bool = True) -> dict[int, Any]:
    """Runs actions in threads of their own; returns results by key. Raises the first error, or returns errors."""
    results: dict[int, Any] = {}

    def run(key: int, action: Callable[[], Any]) -> None:
        try:
            results[key] = action()
        except Exception as error:
            results[key] = error

    threads = [threading.Thread(target=run, args=item) for item in actions.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
        assert not thread.is_alive(), "a worker hangs"
    for result in results.values() if raising else ():
        if isinstance(result, Exception):
            raise result
    return results


def read_line(process: subprocess.Popen[bytes]) -> str:
    """Reads the next line of a process's output; the output until its end if there is none."""
    assert process.stdout is not None
    deadline = time.monotonic() + TIMEOUT_S
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(deadline - time.monotonic(), 0.0))
        assert ready, f"no output in time, after {line!r}"
        # Only this line is read: `select` would not see bytes in a buffer of Python's.
        part = os.read(process.stdout.fileno(), 1)
        if not part:
            break
        line += part
    return line.decode().strip()


def quiet(log: str) -> str:
    """Returns a daemon's log without the warnings of a busy machine."""
    busy = " is slow: ", "the event loop stood still"
    return "".join(line for line in log.splitlines(keepends=True) if not any(words in line for words in busy))


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a process by SIGKILL, and waits for its end."""
    process.send_signal(signal.SIGKILL)
    process.wait(TIMEOUT_S)
