"""Flow control of one operation: the bytes that may be under way to each peer, and the memory that is still borrowed.

The receiver grants credit for chunks it has consumed, per operation and peer. So a slow peer costs bounded memory
here (data without credit is not sent but waits in the arena, where it lies anyway), and bounded memory there
(one window an operation). Chunks of all operations that a peer has not reached yet are bounded together, too
(`early_credit`). Credit across all operations was rejected: chunks of an operation that a peer has not reached could
then use up the credit that another one needs to finish.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from fusion_rt import wire
from fusion_rt.core.errors import FusionError
from fusion_rt.tracing.format import Kind
from fusion_rt.tracing.recorder import NULL, Instrument
from fusiond.core.effects import Outlet
from fusiond.core.tracing import about_key
from fusiond.transport.early_credit import EarlyCredit

BORROW_FROM = 64 * 1024  # bytes; a smaller payload is copied when it is sent, a larger one borrowed


class CreditExceeded(FusionError):
    """A peer has sent more than it was granted."""


def window_chunks(window_bytes: int, chunk_bytes: int) -> int:
    """Chunks of an operation that may be under way to a peer which has granted no more credit."""
    return max(2, window_bytes // chunk_bytes)


class ChunkOutlet(Outlet, Protocol):
    """The way of a port to other nodes: a part of `core.effects.Effects`."""

    def send_chunk(self, node: int, chunk: wire.Chunk, payload: bytes | memoryview, /, urgency: int) -> bool:
        """Sends a chunk now; returns whether its payload stays borrowed until credit for it comes."""


class JobRunner(Protocol):
    """An object that runs the jobs of an exchange on threads."""

    def work(self, nbytes: int, job: Callable[[], None], then: Callable[[], None]) -> None:
        """See `Port.work`."""

    def beside(self, job: Callable[[], None], then: Callable[[], None]) -> None:
        """See `Port.beside`."""


@dataclass(slots=True)
class _Flow:
    """Chunks between this node and one position.

    Attributes:
        sent, taken: those sent to it, and those of it consumed here, in all.
        under_way: sent to it and not yet consumed there.
        consumed: of it here, and not yet granted.
        borrows: it still has a borrowed payload of ours to consume.
        lends: it waits for our last credit, because it sent borrowed payloads.
        waiting: chunks for which it has granted no credit.
        reached: something has come of it, so it has reached the operation.
    """

    sent: int = 0
    taken: int = 0
    under_way: int = 0
    consumed: int = 0
    borrows: bool = False
    lends: bool = False
    waiting: deque[tuple[wire.Chunk, bytes | memoryview]] = field(default_factory=deque)
    reached: bool = False


@dataclass
class FlowPort:
    """The `Port` of one exchange.

    Attributes:
        key, digest: go into each chunk.
        members: node indices of the process set; positions index this.
        node: this node.
        chunk_bytes, window_bytes: largest payload of a chunk, and the bytes that may be under way to a peer.
        outside: sends chunks and credit.
        trace: records chunks that wait.
        kind: the chunks' type.
        urgency: of chunks; the less, the sooner they are needed.
        lends: large payloads are memory that changes when the exchange is over (`Exchange.lends`).
        runner: runs jobs on threads; None: they run in the thread that asks.
        early: credit for chunks that their receivers may not expect yet; None: they always do.
        is_over: the exchange has finished, everything is sent, and nothing of it is borrowed any more.
    """

    key: wire.OpKey
    digest: int
    members: Sequence[int]
    node: int
    chunk_bytes: int
    window_bytes: int
    outside: ChunkOutlet
    trace: Instrument = NULL
    kind: type[wire.Chunk] = wire.Chunk
    urgency: int = 0
    lends: bool = True
    runner: JobRunner | None = None
    early: EarlyCredit | None = None
    is_over: bool = False
    _flows: defaultdict[int, _Flow] = field(default_factory=partial(defaultdict, _Flow))  # by position
    _done: bool = False

    def __post_init__(self) -> None:
        self.position, self.nodes = self.members.index(self.node), len(self.members)
        self._window = window_chunks(self.window_bytes, self.chunk_bytes)

    @property
    def borrows(self) -> bool:
        """True if payloads that have been sent may still lie in borrowed memory."""
        return any(flow.borrows for flow in self._flows.values())

    def close(self) -> None:
        """The operation is over, whether it has failed or not. The port lets go of its runner: both are freed then."""
        self.runner = None
        if self.early is not None:
            for position, flow in self._flows.items():
                if not flow.reached:
                    self.early.over(self.members[position], self.key)

    def send(self, position: int, part: int, start: int, hop: int, payload: bytes | memoryview) -> None:
        chunk = self.kind(self.key, self.digest, part, start, hop)
        flow = self._flows[position]
        if not flow.waiting and self._may_send(position, flow, len(payload)):
            self._send_now(position, flow, chunk, payload)
            return
        if not flow.waiting:
            self._record(Kind.BLOCKED_BEGIN, position)
        self._record(Kind.QUEUED, position, len(payload))
        flow.waiting.append((chunk, payload))

    def work(self, nbytes: int, job: Callable[[], None], then: Callable[[], None]) -> None:
        if self.runner is not None:
            self.runner.work(nbytes, job, then)
        else:
            job()
            then()

    def beside(self, job: Callable[[], None], then: Callable[[], None]) -> None:
        if self.runner is not None:
            self.runner.beside(job, then)
        else:
            job()
            then()

    def finish(self) -> None:
        self._done = True
        for position, flow in sorted(self._flows.items()):
            if flow.lends and flow.consumed:
                self._grant_consumed(position, flow)
        self._check()

    def consumed(self, position: int, nbytes: int) -> None:
        """Notes that the exchange has taken a chunk of that position."""
        flow = self._flows[position]
        flow.taken += 1
        flow.consumed += 1
        self.reached(position)
        flow.lends |= self.lends and nbytes >= BORROW_FROM
        if 4 * flow.consumed >= self._window or (self._done and flow.lends):
            self._grant_consumed(position, flow)

    def credit(self, position: int, count: int) -> None:
        """Notes that a position has consumed `count` more chunks."""
        flow = self._flows[position]
        flow.under_way -= count
        self._mark_reached(position, flow)
        self._send_waiting(position, flow)
        if not flow.waiting:
            flow.borrows &= flow.under_way > 0
            self._check()

    def reached(self, position: int) -> None:
        """Notes that a position has reached this operation: chunks to it do not wait there."""
        flow = self._flows[position]
        if not flow.reached:
            self._mark_reached(position, flow)
            self._send_waiting(position, flow)

    def resume(self, node: int) -> bool:
        """See `early_credit.Waiting`."""
        position = self.members.index(node)
        flow = self._flows[position]
        self._send_waiting(position, flow)
        return not flow.waiting or flow.under_way >= self._window

    def _mark_reached(self, position: int, flow: _Flow) -> None:
        if not flow.reached:
            flow.reached = True
            if self.early is not None:
                self.early.reached(self.members[position], self.key)

    def _may_send(self, position: int, flow: _Flow, nbytes: int) -> bool:
        """Returns whether a chunk may be sent now; if so, its credit is taken."""
        if flow.under_way >= self._window:
            return False
        if flow.reached or self.early is None:
            return True
        return self.early.take(self.members[position], nbytes, self)

    def _send_waiting(self, position: int, flow: _Flow) -> None:
        while flow.waiting and self._may_send(position, flow, len(flow.waiting[0][1])):
            self._send_now(position, flow, *flow.waiting.popleft())
            if not flow.waiting:
                self._record(Kind.BLOCKED_END, position)

    def traffic(self, position: int) -> tuple[int, int, int]:
        """Chunks sent to a position, consumed of it, and waiting for its credit."""
        flow = self._flows[position]
        return flow.sent, flow.taken, len(flow.waiting)

    def _send_now(self, position: int, flow: _Flow, chunk: wire.Chunk, payload: bytes | memoryview) -> None:
        flow.sent += 1
        flow.under_way += 1
        chunk.asks = not flow.reached and self.early is not None and self.early.is_short(self.members[position])
        if self.outside.send_chunk(self.members[position], chunk, payload, urgency=self.urgency) and self.lends:
            flow.borrows = True

    def _grant_consumed(self, position: int, flow: _Flow) -> None:
        count, flow.consumed = flow.consumed, 0
        credit = wire.MessageCredit if self.kind is wire.MessageChunk else wire.Credit
        self.outside.to_node(self.members[position], credit(self.key, count))

    def _record(self, kind: Kind, position: int, nbytes: int = 0) -> None:
        name, clock, plan = about_key(self.key)
        self.trace.record(kind, name, nbytes, clock, plan, 0, self.members[position])

    def _check(self) -> None:
        self.is_over = self._done and not any(flow.borrows or flow.waiting for flow in self._flows.values())
