"""The cost of control by the number of hosts: it is counted, and grows with the number of hosts and no more."""

from __future__ import annotations

import pytest

from benchmarks import control

MOST = 1.2  # exponent of N
SIZES = (8, 16, 32)


def test_the_exponent_is_that_of_the_figures() -> None:
    assert control.exponent({8: 3 * 8**1.5, 16: 3 * 16**1.5, 64: 3 * 64**1.5}) == pytest.approx(1.5)
    assert control.exponent({8: 0.0, 16: 1.0}) == 0.0


def test_no_cost_of_a_job_grows_faster_than_its_hosts() -> None:
    """Lines of Python, messages and bytes of a daemon, and of the coordinator, are counted in each phase of a job."""
    counted = {nodes: control.lines(nodes) for nodes in SIZES}
    grown = {
        name: control.exponent({nodes: figures[name] for nodes, figures in counted.items()})
        for name in counted[SIZES[0]]
    }
    assert len(grown) == 5 * len(control.PHASES)
    assert {name: exponent for name, exponent in grown.items() if exponent > MOST} == {}


@pytest.mark.parametrize("part", control.PARTS)
def test_no_part_does_more_for_each_host_of_a_larger_job(part: str) -> None:
    """Lines that run in the coordinator, and in a daemon that is asked for figures."""
    counted = {hosts: float(control.lines_of(lambda hosts=hosts: control.PARTS[part](hosts))) for hosts in (16, 32, 64)}
    assert control.exponent(counted) <= (2 * MOST if part == "the order of a ring" else MOST)
