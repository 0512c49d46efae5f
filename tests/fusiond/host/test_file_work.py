"""Work on files, each on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from fusiond.host.file_work import FileWork
from fusiond.host.loop import EventLoop


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


def ended(loop: EventLoop, files: FileWork) -> BaseException | None:
    """Runs a job that does nothing; returns what its end was told."""
    told: list[BaseException | None] = []

    def then(error: BaseException | None) -> None:
        told.append(error)
        loop.stop()

    files.run(lambda: None, then)
    loop.run()
    (error,) = told
    return error


def test_the_limit_of_processes_is_an_error_of_the_job_and_not_of_the_loop(
    loop: EventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    files = FileWork(loop)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", no_thread)
        error = ended(loop, files)
    assert isinstance(error, OSError)
    assert "raise `ulimit -u`" in str(error)
    files.close()


def test_the_end_of_a_job_is_told_in_the_loop(loop: EventLoop) -> None:
    files = FileWork(loop)
    assert ended(loop, files) is None
    files.close()
