"""Jobs of a plan on threads: of which none is under way, and one that is alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from fusiond.collectives.base import Job
from fusiond.operations.thread_work import ThreadWork

LARGE = float("inf")  # bytes: on a thread


class Threads:
    """Threads whose jobs end when the test says so."""

    def __init__(self) -> None:
        self.jobs: deque[Callable[[], None]] = deque()
        self.work = ThreadWork(self._run)
        self.order: list[str] = []

    def _run(self, jobs: Sequence[Job], then: Callable[[BaseException | None], None]) -> None:
        def ended() -> None:
            for job in jobs:
                job()
            then(None)

        self.jobs.append(ended)

    def do(self, name: str, plan: int = 1) -> None:
        self.work.do(plan, [lambda: self.order.append(name)], LARGE, lambda error: None)

    def alone(self, name: str) -> None:
        self.work.alone(1, lambda: self.order.append(name), LARGE, lambda error: self.order.append(f"{name} is over"))


def test_jobs_of_a_plan_begin_when_the_one_that_is_alone_has_ended() -> None:
    threads = Threads()
    threads.alone("copy")
    threads.do("first")
    threads.do("second")
    threads.do("of another plan", plan=2)
    threads.work.when_quiet(1, lambda: threads.order.append("quiet"))
    assert len(threads.jobs) == 2
    threads.jobs.popleft()()
    assert threads.order == ["copy", "copy is over"]
    while threads.jobs:
        threads.jobs.popleft()()
    assert threads.order == ["copy", "copy is over", "of another plan", "first", "second", "quiet"]


def test_those_that_wait_for_quiet_do_so_one_after_the_other() -> None:
    threads = Threads()
    threads.do("step")
    for name in ("first", "second"):
        threads.work.when_quiet(1, lambda name=name: threads.alone(name))  # type: ignore[misc]
    while threads.jobs:
        assert len(threads.jobs) == 1
        threads.jobs.popleft()()
    assert threads.order == ["step", "first", "first is over", "second", "second is over"]
