"""Fixtures of the tests that break things."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.netlab import Netlab, preflight
from tests.faults.jobs import LabDaemons, ProxiedDaemons
from tests.fusiond.processes import Daemons


@pytest.fixture
def daemons(runtime_dir: Path) -> Iterator[Callable[..., Daemons]]:
    """Makes the (real) daemons of a job, which are ended with the test."""
    made: list[Daemons] = []

    def make(*local_sizes: int, **environment: str) -> Daemons:
        made.append(Daemons(runtime_dir, local_sizes, True, **environment))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def proxied(runtime_dir: Path) -> Iterator[Callable[..., ProxiedDaemons]]:
    """Makes the daemons of two nodes with proxies between them."""
    made: list[ProxiedDaemons] = []

    def make(seed: int, **environment: str) -> ProxiedDaemons:
        made.append(ProxiedDaemons(runtime_dir, seed, **environment))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def lab() -> Iterator[Netlab]:
    """Three hosts."""
    if why_not := preflight():
        pytest.skip(why_not)
    with Netlab(hosts=3) as lab:
        yield lab


@pytest.fixture
def on_hosts(lab: Netlab, runtime_dir: Path) -> Iterator[Callable[..., LabDaemons]]:
    """Makes daemons on the hosts of the lab."""
    made: list[LabDaemons] = []

    def make(*local_sizes: int, **environment: str) -> LabDaemons:
        made.append(LabDaemons(lab, runtime_dir, local_sizes, **environment))
        return made[-1]

    yield make
    for each in made:
        each.close()
