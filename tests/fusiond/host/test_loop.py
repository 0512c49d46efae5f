"""The event loop, on real descriptors and with a clock that the test moves."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from fusiond.host.loop import EventLoop

TIMEOUT_S = 10.0


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def loop(clock: Clock) -> Iterator[EventLoop]:
    before = len(os.listdir("/proc/self/fd"))
    loop = EventLoop(clock)
    yield loop
    loop.close()
    assert len(os.listdir("/proc/self/fd")) <= before  # less, where one of an earlier test was closed meanwhile


@pytest.fixture
def pair(loop: EventLoop) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connected sockets; asks for the loop, so that they are closed before it is."""
    first, second = socket.socketpair()
    with first, second:
        yield first, second


Pair = tuple[socket.socket, socket.socket]


def test_a_reader_is_called_as_long_as_there_is_something_to_read(loop: EventLoop, pair: Pair) -> None:
    got = []
    loop.add_reader(pair[1].fileno(), lambda: got.append(pair[1].recv(1)))
    pair[0].send(b"ab")
    loop.turn()
    loop.turn()
    assert got == [b"a", b"b"]


def test_a_reader_hears_of_a_hang_up(loop: EventLoop, pair: Pair) -> None:
    got = []
    loop.add_reader(pair[1].fileno(), lambda: got.append(pair[1].recv(1)))
    pair[0].close()
    loop.turn()
    assert got == [b""]


def test_of_descriptors_that_are_ready_together_the_lowest_is_first(loop: EventLoop) -> None:
    heard: list[int] = []
    pipes = [os.pipe() for _ in range(8)]
    for read, _ in pipes:
        loop.add_reader(read, lambda fd=read: heard.append(fd))  # type: ignore[misc]
    for _, write in reversed(pipes):
        os.write(write, b"x")
    loop.turn()
    assert heard == sorted(read for read, _ in pipes), "standard input, which explains the others, is the lowest of all"
    for read, write in pipes:
        loop.remove(read)
        os.close(read)
        os.close(write)


def test_a_reader_may_remove_another_that_is_due(loop: EventLoop) -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    called = []

    def reader(me: int) -> Callable[[], None]:
        def read() -> None:
            called.append(me)
            loop.remove(pairs[1 - me][1].fileno())

        return read

    for me, (writer, _) in enumerate(pairs):
        loop.add_reader(pairs[me][1].fileno(), reader(me))
        writer.send(b"x")
    loop.turn()
    assert len(called) == 1
    for writer, reader_end in pairs:
        writer.close()
        reader_end.close()


def test_a_writer_is_called_while_there_is_room(loop: EventLoop, pair: Pair) -> None:
    called = []
    loop.add_reader(pair[0].fileno(), lambda: called.append("read"))
    loop.add_writer(pair[0].fileno(), lambda: called.append("write"))
    loop.turn()
    assert called == ["write"]
    loop.remove_writer(pair[0].fileno())
    pair[1].send(b"x")
    loop.turn()
    assert called == ["write", "read"]


def test_what_is_called_soon_comes_after_the_events_at_hand(loop: EventLoop, pair: Pair) -> None:
    order = []

    def read() -> None:
        pair[1].recv(1)
        loop.call_soon(lambda: order.append("soon"))
        order.append("event")

    loop.add_reader(pair[1].fileno(), read)
    pair[0].send(b"x")
    loop.turn()
    assert order == ["event", "soon"]


def test_a_callback_that_calls_itself_soon_lets_others_have_their_turn(loop: EventLoop, pair: Pair) -> None:
    turns = []

    def again() -> None:
        turns.append("again")
        loop.call_soon(again)

    loop.call_soon(again)
    loop.add_reader(pair[1].fileno(), lambda: turns.append(pair[1].recv(1).decode()))
    pair[0].send(b"x")
    loop.turn()
    loop.turn()
    assert turns == ["x", "again", "again"]


def test_timers_run_in_the_order_in_which_they_are_due(loop: EventLoop, clock: Clock) -> None:
    called = []
    for seconds in (3.0, 1.0, 2.0, 1.0):
        loop.call_later(seconds, lambda seconds=seconds: called.append(seconds))  # type: ignore[misc]
    clock.now += 2.5
    loop.turn()
    assert called == [1.0, 1.0, 2.0]
    clock.now += 1
    loop.turn()
    assert called == [1.0, 1.0, 2.0, 3.0]


def test_a_cancelled_timer_does_not_run(loop: EventLoop, clock: Clock) -> None:
    called = []
    timer = loop.call_later(1, lambda: called.append("cancelled"))
    loop.call_later(2, lambda: called.append("kept"))
    timer.cancel()
    clock.now += 3
    loop.turn()
    assert called == ["kept"]


def test_a_repeated_callback_goes_on(loop: EventLoop, clock: Clock) -> None:
    called = []
    loop.call_every(1, lambda: called.append(clock.now))
    for _ in range(3):
        clock.now += 1
        loop.turn()
    assert called == [101.0, 102.0, 103.0]


def test_a_timer_ends_the_wait_for_events() -> None:
    loop = EventLoop()  # with real time
    loop.call_later(0.01, loop.stop)
    loop.run()
    assert loop.statistics()["turns"] <= 3  # it waited, and did not spin
    loop.close()


def test_another_thread_wakes_the_loop(loop: EventLoop) -> None:
    called: list[threading.Thread] = []

    def finish() -> None:
        called.append(threading.current_thread())
        loop.stop()

    thread = threading.Thread(target=lambda: loop.call_from_thread(finish))
    thread.start()
    loop.run()  # without a timer, so that nothing else could wake it
    thread.join(TIMEOUT_S)
    assert called == [threading.current_thread()]


def test_nothing_from_other_threads_is_lost(loop: EventLoop) -> None:
    called = []

    def call_often() -> None:
        for number in range(1000):
            loop.call_from_thread(lambda number=number: called.append(number))  # type: ignore[misc]
        loop.call_from_thread(loop.stop)

    thread = threading.Thread(target=call_often)
    thread.start()
    loop.run()
    thread.join(TIMEOUT_S)
    assert called == list(range(1000))


def test_a_thread_that_comes_after_the_end_of_the_loop_writes_into_no_file_that_was_opened_since() -> None:
    loop = EventLoop()
    loop.close()
    since = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(4)]  # they get the numbers of those that were closed
    thread = threading.Thread(target=lambda: loop.call_from_thread(lambda: pytest.fail("called")))
    thread.start()
    thread.join(TIMEOUT_S)
    written, _, _ = select.select(since, [], [], 0)
    for fd in since:
        os.close(fd)
    assert not written


def test_a_loop_is_closed_after_a_thread_has_woken_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop runs a callback, and may be closed after it, before the thread that gave it has written."""
    loop, still_open = EventLoop(), list[bool]()
    closing, write = threading.Thread(target=loop.close), os.eventfd_write

    def late(fd: int, value: int) -> None:
        closing.start()
        closing.join(0.05)
        still_open.append(os.path.exists(f"/proc/self/fd/{fd}"))
        write(fd, value)

    monkeypatch.setattr(os, "eventfd_write", late)
    with contextlib.suppress(OSError):  # a bad descriptor
        loop.call_from_thread(loop.stop)
    closing.join(TIMEOUT_S)
    assert still_open == [True]


def test_an_exception_ends_the_loop(loop: EventLoop) -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    loop.call_soon(fail)
    with pytest.raises(RuntimeError, match="a bug"):
        loop.run()


def test_an_idle_turn_waits(loop: EventLoop, pair: Pair) -> None:
    loop.add_reader(pair[1].fileno(), loop.stop)
    timer = threading.Timer(0.02, pair[0].send, [b"x"])
    timer.start()
    loop.run()
    timer.join()
    assert loop.statistics()["turns"] == 1


def test_a_removed_descriptor_is_forgotten(loop: EventLoop, pair: Pair) -> None:
    watched = loop.statistics()["descriptors"]
    loop.add_reader(pair[1].fileno(), lambda: pytest.fail("called"))
    assert loop.statistics()["descriptors"] == watched + 1
    loop.remove(pair[1].fileno())
    loop.remove(pair[1].fileno())
    loop.remove_writer(pair[1].fileno())
    pair[0].send(b"x")
    loop.call_soon(loop.stop)
    loop.run()
    assert loop.statistics()["descriptors"] == watched


def test_callbacks_that_take_long_are_told_by_their_names(loop: EventLoop, clock: Clock) -> None:
    def slow(seconds: float) -> None:
        clock.now += seconds

    def short() -> None:
        clock.now += 0.001

    for seconds in (0.25, 2.0, 0.5):
        loop.call_soon(partial(slow, seconds))
    loop.call_soon(short)
    loop.turn()
    ((name, seconds),) = loop.longest.items()
    assert name.endswith(".<locals>.slow")
    assert seconds == 2.0
