"""The benchmark of sparse routes, small."""

from __future__ import annotations

import pytest

from benchmarks import sparse
from benchmarks.common import launch
from benchmarks.netlab import preflight
from tests import forks

UNAVAILABLE = preflight()
pytestmark = [
    pytest.mark.root,
    pytest.mark.multiprocess,
    pytest.mark.skipif(UNAVAILABLE is not None, reason=UNAVAILABLE or ""),
]


def test_what_two_hosts_send_is_counted_and_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "PYTHON", forks.interpreter(forks.WORKER))
    k = 2000
    payload, link = sparse.measure(2, "owners", 0.01, 1, 200_000)
    assert 2 * k < payload < 4 * k  # half of the selection, and half of its sum, in about three bytes each
    assert payload < link < 2 * payload  # headers
    found = {(2, "owners"): (payload, link), (2, "gather"): (payload, link)}
    sparse.show(sparse.records(found, 0.01, 200_000))
    assert "k = 2,000" in capsys.readouterr().out
