"""The jobs that these tests share: ranks on one node, which import torch once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness import Job

START = {"HOROVOD_START_TIMEOUT": "120"}  # seconds; on a busy machine, importing torch several times takes long


@pytest.fixture(scope="session")
def job() -> Iterator[Job]:
    """Two ranks. Small buckets, so that the small models of the tests have several."""
    with Job((2,), {**START, "HOROVOD_FUSION_THRESHOLD": "4KiB"}) as running:
        yield running


@pytest.fixture(scope="session")
def job_of_four() -> Iterator[Job]:
    with Job((4,), START) as running:
        yield running
