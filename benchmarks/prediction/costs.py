"""Measures what messages, kernels and codecs cost on this machine, in a few seconds on one thread and on loopback."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable

import numpy as np
import zmq

from fusion_rt import codecs, wire
from fusion_rt.codecs.base import Layout
from fusion_rt.codecs.dense import Dense
from fusion_rt.kernels import cpu
from fusion_trace.simulate.ghosts import F32
from fusion_trace.simulate.measuring import TURNS, best, codec_costs
from fusion_trace.simulate.model import Costs
from fusiond.collectives.base import Reducer
from fusiond.collectives.ring import Ring
from fusiond.transport.flow_control import FlowPort

_KEY = wire.OpKey(0, 1, "0", 0)
_CHUNK = 256 * 1024


def costs(texts: Iterable[str] = (), local: float | None = None) -> Costs:
    """Measures messages and kernels, and these codecs.

    Args:
        local: what a worker's message to its daemon and the answer take, both ways (s), where that was measured.
    """
    protocol_send, protocol_receive = _protocol()
    zmq_send, zmq_receive, byte = _sockets()
    first, second, out = (np.ones(_CHUNK // 4, np.float32) for _ in range(3))
    reduce = best(lambda: cpu.reduce("sum", F32, [first, second], [out]), 50) / _CHUNK
    copy = best(lambda: np.copyto(out, first), 50) / _CHUNK
    default = Costs()
    return Costs(
        send=protocol_send + zmq_send,
        receive=protocol_receive + zmq_receive,
        control=zmq_send + zmq_receive / 2,
        io_send=byte,
        io_receive=byte,
        local=default.local if local is None else local,
        job=default.job,
        reduce=reduce,
        copy=copy,
        apply=2 * reduce,
        threads=1,
        codecs={text: codec_costs(text) for text in texts if not codecs.parse(text).lossless},
    )


def _protocol() -> tuple[float, float]:
    """Measures Python's part of a chunk at its sender and its receiver (s): the exchange, flow control, and the
    message."""
    sent: list[bytes] = []

    class Outlet:
        def send_chunk(self, node: int, chunk: wire.Chunk, payload: bytes | memoryview, urgency: int) -> bool:
            sent.append(wire.encode(chunk))
            return False

        def to_node(self, node: int, message: wire.PeerMessage) -> None:
            pass

    def port(node: int) -> FlowPort:
        return FlowPort(_KEY, 0, range(2), node, 4096, 1 << 30, Outlet())

    chunks = 512
    times: list[tuple[float, float]] = []
    for _ in range(TURNS):
        arrays = [np.ones(2 * chunks * 1024, np.float32) for _ in range(2)]
        ports = [port(node) for node in range(2)]
        dense = Dense().open(Layout(F32, len(arrays[0])))
        rings = [Ring(p, Reducer("sum", F32), dense, [a], [a]) for p, a in zip(ports, arrays, strict=True)]
        sent.clear()
        began = time.perf_counter()
        rings[0].start()
        middle = time.perf_counter()
        frames = list(sent)
        payload = memoryview(bytes(4096))
        rings[1].start()
        before = time.perf_counter()
        for frame in frames:
            chunk = wire.decode_peer_message(frame)
            assert isinstance(chunk, wire.Chunk)
            rings[1].receive(0, chunk, payload)
            ports[1].consumed(0, len(payload))
        ended = time.perf_counter()
        times.append(((middle - began) / len(frames), (ended - before) / len(frames)))
    sending, both = min(t for t, _ in times), min(t for _, t in times)
    return sending, max(both - sending, sending)  # what was received was also passed on


def _sockets() -> tuple[float, float, float]:
    """Measures ZeroMQ's part (s): a message at its sender and its receiver, and a byte."""
    contexts = [zmq.Context(), zmq.Context()]  # each with its own I/O thread, as two daemons have
    inbox, outbox = contexts[0].socket(zmq.ROUTER), contexts[1].socket(zmq.DEALER)
    try:
        number = inbox.bind_to_random_port("tcp://127.0.0.1")
        outbox.connect(f"tcp://127.0.0.1:{number}")
        head = bytes(60)

        def through(nbytes: int, count: int) -> tuple[float, float, float]:
            payload = bytes(nbytes)
            began = time.perf_counter()
            for _ in range(count):
                outbox.send(head, zmq.SNDMORE)
                outbox.send(payload, copy=False)
            sent = time.perf_counter()
            for _ in range(count):
                inbox.recv()
                inbox.recv()
                inbox.recv(copy=False)
            ended = time.perf_counter()
            return (sent - began) / count, (ended - sent) / count, (ended - began) / count

        through(64, 100)
        small = [through(64, 500) for _ in range(TURNS)]
        large = [through(2 << 20, 40) for _ in range(TURNS)]
        byte = statistics.median(total for *_, total in large) / (2 << 20)
        return min(s for s, _, _ in small), min(r for _, r, _ in small), byte
    finally:
        for socket in (inbox, outbox):
            socket.close(0)
        for context in contexts:
            context.term()
