"""`fusion-trace summary`: what is said of ranks that differ, and of the first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fusion_rt.tracing.format import Kind, Role
from fusion_trace.analyse import stragglers, summary
from fusion_trace.analyse.summary import Rank, alone
from fusion_trace.read.choice import StepRange
from fusion_trace.read.job import JobTrace, load
from fusion_trace.read.operations import operations
from fusion_trace.report import figures
from fusion_trace.report.summary_page import _rates, unhurt
from tests.tools.synthetic import MS, Job, S, simulate


def rank(number: int, milliseconds: float) -> Rank:
    ns = round(milliseconds * MS)
    return Rank(number, 0, "a", 1, 20, 1, 20, ns, ns, ns, 1e9 / ns)


def test_a_rank_that_nobody_waits_for_is_named_and_how_many_steps_each_takes() -> None:
    ranks = [rank(0, 2.5), rank(1, 2.4), rank(2, 2.5), rank(3, 55.0)]
    assert [each.rank for each in alone(ranks)] == [3]
    told = "rank 3 takes 55.0 ms a step, where most take 2.50 ms; but no rank waited for that"
    assert unhurt(ranks) == (told, False)
    assert _rates(ranks) == "18.18 (rank 3) to 416.67 (rank 1) steps"


def test_ranks_that_wait_for_each_other_take_the_same_steps() -> None:
    ranks = [rank(0, 2.5), rank(1, 2.45)]
    assert unhurt(ranks) is None
    assert _rates(ranks) == "408.16 steps"


def test_a_first_step_that_took_long_is_told(tmp_path: Path) -> None:
    for name, late in (("usual", 0), ("compiled", 16 * S)):
        truth = simulate(Job())
        gradient = min(row[0] for tape in truth.tapes.values() for row in tape.rows if row[6] == Kind.GRADIENT)
        for (role, _), tape in truth.tapes.items():
            tape.rows = [
                (time if role == Role.WORKER and time <= gradient else time + late, *rest) for time, *rest in tape.rows
            ]
        (tmp_path / name).mkdir()
        truth.write(tmp_path / name)
    told = {
        name: [odd for odd in summary.find(load([str(tmp_path / name)], "")).odd if "first step" in odd]
        for name in ("usual", "compiled")
    }
    assert not told["usual"]
    assert told["compiled"][0].startswith("the first step took 16.0 s on rank ")


@pytest.mark.parametrize("find", [summary.find, figures.analyse])
def test_stragglers_are_looked_for_before_columns_of_operations_take_memory(
    find: Callable[[JobTrace], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(Job(nodes=1, ranks_per_node=2)).write(tmp_path)
    trace = load([str(tmp_path)], "")
    before = operations.cache_info().misses
    made: list[int] = []

    def looked(trace: JobTrace, chosen: StepRange) -> tuple[stragglers.Finding, ...]:
        made.append(operations.cache_info().misses - before)
        return ()

    monkeypatch.setattr(stragglers, "find", looked)
    find(trace)
    assert made == [0]
