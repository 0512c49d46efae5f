"""Cost of a collective by the alpha-beta model (Thakur et al., 2005, section 3), from which exchanges are chosen.

A message of n bytes takes `latency + n * seconds_per_byte`. The coordinator measures both for every link when the job
starts and gives all nodes the worst of each, so that they choose alike; workers predict with it, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

_CHUNK_SECONDS = 4.5e-3
_CHUNK_STEP = 64 * 1024  # bytes
_CREDIT_SECONDS = 10e-3
_LEAST_CREDIT = 12 * _CHUNK_STEP


@dataclass(frozen=True)
class CostModel:
    """Cost of a message: `latency` in seconds, and `seconds_per_byte`."""

    latency: float = 100e-6
    seconds_per_byte: float = 1e-9

    def rounded(self) -> CostModel:
        """Returns the model by which exchanges between nodes are chosen: latency (microseconds) and rate (B/s) rounded
        to powers of two.

        The order in which numbers are added up depends on it, and so the last bits of sums, which should not differ
        from job to job because links were measured a little faster.
        """
        latency = 2.0 ** round(math.log2(1e6 * max(self.latency, 1e-6))) / 1e6
        return CostModel(latency, 2.0 ** round(math.log2(self.seconds_per_byte)))

    def chunk_bytes(self, largest: int) -> int:
        """Returns the payload of a chunk (bytes): as many as links carry in `_CHUNK_SECONDS`, but at most `largest`.

        A chunk costs every node some Python, so fast links want large ones; but the last one passes through all nodes
        alone, so slow links want small ones. Measured: docs/design/transport.md, "The data path".
        """
        wanted = self._carried(_CHUNK_SECONDS) // _CHUNK_STEP * _CHUNK_STEP
        return min(largest, max(wanted, 4 * _CHUNK_STEP))

    def link_credit(self, largest: int) -> int:
        """Returns the bytes that a connection may have sent and not acknowledged, at most `largest`.

        That is as much as a link carries in `_CREDIT_SECONDS`, for which the peer's event loop may be busy otherwise,
        and in a round trip, with a quarter more because messages are acknowledged as a whole. It is at least
        `_LEAST_CREDIT`: on a slow link that carries as much the other way, acknowledgements wait behind the data under
        way there.
        Measured: docs/design/transport.md, "The data path".
        """
        busy = max(self._carried(_CREDIT_SECONDS), _LEAST_CREDIT)
        return min(largest, busy + int(1.25 * 2 * self.latency / self.seconds_per_byte))

    def acknowledged_bytes(self) -> int:
        """Returns the bytes that a node receives before it acknowledges them: as many as links carry in a third of
        `_CREDIT_SECONDS`, so that acknowledgements come before the sender has to wait for them."""
        return max(self._carried(_CREDIT_SECONDS / 3), _CHUNK_STEP)

    def _carried(self, seconds: float) -> int:
        """Returns the bytes that a link carries in so many seconds."""
        return int(seconds / self.seconds_per_byte)

    def ring(self, nbytes: int, nodes: int) -> float:
        """Returns the seconds of a ring all-reduce: 2 (N - 1) steps that move 2 n (N - 1) / N bytes."""
        steps = 2 * (nodes - 1)
        return steps * self.latency + steps / nodes * nbytes * self.seconds_per_byte

    def doubling(self, nbytes: int, nodes: int) -> float:
        """Returns the seconds of recursive doubling: log2 N rounds of n bytes, and two more if N is no power of two."""
        power = nodes.bit_length() - 1
        rounds = power + (2 if nodes != 1 << power else 0)
        return rounds * (self.latency + nbytes * self.seconds_per_byte)

    def prefers_gathering(self, nbytes: int, nodes: int) -> bool:
        """Returns whether gathering, in which each node sends `nbytes` to all others, is no slower than summing through
        the owners of ranges: one step that moves n (N - 1) bytes, or two that move 2 n (N - 1) / N."""
        gathered = self.latency + (nodes - 1) * nbytes * self.seconds_per_byte
        return gathered <= 2 * self.latency + 2 * (nodes - 1) / nodes * nbytes * self.seconds_per_byte

    def halving(self, nbytes: int, nodes: int) -> float:
        """Returns the seconds of an all-reduce by halving: 2 ceil(log2 N) rounds that move the bytes of a ring."""
        rounds = 2 * (nodes - 1).bit_length()
        return rounds * self.latency + 2 * (nodes - 1) / nodes * nbytes * self.seconds_per_byte

    def route(self, nbytes: int, nodes: int, chunk_bytes: int) -> Literal["ring", "doubling", "halving"]:
        """Returns the cheapest all-reduce between N >= 2 nodes.

        Recursive doubling moves an array as one chunk, at most `chunk_bytes` long. Halving moves as many bytes as a
        ring does, in fewer messages, but not between neighbours alone, along the best links, and without pause. So it
        has to be sooner by a tenth.
        """
        ring, halving = self.ring(nbytes, nodes), self.halving(nbytes, nodes)
        if nbytes <= chunk_bytes and self.doubling(nbytes, nodes) <= min(ring, halving):
            return "doubling"
        return "halving" if 1.1 * halving <= ring else "ring"
