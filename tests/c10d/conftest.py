"""The jobs that these tests share, whose workers call `init_process_group` themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness import Job

START = {"HOROVOD_START_TIMEOUT": "120"}  # seconds; on a busy machine, importing torch several times takes long


@pytest.fixture(scope="session", params=[(4,), (2, 2)], ids=["one node", "two nodes"])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    """Four ranks of one node, and then two nodes of two ranks."""
    with Job(request.param, START, init=False) as running:
        yield running
