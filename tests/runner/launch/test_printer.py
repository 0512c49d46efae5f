"""The thread that writes for the launcher."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from fusion_rt.runner.launch.printer import ROOM, Printer


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


def test_everything_is_written_in_order_over_all_descriptors(tmp_path: Path) -> None:
    path = tmp_path / "out"

    async def main() -> None:
        printer = Printer()
        first = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        second = os.dup(first)
        for number in range(1000):
            printer.write(first if number % 2 else second, b"%d\n" % number)
        assert await printer.close(10)
        assert printer.statistics().written == path.stat().st_size
        os.close(first)
        os.close(second)

    run(main())
    assert path.read_text().split() == [str(number) for number in range(1000)]


@pytest.mark.parametrize("blocking", [True, False])
def test_a_slow_reader_holds_producers_back_and_loses_nothing(blocking: bool) -> None:
    async def main() -> None:
        reader, writer = os.pipe()
        os.set_blocking(writer, blocking)
        printer = Printer()
        printer.write(writer, b"x" * (ROOM + 100_000))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(printer.room(), 0.05)
        assert not await printer.close(0.05)  # nobody reads: it does not wait for ever
        left = ROOM + 100_000
        while left:
            left -= len(await asyncio.to_thread(os.read, reader, 1 << 20))
        await asyncio.wait_for(printer.room(), 10)
        assert await printer.close(10)
        os.close(reader)
        os.close(writer)

    run(main())


def test_who_cannot_wait_loses_what_there_is_no_room_for() -> None:
    async def main() -> None:
        reader, writer = os.pipe()
        printer = Printer()
        printer.write(writer, b"x" * (ROOM + 1))
        waiter = asyncio.ensure_future(printer.room())
        await asyncio.sleep(0)
        assert not waiter.done()
        printer.wait_no_more()
        await asyncio.wait_for(waiter, 10)
        printer.write(writer, b"y" * 50)
        assert printer.statistics().dropped == 50
        os.close(reader)
        assert await printer.close(10)
        os.close(writer)

    run(main())


def test_a_descriptor_that_fails_is_told_once_and_the_others_go_on(tmp_path: Path) -> None:
    async def main() -> None:
        reader, broken = os.pipe()
        os.close(reader)
        good = os.open(tmp_path / "good", os.O_WRONLY | os.O_CREAT)
        printer = Printer()
        for _ in range(3):
            printer.write(broken, b"lost")
            printer.write(good, b"kept\n")
        assert await printer.close(10)
        assert list(printer.failures) == [broken]
        assert isinstance(printer.failures[broken], BrokenPipeError)
        statistics = printer.statistics()
        assert (statistics.dropped, statistics.written) == (12, 15)
        os.close(broken)
        os.close(good)

    run(main())
    assert (tmp_path / "good").read_text() == "kept\n" * 3


def test_signals_reach_the_event_loop_however_many_pieces_were_written_while_it_was_busy(tmp_path: Path) -> None:
    async def main() -> None:
        printer = Printer()
        handled = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, handled.set)
        file = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT)
        for _ in range(2000):
            printer.write(file, b"x")
        while printer.statistics().written < 2000:  # without letting the loop turn
            os.sched_yield()
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.wait_for(handled.wait(), 10)
        assert await printer.close(10)
        os.close(file)

    run(main())
