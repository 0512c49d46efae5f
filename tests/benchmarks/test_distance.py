"""All-reduce over a relay with a delay: what the daemons choose, and that the result is right."""

from __future__ import annotations

import pytest

from benchmarks import distance
from benchmarks.common import launch
from benchmarks.netlab import Netlab, Path, preflight

UNAVAILABLE = preflight()
pytestmark = [
    pytest.mark.root,
    pytest.mark.multiprocess,
    pytest.mark.long,
    pytest.mark.skipif(UNAVAILABLE is not None, reason=UNAVAILABLE or ""),
]


@pytest.mark.parametrize(("delay", "connections"), [(0.0, {1}), (0.02, set(range(2, 9)))])
def test_only_hosts_that_are_far_get_several_connections(delay: float, connections: set[int]) -> None:
    command = ["-m", f"benchmarks.{distance.NAME}", "--worker", "--rounds", "2", "--runtimes", distance.OURS]
    with Netlab(2, "1gbit", path=Path(delay=delay), congestion="cubic") as lab:
        found = launch.on_lab(lab, [*command, "--sizes", "4000000"])

    assert {peer["connections"] for peer in found["chosen"]} <= connections
    assert len(found["samples"]["4000000"][distance.OURS]) == 2  # the worker has looked at the sums
    assert lab.relayed["packets"] > 100
