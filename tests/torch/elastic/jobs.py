"""Elastic jobs for tests: real daemons and workers on this machine, hosts that are names, and a launcher that does what
the test says. A host keeps its daemon as long as it is among the hosts.

A worker runs a function of a test module, `function(worker, *args)`, and talks with the test through its `Worker`. The
job moves it from one membership epoch to the next when the test says so: `change`.
"""

from __future__ import annotations

import importlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from fusion_rt.core.topology import Topology
from fusion_rt.host.bootstrap import (
    Abandon,
    DaemonConfig,
    Endpoint,
    EpochOver,
    Phase,
    Reform,
    Reformed,
    decode_line,
    encode_line,
    socket_path,
)
from fusion_rt.local import elastic
from tests import forks

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 180.0  # for anything that is waited for
_FD = "FUSION_TEST_FD"
_CALL = "FUSION_TEST_CALL"
_JOB = "test"
_SAID: Any = Phase | Reformed | EpochOver


class Hand:
    """A worker as the test sees it.

    Attributes:
        host, slot: where it is.
        process: it.
        reports: what it has said and nobody has taken yet.
    """

    def __init__(self, host: str, slot: int, process: subprocess.Popen[bytes], connection: Connection) -> None:
        self.host, self.slot, self.process, self.connection = host, slot, process, connection
        self.agent: socket.socket | None = None
        self.reports: list[Any] = []
        self.waiting: elastic.Rejoin | None = None
        self.silent = False  # its connection has ended

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def tell(self, value: Any) -> None:
        """Says something to its function, which waits for it in `Worker.listen`."""
        self.connection.send_bytes(pickle.dumps(value))

    def close(self) -> None:
        """Ends the process, if it has not ended, and all connections to it."""
        if self.alive:
            self.process.kill()
        self.process.wait()
        self.connection.close()
        if self.agent is not None:
            self.agent.close()


class Worker:
    """The test as a worker sees it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def say(self, value: Any) -> None:
        # Not by `send`, for which torch would share the memory of tensors.
        self._connection.send_bytes(pickle.dumps(value))

    def listen(self) -> Any:
        return pickle.loads(self._connection.recv_bytes())


class ElasticJob:
    """An elastic job of the function `function(worker, *args)`.

    Args:
        hosts: number of workers of each host; the first ranks are on the first.
        environment: variables besides this process's.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *args: Any,
        hosts: Mapping[str, int],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._directory = tempfile.mkdtemp(prefix="frt", dir="/tmp")
        self._call = pickle.dumps((function.__module__, function.__qualname__, args))
        self._environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "FUSION_RUNTIME_DIR": self._directory,
            "FUSION_TRACE_DIR": f"{self._directory}-traces",
            "FUSION_KERNEL_THREADS": "1",
            "HOROVOD_START_TIMEOUT": "120",
            "HOROVOD_ELASTIC": "1",
            **(environment or {}),
        }
        self.epoch = 0
        self.hands: list[Hand] = []
        self.topology = Topology(("",), ((0,),))
        self._listeners: dict[str, socket.socket] = {}
        self._strangers: dict[socket.socket, str] = {}
        self._nodes: dict[str, int] = {}  # of all hosts there ever were
        self._serials: dict[str, int] = {}  # how many daemons each has had
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._endpoints: dict[str, Endpoint] = {}
        try:
            self._begin(hosts)
        except BaseException:
            self.close()
            raise

    # --- what happens to it -------------------------------------------------------------------------------------------

    def announce(self, added: bool = False, removed: bool = False) -> None:
        """Tells all workers that hosts come or go."""
        message = elastic.encode(elastic.HostsChanged(time.time(), added, removed))
        self._until(lambda: all(hand.agent is not None for hand in self.living()), "every worker to attach")
        for hand in self.living():
            assert hand.agent is not None
            hand.agent.send(message)

    def change(self, hosts: Mapping[str, int], in_order: bool = False) -> list[str]:
        """Waits until all workers that live have left the epoch, and begins the next on these hosts.

        Args:
            in_order: ranks are given out in the order of `hosts`. Else those that have been there come first.

        Returns:
            Why each had left, in the order of ranks.
        """
        self.await_leaving()
        reasons = [hand.waiting.error for hand in self.living() if hand.waiting is not None]
        self._begin(hosts, in_order)
        return reasons

    def await_leaving(self) -> None:
        """Waits until all workers that live have left the epoch, and wait for their places in the next."""
        self._until(lambda: all(hand.waiting is not None for hand in self.living()), "every worker to leave the epoch")

    def await_word(self) -> None:
        """Waits until all workers that live have left the epoch, or one of them has said something."""
        self._until(
            lambda: (
                all(hand.waiting is not None for hand in self.living()) or any(hand.reports for hand in self.living())
            ),
            "every worker to leave the epoch, or to say something",
        )

    def abandon(self) -> None:
        """Gives up the epoch, which cannot come about."""
        for host in self._daemons:
            self._order(host, Abandon(self.epoch, "the launcher gave it up"))

    def kill(self, hand: Hand) -> None:
        """SIGKILL."""
        hand.process.send_signal(signal.SIGKILL)
        hand.process.wait(TIMEOUT_S)

    def kill_daemon(self, host: str) -> None:
        """SIGKILL."""
        self._daemons[host].kill()
        self._daemons[host].wait(TIMEOUT_S)

    # --- its workers --------------------------------------------------------------------------------------------------

    def living(self) -> list[Hand]:
        """Workers that have not ended, in the order of ranks."""
        return [hand for hand in self.hands if hand.alive]

    def report(self, hand: Hand) -> Any:
        """The next thing that a worker says."""
        self._until(lambda: bool(hand.reports) or hand.silent, f"a word of the worker on {hand.host}")
        assert hand.reports, f"the worker on {hand.host} has ended with status {hand.process.wait(TIMEOUT_S)}"
        return hand.reports.pop(0)

    def reports(self) -> list[Any]:
        """The next thing that each living worker says, in the order of ranks."""
        return [self.report(hand) for hand in self.living()]

    def tell(self, value: Any) -> None:
        """Says something to all living workers."""
        for hand in self.living():
            hand.tell(value)

    def finish(self) -> list[Any]:
        """What the functions of all living workers return."""
        found = []
        for hand in self.living():
            kind, value = self.report(hand)
            assert kind == "returned", value
            assert hand.process.wait(TIMEOUT_S) == 0
            found.append(value)
        return found

    # --- the launcher -------------------------------------------------------------------------------------------------

    def _begin(self, hosts: Mapping[str, int], in_order: bool = False) -> None:
        self.epoch += 1
        old = {(hand.host, hand.slot): hand for hand in self.living()}
        known = {host for host, _ in old}
        names = list(hosts) if in_order else sorted(hosts, key=lambda name: name not in known)  # a stable order
        ranks: list[tuple[int, ...]] = []
        for name in names:
            start = sum(map(len, ranks))
            ranks.append(tuple(range(start, start + hosts[name])))
        self.topology = Topology(tuple(names), tuple(ranks))
        self._reform()
        for hand in self.hands:
            if not hand.alive:
                hand.close()
        self.hands = []
        for node, name in enumerate(names):
            for slot, rank in enumerate(ranks[node]):
                environment = self._place(name, node, slot, rank)
                if (name, slot) in old:
                    hand = old.pop((name, slot))
                    self._answer(hand, elastic.Assignment(self.epoch, environment))
                else:
                    hand = self._start_worker(name, slot, environment)
                self.hands.append(hand)
        for hand in old.values():
            self._answer(hand, elastic.Removed(f"{hand.host} is not among the hosts any more"))
            assert hand.process.wait(TIMEOUT_S) == 0
            hand.close()

    def _place(self, host: str, node: int, slot: int, rank: int) -> dict[str, str]:
        topology = self.topology
        found = {
            "HOROVOD_RANK": rank,
            "HOROVOD_SIZE": topology.size,
            "HOROVOD_LOCAL_RANK": slot,
            "HOROVOD_LOCAL_SIZE": len(topology.ranks[node]),
            "HOROVOD_CROSS_RANK": topology.cross_rank(rank),
            "HOROVOD_CROSS_SIZE": topology.cross_size(rank),
            "FUSION_NODE": self._nodes[host],
            "FUSION_JOB_ID": _JOB,
            "FUSION_SOCKET": socket_path(self._directory, _JOB, self._nodes[host], self._serials[host]),
            elastic.EPOCH: self.epoch,
        }
        return {name: str(value) for name, value in found.items()}

    def _start_worker(self, host: str, slot: int, environment: Mapping[str, str]) -> Hand:
        path = os.path.join(self._directory, f"agent-{host}")
        if host not in self._listeners:
            listener = self._listeners[host] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            listener.bind(path)
            listener.listen(16)
            listener.setblocking(False)
        ours, theirs = Pipe()
        own = {elastic.SOCKET: path, elastic.SLOT: str(slot), _FD: str(theirs.fileno()), _CALL: self._call.hex()}
        process = forks.popen(
            [sys.executable, "-c", "from tests.torch.elastic.jobs import serve; serve()"],
            forks.WORKER,
            env={**self._environment, **environment, **own},
            cwd=ROOT,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        return Hand(host, slot, process, ours)

    def _answer(self, hand: Hand, message: elastic.Assignment | elastic.Removed) -> None:
        assert hand.agent is not None
        hand.waiting = None
        hand.agent.send(elastic.encode(message))

    def _reform(self) -> None:
        """Starts daemons on hosts that are new, ends those of hosts that are not among them any more, and orders all
        others to the epoch."""
        there = dict(zip(self.topology.hosts, self.topology.ranks, strict=True))
        for host in [host for host in self._daemons if host not in there]:
            self._end_daemon(host)
        for host in there:
            self._nodes.setdefault(host, len(self._nodes))
        new = [host for host in there if host not in self._daemons]
        for host in new:
            self._start_daemon(host)
        for host in new:
            stdout = self._daemons[host].stdout
            assert stdout is not None
            self._endpoints[host] = decode_line(stdout.readline(), Endpoint)
        hosts = tuple(self._nodes)
        topology = Topology(hosts, tuple(there.get(host, ()) for host in hosts))
        absent = tuple(node for node, host in enumerate(hosts) if host not in there)
        peers = tuple(self._endpoints[host] for host in hosts if host in there)
        for host in there:
            self._order(host, Reform(self.epoch, topology, absent, peers))
        for host in there:
            stdout = self._daemons[host].stdout
            assert stdout is not None
            while decode_line(stdout.readline(), _SAID) != Reformed(self.epoch):
                pass

    def _start_daemon(self, host: str) -> None:
        process = forks.popen(
            [sys.executable, "-m", "fusiond", "start", "--foreground", "--config-stdin"],
            forks.WORKER,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environment,
            cwd=ROOT,
        )
        self._daemons[host] = process
        serial = self._serials[host] = self._serials.get(host, 0) + 1
        node, hosts = self._nodes[host], tuple(self._nodes)
        alone = Topology(hosts, tuple((0,) if other == host else () for other in hosts))
        assert process.stdin is not None
        process.stdin.write(encode_line(DaemonConfig(_JOB, node, alone, elastic=True, serial=serial)))
        process.stdin.flush()

    def _order(self, host: str, order: Reform | Abandon) -> None:
        stdin = self._daemons[host].stdin
        assert stdin is not None
        stdin.write(encode_line(order))
        stdin.flush()

    def _end_daemon(self, host: str) -> None:
        process = self._daemons.pop(host)
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        """Reads what workers say until a condition holds."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            left = deadline - time.monotonic()
            assert left > 0, f"waited in vain for {what}"
            agents = {hand.agent: hand for hand in self.hands if hand.agent is not None}
            words = {hand.connection: hand for hand in self.hands if not hand.silent}
            for ready in wait([*self._listeners.values(), *self._strangers, *agents, *words], min(left, 0.5)):
                if ready in words:
                    self._hear(words[ready])
                elif ready in agents:
                    self._read(agents[ready])
                elif ready in self._strangers:
                    self._attach(ready)
                else:
                    host = next(name for name, listener in self._listeners.items() if listener is ready)
                    self._strangers[self._listeners[host].accept()[0]] = host

    def _attach(self, connection: socket.socket) -> None:
        host = self._strangers.pop(connection)
        data = connection.recv(elastic.MAX_PACKET)
        message = elastic.decode_from_worker(data) if data else None
        slot = message.slot if isinstance(message, elastic.Attach) else None
        hands = [hand for hand in self.hands if (hand.host, hand.slot) == (host, slot) and hand.alive]
        if hands:
            hands[0].agent = connection
        else:  # it was killed before it was heard
            connection.close()

    def _read(self, hand: Hand) -> None:
        assert hand.agent is not None
        data = hand.agent.recv(elastic.MAX_PACKET)
        if not data:
            hand.agent.close()
            hand.agent = None
            return
        message = elastic.decode_from_worker(data)
        assert isinstance(message, elastic.Rejoin)
        assert message.epoch == self.epoch
        hand.waiting = message

    @staticmethod
    def _hear(hand: Hand) -> None:
        try:
            hand.reports.append(pickle.loads(hand.connection.recv_bytes()))
        except (EOFError, ConnectionError):
            hand.silent = True

    def close(self) -> None:
        """Ends everything."""
        for hand in self.hands:
            hand.close()
        for sock in (*self._strangers, *self._listeners.values()):
            sock.close()
        for host in list(self._daemons):
            self._end_daemon(host)
        shutil.rmtree(self._directory)
        shutil.rmtree(f"{self._directory}-traces", ignore_errors=True)  # nobody has recorded, perhaps

    def __enter__(self) -> ElasticJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve() -> None:
    """What a worker process runs."""
    import faulthandler

    faulthandler.register(signal.SIGUSR1)
    connection = Connection(int(os.environ.pop(_FD)))
    module, name, args = pickle.loads(bytes.fromhex(os.environ.pop(_CALL)))
    function = getattr(importlib.import_module(module), name)
    worker = Worker(connection)
    worker.say(("returned", function(worker, *args)))


def same(values: Sequence[Any]) -> Any:
    """The value, which has to be the same everywhere."""
    assert all(value == values[0] for value in values), values
    return values[0]
