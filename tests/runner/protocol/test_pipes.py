"""Silence of the other end of a connection, with a clock that the test turns."""

from __future__ import annotations

import asyncio

import pytest

from fusion_rt.runner.protocol import pipes


@pytest.fixture
def beats(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that were slept for, without taking any time."""
    slept: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return slept


def test_silence_is_told_after_the_limit_from_the_last_message_on(beats: list[float]) -> None:
    silence = pipes.Silence(60.0)
    silence.listening = True

    async def talk() -> None:
        waiting = asyncio.ensure_future(silence.wait())
        while len(beats) < pipes.BEATS - 1:
            await asyncio.wait([waiting], timeout=0)
        silence.heard()
        await waiting

    asyncio.run(talk())
    assert sum(beats) == pytest.approx(60.0 + 60.0 * (pipes.BEATS - 1) / pipes.BEATS)


def test_time_in_which_nobody_reads_is_no_silence(beats: list[float]) -> None:
    silence = pipes.Silence(60.0)

    async def read_late() -> None:
        waiting = asyncio.ensure_future(silence.wait())
        while len(beats) < 10 * pipes.BEATS:
            await asyncio.wait([waiting], timeout=0)
        assert not waiting.done()
        silence.listening = True
        await waiting

    asyncio.run(read_late())
    assert len(beats) >= 11 * pipes.BEATS - 1  # the step that was under way counts


def test_a_sign_of_life_is_overdue_when_it_should_have_come_while_this_process_was_awake(
    beats: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    del beats
    now = [100.0]
    monkeypatch.setattr(pipes.time, "monotonic", lambda: now[0])
    silence = pipes.Silence(12.0)
    step = 12.0 / pipes.BEATS
    silence.listening = True
    found = []

    async def stand_still() -> None:
        waiting = asyncio.ensure_future(silence.wait())
        found.append(silence.overdue)  # nothing has come yet: another limit counts
        silence.heard()
        now[0] += 50.0
        found.append(silence.overdue)  # it has not counted one step: it was stopped
        while silence._steps < 3:
            await asyncio.wait([waiting], timeout=0)
        found.append(silence.overdue)
        silence.heard()
        found.append(silence.overdue)
        waiting.cancel()

    asyncio.run(stand_still())
    assert found == [0.0, 0.0, 2 * step, 0.0]
