"""Flow control of one operation: how much of it may be under way to each peer, and what is still borrowed.

The receiver grants credit for chunks it has consumed, per operation and peer. So a slow peer costs bounded memory
here (what it has no credit for is not sent but waits in the arena, where it lies anyway), and bounded memory there
(one window an operation, also of operations that its workers have not reached yet). Credit across operations was
rejected: chunks of an operation that a peer has not reached could then use up the credit that another one needs to
finish.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from fusion_rt import wire
from fusion_rt.errors import FusionError
from fusion_rt.trace import NULL, Instrument
from fusion_rt.trace_format import Kind
from fusiond.core.tracing import about_key

BORROW_FROM = 64 * 1024  # bytes; a smaller payload is copied when it is sent, a larger one borrowed
SendChunk = Callable[[int, wire.Chunk, bytes | memoryview], bool]


class CreditExceeded(FusionError):
    """A peer has sent more than it was granted."""


def window_chunks(window_bytes: int, chunk_bytes: int) -> int:
    """Chunks of an operation that may be under way to a peer which has granted no more credit."""
    return max(2, window_bytes // chunk_bytes)


class FlowPort:
    """The `Port` of one exchange.

    Args:
        key, digest: go into each chunk.
        nodes: node indices of the process set; positions index this.
        node: this node.
        chunk_bytes, window_bytes: largest payload of a chunk, and what may be under way to a peer.
        send_chunk: sends (node, chunk, payload) now; returns whether the payload stays borrowed until credit comes.
        grant: sends credit (node, chunks).
        finished: called when the exchange has finished and nothing of it is borrowed any more.
        trace: what waits is recorded there.

    Attributes:
        lends: whether large payloads are memory that changes when the exchange is over (`Exchange.lends`).
    """

    def __init__(
        self,
        key: wire.OpKey,
        digest: int,
        nodes: Sequence[int],
        node: int,
        chunk_bytes: int,
        window_bytes: int,
        send_chunk: SendChunk,
        grant: Callable[[int, int], None],
        finished: Callable[[], None],
        trace: Instrument = NULL,
    ) -> None:
        self.position = nodes.index(node)
        self.nodes = len(nodes)
        self.chunk_bytes = chunk_bytes
        self._key = key
        self._digest = digest
        self._node_of = nodes
        self._window = window_chunks(window_bytes, chunk_bytes)
        self._send_chunk = send_chunk
        self._grant = grant
        self._finished = finished
        self._trace = trace
        self._under_way: dict[int, int] = {}  # chunks sent to a position and not yet consumed there
        self._borrowed: set[int] = set()  # positions that still have a borrowed payload of ours to consume
        self._waiting: dict[int, deque[tuple[wire.Chunk, bytes | memoryview]]] = {}
        self._sent = dict.fromkeys(range(len(nodes)), 0)  # chunks sent to a position in all
        self._taken = dict.fromkeys(range(len(nodes)), 0)  # chunks of a position consumed here in all
        self._consumed: dict[int, int] = {}  # chunks of a position consumed here and not yet granted
        self.lends = True
        self._owed: set[int] = set()  # positions that wait for our last credit, because they sent borrowed payloads
        self._done = False
        self._told = False

    def send(self, position: int, part: int, start: int, hop: int, payload: bytes | memoryview) -> None:
        chunk = wire.Chunk(self._key, self._digest, part, start, hop)
        if self._under_way.get(position, 0) < self._window and not self._waiting.get(position):
            self._send_now(position, chunk, payload)
        else:
            waiting = self._waiting.setdefault(position, deque())
            if not waiting:
                self._record(Kind.BLOCKED_BEGIN, position)
            self._record(Kind.QUEUED, position, len(payload))
            waiting.append((chunk, payload))

    def finish(self) -> None:
        self._done = True
        for position in self._owed:
            if count := self._consumed.pop(position, 0):
                self._grant(self._node_of[position], count)
        self._check()

    def consumed(self, position: int, nbytes: int) -> None:
        """A chunk of that position has been taken by the exchange."""
        self._taken[position] += 1
        count = self._consumed.get(position, 0) + 1
        self._consumed[position] = count
        if nbytes >= BORROW_FROM and self.lends:
            self._owed.add(position)
        if 4 * count >= self._window or (self._done and position in self._owed):
            self._consumed[position] = 0
            self._grant(self._node_of[position], count)

    def credit(self, position: int, count: int) -> None:
        """That position has consumed `count` more chunks."""
        self._under_way[position] = self._under_way.get(position, 0) - count
        waiting = self._waiting.get(position)
        while waiting and self._under_way[position] < self._window:
            self._send_now(position, *waiting.popleft())
            if not waiting:
                self._record(Kind.BLOCKED_END, position)
        if not waiting:
            if self._under_way[position] <= 0:
                self._borrowed.discard(position)
            self._check()

    def traffic(self, position: int) -> tuple[int, int, int]:
        """Chunks sent to a position, consumed of it, and waiting for its credit."""
        return self._sent[position], self._taken[position], len(self._waiting.get(position, ()))

    def _send_now(self, position: int, chunk: wire.Chunk, payload: bytes | memoryview) -> None:
        self._sent[position] += 1
        self._under_way[position] = self._under_way.get(position, 0) + 1
        if self._send_chunk(self._node_of[position], chunk, payload) and self.lends:
            self._borrowed.add(position)

    def _record(self, kind: Kind, position: int, nbytes: int = 0) -> None:
        name, clock, plan = about_key(self._key)
        self._trace.record(kind, name, nbytes, clock, plan, 0, self._node_of[position])

    def _check(self) -> None:
        if self._done and not self._told and not self._borrowed and not any(self._waiting.values()):
            self._told = True
            self._finished()
