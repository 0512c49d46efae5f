"""What the tools say of jobs with known faults is right: some of the cases that `python -m tests.diagnosis` tries."""

from __future__ import annotations

import pytest

from tests.diagnosis.cases import FAULTS, clean, faulty, uneven
from tests.diagnosis.scoring import judge, score

FIRST = 5_000


@pytest.mark.timeout(600)  # all in one thread: 13 s of a processor, of which a busy machine may give it a twentieth
def test_faults_are_named_with_what_they_cost_and_nothing_else_is() -> None:
    """2 of each kind of fault."""
    verdicts = [judge(faulty(seed)) for seed in range(FIRST, FIRST + 2 * len(FAULTS))]
    wrong = [
        (each.case.seed, each.case.fault, each.told)
        for each in verdicts
        if each.wrong or (each.asked and not each.found)
    ]
    found = score(verdicts)
    assert found.precision >= 0.95, wrong
    assert found.recall >= 0.95, wrong
    assert found.error <= 0.1


def test_nobody_is_named_in_jobs_without_a_fault() -> None:
    verdicts = [judge(clean(seed)) for seed in range(FIRST, FIRST + 12)]
    assert [each.told for each in verdicts if each.wrong] == []


def test_daemons_are_not_named_for_having_more_ranks() -> None:
    verdicts = [judge(uneven(seed)) for seed in range(FIRST, FIRST + 12)]
    assert [each.told for each in verdicts if each.wrong] == []
