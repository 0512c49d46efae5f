"""Work of one engine on threads, or at once where that is faster; and when none of it is under way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from fusiond.collectives.base import Job

INLINE_WORK = 128 * 1024  # bytes; less is worked on at once, where a thread's hand-over would cost more
# Bytes; of data that is only combined (`Reducer.is_plain`) or copied within a node, in a tenth of a millisecond.
PLAIN_WORK = 1024 * 1024

Act: TypeAlias = Callable[[], None]
RunJobs: TypeAlias = Callable[[Sequence[Job], Callable[[BaseException | None], None]], None]


class ThreadWork:
    """The jobs under way, by plan.

    Args:
        run_jobs: runs jobs outside the event loop, then calls back inside, with the exception of one that raised it.

    Attributes:
        resume: called with a plan that was quiet, and of which jobs may begin again.
    """

    def __init__(self, run_jobs: RunJobs) -> None:
        self.resume: Callable[[int], None] = lambda plan: None
        self._run_jobs = run_jobs
        self._under_way: Counter[int] = Counter()
        self._held: dict[int, list[Callable[[], None]]] = {}  # jobs that wait for one that is `alone`, by plan
        self._quiet: list[tuple[int, Act]] = []  # plan, and the work to be done when no job of it is under way
        self._all_quiet: list[Act] = []

    def do(self, plan: int, jobs: Sequence[Job], nbytes: float, then: Callable[[BaseException | None], None]) -> None:
        """Runs jobs of a plan, on threads if they work on much, and then `then` in the event loop.

        Args:
            plan: its id; 0: of a tensor outside a plan.
            nbytes: how much all of them read.
            then: gets the exception that a job raised. Work that it begins counts as under way without a gap.
        """
        self._under_way[plan] += 1
        if plan in self._held:
            self._held[plan].append(partial(self._run, plan, jobs, nbytes, then))
        else:
            self._run(plan, jobs, nbytes, then)

    def alone(self, plan: int, job: Job, nbytes: float, then: Callable[[BaseException | None], None]) -> None:
        """Runs a job as `do` does, when no other one of the plan is under way. Those that come meanwhile begin after
        `then`, but count as under way."""
        assert not self._under_way[plan], "to be called when the plan is quiet"
        self._under_way[plan] += 1
        held = self._held[plan] = []

        def over(error: BaseException | None) -> None:
            del self._held[plan]
            then(error)
            for begin in held:
                begin()

        self._run(plan, [job], nbytes, over)

    def _run(self, plan: int, jobs: Sequence[Job], nbytes: float, then: Callable[[BaseException | None], None]) -> None:
        if jobs and nbytes > INLINE_WORK:
            self._run_jobs(jobs, partial(self._done, plan, then))
            return
        try:
            for job in jobs:
                job()
        except Exception as error:  # reported like one from a thread
            self._done(plan, then, error)
        else:
            self._done(plan, then, None)

    def when_quiet(self, plan: int, then: Act) -> None:
        """Calls `then` when no job of a plan is under way: at once, or as soon as those that are have ended."""
        if self._under_way[plan]:
            self._quiet.append((plan, then))
        else:
            then()

    def when_all_quiet(self, then: Act) -> None:
        """Calls `then` when no job at all is under way. Until then they may write into the memory of workers."""
        if self._under_way.total():
            self._all_quiet.append(then)
        else:
            then()

    def pauses(self, plan: int) -> bool:
        """Returns whether a plan has to become quiet, so that nothing of it may begin."""
        return any(of == plan for of, _ in self._quiet)

    def forget(self) -> None:
        """Forgets all that wait for a plan to be quiet."""
        self._quiet.clear()

    def _done(self, plan: int, then: Callable[[BaseException | None], None], error: BaseException | None) -> None:
        then(error)
        self._under_way[plan] -= 1
        if self._under_way[plan]:
            return
        del self._under_way[plan]
        if self._quiet:
            self._tell_of(plan)
        if self._all_quiet and not self._under_way.total():
            all_asked, self._all_quiet = self._all_quiet, []
            for act in all_asked:
                act()

    def _tell_of(self, plan: int) -> None:
        """No job of a plan is under way any more."""
        asked = [act for of, act in self._quiet if of == plan]
        if asked:
            self._quiet = [quiet for quiet in self._quiet if quiet[0] != plan]
            for act in asked:
                self.when_quiet(plan, act)  # one of them may begin something that the others wait for
            self.resume(plan)
