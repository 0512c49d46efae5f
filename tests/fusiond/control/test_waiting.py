"""What nodes tell, put together: who is missing, which link is late, and in which words."""

from __future__ import annotations

import json
from typing import Any

from fusion_rt import wire
from fusion_rt.core.topology import Topology
from fusion_rt.wire import OpKey
from fusiond.control.waiting import (
    MOST_SHOWN,
    Stall,
    Survey,
    describe_ranks,
    document,
    fitting,
    merge,
    stragglers,
)

TOPOLOGY = Topology(("a", "b", "c"), ((0, 1), (2,), (3,)))
X = OpKey(0, 0, "x", 7)
EVERYONE = (0, 1, 2, 3)


def waiting(submitted: tuple[int, ...], seconds: float = 9.0, *traffic: wire.Traffic, **other: Any) -> wire.Waiting:
    return wire.Waiting("operation", X, "tensor 'x'", seconds, submitted, EVERYONE, traffic, **other)


def one(told: dict[int, list[wire.Waiting]]) -> Stall:
    (stall,) = merge(told.items(), TOPOLOGY)
    return stall


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_a_rank_that_no_node_has_seen_submit_is_missing() -> None:
    stall = one({0: [waiting((0,), 3.0)], 1: [waiting((2,), 9.0)], 2: []})
    assert (stall.submitted, stall.missing) == ((0, 2), (1, 3))
    assert (stall.what, stall.seconds) == ("tensor 'x'", 9.0)


def test_who_has_completed_it_already_is_not_missing() -> None:
    over = wire.Waiting("operation", X, "tensor 'x'", 0.0, (2,), note="it is over on host b (node 1)")
    stall = one({0: [waiting((0, 1))], 2: [waiting((3,))], 1: [over]})
    assert (stall.submitted, stall.missing) == (EVERYONE, ())
    assert stall.notes == ("it is over on host b (node 1)",)


def test_ranks_that_are_not_awaited_are_not_missing() -> None:
    some = wire.Waiting("operation", X, "tensor 'x'", 1.0, (0,), (0, 2))
    assert one({0: [some]}).missing == (2,)


def test_what_has_waited_longest_comes_first_and_what_nobody_waits_for_not_at_all() -> None:
    other = OpKey(0, 0, "y", 0)
    told = {
        0: [waiting((0,), 3.0), wire.Waiting("operation", other, "tensor 'y'", 5.0, (0,), EVERYONE)],
        1: [wire.Waiting("home", OpKey(0, 1, "0", 0), "a home", 99.0, (), (2,))],
    }
    assert [stall.key for stall in merge(told.items(), TOPOLOGY)] == [other, X]


def test_a_home_tells_whom_it_waits_for_wherever_it_is() -> None:
    key = OpKey(0, 1, "3", 0)
    told = {
        0: [wire.Waiting("home", key, "bucket 3 at its home", 8.0, (0,))],
        2: [wire.Waiting("home", key, "bucket 3 at its home", 0.0, (), (1, 2))],
    }
    stall = one(told)
    assert (stall.kind, stall.submitted, stall.missing) == ("home", (0,), (1, 2))


def test_a_plan_waits_for_those_who_have_not_proposed_it() -> None:
    key = OpKey(0, 0, "opt", 0)
    told = {
        0: [wire.Waiting("plan", key, "the plan of 'opt'", 0.0, (1,), EVERYONE)],
        1: [wire.Waiting("plan", key, "the plan of 'opt'", 6.0, (), (0, 2, 3))],
    }
    stall = one(told)
    assert (stall.submitted, stall.missing, stall.seconds) == ((1,), (0, 2, 3), 6.0)


# --- links ------------------------------------------------------------------------------------------------------------


def traffic(node: int, sent: int = 0, received: int = 0, unsent: int = 0, silent: float = 5.0) -> wire.Traffic:
    return wire.Traffic(node, sent, received, unsent, silent)


def test_a_link_that_holds_chunks_back_is_the_straggler() -> None:
    told = {
        0: [waiting((0, 1), 9.0, traffic(1, sent=7, received=4), traffic(2))],
        1: [waiting((2,), 9.0, traffic(0, sent=4, received=3, silent=8.0), traffic(2))],
        2: [waiting((3,), 9.0, traffic(0), traffic(1))],
    }
    (straggler,) = one(told).stragglers
    assert (straggler.sender, straggler.receiver, straggler.chunks, straggler.seconds) == (0, 1, 4, 8.0)
    assert straggler.describe(TOPOLOGY) == (
        "4 chunks from host a (node 0) to host b (node 1) are under way, and nothing has come there for 8 s: that link "
        "is the straggler"
    )


def test_a_peer_that_takes_nothing_is_the_straggler() -> None:
    (straggler,) = stragglers({0: [traffic(1, sent=2, unsent=5)], 1: [traffic(0, received=2)]})
    assert straggler.unread
    assert straggler.describe(TOPOLOGY).startswith("host b (node 1) takes nothing from host a (node 0), which has 5")


def test_what_is_on_its_way_for_a_moment_is_no_straggler() -> None:
    assert stragglers({0: [traffic(1, sent=2)], 1: [traffic(0, received=1, silent=0.2)]}) == ()
    assert stragglers({0: [traffic(1, sent=2)]}) == ()  # the other one has not said


def test_links_are_not_blamed_where_ranks_are_missing() -> None:
    told = {
        0: [waiting((0, 1), 9.0, traffic(1, sent=7))],
        1: [waiting((2,), 9.0, traffic(0))],
    }
    stall = one(told)
    assert stall.missing == (3,)
    assert stall.stragglers == ()


def test_a_node_that_has_not_begun_is_named() -> None:
    told = {
        0: [waiting((0, 1), 9.0, traffic(1), traffic(2))],
        1: [waiting((2,), 9.0, traffic(0), traffic(2))],
        2: [waiting((3,))],
    }
    assert one(told).idle == (2,)


# --- words and JSON ---------------------------------------------------------------------------------------------------


def located(rank: int, frames: int = 1) -> wire.Whereabouts:
    frame = wire.Frame("/train.py", 12, "slow", "time.sleep(300)")
    return wire.Whereabouts(rank, 100 + rank, "sleeping (S)", "", wire.Stack((frame,) * frames))


def test_where_ranks_are_goes_after_a_sentence() -> None:
    assert describe_ranks([], [], TOPOLOGY) == ""
    assert describe_ranks([located(3), located(0)], [], TOPOLOGY) == (
        "\nrank 0 (host a, pid 100, sleeping (S)), most recent call first:\n    /train.py:12 in slow: time.sleep(300)"
        "\nrank 3 (host c, pid 103, sleeping (S)), most recent call first:\n    /train.py:12 in slow: time.sleep(300)"
    )
    assert describe_ranks([], [1], TOPOLOGY) == "\nhost b (node 1) did not report where its ranks are"


def test_of_many_ranks_some_are_shown() -> None:
    many = Topology(("a",), (tuple(range(50)),))
    text = describe_ranks([located(rank) for rank in range(50)], [], many)
    assert text.count("most recent call first") == MOST_SHOWN
    assert text.endswith(f"\nand {50 - MOST_SHOWN} more ranks")


def survey() -> Survey:
    stalls = merge([(0, [waiting((0,), 3.25, traffic(1, sent=2))]), (1, [waiting((2,), 1.0, traffic(0))])], TOPOLOGY)
    return Survey(stalls, {1: located(1)}, {0: 10, 1: 11}, (2,), 0)


def test_a_survey_is_json() -> None:
    told = json.loads(json.dumps(document(survey(), TOPOLOGY)))
    (stall,) = told["waiting"]
    assert (stall["kind"], stall["key"]["name"], stall["seconds"]) == ("operation", "x", 3.25)
    assert (stall["submitted"], stall["missing"]) == ([0, 2], [1, 3])
    (rank,) = told["ranks"]
    assert (rank["rank"], rank["host"], rank["pid"], rank["state"]) == (1, "a", 101, "sleeping (S)")
    assert rank["stack"]["frames"][0] == {
        "file": "/train.py", "line": 12, "function": "slow", "source": "time.sleep(300)", "inner": 0,
    }  # fmt: skip
    assert [(d["node"], d["pid"], d["answered"]) for d in told["daemons"]] == [
        (0, 10, True),
        (1, 11, True),
        (2, None, False),
    ]
    assert told["ranks_of_nodes"] == [[0, 1], [2], [3]]


def test_json_that_is_too_long_loses_stacks_first_and_then_operations() -> None:
    told = document(survey(), TOPOLOGY)
    told["ranks"] = [dict(told["ranks"][0]) for _ in range(40)]
    told["waiting"] = [told["waiting"][0]] * 40
    whole = len(json.dumps(told))
    shorter = json.loads(fitting(told, whole - 1000))
    assert len(shorter["ranks"]) == len(shorter["waiting"]) == 40
    assert shorter["ranks"][0]["stack"]["frames"]
    assert shorter["ranks"][-1]["why_not"] == "there are too many stacks to show"
    short = json.loads(fitting(shorter, 5000))
    assert len(json.dumps(short)) <= 5000
    assert len(short["waiting"]) + short["more"] == 40
    assert json.loads(fitting(short, 10))["waiting"] == []  # there is nothing more to leave out
