"""Shards and mirrors of shards of a formation that has ended, kept until the workers have taken them to the next one.

A step that was under way ends the same for all shards: workers agree about the last clock that counts, which somebody
has got all answers of or nobody, and ask for what shards had then. A home has its last update and what it was before;
its mirror can still leave the last update out. No home takes in a clock before all workers have the answers to the
one before, so two states are enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusiond.collectives.base import Array
from fusiond.operations.thread_work import Act, ThreadWork
from fusiond.shards.history import ShardHistory
from fusiond.shards.mirrors import Mirror
from fusiond.shards.push_pull import PushPullClient


@dataclass(frozen=True)
class KeptPlan:
    """The shards of one plan on one node, and its mirrors of others.

    Attributes:
        epoch, plan: of which membership epoch, and which plan.
        homes: by bucket; those that had begun.
        mirrors: of homes on another node.
        clients: of local workers, with what their codecs have not sent.
        work: the threads that may still be at work on them.
    """

    epoch: int
    plan: int
    homes: Sequence[tuple[int, ShardHistory]]
    mirrors: Sequence[Mirror]
    clients: Sequence[PushPullClient]
    work: ThreadWork


class KeptShards:
    """All that a daemon has kept, by process set and group."""

    def __init__(self) -> None:
        self._plans: dict[tuple[int, str], KeptPlan] = {}

    def keep(self, group: tuple[int, str], kept: KeptPlan) -> None:
        """Keeps shards of a formation that has ended."""
        self._plans[group] = kept
        kept.work.when_all_quiet(lambda: _let_go(kept))

    def drop(self, group: tuple[int, str]) -> None:
        """Drops what was kept of a group, which has another plan."""
        self._plans.pop(group, None)

    def when_quiet(self, group: tuple[int, str], then: Act) -> None:
        """Calls `then` when no thread is at work on what is kept of a group: at once, or later."""
        kept = self._plans.get(group)
        if kept is None:
            then()
        else:
            kept.work.when_all_quiet(then)

    def recall(self, group: tuple[int, str], epoch: int, plan: int, clock: int) -> dict[str, Array]:
        """Returns what shards, mirrors and the codecs of workers had when all contributions before a clock counted, and
        no other ones: `home:BUCKET:-1:KEY`, `mirror:BUCKET:-1:KEY` and `sender:BUCKET:RANK:codec/KEY`. Those of which
        that is not known are left out.

        Args:
            epoch, plan: of which it is; else nothing is returned.
        """
        kept = self._plans.get(group)
        if kept is None or (kept.epoch, kept.plan) != (epoch, plan):
            return {}
        states: list[tuple[str, dict[str, Array] | None]] = []
        states += [(f"home:{bucket}:-1", history.state_at(clock)) for bucket, history in kept.homes]
        states += [(f"mirror:{mirror.bucket.index}:-1", mirror.state_at(clock)) for mirror in kept.mirrors]
        found = {f"{prefix}:{key}": value for prefix, state in states for key, value in (state or {}).items()}
        for client in kept.clients:
            prefix = f"sender:{client.bucket.index}:{client.rank}:codec"
            found |= {f"{prefix}/{key}": value for key, value in client.remembered_at(clock).items()}
        return found


def _let_go(kept: KeptPlan) -> None:
    """Drops contributions, which are in the arenas of workers, when no thread works on them any more."""
    for _, history in kept.homes:
        history.home.slots.clear()
        history.home.waiting.clear()
