"""Measures what messages, kernels and codecs cost on this machine, in a few seconds on one thread and on loopback.

The best of several turns counts: what else the machine does can only make them longer.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import zmq

from fusion_rt import codecs, wire
from fusion_rt.codecs.base import BucketCodec, Layout
from fusion_rt.codecs.dense import Dense
from fusion_rt.kernels import cpu
from fusion_trace.simulate.ghost_codecs import real_layout
from fusion_trace.simulate.ghosts import F32
from fusion_trace.simulate.model import Bucket, CodecCosts, Costs
from fusiond.collectives.base import Array, Reducer
from fusiond.collectives.ring import Ring
from fusiond.transport.flow_control import FlowPort

_TURNS = 5
_KEY = wire.OpKey(0, 1, "0", 0)
_CHUNK = 256 * 1024


def best(work: Callable[[], object], repeats: int = 1, turns: int = _TURNS) -> float:
    """Returns the seconds that `work` takes, in the best of several turns of so many repetitions."""
    work()
    times = []
    for _ in range(turns):
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        times.append((time.perf_counter() - began) / repeats)
    return min(times)


def machine() -> dict[str, Any]:
    """Describes the machine that was measured on."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), model)
    except OSError:
        pass
    return {"cpu": model, "cores": os.cpu_count(), "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(), "zmq": zmq.zmq_version()}  # fmt: skip


def costs(texts: Iterable[str] = (), local: float | None = None, elements: int = 1 << 20) -> Costs:
    """Measures messages and kernels, and these codecs.

    Args:
        local: what a worker's message to its daemon and the answer take, both ways (s), where that was measured.
        elements: of the bucket that codecs are measured with.
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
        codecs={text: codec_costs(text, elements) for text in texts if not codecs.parse(text).lossless},
    )


# --- messages ---------------------------------------------------------------------------------------------------------


def _protocol() -> tuple[float, float]:
    """Measures Python's part of a chunk at its sender and its receiver (s): the exchange, flow control, and the
    message."""
    sent: list[bytes] = []

    def send_chunk(node: int, chunk: wire.Chunk, payload: bytes | memoryview) -> bool:
        sent.append(wire.encode(chunk))
        return False

    def port(node: int) -> FlowPort:
        return FlowPort(_KEY, 0, range(2), node, 4096, 1 << 30, send_chunk, lambda *_: None, lambda: None)

    chunks = 512
    times: list[tuple[float, float]] = []
    for _ in range(_TURNS):
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
        small = [through(64, 500) for _ in range(_TURNS)]
        large = [through(2 << 20, 40) for _ in range(_TURNS)]
        byte = statistics.median(total for *_, total in large) / (2 << 20)
        return min(s for s, _, _ in small), min(r for _, r, _ in small), byte
    finally:
        for socket in (inbox, outbox):
            socket.close(0)
        for context in contexts:
            context.term()


# --- codecs -----------------------------------------------------------------------------------------------------------


def codec_costs(text: str, elements: int = 1 << 20) -> CodecCosts:
    """Measures one codec, on values from a normal distribution.

    Raises:
        CodecError: there is no such codec.
    """
    side = int(elements**0.5)
    bucket = Bucket(4 * side * side, ((side, side),))
    codec = codecs.parse(text).open(real_layout(bucket))
    values: Array = np.random.default_rng(1).standard_normal(bucket.elements).astype(np.float32)
    return _MEASURED[codec.exchange](codec, values)


def _chunks(codec: BucketCodec, values: Array) -> CodecCosts:
    payload = codec.encode(0, values)
    nbytes = len(payload)
    out = np.empty_like(values)
    pack = best(lambda: codec.encode(0, values)) / nbytes
    unpack = best(lambda: codec.decode(0, payload, out)) / nbytes
    lossless = codec.lossless
    return CodecCosts(nbytes / values.nbytes, pack=0.0 if lossless else pack, unpack=0.0 if lossless else unpack)


def _summing(codec: Any, values: Array) -> CodecCosts:
    n, dense = len(values), values.nbytes
    codec.node, codec.nodes = 0, 2
    contribute = min(_once(lambda: codec.contribute(values)) for _ in range(_TURNS))
    portion = codec.contribute(values)
    payload = codec.pack(portion, 0, n)
    nbytes = len(payload)
    pack = best(lambda: codec.pack(portion, 0, n))
    unpack = best(lambda: codec.unpack(payload, 0, n))
    parts = [codec.unpack(payload, 0, n) for _ in range(_TURNS + 1)]
    add = min(_once(lambda part=part: codec.add(part, portion)) for part in parts)  # type: ignore[misc]
    totals = [codec.add(codec.unpack(payload, 0, n), portion) for _ in range(3)]
    conclude = min(_once(lambda t=t: codec.conclude(t, 2)) for t in totals)  # type: ignore[misc]
    out = np.zeros_like(values)
    write = best(lambda: codec.write(portion, [out], 1.0, 2))
    summed = 2 * nbytes if codec.adapts else nbytes  # sums of selections are longer than each
    return CodecCosts(
        nbytes / dense, contribute / dense, pack / nbytes, unpack / nbytes, add / summed, conclude / summed,
        write / nbytes,
    )  # fmt: skip


def _factors(codec: Any, values: Array) -> CodecCosts:
    dense = values.nbytes
    rows = []
    for _ in range(_TURNS):
        out = np.empty_like(values)
        began = time.perf_counter()
        first = codec.start(values)
        one = time.perf_counter()
        second = codec.second(first)
        two = time.perf_counter()
        codec.finish(second, [out])
        rows.append((one - began, two - one, time.perf_counter() - two))
    start, middle, finish = (min(column) / dense for column in zip(*rows, strict=True))
    ratio = 4 * (codec.first_elements + codec.second_elements) / dense
    return CodecCosts(ratio, contribute=start, add=middle, write=finish)


_MEASURED: Mapping[str, Callable[[Any, Array], CodecCosts]] = {
    "chunks": _chunks,
    "owners": _summing,
    "factors": _factors,
}
"""By how nodes add up what a codec encodes (`BucketCodec.exchange`)."""


def _once(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
