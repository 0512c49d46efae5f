"""The comparison of what was found with fixed settings."""

from __future__ import annotations

from benchmarks import autotune
from benchmarks.common.results import Measure, Record


def record(**seconds: float) -> Record:
    names = [autotune.DEFAULT, *autotune.CLASSES, *autotune.SWEEP, *autotune.LOSSY, *autotune.LATE]
    samples = {name: [1.0, 1.0, 1.0] for name in names}
    samples |= {name.replace("_", " "): [value] * 3 for name, value in seconds.items()}
    return Record({"network": "1gbit", "hosts": 4}, [Measure("a step", "s", samples, autotune.DEFAULT)])


def holds(found: Record) -> dict[str, bool]:
    return {goal: ok for goal, _, ok in autotune.reached(found)}


def test_all_goals_hold_where_nothing_is_slower() -> None:
    goals = holds(record())
    assert len(goals) == 5
    assert all(goals.values())


def test_each_is_compared_with_the_best_of_its_own_mathematics() -> None:
    goals = holds(record(fp16=0.5))
    assert [goal for goal, ok in goals.items() if not ok] == [
        "1gbit: --auto=lossy at most 2 % behind the best fixed setting"
    ]
    assert [ok for goal, ok in holds(record(ring=0.5)).items() if "behind" in goal] == [False] * 4


def test_two_percent_behind_is_still_good() -> None:
    samples = record(ring=0.981).measures[0].samples
    assert min(map(min, samples.values())) == 0.981
    assert all(holds(record(ring=0.981)).values())


def test_luck_in_one_turn_makes_nobody_the_best_in_it() -> None:
    samples = {name: [1.0] * 5 for name in (autotune.TUNED, "steady", *"abcde")}
    for turn, lucky in enumerate("abcde"):
        samples[lucky] = [2.0] * 5
        samples[lucky][turn] = 0.5
    assert autotune.behind(samples, autotune.TUNED, ["steady", *"abcde"]) == (1.0, 1.0, 1.0)
    samples["better"] = [0.8, 0.9, 0.8, 0.9, 0.8]
    assert autotune.behind(samples, autotune.TUNED, ["steady", "better"]).value == 1.25


def test_the_table_names_the_best() -> None:
    text = autotune.table([record(ring=0.25, fp16=0.125)]).markdown()
    assert "250 (ring)" in text
    assert "125 (fp16)" in text


def test_every_fixed_setting_is_one_that_a_plan_can_have() -> None:
    from fusion_rt import wire

    for setting in {**autotune.SWEEP, **autotune.LOSSY, **autotune.LATE}.values():
        proposal = wire.Proposal("g", 0, 0, wire.Reduction(), (), wire.Tuning(**setting))
        assert wire.decode_worker_message(wire.encode(wire.Propose(1, proposal)))
