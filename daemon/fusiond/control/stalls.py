"""Operations that do not fit or have waited long: the coordinator is asked, and asks all nodes. No I/O."""

from __future__ import annotations

from fusion_rt import wire
from fusion_rt.trace_format import Kind
from fusion_rt.wire import OpKey
from fusiond.control.coordination import Coordination
from fusiond.core.tracing import about_key
from fusiond.operations.context import Context
from fusiond.operations.executor import Run
from fusiond.operations.outcomes import Failing

_DEPARTURE_GRACE = 2.0  # seconds that an operation may still take to complete once one of its ranks has left


class Stalls:
    """Of one engine: `context`, what has failed, and the way to the coordinator are the engine's."""

    def __init__(self, context: Context, failing: Failing, coordination: Coordination) -> None:
        self._context = context
        self._failing = failing
        self._coordination = coordination

    def disagree(self, run: Run) -> None:
        """The ranks do not agree."""
        run.disputed = True
        self._inquire(run, 0.0)

    def tick(self) -> None:
        """Time has passed: asks about what has waited long, or waits for ranks that have left."""
        now = self._context.outside.clock()
        settings = self._context.settings
        participants = self._context.participants
        departed = participants.departed.difference(participants.lost)
        for run in list(self._context.runs.values()):
            waited = now - run.since
            left = any(r in run.members.set.ranks and r not in run.parts for r in departed)
            warn = waited > settings.stall_warning_time and run.inquired < run.since
            if warn or (
                now - run.inquired > _DEPARTURE_GRACE
                and (waited > settings.operation_timeout or (left and waited > _DEPARTURE_GRACE and run.parts))
            ):
                self._inquire(run, waited)

    def answer(self, inquiry: wire.Inquiry) -> None:
        """The coordinator asks what this node's ranks have submitted."""
        run = self._context.runs.get(inquiry.key)
        traffic = () if run is None else run.traffic(self._context.node, self._context.outside.clock())
        self._coordination.ask(wire.Report(inquiry.key, self._submitted(inquiry.key), traffic))

    def _inquire(self, run: Run, waited: float) -> None:
        """Has the coordinator ask everybody, and tell everybody if something is wrong."""
        run.inquired = self._context.outside.clock()
        name, clock, plan = about_key(run.key)
        self._context.trace.record(Kind.STALL, name, int(waited), clock, plan)
        self._coordination.ask(wire.Mismatch(run.key, waited))

    def _submitted(self, key: OpKey) -> dict[int, wire.Signature]:
        """What local ranks have submitted of an operation that is under way, or has been recently."""
        run = self._context.runs.get(key)
        if run is not None:
            return {rank: part.signature for rank, part in run.parts.items()}
        signature = self._failing.completed_as(key)
        if signature is None or key.process_set not in self._context.participants:
            return {}
        return dict.fromkeys(self._context.participants.members(key.process_set).local, signature)
