"""The benchmark of sparse routes, small."""

from __future__ import annotations

import pytest

from benchmarks import sparse
from benchmarks.netlab import preflight

UNAVAILABLE = preflight()
pytestmark = [
    pytest.mark.root,
    pytest.mark.multiprocess,
    pytest.mark.skipif(UNAVAILABLE is not None, reason=UNAVAILABLE or ""),
]


def test_through_owners_less_is_sent_than_by_gathering(capsys: pytest.CaptureFixture[str]) -> None:
    owners, gather = (sparse.measure(3, route, 0.01, 1, 200_000) for route in sparse.ROUTES)
    assert 2000 * 2 < owners[0] < gather[0]
    assert owners[0] < owners[1]  # headers
    sparse.show({(3, "owners"): owners, (3, "gather"): gather}, 0.01, 200_000)
    assert "k = 2,000" in capsys.readouterr().out
