"""Sends and receives are recorded from their beginning to their end, which Horovod's timeline waits for."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from fusion_rt import wire
from fusion_rt.tracing.format import NOBODY, Kind
from fusion_rt.tracing.reader import Event
from fusiond.engine.engine import Engine
from fusiond.timeline.writer import Order, TimelineWriter
from tests.fusiond.point_to_point.mail import Mail


class Kept:
    """An instrument that keeps what is recorded."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def record(
        self, kind: int, name: str, value: int = 0, clock: int = 0, plan: int = 0, extra: int = 0, peer: int = NOBODY
    ) -> None:
        self.events.append(Event(1000 * len(self.events), Kind(kind), name, clock, plan, extra, peer))

    def number(self, text: str) -> int:
        return 0

    def close(self) -> None:
        pass


def recorded(sizes: list[int]) -> list[Event]:
    """What the node of the rank that receives has recorded of messages of all kinds, of which some fail."""
    mail, kept = Mail(sizes), Kept()
    last = mail.job.nodes[-1]
    last.engine = Engine(last.context(kept))
    mail.send(0, 1, b"abcd", inline=True, answered=False)
    mail.receive(1, wire.ANYBODY, 4, inline=True)
    mail.receive(1, 0, 4, seconds=2.0)
    mail.receive(1, 0, 200_000, 5)
    mail.send(0, 1, bytes(200_000), 5)
    mail.send(0, 1, bytes(9000), 6, seconds=2.0)
    mail.send(1, 0, bytes(9000), 6)
    mail.job.settle()
    mail.job.pass_time(3)
    mail.job.leave(0)
    mail.job.settle()
    return kept.events


@pytest.mark.parametrize("sizes", [[2], [1, 1]], ids=["a node", "two nodes"])
def test_whatever_begins_ends(sizes: list[int]) -> None:
    events = recorded(sizes)
    begun = Counter((event.name, event.clock) for event in events if event.kind == Kind.READY)
    ended = Counter((event.name, event.clock) for event in events if event.kind in (Kind.RUN_END, Kind.FAILED))
    assert begun
    assert begun == ended
    names = {event.name for event in events}
    assert names <= {"message 0 to 1", "message 1 to 0", "message to 1", ""}


@pytest.mark.parametrize("sizes", [[2], [1, 1]], ids=["a node", "two nodes"])
def test_the_timeline_of_messages_has_an_end_for_each_beginning(sizes: list[int]) -> None:
    writer = TimelineWriter(Order("t.json", nodes=((0,), (1,))), (0, 0))
    lines = [json.loads(line) for event in recorded(sizes) for line in writer.take(event)]
    phases = Counter((line["ph"], line["pid"]) for line in lines if line["ph"] in "BE")
    assert phases
    assert all(phases["B", pid] == phases["E", pid] for _, pid in phases)
    assert "NEGOTIATE_MESSAGE" in {line.get("name") for line in lines}
