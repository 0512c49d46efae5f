"""Tests of how fast links seem to be, and of the range that is told where clocks or bursts leave doubt."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np
import pytest

from fusion_trace.analyse.link_figures import Link, LinkFigures, link_figures, link_speed, one_shaper, with_bursts
from fusion_trace.read.chunks import Chunk, ChunkColumns
from fusion_trace.read.job import JobTrace
from fusion_trace.read.operations import operations
from fusion_trace.read.span_columns import Span
from fusion_trace.report import sections
from tests.diagnosis.generator import MS, US, S, Shape, make

NODES = Shape(nodes=2, buckets=3, bandwidth=125e6, steps=60, latency=20 * US, skews={1: S}, drifts={1: -40.0})


CHUNK = 170_000


class Shaped:
    """One direction of a link, as a token bucket lets messages pass."""

    def __init__(self, link: Link) -> None:
        self.link, self.paid = link, -np.inf

    def send(self, now: float) -> float:
        """Returns when a chunk that is handed over now has come."""
        took = CHUNK / self.link.bandwidth
        self.paid = max(self.paid, now - self.link.burst / self.link.bandwidth) + took
        return max(now, self.paid) + self.link.latency


def exchanged(link: Link, steps: int = 60, pause: float = 0.08) -> list[Chunk]:
    """Returns the chunks of a job of two nodes, of which the second is the slower one: when its chunk has come, another
    one of its own follows, and one of the first's."""
    return list(_exchanged(link, steps, pause))


def _exchanged(link: Link, steps: int, pause: float) -> Iterator[Chunk]:
    rng, lanes = np.random.default_rng(1), (Shaped(link), Shaped(link))
    at, events = 1.0, []
    for _ in range(steps):
        events += [(at, 0, False), (at + 0.06, 1, True)]
        at += 0.08 + pause + 2 * CHUNK / link.bandwidth * rng.uniform(0.5, 1.0)
    heapq.heapify(events)
    number = 0
    while events:
        now, source, then = heapq.heappop(events)
        came = lanes[source].send(now)
        if then:
            heapq.heappush(events, (came, 0, False))
            heapq.heappush(events, (came, 1, False))
        number += 1
        noisy = came + rng.exponential(0.0005)
        yield Chunk(source, 1 - source, number, CHUNK, None, round(now * 1e9), round(noisy * 1e9), None)


def directions(chunks: list[Chunk]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    its = [sorted((c for c in chunks if c.source == n), key=lambda c: c.sent or 0) for n in (0, 1)]
    return [tuple(np.array([getattr(c, of) for c in each]) for of in ("sent", "received", "nbytes")) for each in its]  # type: ignore[misc]


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


@pytest.mark.parametrize("rate", [2.4e6, 12e6])
def test_a_shaper_of_which_steps_see_little_but_the_burst_is_found_with_its_rate(rate: float) -> None:
    sides = directions(exchanged(Link(rate, 0.0, burst=125_000)))
    fastest = max(speed[0] for side in sides if (speed := link_speed(*side)) is not None)
    assert fastest > 1.4 * rate  # as it seems to be
    found = with_bursts(Link(fastest, 0.0), sides)
    assert found is not None
    assert found.bandwidth == pytest.approx(rate, rel=0.1)
    assert found.burst == pytest.approx(125_000, rel=0.15)


@pytest.mark.parametrize("latency", [0.0, 0.002])
def test_links_without_bursts_have_the_rate_that_they_seem_to_have(latency: float) -> None:
    sides = directions(exchanged(Link(2.4e6, latency)))
    speeds = [speed for side in sides if (speed := link_speed(*side)) is not None]
    for rate, _ in speeds:
        assert rate == pytest.approx(2.4e6, rel=0.05)
    bursty = with_bursts(Link(*speeds[0]), sides)
    assert bursty is None or bursty.burst < 30_000


def test_two_directions_that_differ_only_in_how_they_use_their_bursts_have_one_shaper() -> None:
    found = one_shaper(directions(exchanged(Link(2.4e6, 0.0, burst=125_000))))
    assert found is not None
    assert found.bandwidth == pytest.approx(2.4e6, rel=0.1)


@pytest.mark.parametrize("burst", [0, 125_000])
def test_two_directions_of_different_rates_have_not(burst: int) -> None:
    fast, slow = (directions(exchanged(Link(rate, 0.0, burst=burst)))[1] for rate in (12e6, 2.4e6))
    found = one_shaper([fast, slow])
    assert found is None
