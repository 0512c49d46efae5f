"""What the daemon tells the process that writes a timeline."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from fusion_rt.trace_format import Kind

KINDS = frozenset(
    {
        Kind.READY,
        Kind.RUN_BEGIN,
        Kind.REDUCE_BEGIN,
        Kind.REDUCE_END,
        Kind.SENT,
        Kind.RECEIVED,
        Kind.ANSWERED,
        Kind.RUN_END,
        Kind.FAILED,
    }
)
"""The records that a timeline is made of."""


class Tensor(msgspec.Struct, tag="tensor", frozen=True, array_like=True):
    """A tensor outside a plan, before its first operation.

    Attributes:
        name: as in records.
        op: in Horovod's words, such as ALLREDUCE.
    """

    name: str
    op: str
    dtype: str
    shape: tuple[int, ...]


class Plan(msgspec.Struct, tag="plan", frozen=True, array_like=True):
    """A plan, before its first bucket.

    Attributes:
        id, process_set: its.
        at_homes: contributions come to homes one at a time, and each is answered by itself.
        buckets: dtype of each, and names and shapes of its tensors.
    """

    id: int
    process_set: int
    at_homes: bool
    op: str
    buckets: tuple[tuple[str, tuple[tuple[str, tuple[int, ...]], ...]], ...]


class Event(msgspec.Struct, tag="e", frozen=True, array_like=True):
    """A record: see `trace_format.Kind`. `ns`: of the monotonic clock."""

    ns: int
    kind: int
    name: str
    clock: int
    plan: int
    peer: int


class Dropped(msgspec.Struct, tag="dropped", frozen=True, array_like=True):
    """So many events, before this one, found no room: the file grows more slowly than things happen."""

    ns: int
    events: int


Told: TypeAlias = Tensor | Plan | Event | Dropped


class Order(msgspec.Struct, frozen=True):
    """What is to be written, and where: the first thing that the process is told.

    Attributes:
        path: of the file; absolute.
        ranks: whose view of it gets a file of its own (its number before the path's suffix); empty: one file, with
            what happens on this node.
        nodes: the ranks of each node.
        mark_cycles: whether the beginning of each step is marked.
        first_step, last_step: steps that are recorded, counted from the start of the timeline, from 0; the last may be
            -1: no end.
        max_bytes: size at which a file is kept as .1, and begun anew; 0: it may grow.
    """

    path: str
    ranks: tuple[int, ...] = ()
    nodes: tuple[tuple[int, ...], ...] = ()
    mark_cycles: bool = False
    first_step: int = 0
    last_step: int = -1
    max_bytes: int = 0


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(list[Told]).decode
