"""The sends and receives that wait: what is said of them, to people and to whoever asks, and when they have for too
long."""

from __future__ import annotations

import math

from fusion_rt import wire
from fusion_rt.tracing.format import Kind
from fusion_rt.wire import ANYBODY, OpKey
from fusiond.control.questions import Questions
from fusiond.operations.context import Context
from fusiond.point_to_point.answers import Answers
from fusiond.point_to_point.calls import Call, CallOwner, ReceiveCall

_SHOWN = 8  # in a warning


class Reports:
    """The reports of one engine about messages under way.

    Args:
        calls: those that have not been answered.
        owner: ends them.
        questions: find out where ranks are.
    """

    def __init__(self, context: Context, calls: Answers, owner: CallOwner, questions: Questions) -> None:
        self._context = context
        self._calls = calls
        self._owner = owner
        self._questions = questions

    def tick(self) -> None:
        """Time has passed: warns of what waits long, and ends what has waited as long as any operation may."""
        now, settings = self._context.outside.clock(), self._context.settings
        late: list[Call] = []
        for call in self._calls:
            waited = now - call.since
            if waited > settings.operation_timeout and call.until == math.inf:
                self._owner.fail_call(call, self.explain(call, waited))
            elif waited > settings.stall_warning_time and not call.warned:
                call.warned = True
                late.append(call)
        if not late:
            return
        for call in late:
            self._context.trace.record(Kind.STALL, call.about[0], int(now - call.since), call.about[1])
        text = "; ".join(self.explain(call, now - call.since) for call in late[:_SHOWN])
        if late[_SHOWN:]:
            text += f"; and {len(late) - _SHOWN} more sends and receives wait"
        ranks = {rank for call in late for rank in self._awaited(call)}
        self._questions.whereabouts(ranks, lambda where: self._context.outside.warn(text + where))

    def explain(self, call: Call, waited: float) -> str:
        """Returns a sentence about a wait; `waited`: seconds."""
        topology = self._context.topology
        other = "another rank" if call.other == ANYBODY else topology.describe([call.other])
        text = f"{call.describe(topology)} has waited {waited:.3g} s"
        if _moves(call):
            return f"{text} for its data, which has not all gone over"
        if isinstance(call, ReceiveCall):
            return f"{text}: {other} has not sent any such message"
        return f"{text}: {other} has not received it"

    def under_way(self) -> list[wire.Waiting]:
        """Returns the waits here."""
        now, topology = self._context.outside.clock(), self._context.topology
        found = []
        for call in self._calls:
            kind = "receive" if isinstance(call, ReceiveCall) else "send"
            key = OpKey(call.group, 0, f"{kind} {call.handle} of rank {call.rank}", call.about[1])
            awaits = self._awaited(call)
            note = "its data is under way" if _moves(call) else ""
            what = call.describe(topology)[: wire.MAX_LINE]
            found.append(wire.Waiting("message", key, what, now - call.since, (call.rank,), awaits, note=note))
        return found

    def _awaited(self, call: Call) -> tuple[int, ...]:
        """Returns the ranks that a call waits for."""
        if _moves(call):
            return ()
        if call.other != ANYBODY:
            return (call.other,)
        participants = self._context.participants
        if call.group not in participants:
            return ()
        ranks = participants.members(call.group).set.ranks
        return tuple(rank for rank in ranks if rank != call.rank and rank not in participants.departed)


def _moves(call: Call) -> bool:
    """Returns whether both ends are there."""
    return (call.message is not None and call.message.receive is not None) or getattr(call, "accepted", False)
