"""Links, as they are found from chunks: rates, latencies, and bursts that pass at once."""

from __future__ import annotations

import numpy as np
import pytest

from fusion_trace.read.chunks import Chunk
from fusion_trace.simulate.links import links_of, one_shaper
from fusion_trace.simulate.model import HEAD_NBYTES, Link
from fusion_trace.simulate.network import Network
from fusion_trace.simulate.simulator import Simulator

CHUNK = 170_000


def exchanged(link: Link, steps: int = 60, pause: float = 0.08) -> list[Chunk]:
    """Returns the chunks of a job of two nodes, of which the second is the slower one: when its chunk has come, another
    one of its own follows, and one of the first's."""
    simulator = Simulator()
    network = Network(simulator, (link, link))
    chunks: list[Chunk] = []
    rng = np.random.default_rng(1)

    def send(source: int, target: int, then: bool = False) -> None:
        began, number = simulator.now, len(chunks)

        def came() -> None:
            noise = rng.exponential(0.0005)
            time = simulator.now + noise
            chunks.append(Chunk(source, target, number, CHUNK, None, round(began * 1e9), round(time * 1e9), None))
            if then:
                send(0, 1)
                send(1, 0)

        network.send(source, target, CHUNK, 0, came)

    at = 1.0
    for _ in range(steps):
        simulator.at(at, send, 0, 1)
        simulator.at(at + 0.06, send, 1, 0, True)
        at += 0.08 + pause + 2 * CHUNK * link.byte * rng.uniform(0.5, 1.0)
    simulator.run()
    return chunks


def test_of_what_follows_a_pause_as_much_as_the_burst_passes_at_once() -> None:
    link = Link(1e6, 0.0, burst=100_000)
    simulator = Simulator()
    network, came = Network(simulator, (link, link)), []
    for at in (1.0, 1.0, 5.0):
        simulator.at(at, network.send, 0, 1, 150_000 - HEAD_NBYTES, 0, lambda: came.append(simulator.now))
    simulator.run()
    assert came == pytest.approx([1.05, 1.2, 5.05])


def test_a_burst_larger_than_a_message_lets_it_pass_after_the_latency() -> None:
    link = Link(1e6, 0.01, burst=1_000_000)
    simulator = Simulator()
    network, came = Network(simulator, (link, link)), []
    simulator.at(2.0, network.send, 0, 1, 150_000, 0, lambda: came.append(simulator.now))
    simulator.run()
    assert came == pytest.approx([2.01])


@pytest.mark.parametrize("rate", [2.4e6, 12e6])
def test_a_shaper_of_which_steps_see_little_but_the_burst_is_found_with_its_rate(rate: float) -> None:
    plain, bursty, _ = links_of(exchanged(Link(rate, 0.0, burst=125_000)), [0, 1], list)
    assert plain[0].bandwidth > 1.4 * rate  # as it seems to be
    assert bursty is not None
    for link in bursty:
        assert link.bandwidth == pytest.approx(rate, rel=0.1)
        assert link.burst == pytest.approx(125_000, rel=0.15)


@pytest.mark.parametrize("latency", [0.0, 0.002])
def test_links_without_bursts_are_found_as_before(latency: float) -> None:
    plain, bursty, _ = links_of(exchanged(Link(2.4e6, latency)), [0, 1], list)
    for link in plain:
        assert link.bandwidth == pytest.approx(2.4e6, rel=0.05)
    assert bursty is None or all(link.burst < 30_000 for link in bursty)


def test_links_are_looked_for_in_the_whole_job_where_steps_send_nothing_large() -> None:
    small = [Chunk(n, 1 - n, 0, 1000, None, 0, 50_000, None) for n in (0, 1)]
    plain, _, assumed = links_of(small, [0, 1], lambda: exchanged(Link(2.4e6, 0.0)))
    assert [link.bandwidth for link in plain] == pytest.approx([2.4e6, 2.4e6], rel=0.05)
    assert not assumed
    plain, bursty, assumed = links_of(small, [0, 1], lambda: small)
    assert [link.bandwidth for link in plain] == [10e9 / 8] * 2
    assert bursty is None
    assert assumed == (0, 1)


def test_the_latency_of_an_idle_link_is_that_of_the_chunk_that_had_the_least() -> None:
    """In each step forty chunks are handed over at once: all but the first wait, which looks like latency."""
    takes = CHUNK / 2.4e6
    chunks = [
        Chunk(
            0, 1, number, CHUNK, None, 10**10 * step, 10**10 * step + round(1e9 * (3e-4 + takes * (number + 1))), None
        )
        for step in range(3)
        for number in range(40)
    ]
    link = links_of(chunks, [0, 1], list)[0][0]
    assert link.latency > 0.9 * takes
    assert link.idle_latency == pytest.approx(3e-4, abs=1e-4)


def directions(chunks: list[Chunk]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    its = [sorted((c for c in chunks if c.source == n), key=lambda c: c.sent or 0) for n in (0, 1)]
    return [tuple(np.array([getattr(c, of) for c in each]) for of in ("sent", "received", "nbytes")) for each in its]  # type: ignore[misc]


def test_two_directions_that_differ_only_in_how_they_use_their_bursts_have_one_shaper() -> None:
    found = one_shaper(directions(exchanged(Link(2.4e6, 0.0, burst=125_000))))
    assert found is not None
    assert found.bandwidth == pytest.approx(2.4e6, rel=0.1)


@pytest.mark.parametrize("burst", [0, 125_000])
def test_two_directions_of_different_rates_have_not(burst: int) -> None:
    fast, slow = (directions(exchanged(Link(rate, 0.0, burst=burst)))[1] for rate in (12e6, 2.4e6))
    found = one_shaper([fast, slow])
    assert found is None
