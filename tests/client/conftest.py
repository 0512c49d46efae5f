"""Fixtures of the tests of a worker's side of the local channel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fusion_rt.client import Client
from tests.client.daemon import Daemon


@pytest.fixture
def daemon(runtime_dir: Path) -> Iterator[Daemon]:
    daemon = Daemon(runtime_dir / "sock")
    yield daemon
    daemon.close()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    client = daemon.connect()
    yield client
    client.close()
