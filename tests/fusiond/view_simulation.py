"""A job in one thread whose nodes may die, and whose workers may leave and come back: engines, what decides about
losses and epochs, and virtual time.

Messages arrive in an order that the seed decides, as in `simulation`, and sometimes time passes while they wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from fusion_rt import wire
from fusion_rt.host.bootstrap import DaemonConfig
from fusiond.app.peer_dispatch import PeerDispatch
from fusiond.engine.engine import Engine
from fusiond.membership.epoch import Membership
from fusiond.membership.failures import Losses
from fusiond.membership.startup import Starting
from fusiond.transport.probe import LinkProbe
from tests.fusiond.simulation import Node, SimulatedJob


class ViewNode(Node):
    """A node's engine with what decides about losses; it does what the daemon's shell does."""

    def __init__(self, job: ViewJob, node: int) -> None:
        super().__init__(job, node)
        self._view_job = job
        self.membership = Membership(job.topology, node)
        self.membership.started = self.membership.mesh_up = True
        self.membership.joined.update(self.membership.local)
        self.losses = Losses(job.topology, node, job.settings.tolerate_losses, self.membership, self, self)
        config = DaemonConfig("simulated", node, job.topology, attached=False)
        loop = mesh = cast(Any, self)  # as much of both as these use
        probe = LinkProbe(self.clock)
        self._starting = Starting(config, job.settings, self.membership, loop, mesh, probe, self)
        self._dispatch = PeerDispatch(
            loop, self.membership, self.losses, self, anybody={}, members=self._starting.handlers()
        )
        self._dispatch.engine_begins(self.engine)
        self.deaf: set[int] = set()  # peers that its mesh has given up
        self.dead = False

    @property
    def going_on(self) -> bool:
        return not (self.dead or self.failure)

    @property
    def view(self) -> wire.View:
        return self.losses.views.view

    def receive(self, source: int, message: wire.PeerMessage, *payload: memoryview) -> None:
        if self.going_on and source not in self.deaf:
            self._dispatch.receive(source, message, *payload)

    # --- workers that leave and come back -----------------------------------------------------------------------------

    def leave(self, rank: int) -> None:
        """Lets a worker leave in good order."""
        self.membership.left.add(rank)
        self.engine.depart([rank])
        for node in range(len(self._view_job.topology.hosts)):
            if node != self.node:
                self.to_node(node, wire.Departed((rank,)))
        self.losses.departed()

    def come_back(self, rank: int) -> None:
        """Lets a worker say hello again."""
        assert self.membership.may_join(rank) == ""
        epoch = self.membership.epoch
        self.membership.join(rank)
        if self.membership.epoch > epoch:
            self.begin_epoch()
        self._starting.check_up()

    def start_failed(self, error: str) -> None:
        self.fail(error)

    def started(self, start: wire.Start, seconds_per_byte: Mapping[int, float]) -> None:
        for rank in self.membership.awaited:
            self._view_job.welcomed(rank)

    # --- mesh ---------------------------------------------------------------------------------------------------------

    def send(self, node: int, message: wire.PeerMessage) -> None:
        self.to_node(node, message)

    def send_payload(self, node: int, message: wire.Probe, payload: bytes) -> None:
        self._view_job.post_payload(self.node, node, wire.encode(message), payload)

    # --- JobControl, for losses and for what peers say ----------------------------------------------------------------

    def begin_epoch(self) -> None:
        self.engine.fail_job("its ranks have left the job")
        self.engine = Engine(self.context(), self.membership.epoch)
        self._dispatch.engine_begins(self.engine)
        self.losses.epoch_begins(self.membership.epoch, self.engine)
        self._starting.check_up()

    def departed(self) -> None:
        self.losses.departed()

    def drop_peer(self, node: int, why: str) -> None:
        self.lose(node, why)

    def lose(self, peer: int, why: str) -> None:
        """Its mesh gives a peer up."""
        if peer not in self.deaf and self.going_on:
            self.deaf.add(peer)
            self.losses.peer_lost(peer, why)

    def job_failed(self, error: str) -> None:
        self.fail(error, True)

    def current_engine(self) -> Engine:
        return self.engine

    def to_node(self, node: int, message: wire.PeerMessage) -> None:
        if not self.dead and node not in self.deaf:
            super().to_node(node, message)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> object:
        return super().call_later(seconds, lambda: None if self.dead else callback())

    def is_over(self) -> bool:
        return len(self.engine.participants.departed) == self._view_job.topology.size

    def fail(self, error: str, tell_peers: bool = True) -> None:
        if self.failure:
            return
        self.failure = error
        self.losses.views.end()
        self.engine.fail_job(error)
        for node in range(len(self._view_job.topology.hosts)) if tell_peers else ():
            if node != self.node:
                self.to_node(node, wire.Abort(error))

    def peers_gone(self, nodes: Sequence[int], why: str) -> None:
        for node in nodes:
            self.lose(node, why)


class ViewJob(SimulatedJob):
    """A job whose nodes may be killed, with the arguments of `SimulatedJob`; losses are tolerated by default."""

    def __init__(self, local_sizes: Sequence[int], seed: int = 0, **settings: Any) -> None:
        super().__init__(local_sizes, seed, **{"tolerate_losses": True, **settings})
        self.members = [ViewNode(self, node) for node in range(len(local_sizes))]
        self.nodes = list(self.members)
        self._when_welcome: dict[int, Callable[[], object]] = {}  # by rank

    @property
    def left(self) -> list[ViewNode]:
        """Returns the nodes that go on."""
        return [node for node in self.members if node.going_on]

    @property
    def ranks_left(self) -> list[int]:
        return [rank for node in self.left for rank in node.membership.awaited]

    def _deliver(self, key: tuple[int, int, str]) -> None:
        source, target, _ = key
        message, payload = self._channels[key].popleft()
        decoded = wire.decode_peer_message(message)
        view = [] if payload is None else [memoryview(b"\0" + bytes(payload))[1:]]
        self.members[target].receive(source, decoded, *view)

    def kill(self, node: int) -> None:
        """Kills a daemon with its workers. Some of its last messages arrive; its peers notice in their own time."""
        self.members[node].dead = True
        self._scripts.update(
            {rank: type(self._scripts[rank])() for rank in self.topology.ranks[node] if rank in self._scripts}
        )
        for (source, _, _), queue in self._channels.items():
            if source == node:
                for _ in range(self._random.randint(0, len(queue))):
                    queue.pop()
        for peer in self.members:
            if peer.node != node:
                delay = self._random.uniform(0, 0.3)
                self.timers.append((self.now + delay, lambda peer=peer: peer.lose(node, "its connection was closed")))  # type: ignore[misc]

    def kill_worker(self, rank: int) -> None:
        """Kills a worker; its daemon sees it."""
        self.members[self.topology.node_of(rank)].losses.worker_lost(rank, f"rank {rank} died")

    def leave(self, rank: int) -> None:
        """Lets a rank leave in good order; the nodes hear of it in their own time."""
        self.members[self.topology.node_of(rank)].leave(rank)

    def come_back(self, rank: int, then: Callable[[], object]) -> None:
        """Lets a rank that has left come back; `then`: its action once its daemon has welcomed it."""
        self._when_welcome[rank] = then
        self.members[self.topology.node_of(rank)].come_back(rank)

    def welcomed(self, rank: int) -> None:
        """Runs a rank's next action, once its daemon says that the job has started."""
        self.later(rank, self._when_welcome.pop(rank))

    def go_on(self, seconds: float = 5.0) -> None:
        """Runs everything that happens in `seconds`."""
        end = self.now + seconds
        while True:
            patient = self._random.random() > 0.02  # else time passes though something waits
            if patient and self.step():
                continue
            due = min((at for at, _ in self.timers), default=end + 1)
            if due <= end:
                self.now = max(self.now, due)
                index = next(i for i, timer in enumerate(self.timers) if timer[0] == due)
                self.timers.pop(index)[1]()
            elif patient:
                break
        self.now = end
        for node in self.left:
            if not node.engine.idle:
                node.engine.tick()

    def outcome(self, rank: int, handle: int) -> wire.DaemonMessage | None:
        """Returns the rank's answer to an operation; None if there is none."""
        return self.answer(rank, handle)[0] if self.is_answered(rank, handle) else None
