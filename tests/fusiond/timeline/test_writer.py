"""The lines of Horovod's timeline, against what its own writer would have written."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fusion_rt.tracing.format import NOBODY, Kind
from fusion_rt.tracing.reader import Event, Gap
from fusiond.timeline.writer import Order, TimelineWriter
from tests.for_each import for_each

TWO_NODES = Order("t.json", nodes=((0, 1), (2, 3)))


def event(us: int, kind: Kind, name: str = "bucket 0", plan: int = 7, clock: int = 0, peer: int = NOBODY) -> Event:
    return Event(1_000_000 + us * 1000, kind, name, clock, plan, 0, peer)


def tensor(name: str, text: str) -> Event:
    return Event(0, Kind.TENSOR, name, 1, 0, 0, NOBODY, text)


def plan(operation: str, *buckets: dict[str, str], number: int = 7) -> list[Event]:
    """The records of a plan; buckets: dtype and shape by name."""
    records = [Event(0, Kind.PLAN, "group", 1, number, len(buckets), NOBODY, operation)]
    for index, members in enumerate(buckets):
        records.append(Event(0, Kind.BUCKET, f"bucket {index}", 0, number, index, NOBODY))
        records += [Event(0, Kind.MEMBER, name, 1, number, index, NOBODY, text) for name, text in members.items()]
    return records


PLAN = plan("ALLREDUCE", {"a": "float32 [2, 3]", "b": "float32 []"}, {"c": "float16 [5]"})


def told(*events: Event | Gap, order: Order = TWO_NODES, rank: int | None = None) -> list[dict[str, Any]]:
    """The lines, without those about rows."""
    writer = TimelineWriter(order, (1_000_000, 1_700_000_000_000_000), rank)
    lines = [json.loads(line) for each in events for line in writer.take(each)]
    return [line for line in lines if line["ph"] != "M"]


def test_a_tensor_has_the_lines_that_horovod_gives_it() -> None:
    writer = TimelineWriter(TWO_NODES, (1_000_000, 1_700_000_000_000_000))
    lines = writer.header()
    for each in (
        tensor("allreduce.x", "ALLREDUCE float32 [3, 4]"),
        event(5, Kind.READY, "allreduce.x", 0, peer=0),
        event(7, Kind.READY, "allreduce.x", 0, peer=1),
        event(9, Kind.RECEIVED, "allreduce.x", 0, peer=1),
        event(10, Kind.RUN_BEGIN, "allreduce.x", 0),
        event(20, Kind.REDUCE_BEGIN, "allreduce.x", 0),
        event(30, Kind.REDUCE_END, "allreduce.x", 0),
        event(31, Kind.SENT, "allreduce.x", 0, peer=1),
        event(40, Kind.RECEIVED, "allreduce.x", 0, peer=1),
        event(41, Kind.REDUCE_BEGIN, "allreduce.x", 0),
        event(42, Kind.SENT, "allreduce.x", 0, peer=1),
        event(50, Kind.RUN_END, "allreduce.x", 0),
        event(51, Kind.ANSWERED, "allreduce.x", 0, peer=0),
    ):
        lines += writer.take(each)
    assert [json.loads(line) for line in lines] == [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": 1700000000000000}},
        {"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}},
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "allreduce.x"}},
        {"name": "process_sort_index", "ph": "M", "pid": 1, "args": {"sort_index": 1}},
        {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 5, "pid": 1},
        {"ph": "X", "name": "0", "ts": 5, "pid": 1, "dur": 0},
        {"ph": "X", "name": "1", "ts": 7, "pid": 1, "dur": 0},
        {"ph": "X", "name": "2", "ts": 9, "pid": 1, "dur": 0},
        {"ph": "X", "name": "3", "ts": 9, "pid": 1, "dur": 0},
        {"ph": "E", "ts": 10, "pid": 1},
        {"ph": "B", "name": "ALLREDUCE", "ts": 10, "pid": 1},
        {"ph": "B", "name": "QUEUE", "ts": 10, "pid": 1},
        {"ph": "E", "ts": 20, "pid": 1},
        {"ph": "B", "name": "SHM_ALLREDUCE", "ts": 20, "pid": 1},
        {"ph": "E", "ts": 31, "pid": 1},
        {"ph": "B", "name": "WAIT_FOR_DATA", "ts": 31, "pid": 1},
        {"ph": "E", "ts": 40, "pid": 1},
        {"ph": "B", "name": "ZMQ_ALLREDUCE", "ts": 40, "pid": 1},
        {"ph": "E", "ts": 50, "pid": 1},
        {"ph": "E", "ts": 50, "pid": 1, "args": {"dtype": "float32", "shape": "[3, 4]"}},
    ]


def test_the_tensors_of_a_bucket_have_a_row_each_with_the_same_lines() -> None:
    lines = told(
        *PLAN,
        event(1, Kind.READY, peer=0),
        event(2, Kind.RUN_BEGIN),
        event(3, Kind.RUN_END),
        event(4, Kind.READY, "bucket 1", peer=0),
    )
    rows = defaultdict(list)
    for line in lines:
        rows[line.pop("pid")].append(line)
    ends = [rows[pid].pop() for pid in (1, 2)]
    assert rows[1] == rows[2]
    assert [end["args"] for end in ends] == [
        {"dtype": "float32", "shape": "[2, 3]"},
        {"dtype": "float32", "shape": "[]"},
    ]
    assert [line.get("name") for line in rows[3]] == ["NEGOTIATE_ALLREDUCE", "0"]


def test_a_name_in_use_twice_has_two_rows() -> None:
    writer = TimelineWriter(TWO_NODES, (0, 0))
    named = [
        json.loads(line)["args"].get("name")
        for clock in (0, 1, 2)
        for each in (
            event(clock, Kind.READY, "allreduce.noname", 0, clock, 0),
            event(9, Kind.RUN_END, "allreduce.noname", 0, clock - 1),
        )
        for line in writer.take(each)
        if b"process_name" in line
    ]
    assert named == ["allreduce.noname", "allreduce.noname (2)"]


def test_other_nodes_that_are_early_begin_the_negotiation() -> None:
    lines = told(*PLAN, event(1, Kind.RECEIVED, peer=1), event(4, Kind.READY, peer=0))
    first = [(line["ph"], line["name"], line["ts"]) for line in lines if line["pid"] == 1]
    assert first == [("B", "NEGOTIATE_ALLREDUCE", 1), ("X", "2", 1), ("X", "3", 1), ("X", "0", 4)]


def test_what_failed_ends_with_an_error() -> None:
    negotiating = told(*PLAN, event(1, Kind.READY, "bucket 1", peer=0), event(2, Kind.FAILED, "bucket 1"))
    running = told(
        *PLAN,
        event(1, Kind.READY, "bucket 1", peer=0),
        event(2, Kind.RUN_BEGIN, "bucket 1"),
        event(3, Kind.FAILED, "bucket 1"),
    )
    assert [(line["ph"], line.get("name")) for line in negotiating[-3:]] == [("E", None), ("B", "ERROR"), ("E", None)]
    for lines in (negotiating, running):
        assert sum(line["ph"] == "B" for line in lines) == sum(line["ph"] == "E" for line in lines)
        assert any(line.get("name") == "ERROR" for line in lines)


def test_contributions_to_homes_are_answered_one_by_one() -> None:
    lines = told(
        *plan("PUSH_PULL", {"a": "float32 [2]"}),
        event(1, Kind.READY, peer=0),
        event(2, Kind.READY, peer=1),
        event(3, Kind.ANSWERED, peer=1),
        event(5, Kind.ANSWERED, peer=0),
    )
    assert [(line["ph"], line.get("name"), line["ts"], line["pid"]) for line in lines] == [
        ("B", "PUSH_PULL", 1, 1),
        ("B", "PUSH_PULL", 2, 2),
        ("E", None, 3, 2),
        ("E", None, 5, 1),
    ]


def test_the_view_of_a_rank_begins_with_its_own_part() -> None:
    events = [*PLAN]
    for bucket, first in (("bucket 0", 0), ("bucket 1", 1)):
        events += [event(first, Kind.READY, bucket, peer=first), event(5, Kind.READY, bucket, peer=1 - first)]
    lines = told(*events, rank=1)
    assert [(line["ph"], line["name"], line["pid"]) for line in lines] == [
        ("B", "NEGOTIATE_ALLREDUCE", 1), ("B", "NEGOTIATE_ALLREDUCE", 2), ("X", "1", 1), ("X", "1", 2),
        ("B", "NEGOTIATE_ALLREDUCE", 3), ("X", "1", 3), ("X", "0", 3),
    ]  # fmt: skip


def step(clock: int, name: str = "bucket 0", plan: int = 7) -> list[Event]:
    """A pass through the plan, or a tensor."""
    kinds = (Kind.READY, Kind.RUN_BEGIN, Kind.RUN_END)
    return [event(10 * clock + i, kind, name, plan, clock, 0) for i, kind in enumerate(kinds)]


def test_cycles_are_passes_through_the_plan() -> None:
    order = Order("t.json", nodes=((0,),), mark_cycles=True)
    before = [each for clock in range(3) for each in step(clock, "allreduce.loss", 0)]
    lines = told(*before, *PLAN, *step(0), *step(0, "bucket 1"), *step(3, "allreduce.loss", 0), *step(1), order=order)
    marks = [line for line in lines if line["ph"] == "i"]
    assert marks[0] == {"ph": "i", "name": "CYCLE_START", "ts": 0, "s": "g"}
    assert [mark["ts"] for mark in marks] == [0, 10, 20, 0, 10]


def test_only_the_steps_that_are_asked_for_are_told() -> None:
    order = Order("t.json", nodes=((0,),), mark_cycles=True, first_step=2, last_step=3)
    lines = told(*PLAN, *[event for clock in range(6) for event in step(clock, "bucket 1")], order=order)
    assert {line["ts"] // 10 for line in lines} == {2, 3}
    assert sum(line["ph"] == "B" for line in lines) == sum(line["ph"] == "E" for line in lines) == 6


def test_rows_of_a_process_set_say_so() -> None:
    writer = TimelineWriter(TWO_NODES, (1_000_000, 5))
    events = [*plan("PUSH_PULL (process set 3)", {"a": "float32 [2]"}), event(1, Kind.READY, peer=1)]
    lines = [json.loads(line) for each in events for line in writer.take(each)]
    assert lines[0]["args"]["name"] == "allreduce.a (process set 3) [rank 1]"


def test_a_plan_that_is_recorded_again_changes_nothing() -> None:
    once = told(*PLAN, *step(0), *step(1), *step(1, "bucket 1"))
    assert told(*PLAN, *step(0), *PLAN, *step(1), *PLAN, *step(1, "bucket 1")) == once


def test_what_is_under_way_when_events_are_lost_ends_there() -> None:
    lines = told(*PLAN, event(1, Kind.READY, peer=0), Gap(1_009_000, 12), event(10, Kind.RUN_END), *step(1))
    assert lines[4] == {"ph": "i", "name": "12 events were dropped", "ts": 9, "s": "g"}
    assert [(line["ph"], line["ts"], line["pid"]) for line in lines[5:7]] == [("E", 9, 1), ("E", 9, 2)]
    assert lines[7]["ts"] == 10  # the end of what is not known any more is left out; the next step is told


def test_a_new_file_repeats_what_is_under_way() -> None:
    writer = TimelineWriter(TWO_NODES, (1_000_000, 5))
    for each in (*PLAN, event(1, Kind.READY, "bucket 1", peer=0), event(2, Kind.RUN_BEGIN, "bucket 1")):
        writer.take(each)
    again = [json.loads(line) for line in writer.header()][2:]
    assert [line.get("args", {}).get("name") or line["name"] for line in again] == [
        "allreduce.c", "process_sort_index", "ALLREDUCE", "QUEUE",
    ]  # fmt: skip
    ends = [json.loads(line) for line in writer.take(event(9, Kind.RUN_END, "bucket 1"))]
    assert len(ends) == 2


@given(st.text(max_size=40), st.text(st.characters(exclude_characters=" "), max_size=10))
def test_any_name_is_escaped(name: str, dtype: str) -> None:
    writer = TimelineWriter(TWO_NODES, (1_000_000, 5))
    lines = [
        line
        for each in (
            tensor(name, f"ALLREDUCE {dtype} [1]"),
            event(1, Kind.READY, name, 0, peer=0),
            event(2, Kind.RUN_BEGIN, name, 0),
            event(3, Kind.RUN_END, name, 0),
        )
        for line in writer.take(each)
    ]
    array = json.loads(b"[" + b",".join(lines) + b"]")
    assert array[0]["args"]["name"] == name
    assert array[-1]["args"]["dtype"] == dtype


@for_each("seed", range(20))
def test_whatever_happens_rows_nest(seed: int) -> None:
    import random

    rng = random.Random(seed)
    writer = TimelineWriter(Order("t", nodes=((0, 1), (2,)), mark_cycles=True), (1_000_000, 5))
    stories = []
    for clock in range(30):
        story = [
            Kind.READY, Kind.READY, Kind.RECEIVED, Kind.RUN_BEGIN, Kind.REDUCE_BEGIN, Kind.REDUCE_END, Kind.SENT,
            Kind.RECEIVED, rng.choice((Kind.RUN_END, Kind.FAILED)),
        ]  # fmt: skip
        stories.append((clock, [kind for kind in story if rng.random() < 0.9]))
    for each in PLAN:
        writer.take(each)
    depth: dict[int, int] = defaultdict(int)
    now = 0
    while stories:
        clock, story = rng.choice(stories[:4])
        if not story:
            stories.remove((clock, story))
            continue
        now += 1
        for line in writer.take(event(now, story.pop(0), f"bucket {clock % 2}", 7, clock // 2, rng.randrange(2))):
            told_line = json.loads(line)
            if told_line["ph"] in "BE":
                depth[told_line["pid"]] += 1 if told_line["ph"] == "B" else -1
                assert depth[told_line["pid"]] >= 0
