"""What a daemon's engine tells of what it does: to the ring of records, and while there is one to a timeline."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache

from fusion_rt import algorithms, trace, wire
from fusion_rt.trace_format import NOBODY
from fusiond.timeline.events import KINDS, Dropped, Event, Plan, Tensor, Told, encode

MAX_WAITING = 65536  # events that wait to be sent; some 10 MB
PACKET_EVENTS = 512  # of a packet
_EMPTY = {"join": "JOIN"}  # operations without data: all others are a BARRIER


class Tee:
    """An `Instrument` that records in a ring and, while a timeline is written, collects its events too.

    Args:
        ring: the other instrument.
        clock: nanoseconds.

    Attributes:
        collects: a timeline is written.
    """

    record: trace.Record

    def __init__(self, ring: trace.Instrument, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._ring = ring
        self._clock = clock
        self._waiting: deque[Told | tuple[int, int, str, int, int, int]] = deque()  # kernel threads append, too
        self._dropped = 0
        self._plans: dict[tuple[int, str], Plan] = {}  # those in force, by process set and group
        self._tensors: dict[str, Tensor] = {}  # told already
        self.collects = False
        self.record = ring.record

    def close(self) -> None:
        """Nothing more is recorded."""
        self._ring.close()
        self.end()

    # --- the timeline -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A timeline begins."""
        self._waiting.clear()
        self._waiting.extend(self._plans.values())
        self._tensors.clear()
        self._dropped = 0
        self.collects = True
        self.record = self._both()

    def end(self) -> None:
        """It ends. What waits can still be had from `packets`."""
        self.collects = False
        self.record = self._ring.record

    def submitted(self, submit: wire.Submit) -> None:
        """A worker has submitted an operation, of which the engine will hear next."""
        if self.collects:
            signature = submit.signature
            tensor = _tensor(submit.name, signature)
            if self._tensors.get(submit.name) != tensor and len(self._waiting) < MAX_WAITING:
                self._tensors[submit.name] = tensor
                self._waiting.append(tensor)

    def planned(self, plan: wire.Plan) -> None:
        """A worker is about to be told of a plan, which is in force."""
        told = _plan(plan)
        key = plan.process_set, plan.group
        if self._plans.get(key) != told:
            self._plans[key] = told
            if self.collects:
                self._waiting.append(told)

    def packets(self) -> Iterator[bytes]:
        """What has happened since the last call."""
        left = len(self._waiting)
        while left > 0:
            some = [self._waiting.popleft() for _ in range(min(left, PACKET_EVENTS))]
            left -= len(some)
            yield encode([Event(*told) if isinstance(told, tuple) else told for told in some])
        if self._dropped:
            yield encode([Dropped(self._clock(), self._dropped)])
            self._dropped = 0

    def _both(self) -> trace.Record:
        ring, now, waiting = self._ring, self._clock, self._waiting

        def record(
            kind: int,
            name: str = "",
            value: int = 0,
            clock: int = 0,
            plan: int = 0,
            extra: int = 0,
            peer: int = NOBODY,
        ) -> None:
            ring.record(kind, name, value, clock, plan, extra, peer)
            if kind in KINDS:
                if len(waiting) < MAX_WAITING:
                    waiting.append((now(), kind, name, clock, plan, peer))
                else:
                    self._dropped += 1

        return record


@lru_cache(maxsize=4096)
def _tensor(name: str, signature: wire.Signature) -> Tensor:
    kind = signature.kind
    if not signature.dtype:
        return Tensor(name, _EMPTY.get(kind, "BARRIER"), "", ())
    op = "ADASUM" if signature.op == "adasum" and kind == "allreduce" else kind.upper()
    return Tensor(name, op, signature.dtype, signature.shape)


def _plan(plan: wire.Plan) -> Plan:
    at_homes = algorithms.parse(plan.reduction.algorithm).at_homes
    buckets = tuple((b.dtype, tuple((t.name, t.shape) for t in b.tensors)) for b in plan.buckets)
    return Plan(
        plan.id, plan.process_set, at_homes, "ADASUM" if plan.reduction.op == "adasum" else "ALLREDUCE", buckets
    )
