"""The kernel pool: jobs run elsewhere, and their end is reported in the loop."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from fusiond.host.loop import EventLoop
from fusiond.host.thread_pool import KernelPool

TIMEOUT_S = 10.0


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


@pytest.fixture
def pool(loop: EventLoop) -> Iterator[KernelPool]:
    pool = KernelPool(loop, 2)
    yield pool
    pool.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kernel-")]


def test_jobs_run_side_by_side_and_end_in_the_loop(loop: EventLoop, pool: KernelPool) -> None:
    meet = threading.Barrier(2, timeout=TIMEOUT_S)  # breaks unless both run at the same time
    ended: list[tuple[BaseException | None, threading.Thread]] = []

    def then(error: BaseException | None) -> None:
        ended.append((error, threading.current_thread()))
        loop.stop()

    pool.run([meet.wait, meet.wait], then)
    loop.run()
    assert ended == [(None, threading.current_thread())]
    assert pool.statistics() == {"threads": 2, "jobs": 2}


def test_the_end_comes_after_the_last_job(loop: EventLoop, pool: KernelPool) -> None:
    done: list[int] = []

    def then(_: BaseException | None) -> None:
        done.append(-1)
        loop.stop()

    pool.run([lambda i=i: done.append(i) for i in range(20)], then)  # type: ignore[misc]
    loop.run()
    assert sorted(done[:-1]) == list(range(20))
    assert done[-1] == -1


def test_a_job_that_raises_is_reported(loop: EventLoop, pool: KernelPool) -> None:
    errors: list[BaseException | None] = []

    def fail() -> None:
        raise MemoryError("no room")

    def then(error: BaseException | None) -> None:
        errors.append(error)
        loop.stop()

    pool.run([lambda: None, fail, lambda: None], then)
    loop.run()
    assert [str(error) for error in errors] == ["no room"]


def test_nothing_keeps_the_arrays_of_a_finished_job(loop: EventLoop, pool: KernelPool) -> None:
    array = np.zeros(10)
    gone = threading.Event()
    weakref.finalize(array, gone.set)

    def job(array: np.ndarray = array) -> None:  # type: ignore[type-arg]
        array += 1

    pool.run([job], lambda _: loop.stop())
    loop.run()
    del array, job
    assert gone.wait(TIMEOUT_S)


def test_at_the_limit_of_processes_the_threads_that_there_are_do_the_work(
    loop: EventLoop, pool: KernelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    done: list[int] = []
    pool.run([lambda number=number: done.append(number) for number in range(5)], lambda error: loop.stop())  # type: ignore[misc]
    loop.run()
    assert sorted(done) == [0, 1, 2, 3, 4]
    assert pool.threads == 2
