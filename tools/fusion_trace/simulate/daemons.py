"""One node's daemon: its threads, and its ways to other nodes and to its workers. `exchanges` and `homes` use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fusion_trace.simulate.model import Cluster
from fusion_trace.simulate.network import Network
from fusion_trace.simulate.simulator import Processor, Simulator, Thread

Answered = Callable[[int, int], None]
"""Called with (rank, bucket) when a worker has its answer."""


class SimulationError(Exception):
    """An event was simulated that cannot happen in a job."""


class Host:
    """A node: the event loop of its daemon, the threads that ZeroMQ sends and receives with, and the pool.

    Attributes:
        others: all nodes, by number. Where one node stands for all of them, each of these is that one.
    """

    def __init__(
        self, simulator: Simulator, network: Network, cluster: Cluster, node: int, processor: Processor | None
    ) -> None:
        self.simulator, self.network, self.cluster, self.node = simulator, network, cluster, node
        self.costs = cluster.costs
        self.others: Sequence[Host] = ()
        self.loop = Thread(simulator, processor)
        self._sending = Thread(simulator, processor)
        self._receiving = Thread(simulator, processor)
        self._pool = [Thread(simulator, processor) for _ in range(self.costs.threads)]
        self._turn = 0

    @property
    def worked(self) -> float:
        """Processor time of all its threads (s)."""
        return sum(thread.busy for thread in (self.loop, self._sending, self._receiving, *self._pool))

    def send(self, target: int, nbytes: int, priority: int, then: Callable[..., None], *arguments: Any) -> None:
        """Sends a payload (at least one byte is taken to be sent); the target's loop does `then`, having received it.

        To be called by what this node's loop does.
        """
        nbytes = max(nbytes, 1)
        self.simulator.spend(self.costs.send)
        self.simulator.at(
            self.simulator.time, self._sending.post, nbytes * self.costs.io_send, self._leave, target, nbytes, priority,
            then, arguments,
        )  # fmt: skip

    def tell(self, target: int, then: Callable[..., None], *arguments: Any) -> None:
        """Sends a control message, such as credit."""
        self.simulator.spend(self.costs.control)
        other = self.others[target]
        self.simulator.at(
            self.simulator.time, self.network.send, self.node, other.node, 0, -1, other.loop.post, other.costs.control,
            then, *arguments,
        )  # fmt: skip

    def _leave(
        self, target: int, nbytes: int, priority: int, then: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        other = self.others[target]
        self.simulator.at(
            self.simulator.time, self.network.send, self.node, other.node, nbytes, priority, other.came, nbytes, then,
            arguments,
        )  # fmt: skip

    def came(self, nbytes: int, then: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Receives a payload, whose last byte has come."""
        self._receiving.post(nbytes * self.costs.io_receive, self._read, then, arguments)

    def _read(self, then: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.simulator.at(self.simulator.time, self.loop.post, self.costs.receive, then, *arguments)

    def work(self, job: Callable[[], Any], then: Callable[..., None]) -> None:
        """Has a thread of the pool do a job, and then the loop `then`."""
        thread = self._pool[self._turn % len(self._pool)]
        self._turn += 1

        def done() -> None:
            job()
            self.simulator.at(self.simulator.time, self.loop.post, self.costs.job / 2, then)

        self.simulator.at(self.simulator.time, thread.post, self.costs.job / 2, done)

    def hear(self, work: Callable[..., None], *arguments: Any) -> None:
        """Has the loop do `work` when it has read a message that a local worker sends now."""
        half = self.costs.local / 2
        self.simulator.after(half, self.loop.post, half, work, *arguments)

    def answer(self, answered: Answered, rank: int, bucket: int) -> None:
        """Tells a local worker that what it has submitted of a bucket is back. To be called by what the loop does."""
        half = self.costs.local / 2
        self.simulator.spend(half)
        self.simulator.at(self.simulator.time + half, answered, rank, bucket)
