"""The jobs on which cells run, one for each world."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.harness import Job, WorkerError
from tests.meetings.cells import WORLDS

LIMIT_S = 60.0  # for one cell
SETTINGS = {"HOROVOD_START_TIMEOUT": "120", "HOROVOD_FUSION_THRESHOLD": "1KiB"}


class Jobs:
    """Jobs that are started when they are needed, and discarded after an error, so that a cell that hangs fails
    alone."""

    def __init__(self) -> None:
        self._running: dict[str, Job] = {}

    def run(self, world: str, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs a function on all ranks; returns its results by rank. Raises `WorkerError`."""
        if world not in self._running:
            self._running[world] = Job(WORLDS[world].nodes, SETTINGS)
        try:
            return self._running[world].run(function, *args, timeout=LIMIT_S)
        except WorkerError:
            job = self._running.pop(world)
            for process in (*job.workers, *job.daemons):
                process.kill()
            job.close()
            raise

    def close(self) -> None:
        for job in self._running.values():
            job.close()


@pytest.fixture(scope="session")
def jobs() -> Iterator[Jobs]:
    running = Jobs()
    yield running
    running.close()
