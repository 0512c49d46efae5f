"""Credit for chunks of operations that a peer has not reached: they wait there, for as long as its ranks are late.

Credit by operation (`flow_control`) bounds one operation, and a rank that is minutes ahead may have thousands under
way. So chunks of all operations that a peer may not have reached share a credit, by peer, and chunks beyond it are held
back here: in the arena, where it lies anyway. An operation that the peer has reached needs none of it. So operations
that were begun in another order there cannot use up the credit that this one needs to finish.

Anything that comes of an operation shows that the peer has reached it: a chunk, or credit. Often nothing comes, as of
a small broadcast. So once half of the credit is used, chunks ask (`wire.Chunk.asks`), and an operation with all
chunks held back asks by a message (`wire.Held`). The peer answers when it reaches the operation (`wire.CaughtUp`).
Below half, nothing is asked, since an answer for each small operation would cost as much as the operation does.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Protocol

from fusion_rt import wire
from fusion_rt.wire import OpKey
from fusiond.core.effects import Outlet

EARLY_BYTES = 96 * 1024 * 1024
"""Bytes of chunks that may wait at a daemon for its workers, from all peers together: it is to stay within 128 MiB."""

LEAST_CHARGE = 32 * 1024
"""Bytes that an operation is charged with at least: its record takes memory, too. So at most 3,072 operations can wait
at a daemon for its workers."""


class Waiting(Protocol):
    """A port with chunks that are held back."""

    key: OpKey

    def resume(self, node: int) -> bool:
        """Sends as many chunks as there is credit for; returns whether no more chunks for this node need early
        credit."""


@dataclass
class _Peer:
    """The bytes that may wait at one peer.

    Attributes:
        charges: bytes, by operation, whether it is still under way here or not.
        used: their sum.
        waiting: ports with chunks held back, the oldest first.
    """

    charges: dict[OpKey, int] = field(default_factory=dict)
    used: int = 0
    waiting: OrderedDict[OpKey, Waiting] = field(default_factory=OrderedDict)


class EarlyCredit:
    """The bytes that may be under way to each peer, of operations that it may not have reached.

    Args:
        nbytes: for each peer.
        outside: tells a peer of an operation of which chunks are held back.
    """

    def __init__(self, nbytes: int, outside: Outlet) -> None:
        self._nbytes = nbytes
        self._outside = outside
        self._peers: defaultdict[int, _Peer] = defaultdict(_Peer)

    def take(self, node: int, nbytes: int, port: Waiting) -> bool:
        """Takes credit for a chunk of a port. If there is not enough, the port waits, and `resume` is called when it
        may go on. A peer at which nothing can be waiting gets a chunk of any size."""
        peer = self._peers[node]
        before = peer.charges.get(port.key, 0)
        charge = max(before + nbytes, LEAST_CHARGE) - before
        is_next = not peer.waiting or next(iter(peer.waiting)) == port.key
        if is_next and (not peer.used or peer.used + charge <= self._nbytes):
            peer.charges[port.key] = before + charge
            peer.used += charge
            return True
        if port.key not in peer.waiting:
            peer.waiting[port.key] = port
            self._outside.to_node(node, wire.Held(port.key))
        return False

    def is_short(self, node: int) -> bool:
        """Returns whether chunks to a peer are to ask."""
        return 2 * self._peers[node].used > self._nbytes

    def reached(self, node: int, key: OpKey) -> None:
        """A peer has reached an operation: gives its credit back. Its port needs none any more."""
        peer = self._peers[node]
        peer.waiting.pop(key, None)
        peer.used -= peer.charges.pop(key, 0)
        self._go_on(node, peer)

    def over(self, node: int, key: OpKey) -> None:
        """An operation is over here. Its chunks that may wait at the peer still count."""
        peer = self._peers[node]
        if peer.waiting.pop(key, None) is not None:
            self._go_on(node, peer)

    def _go_on(self, node: int, peer: _Peer) -> None:
        while peer.waiting and (not peer.used or peer.used < self._nbytes):
            key, port = next(iter(peer.waiting.items()))
            if not port.resume(node):
                return
            peer.waiting.pop(key, None)

    def statistics(self) -> dict[str, int]:
        """Returns the bytes that may wait at peers, `early_bytes`, and how many operations are held back, `held`."""
        peers = self._peers.values()
        return {"early_bytes": sum(p.used for p in peers), "held": sum(len(p.waiting) for p in peers)}
