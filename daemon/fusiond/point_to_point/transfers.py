"""Messages that move in chunks, under the credit that exchanges have: those that a node sends, and those that it
receives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fusion_rt import wire
from fusion_rt.tracing.format import Kind
from fusion_rt.wire import OpKey
from fusiond.core.assembly import BytesInPieces
from fusiond.core.contribution import Array
from fusiond.operations.context import Context
from fusiond.operations.starter import Starter
from fusiond.point_to_point.calls import CallOwner, Message, SendCall
from fusiond.transport.flow_control import FlowPort

_SOURCE, _TARGET = range(2)  # positions


@dataclass(slots=True)
class _Incoming:
    """A message that comes, under the credit of a port."""

    message: Message
    assembly: BytesInPieces
    memory: Array
    port: FlowPort


class Transfers:
    """The transfers of one node.

    Args:
        context: the engine's.
        starter: knows how large chunks are.
        owner: is told of moved chunks.

    Attributes:
        dropped: chunks that came for messages that had been given up, or never were.
    """

    def __init__(self, context: Context, starter: Starter, owner: CallOwner) -> None:
        self.dropped = 0
        self._context = context
        self._starter = starter
        self._owner = owner
        self._outgoing: dict[OpKey, tuple[SendCall, FlowPort]] = {}
        self._incoming: dict[OpKey, _Incoming] = {}

    def send(self, call: SendCall, memory: Array) -> None:
        """Sends a message (uint8) that was accepted, as far as there is credit."""
        port = self._port(call.key, (self._context.node, call.node))
        self._outgoing[call.key] = call, port
        view = memory.data
        for start in range(0, call.nbytes, port.chunk_bytes):
            port.send(_TARGET, 0, start, 0, view[start : start + port.chunk_bytes])
        port.finish()
        self._end_if_over(call, port)

    def _end_if_over(self, call: SendCall, port: FlowPort) -> None:
        if port.is_over and self._outgoing.pop(call.key, None) is not None:
            self._owner.sent(call)

    def receive(self, message: Message, memory: Array) -> None:
        """Takes a message's chunks into this memory (uint8), as long as the message, from now on."""
        if not message.nbytes:
            self._owner.whole(message)
            return
        port = self._port(message.key, (message.node, self._context.node))
        self._incoming[message.key] = _Incoming(message, BytesInPieces(message.key.in_words, len(memory)), memory, port)

    def forget(self, key: OpKey) -> None:
        """A message is given up: its later chunks are dropped."""
        self._outgoing.pop(key, None)
        self._incoming.pop(key, None)

    def clear(self) -> None:
        """All messages are given up."""
        self._outgoing.clear()
        self._incoming.clear()

    @property
    def is_empty(self) -> bool:
        """True if nothing moves."""
        return not (self._outgoing or self._incoming)

    def chunk(self, node: int, chunk: wire.MessageChunk, payload: memoryview) -> None:
        """A chunk has come. Raises `WireError` if it is no part of its message, or came before."""
        found = self._incoming.get(chunk.key)
        if found is None or found.message.node != node:
            self.dropped += 1
            return
        is_whole = found.assembly.add(chunk.start, len(payload))
        found.memory[chunk.start : chunk.start + len(payload)] = np.frombuffer(payload, np.uint8)
        name, clock = chunk.key.name, chunk.key.clock
        self._context.trace.record(Kind.TAKEN, name, len(payload), clock, 0, 0, node)
        found.port.consumed(_SOURCE, len(payload))
        if is_whole:
            del self._incoming[chunk.key]
            found.port.finish()
            self._owner.whole(found.message)

    def credit(self, node: int, credit: wire.MessageCredit) -> None:
        """A node has taken chunks."""
        found = self._outgoing.get(credit.key)
        if found is not None and found[0].node == node:
            call, port = found
            port.credit(_TARGET, credit.chunks)
            self._end_if_over(call, port)

    def _port(self, key: OpKey, nodes: tuple[int, int]) -> FlowPort:
        context = self._context
        chunk_bytes, window_bytes = self._starter.limits(wire.Tuning())
        return FlowPort(
            key, 0, nodes, context.node, chunk_bytes, window_bytes, context.outside, context.trace, wire.MessageChunk
        )
