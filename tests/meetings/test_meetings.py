"""Every two things that a script can join are right together, or are refused by a sentence that names both."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import WorkerError
from tests.meetings import cells, ranks, table
from tests.meetings.cells import Cell
from tests.meetings.conftest import Jobs
from tests.meetings.judge import Outcome, judge, named

COVER = cells.cover()
DOCUMENT = Path(__file__).parents[2] / "docs" / "algorithms.md"


def meet(jobs: Jobs, cell: Cell) -> None:
    outcome = judge(cell, jobs.run(cell.world, ranks.run, cell))
    documented = table.read(DOCUMENT)
    assert (outcome is Outcome.REFUSED) == documented.refuses(cell), (
        f"docs/algorithms.md says otherwise of this cell, which was {outcome.name.lower()}; "
        "`python -m tests.meetings` writes its tables anew"
    )


@pytest.mark.parametrize("cell", COVER, ids=str)
def test_each_pair_of_things_meets_in_a_cell_that_is_right_or_documented_as_refused(jobs: Jobs, cell: Cell) -> None:
    meet(jobs, cell)


@pytest.mark.parametrize("cell", cells.properties(), ids=str)
def test_an_algorithm_keeps_its_promises_in_worlds_of_up_to_eight_ranks(jobs: Jobs, cell: Cell) -> None:
    meet(jobs, cell)


@pytest.mark.long
@pytest.mark.parametrize("script", cells.FEATURES)
def test_two_hundred_other_meetings_of_a_script_are_right_or_documented_as_refused(jobs: Jobs, script: str) -> None:
    wrong = []
    for cell in cells.sample(script, 200):
        try:
            meet(jobs, cell)
        except (AssertionError, WorkerError) as error:
            wrong.append(f"{cell}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("cell", list(cells.refused()), ids=str)
def test_what_an_algorithm_cannot_have_is_refused_on_all_ranks_by_a_sentence_that_names_both(
    jobs: Jobs, cell: Cell
) -> None:
    reports = jobs.run(cell.world, ranks.run, cell)
    for report in reports:
        assert named(cell, report.refused), report.refused


def test_the_cover_has_every_pair_of_things_that_go_together() -> None:
    assert cells.pairs() == set().union(*(cell.pairs for cell in COVER))
