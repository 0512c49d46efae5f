"""Jobs for faults: daemons on the hosts of a lab or behind a bad network, and workers that sum integers.

The sums can be computed without any communication, so that a result is exactly right or wrong.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.netlab import Netlab
from fusion_rt import wire
from fusion_rt.client import Client
from fusion_rt.core.errors import HorovodInternalError
from fusion_rt.host.bootstrap import PeerTable, encode_line
from tests.faults.proxy import Proxy
from tests.fusiond.processes import COMMAND, Daemons, read_line

FAST = {"FUSION_HEARTBEAT_INTERVAL": "50ms", "FUSION_HEARTBEAT_TIMEOUT": "2s"}  # silence is noticed soon
HANGABLE = [COMMAND[0], "-m", "tests.faults.hangable", *COMMAND[3:]]
WAIT_S = 90.0  # for what has to happen, on however slow a machine
_MODULUS = 1009  # after so many places, the same integers come again

Array = npt.NDArray[np.int64]


class LabDaemons(Daemons):
    """The daemons of a job, each on a host of a lab. Their sockets are files, so that workers may be anywhere."""

    def __init__(self, lab: Netlab, directory: Path, local_sizes: Sequence[int], **environment: str) -> None:
        super().__init__(directory, local_sizes, True, **environment)
        for host in lab.hosts[: len(local_sizes)]:
            self.commands[host.index] = ["ip", "netns", "exec", host.name, *COMMAND]
            self.addresses[host.index] = host.address


class ProxiedDaemons(Daemons):
    """The daemons of a job of two nodes; what node 0 sends to node 1 passes through proxies.

    Attributes:
        control, payload: the proxies, once it has been started.
    """

    def __init__(self, directory: Path, seed: int, **environment: str) -> None:
        super().__init__(directory, [1, 1], True, **environment)
        self._seed = seed
        self.control: Proxy
        self.payload: Proxy

    def start(self, tell_peers: bool = True) -> ProxiedDaemons:
        super().start(tell_peers)
        return self

    def tell(self, node: int) -> None:
        if node == 1:
            super().tell(node)
            return
        target = self.endpoints[1]
        self.control = Proxy(target.control_port, self._seed).__enter__()
        self.payload = Proxy(target.payload_port, self._seed + 1).__enter__()
        ports = {"control_port": self.control.port, "payload_port": self.payload.port}
        seen = type(target)(**{name: getattr(target, name) for name in target.__struct_fields__} | ports)
        stdin = self.processes[0].stdin
        assert stdin is not None
        stdin.write(encode_line(PeerTable((self.endpoints[0], seen))))
        stdin.flush()

    def close(self) -> None:
        super().close()
        for proxy in (self.control, self.payload):
            proxy.__exit__(None, None, None)


def part(rank: int, step: int, count: int) -> Array:
    """Returns the integers (count,) that a rank adds in a step; they depend on step, rank and index."""
    return np.resize((np.arange(_MODULUS) * 31 + step * 7 + rank * 13) % _MODULUS, count)


def total(ranks: Sequence[int], step: int, count: int) -> Array:
    """Returns the expected sum of a step over ranks."""
    return np.resize(np.sum([part(rank, step, _MODULUS) for rank in ranks], axis=0), count)


def add(client: Client, step: int, count: int, name: str = "sum") -> Array:
    """Sums one step over all ranks.

    Raises:
        HorovodInternalError: it failed.
    """
    region = client.allocate(8 * count)
    array = np.frombuffer(region.view, np.int64)[:count]
    try:
        array[:] = part(client.rank, step, count)
        signature = wire.Signature("allreduce", "int64", (count,))
        client.wait(client.submit(name, signature, place=(region.segment, region.offset)))
        result: Array = array.copy()
        return result
    finally:
        del array
        client.arena.free(region)


class Workers:
    """Clients that sum, step after step, each in a thread of its own, until they fail or are told to stop.

    Args:
        clients: by rank.
        count: elements of each step.
        ranks: all ranks of the job, whether they are among the clients or not.
        computing: seconds that each takes between two steps, so that a test in which time has to pass leaves processors
            to others.

    Attributes:
        steps: completed by each rank.
        wrong: wrong results, as (rank, step).
        errors: exceptions, by rank.
        raised: their times by the monotonic clock.
    """

    def __init__(self, clients: dict[int, Client], count: int, ranks: Sequence[int], computing: float = 0.0) -> None:
        self._count = count
        self._computing = computing
        self._ranks = ranks
        self._counting = threading.Lock()  # nobody counts between what the last step is made of and its being set
        self._last = 1 << 30  # the step before which all of them stop
        self.steps = dict.fromkeys(clients, 0)
        self.wrong: list[tuple[int, int]] = []
        self.errors: dict[int, str] = {}
        self.raised: dict[int, float] = {}
        self._threads = [threading.Thread(target=self._work, args=(client,)) for client in clients.values()]
        for thread in self._threads:
            thread.start()

    def _work(self, client: Client) -> None:
        rank = client.rank
        try:
            while (step := self.steps[rank]) < self._last:
                result = add(client, step, self._count)
                if not np.array_equal(result, total(self._ranks, step, self._count)):
                    self.wrong.append((rank, step))
                with self._counting:
                    self.steps[rank] += 1
                time.sleep(self._computing)
        except HorovodInternalError as error:
            self.raised[rank] = time.monotonic()
            self.errors[rank] = str(error)

    def go_on(self, steps: int = 3) -> None:
        """Waits until every rank has completed `steps` more, or one has failed."""
        goal = {rank: done + steps for rank, done in self.steps.items()}
        wait(lambda: self.errors or all(self.steps[rank] >= goal[rank] for rank in goal), f"{steps} more steps")

    def end(self) -> None:
        """Waits, after a fault that may be fatal or not, until all have failed, or have gone on and been stopped."""
        goal = {rank: done + 3 for rank, done in self.steps.items()}
        wait(
            lambda: len(self.errors) == len(goal) or all(self.steps[rank] >= goal[rank] for rank in goal),
            "the end of all, or more steps of all",
        )
        if not self.errors:
            self.stop()

    def stop(self) -> None:
        """Stops all after the same step; call it while every rank can still go on."""
        with self._counting:
            self._last = max(self.steps.values()) + 3
        self.join()

    def join(self) -> None:
        """Waits until all have failed or stopped."""
        deadline = time.monotonic() + WAIT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        hanging = [rank for rank in self.steps if rank not in self.errors and self.steps[rank] < self._last]
        assert not hanging, f"ranks {hanging} still wait; {self.errors}"


ADDING = """
import sys
from tests.faults.jobs import add
print("joined", flush=True)
step = 0
while True:
    if step == 3: print("under way", flush=True)
    add(client, step, {count})
    step += 1
"""


def adding_process(job: Daemons, rank: int, count: int) -> Callable[[], object]:
    """Starts a worker in a process of its own that does what those of `Workers` do, as the last of `job.others`.

    Returns: waits until it has taken some steps.
    """
    process = job.worker_process(rank, ADDING.format(count=count))

    def under_way() -> object:
        while (line := read_line(process)) != "under way":
            assert line, process.communicate()[1].decode()
        return process

    return under_way


def wait(condition: Callable[[], object], what: str, timeout: float = WAIT_S) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout} s"
        time.sleep(0.005)


def fifo(directory: Path, node: int) -> Path:
    """Makes a FIFO through which the daemon of a node can be hung."""
    path = directory / f"hang.{node}"
    os.mkfifo(path)
    return path
