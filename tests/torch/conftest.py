"""The job that these tests share: two ranks on one node, which import torch once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness import Job


@pytest.fixture(scope="session")
def job() -> Iterator[Job]:
    """Small buckets, so that the small models of the tests have several."""
    with Job((2,), {"HOROVOD_FUSION_THRESHOLD": "4KiB"}) as running:
        yield running
