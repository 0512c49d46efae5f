"""The nodes of one operation in one thread: their exchanges, and a network that delivers in any order.

Chunks may overtake each other, also between the same two nodes: a daemon may have several connections to a peer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fusion_rt import wire
from fusion_rt.core.dtypes import DTYPES
from fusiond.collectives.base import Exchange

Array = npt.NDArray[Any]
KEY = wire.OpKey(0, 0, "x", 0)
CHUNK_BYTES = 256  # so that a few hundred elements are several chunks
Message = tuple[int, int, wire.Chunk, memoryview | bytes]  # source, target, chunk, payload


class GroupPort:
    """The port of one node."""

    def __init__(self, group: Group, position: int) -> None:
        self._group = group
        self.position = position
        self.nodes = group.nodes
        self.chunk_bytes = group.chunk_bytes
        self.finished = 0

    def send(self, position: int, part: int, start: int, hop: int, payload: memoryview | bytes) -> None:
        assert 0 <= position < self.nodes
        assert position != self.position
        assert len(payload) <= self.chunk_bytes
        assert self.finished == 0 or self._group.may_send_last
        self._group.under_way.append((self.position, position, wire.Chunk(KEY, 0, part, start, hop), payload))
        self._group.sent_bytes[self.position] += len(payload)
        self._group.sent_to[self.position].append(position)

    def work(self, nbytes: int, job: Callable[[], None], then: Callable[[], None]) -> None:
        job()
        then()

    def beside(self, job: Callable[[], None], then: Callable[[], None]) -> None:
        job()
        then()

    def finish(self) -> None:
        self.finished += 1


class Group:
    """Runs one exchange a node.

    Args:
        nodes: how many.
        make: makes the exchange of a node, from its port.
        seed: decides the order of everything.
    """

    def __init__(
        self, nodes: int, make: Callable[[GroupPort], Exchange], seed: int = 0, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self.nodes = nodes
        self.chunk_bytes = chunk_bytes
        self.under_way: list[Message] = []
        self.delivered: list[Message] = []
        self.sent_bytes = [0] * nodes
        self.sent_to: list[list[int]] = [[] for _ in range(nodes)]  # of each node, one after the other
        self.may_send_last = False
        self._early: dict[int, list[Message]] = {}
        self._choose = random.Random(seed)
        self.ports = [GroupPort(self, position) for position in range(nodes)]
        self.exchanges = [make(port) for port in self.ports]
        self._to_start = list(range(nodes))

    def step(self) -> bool:
        """Starts a node or delivers a chunk; False when there is nothing left to do."""
        choices = len(self._to_start) + len(self.under_way)
        if not choices:
            return False
        pick = self._choose.randrange(choices)
        if pick < len(self._to_start):
            self._start(self._to_start.pop(pick))
            return True
        message = self.under_way.pop(pick - len(self._to_start))
        if message[1] in self._to_start:
            self._early.setdefault(message[1], []).append(message)
        else:
            self._deliver(message)
        return True

    def run(self) -> Group:
        """Goes on to the end, at which every node has finished once."""
        while self.step():
            pass
        assert [port.finished for port in self.ports] == [1] * self.nodes
        return self

    def to_started_nodes(self) -> list[Message]:
        """Returns the chunks under way to nodes that could take them now."""
        return [message for message in self.under_way if message[1] not in self._to_start]

    def _start(self, position: int) -> None:
        for job in self.exchanges[position].jobs(self._choose.choice([1, 2])):
            job()
        self.exchanges[position].start()
        for message in self._early.pop(position, []):
            self._deliver(message)

    def _deliver(self, message: Message) -> None:
        source, target, chunk, payload = message
        # As ZeroMQ hands it over: read when it leaves, read-only, and at any address.
        copy = memoryview(b"\0" + bytes(payload))[1:]
        self.delivered.append((source, target, chunk, copy))
        self.exchanges[target].receive(source, chunk, copy)


# --- elements ---------------------------------------------------------------------------------------------------------


def stored(values: Array, dtype: str) -> Array:
    """Values as a bucket of that dtype stores them; exact for small integers and powers of two."""
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    if dtype == "bfloat16":
        return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if dtype == "bool":
        return (values != 0).astype(np.uint8)
    return values.astype(DTYPES[dtype].storage)


def loaded(array: Array, dtype: str) -> Array:
    """The opposite of `stored`, in float64 or int64."""
    if dtype == "float16":
        return array.view(np.float16).astype(np.float64)
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64 if dtype.startswith("float") else np.int64)


def small_values(count: int, op: str, dtype: str, seed: int) -> Array:
    """Values whose combination over a dozen ranks is exact in every dtype."""
    choose = np.random.default_rng(seed)
    if op == "product":
        return choose.choice([1, 2, 1, 1] if dtype in ("uint8", "bool") else [1, -1, 2, -1], count).astype(np.float64)
    low = 0 if dtype in ("uint8", "bool") else -9
    return choose.integers(low, 10, count).astype(np.float64)


def combined(op: str, dtype: str, parts: Sequence[Array], divisor: int = 1) -> Array:
    """Returns all ranks' values as numpy combines them, in the dtype as it is stored."""
    values = np.stack([loaded(part, dtype) for part in parts])
    if dtype == "bool":
        any_or_all = values.any(0) if op in ("sum", "max") else values.all(0)
        return any_or_all.astype(np.uint8)
    how = {"sum": np.sum, "min": np.min, "max": np.max, "product": np.prod}[op]
    result = how(values, axis=0)
    if divisor != 1:
        result = result / divisor if values.dtype == np.float64 else np.trunc(result / divisor).astype(np.int64)
    return stored(result, dtype) if dtype != "uint8" else result.astype(np.int64).astype(np.uint8)
