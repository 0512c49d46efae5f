"""These tests run on two ranks, and again on four."""

from __future__ import annotations

import pytest

from tests.harness import Job


@pytest.fixture(scope="session", params=[2, 4], ids=["2 ranks", "4 ranks"])
def job(request: pytest.FixtureRequest, job: Job) -> Job:
    chosen: Job = request.getfixturevalue("job_of_four") if request.param == 4 else job
    return chosen
