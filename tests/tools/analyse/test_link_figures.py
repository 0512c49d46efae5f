"""Tests of how fast links seem to be, and of the range that is told where clocks or bursts leave doubt."""

from __future__ import annotations

import numpy as np
import pytest

from fusion_trace.analyse.link_figures import LinkFigures, link_figures
from fusion_trace.read.chunk_columns import ChunkColumns
from fusion_trace.read.job import JobTrace
from fusion_trace.read.operations import operations
from fusion_trace.read.span_columns import Span
from fusion_trace.report import sections
from fusion_trace.simulate.model import Link
from tests.diagnosis.generator import MS, US, S, Shape, make
from tests.tools.simulate.test_links import exchanged

NODES = Shape(nodes=2, buckets=3, bandwidth=125e6, steps=60, latency=20 * US, skews={1: S}, drifts={1: -40.0})


def figures(trace: JobTrace, chunks: ChunkColumns) -> tuple[LinkFigures, ...]:
    return link_figures(trace, chunks, Span(0, S))


def test_a_rate_is_told_with_what_clocks_leave_of_it() -> None:
    """Links of 1 Gbit/s. With echoes of 4 ms and more, one seems to be faster: its end is later than its clock says."""
    trace = make(Shape(**{**vars(NODES), "round_trip": 4 * MS})).trace
    links = figures(trace, operations(trace).chunks)
    assert max(link.bandwidth or 0.0 for link in links) > 1.2 * 125e6
    for link in links:
        assert link.between is not None
        assert link.between[0] <= 125e6 * 1.01 <= link.between[1] * 1.02
    assert any(" to " in sections.bandwidth(link) for link in links)


def test_a_rate_that_clocks_leave_no_doubt_of_is_one_number() -> None:
    trace = make(NODES).trace
    assert [sections.bandwidth(link) for link in figures(trace, operations(trace).chunks)] == [
        "1,008 Mbit/s",
        "1,000 Mbit/s",
    ]


@pytest.mark.parametrize("rate", [2.4e6, 12e6])
def test_a_burst_that_passes_at_once_is_not_taken_for_the_rate_of_its_link(rate: float) -> None:
    chunks = sorted(exchanged(Link(rate, 0.0, burst=125_000)), key=lambda chunk: chunk.sent or 0)
    source, target, nbytes, sent, received = (
        np.array([getattr(chunk, name) for chunk in chunks], np.int64)
        for name in ("source", "target", "nbytes", "sent", "received")
    )
    none = np.zeros(len(chunks), np.int64)
    columns = ChunkColumns(none, source, target, none, nbytes, sent, sent, received, received)
    for link in figures(JobTrace("x", (), ("",), {}), columns):
        assert link.bandwidth is not None
        assert link.between is not None
        assert link.bandwidth > 1.4 * rate
        assert link.between[0] == pytest.approx(rate, rel=0.1)
        assert link.between[1] == link.bandwidth
