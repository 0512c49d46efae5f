"""What local workers have waited for too long at homes: it is told, and at last given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fusion_rt import wire
from fusion_rt.wire import OpKey
from fusiond.buckets.plans import PlanState
from fusiond.shards.node import Here
from fusiond.shards.push_pull import Sender, Senders
from fusiond.shards.server import Boxes


class Told(NamedTuple):
    """What the nodes have told of homes: what each waits for, by the key of its `wire.Waiting`; and where those are
    that homes wait for, as lines to go after a sentence."""

    reasons: dict[OpKey, str]
    where: str


Ask = Callable[[], Told | None]  # None: it has been asked, and is known at a later tick


class Overdue:
    """Of one node.

    Args:
        here: this node.
        senders: of the workers that wait.
        boxes: the homes here.
    """

    def __init__(self, here: Here, senders: Senders, boxes: Boxes) -> None:
        self._here = here
        self._senders = senders
        self._boxes = boxes

    def tick(self, ask: Ask) -> None:
        """Warns of what has waited long, and ends what has waited too long."""
        now, settings = self._here.outside.clock(), self._here.settings
        warned = False
        for sender in list(self._senders):
            waited = now - sender.since
            late = waited > settings.operation_timeout
            if sender.post is None or not (late or (waited > settings.stall_warning_time and not sender.warned)):
                continue
            told = ask()
            if told is None:
                return
            text = self._what_waits(
                sender, waited, told.reasons.get(key_of(sender.plan, sender.bucket, sender.home), "")
            )
            if not late:
                self._here.outside.warn(text if warned else text + told.where)
                sender.warned = warned = True
            elif not sender.busy and self._boxes.withdraw(sender):  # else at the next tick
                sender.failed = text + told.where
                self._senders.fail(sender, sender.release(), sender.failed)

    def under_way(self) -> list[wire.Waiting]:
        """What local ranks wait for at homes, and what the homes here wait for."""
        now = self._here.outside.clock()
        waiting = [sender for sender in self._senders if sender.post is not None]
        return [
            *(_waiting(s.plan, s.bucket, s.home, now - s.since, submitted=(s.rank,)) for s in waiting),
            *(
                _waiting(box.plan, box.bucket, box.home.rank, awaits=awaits)
                for box in self._boxes
                if (awaits := self._boxes.awaited(box))
            ),
        ]

    def _what_waits(self, sender: Sender, waited: float, reason: str) -> str:
        plan, bucket = sender.plan.plan, sender.bucket.index
        text = f"rank {sender.rank} has waited {waited:.0f} s for the home of bucket {bucket} of {plan.group!r}"
        if plan.homes:
            text += f", which is on {self._here.topology.describe_node(plan.homes[bucket])}"
        reason = self._boxes.reason(sender) or reason
        return f"{text}; {reason}" if reason else text


def key_of(state: PlanState, bucket: wire.Bucket, home: int) -> OpKey:
    """Of what is told of a home."""
    return OpKey(state.plan.process_set, state.plan.id, str(bucket.index), home + 1)


def _waiting(
    state: PlanState,
    bucket: wire.Bucket,
    home: int,
    seconds: float = 0.0,
    submitted: tuple[int, ...] = (),
    awaits: tuple[int, ...] = (),
) -> wire.Waiting:
    what = f"bucket {bucket.index} of {state.plan.group!r} at its home"
    if not state.plan.homes:
        what += f" with rank {state.members.set.ranks[home]}"
    key = key_of(state, bucket, home)
    return wire.Waiting("home", key, what[: wire.MAX_LINE], seconds, submitted, awaits)
