"""Work for the homes of a plan, on the spot or in the kernel pool; and when none of it is under way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

from fusiond.operations.executor import INLINE_WORK
from fusiond.shards.node import Here

Act: TypeAlias = Callable[[], None]


class Jobs:
    """The jobs of all plans.

    Args:
        here: this node.
        failed: called with an exception that a job raised.
        resume: called with a plan whose jobs may begin again.
    """

    def __init__(self, here: Here, failed: Callable[[BaseException], None], resume: Callable[[int], None]) -> None:
        self._here = here
        self._failed = failed
        self._resume = resume
        self._jobs: Counter[int] = Counter()  # by plan: how many are under way
        self._quiet: list[tuple[int, Act]] = []  # plan, and what is to be done when no job of it is under way
        self._all_quiet: list[Act] = []  # what is to be done when there is none of any plan, and everything is over
        self._under_way = 0

    def do(self, plan: int, work: Act, nbytes: float, then: Act) -> None:
        """Runs `work` for a plan, in the kernel pool if it is much, and `then` in the event loop."""
        self._jobs[plan] += 1
        self._under_way += 1

        def done(error: BaseException | None) -> None:
            self._under_way -= 1
            if self._here.over:
                if not self._under_way:
                    asked, self._all_quiet = self._all_quiet, []
                    for act in asked:
                        act()
                return
            if error is None:
                then()
                self._done(plan)
            else:
                self._failed(error)

        if nbytes > INLINE_WORK:
            self._here.outside.run_jobs([work], done)
            return
        try:
            work()
        except Exception as error:  # reported like one from the pool
            done(error)
        else:
            done(None)

    def when_quiet(self, plan: int, then: Act) -> None:
        """Calls `then` when no job of a plan is under way: at once, or as soon as those that are have ended."""
        if self._jobs[plan]:
            self._quiet.append((plan, then))
        else:
            then()

    def when_all_quiet(self, then: Act) -> None:
        """As `when_quiet`, of all plans, once everything here is over."""
        if self._under_way:
            self._all_quiet.append(then)
        else:
            then()

    def pauses(self, plan: int) -> bool:
        """Whether somebody waits for a plan to be quiet, so that homes of it begin nothing."""
        return any(of == plan for of, _ in self._quiet)

    def forget(self) -> None:
        """Nobody waits for a plan to be quiet any more."""
        self._quiet.clear()

    def _done(self, plan: int) -> None:
        self._jobs[plan] -= 1
        if self._jobs[plan]:
            return
        del self._jobs[plan]
        asked = [then for of, then in self._quiet if of == plan]
        if asked:
            self._quiet = [quiet for quiet in self._quiet if quiet[0] != plan]
            for then in asked:
                then()
            self._resume(plan)
