"""What the nodes know of homes that workers wait for: asked when something has waited long. No I/O."""

from __future__ import annotations

from fusiond.control.questions import Questions
from fusiond.control.survey import Survey, survey
from fusiond.control.waiting import describe_ranks, describe_silent
from fusiond.operations.context import Context
from fusiond.shards.timeouts import Told

_FRESH = 5.0  # seconds for which an answer is good


class HomeStalls:
    """Asks, at most once in `_FRESH`, and remembers what was told."""

    def __init__(self, context: Context, questions: Questions) -> None:
        self._context = context
        self._questions = questions
        self._asking = False
        self._told: Told | None = None
        self._came = 0.0

    def ask(self) -> Told | None:
        """What the nodes have told; None while they are being asked."""
        now = self._context.outside.clock()
        if not self._asking and (self._told is None or now - self._came > _FRESH):
            self._asking, self._told = True, None
            survey(self._context, self._questions, False, self._answered)
        return self._told

    def _answered(self, result: Survey) -> None:
        topology = self._context.topology
        stalls = [stall for stall in result.stalls if stall.kind == "home" and stall.missing]
        missing = {rank for stall in stalls for rank in stall.missing}
        found = [where for rank, where in result.found.items() if rank in missing]
        self._asking = False
        self._came = self._context.outside.clock()
        self._told = Told(
            {stall.key: f"it waits for {topology.describe(stall.missing)}" for stall in stalls},
            describe_ranks(found, topology) + describe_silent(result.silent, topology),
        )
