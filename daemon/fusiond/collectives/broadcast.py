"""Broadcast along a tree of nodes: a chain for large arrays, whose chunks form a pipeline, else a binomial tree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fusion_rt import wire
from fusion_rt.kernels import ordinary
from fusiond.collectives.agreed import Agreed, Maker
from fusiond.collectives.base import Array, Exchange, ExchangeError, Job, Once, Port, chunk_starts, raw, split_jobs


def tree(position: int, root: int, nodes: int, chain: bool) -> tuple[int, list[int]]:
    """Returns the parent (the root's is itself) and the children of a position, in a chain or a binomial tree."""
    distance = (position - root) % nodes
    if chain:
        parent = max(distance - 1, 0)
        children = [distance + 1] if distance + 1 < nodes else []
    else:
        lowest = distance & -distance if distance else 1 << nodes.bit_length()
        parent = distance - lowest if distance else 0
        bits = [1 << bit for bit in reversed(range(nodes.bit_length())) if 1 << bit < lowest]
        children = [distance + bit for bit in bits if distance + bit < nodes]
    return (parent + root) % nodes, [(child + root) % nodes for child in children]


class Broadcast(Exchange):
    """Copies one member's bytes to all others.

    Args:
        port: N >= 1 nodes.
        root: position of the node of the root rank.
        source: the root rank's bytes, on its node; None on the others.
        outputs: bytes (uint8) wherever they go on this node; on the root's, the source may be among them.
    """

    def __init__(self, port: Port, root: int, source: Array | None, outputs: Sequence[Array]) -> None:
        super().__init__(port)
        self.lanes = True
        self._source = source
        self._outputs = outputs
        self._nbytes = len(outputs[0])
        self._parent, self._children = tree(port.position, root, port.nodes, self._nbytes > port.chunk_bytes)
        self._once = Once(0 if source is not None else len(chunk_starts(self._nbytes, port.chunk_bytes)))
        self.local_nbytes = self._nbytes * len(outputs) if source is not None else 0

    def jobs(self, threads: int) -> Sequence[Job]:
        source = self._source
        if source is None:
            return ()
        others = [output for output in self._outputs if not ordinary.are_same(output, source)]
        if not others:
            return ()

        def copy(low: int, high: int) -> None:
            ordinary.copy(source[low:high], [output[low:high] for output in others])

        return split_jobs(copy, self._nbytes, threads, 1)

    def start(self) -> None:
        if self._source is not None and self._children:
            for start in chunk_starts(self._nbytes, self.port.chunk_bytes):
                self._pass_on(start, raw(self._source[start : start + self.port.chunk_bytes]))
        if self._once.complete:
            self.port.finish()

    def receive(self, position: int, chunk: wire.Chunk, payload: memoryview) -> None:
        length = min(self.port.chunk_bytes, self._nbytes - chunk.start)
        if (
            self._source is not None
            or position != self._parent
            or chunk.start % self.port.chunk_bytes
            or chunk.start >= self._nbytes
            or len(payload) != length
            or chunk.part
            or chunk.hop
        ):
            raise ExchangeError(f"a chunk of {chunk.key.name!r} from node {position} does not belong to this broadcast")
        self._once.came(chunk)

        def take() -> None:
            values = np.frombuffer(payload, np.uint8)
            for output in self._outputs:
                output[chunk.start : chunk.start + length] = values

        def go_on() -> None:
            self._once.taken += 1
            self._pass_on(chunk.start, payload)
            if self._once.complete:
                self.port.finish()

        self.port.beside(take, go_on)

    def _pass_on(self, start: int, payload: memoryview) -> None:
        for child in self._children:
            self.port.send(child, 0, start, 0, payload)


def _broadcast(agreed: Agreed) -> Broadcast:
    root = agreed.ranks.index(agreed.signature.root)
    here = agreed.here
    source = agreed.local[here.index(root)].values.view(np.uint8) if root in here else None
    return Broadcast(agreed.port, agreed.homes[root], source, [output.view(np.uint8) for output in agreed.outputs])


EXCHANGES: dict[wire.Kind, Maker] = {"broadcast": _broadcast}
