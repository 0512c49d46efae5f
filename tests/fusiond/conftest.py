"""Fixtures of the daemon's tests."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusiond.transport import flow_control
from tests.fusiond.processes import Daemons


@pytest.fixture
def small_loans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Borrows payloads from 1 KiB on, so that a simulated job borrows memory with little data."""
    monkeypatch.setattr(flow_control, "BORROW_FROM", 1024)


@pytest.fixture(scope="module")
def short_directory() -> Iterator[Path]:
    """Makes a `runtime_dir` for a whole module; it has to be passed to daemons, since it is not exported."""
    path = Path(tempfile.mkdtemp(prefix="frt", dir="/tmp"))
    yield path
    shutil.rmtree(path)
    shutil.rmtree(f"{path}-traces", ignore_errors=True)  # nobody has recorded, perhaps


@pytest.fixture
def daemons(runtime_dir: Path) -> Iterator[Callable[..., Daemons]]:
    """Makes the (real) daemons of a job, which are ended with the test."""
    made: list[Daemons] = []

    def make(*local_sizes: int, attached: bool = True, **environment: str) -> Daemons:
        made.append(Daemons(runtime_dir, local_sizes, attached, **environment))
        return made[-1]

    yield make
    for each in made:
        each.close()
