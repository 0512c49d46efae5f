"""Starts elastic jobs with the real daemon, and ends what a failing test left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runner.elastic.jobs import Job


@pytest.fixture
def start(fusionrun, until) -> Iterator[Callable[..., Job]]:
    fusionrun.real_daemon = True
    jobs: list[Job] = []

    def start_job(*arguments: str | Path, **variables: Any) -> Job:
        jobs.append(Job(fusionrun, until, arguments, **variables))
        return jobs[-1]

    yield start_job
    for job in jobs:
        if job.process.poll() is None:
            job.process.terminate()
            job.wait()
