"""The numbers that a simulation is made with: costs of links, messages and kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fusion_rt import codecs

FRAMED = 1514 / 1448
"""Bytes on an Ethernet link for each byte of payload, at an MTU of 1500 and with TCP timestamps."""

HEAD_NBYTES = 90
"""Size of a message before its payload, with ZeroMQ's own framing."""


@dataclass(frozen=True)
class Link:
    """A node's connection to all others, by one network card, the same in each direction.

    Attributes:
        bandwidth: bytes of payload a second.
        latency: seconds from a byte's departure to its arrival, one way.
        discipline: what leaves first of what waits: `fifo`, or `priority` (buckets by their number, smaller first).
        burst: bytes that pass at once after a pause in which as many could have passed: the size of a token bucket.
        idle_latency: the latency (s) of what found the link idle; the rest of `latency` may have been a queue.
    """

    bandwidth: float
    latency: float = 50e-6
    discipline: str = "fifo"
    burst: float = 0.0
    idle_latency: float = 50e-6

    def __post_init__(self) -> None:
        if not self.bandwidth > 0 or not self.latency >= 0 or self.discipline not in ("fifo", "priority"):
            raise ValueError(f"there is no link of {self.bandwidth} bytes/s, {self.latency} s and {self.discipline!r}")
        if not self.burst >= 0:
            raise ValueError(f"there is no link with bursts of {self.burst} bytes")

    @property
    def byte(self) -> float:
        """Seconds for a byte."""
        return 1 / self.bandwidth


def ethernet(bits_per_second: float, latency: float = 50e-6) -> Link:
    """Returns a link with a rate in bits of whole frames, as `tc` and sellers count."""
    return Link(bits_per_second / 8 / FRAMED, latency)


class CodecCosts(msgspec.Struct, frozen=True):
    """Costs of a codec: seconds for each byte of the dense bucket, or of what is on the wire; and how large that is.

    Attributes:
        ratio: bytes on the wire for each byte of the dense bucket.
        contribute: compressing a gradient, with its residual; for each dense byte.
        pack, unpack, add, conclude, write: for each byte on the wire.
    """

    ratio: float = 1.0
    contribute: float = 0.0
    pack: float = 0.0
    unpack: float = 0.0
    add: float = 0.0
    conclude: float = 0.0
    write: float = 0.0


class Costs(msgspec.Struct, frozen=True):
    """Costs of daemons and workers for everything that is not the link (s).

    Attributes:
        send, receive: in the event loop, for a chunk or piece; without what kernels do with it.
        control: in the event loop, for a control message (credit), on each side.
        io_send, io_receive: in ZeroMQ's thread, for each byte.
        local: from a worker's message to the daemon that has read it; and back.
        job: to hand work to the pool of threads, and back.
        reduce: combining two parts; for each byte of the result.
        copy: putting a received part in its place; for each byte.
        apply: the optimizer of a shard, or an average at a replica; for each byte.
        threads: of the pool.
        codecs: by their text.
    """

    send: float = 30e-6
    receive: float = 40e-6
    control: float = 12e-6
    io_send: float = 0.35e-9
    io_receive: float = 0.35e-9
    local: float = 40e-6
    job: float = 40e-6
    reduce: float = 0.2e-9
    copy: float = 0.1e-9
    apply: float = 0.5e-9
    threads: int = 1
    codecs: Mapping[str, CodecCosts] = {}

    def codec(self, text: str) -> CodecCosts:
        """Returns the costs of a codec.

        Raises:
            KeyError: it was not measured.
        """
        return CodecCosts() if codecs.parse(text).lossless else self.codecs[text]


@dataclass(frozen=True)
class Bucket:
    """Tensors that are exchanged together.

    Attributes:
        nbytes: of the dense bucket; a multiple of 4.
        shapes: of its tensors, if they are known: codecs look at them, and send small ones whole.
    """

    nbytes: int
    shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def elements(self) -> int:
        """Number of float32 elements."""
        return self.nbytes // 4


@dataclass(frozen=True)
class Cluster:
    """Nodes, and how they are joined.

    Attributes:
        links: of each node.
        workers: on each node.
        costs: of each daemon.
        chunk_bytes, window_bytes: the settings.
        machines: of each node, the number of the machine that it is on; processors: of each machine, which its workers
            and daemons share. Empty: each thread has a processor.
    """

    links: tuple[Link, ...]
    workers: int = 1
    costs: Costs = field(default_factory=Costs)
    chunk_bytes: int = 2 << 20
    window_bytes: int = 16 << 20
    machines: tuple[int, ...] = ()
    processors: tuple[int, ...] = ()
    sparse_route: str = "auto"

    @property
    def nodes(self) -> int:
        return len(self.links)

    @property
    def ranks(self) -> int:
        return self.nodes * self.workers

    def node_of(self, rank: int) -> int:
        return rank // self.workers


def equal(nodes: int, link: Link, **more: Any) -> Cluster:
    """Returns nodes with equal links."""
    return Cluster((link,) * nodes, **more)
