"""The clock of all waits on a node: they are reported on request, warned of, and ended when their time is up. No I/O.

One clock looks at all of it: operations, proposals of plans, and contributions to buckets' homes. About an operation or
a plan the coordinator is asked, which asks all nodes, so that one sentence holds for all ranks. A contribution concerns
the rank that made it only: this node asks the others itself, and ends it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from fusion_rt import wire
from fusion_rt.tracing.format import Kind
from fusion_rt.wire import OpKey
from fusiond.control.coordination import Coordination
from fusiond.control.inquiries import Inquiries
from fusiond.control.questions import Questions
from fusiond.control.waiting import (
    Subject,
    Survey,
    describe,
    describe_ranks,
    explain_contribution,
    plan_in_words,
)
from fusiond.core.deadlines import Deadlines
from fusiond.core.tracing import about_key
from fusiond.operations.operation import NodeOperations, Operation
from fusiond.shards import ParameterService
from fusiond.shards.waits import key_of

_AGAIN = 10.0  # seconds after which it is asked again about an operation whose time was up, and which has not ended
_GRACE = 2.0  # seconds for an operation that is late, or waits for a lost rank, to complete before the next question


class _Wait(NamedTuple):
    """Something that waits. `rank`: whose contribution it is; `left`: ranks have left that it may wait for; `seconds`:
    its own time-out, to which `Stalls.limit` sees."""

    subject: Subject
    since: float
    left: bool = False
    rank: int = -1
    seconds: float = 0.0


class Proposed(Protocol):
    """The plans that local ranks have proposed."""

    def waits(self) -> Iterable[tuple[OpKey, float, Collection[int]]]:
        """Returns of each its key, when the first rank proposed it (s), and the ranks that have."""


class Stalls:
    """The clock of one engine, whose other parts it uses."""

    def __init__(
        self,
        operations: NodeOperations,
        coordination: Coordination,
        questions: Questions,
        homes: ParameterService,
        proposals: Proposed,
    ) -> None:
        context = operations.context
        self._context = context
        self._operations = operations
        self._coordination = coordination
        self._questions = questions
        self._homes = homes
        self._proposals = proposals
        self._of_groups = Inquiries(context.participants, context.settings, questions, self)
        self._deadlines = Deadlines(context.outside, self)
        self._asked: dict[tuple[Subject, int], float] = {}  # time (s) of each wait
        self._due: set[tuple[OpKey, int]] = set()  # contributions about which the nodes are being asked

    # --- the clock ----------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Time has passed: asks about long waits, and about waits for ranks that have left."""
        now, settings = self._context.outside.clock(), self._context.settings
        asked, self._asked = self._asked, {}
        due = set()
        for wait in list(self._waits()):
            this = wait.subject, wait.rank
            waited, last = now - wait.since, asked.get(this, -math.inf)
            timeout = math.inf if wait.seconds else settings.operation_timeout
            late = waited > timeout or (wait.left and waited > _GRACE)
            if (waited > settings.stall_warning_time and last < wait.since) or (late and now - last > _GRACE):
                if wait.rank < 0:
                    last = now
                    self._inquire(wait.subject, waited, wait.seconds)
                elif not self._due:  # else at a later tick
                    last = now
                    due.add((wait.subject[1], wait.rank))
            self._asked[this] = last
        if due:
            self._due = due
            self._questions.survey(False, self._told_of_homes)

    def disagree(self, operation: Operation) -> None:
        """The ranks do not agree about an operation."""
        operation.disputed = True
        self._asked[("operation", operation.key), -1] = self._context.outside.clock()
        self._inquire(("operation", operation.key), 0.0)

    def _waits(self) -> Iterator[_Wait]:
        participants = self._context.participants
        departed = participants.departed.difference(participants.lost)
        for operation in self._operations.under_way.values():
            if wire.is_group(operation.key.process_set) and not operation.parts:
                continue  # no rank waits for it here; nodes with ranks that wait see to it
            left = bool(operation.parts) and any(
                r in operation.members.set and r not in operation.parts for r in departed
            )
            yield _Wait(("operation", operation.key), operation.since, left, seconds=operation.seconds)
        for key, since, ranks in self._proposals.waits():
            members = participants.members(key.process_set).set
            yield _Wait(("plan", key), since, any(rank in members and rank not in ranks for rank in departed))
        for client in self._homes.waits.contributions():
            key = key_of(client.plan, client.bucket, client.home)
            yield _Wait(("home", key), client.since, rank=client.rank)

    def _inquire(self, subject: Subject, waited: float, seconds: float = 0.0) -> None:
        """Has the coordinator ask everybody, and tell everybody if something is wrong."""
        kind, key = subject
        assert kind in ("operation", "plan")
        if kind == "operation":
            name, clock, plan = about_key(key)
            self._context.trace.record(Kind.STALL, name, int(waited), clock, plan)
        if wire.is_group(key.process_set):  # no coordinator knows it
            self._of_groups.inquire(subject, min(waited, seconds or waited), seconds)
        else:
            self._coordination.ask(wire.Mismatch(key, waited, kind))

    def submitted(self, subject: Subject) -> Mapping[int, wire.Signature | None]:
        """No node knows more of an operation of a group than the others tell."""
        return {}

    def warn(self, text: str) -> None:
        """Something is late, which people are to be told."""
        self._context.outside.warn(text)

    def conclude(self, subject: Subject, error: str, missing: Sequence[int]) -> None:
        """An inquiry about an operation of a group is over."""
        if error and subject[1] in self._operations.under_way:  # else it has ended since
            self._operations.everywhere(subject[1], error, missing)

    def limit(self, operation: Operation) -> None:
        """An operation of a group fails when its time is up."""
        self._deadlines.add(operation.until)

    def end_overdue(self, now: float) -> float:
        """Asks about the operations whose time is up; returns when the next one's is."""
        for operation in list(self._operations.under_way.values()):
            if operation.until <= now:
                operation.until = now + _AGAIN
                waited = math.nextafter(operation.seconds, math.inf)
                self._of_groups.inquire(("operation", operation.key), waited, operation.seconds)
        return min((operation.until for operation in self._operations.under_way.values()), default=math.inf)

    def forget_group(self, group: int) -> None:
        """A group has been closed."""
        for subject in [subject for subject in self._of_groups if subject[1].process_set == group]:
            self._of_groups.forget(subject)

    def _told_of_homes(self, result: Survey) -> None:
        """The nodes have told the waits of homes: contributions that have waited too long are ended."""
        due, self._due = self._due, set()
        topology, settings = self._context.topology, self._context.settings
        stalls = {stall.key: stall for stall in result.stalls if stall.kind == "home"}
        missing = {rank for stall in stalls.values() for rank in stall.missing}
        found = [where for rank, where in result.found.items() if rank in missing]
        where = describe_ranks(found, result.silent, topology)
        shown = False
        for client in self._homes.waits.contributions():
            key = key_of(client.plan, client.bucket, client.home)
            waited = self._context.outside.clock() - client.since
            if (key, client.rank) not in due or waited <= min(settings.stall_warning_time, settings.operation_timeout):
                continue  # it has been answered, and this is another one
            plan, bucket = client.plan.plan, client.bucket.index
            node = plan.homes[bucket] if plan.homes else None
            text = explain_contribution(client.rank, waited, bucket, plan.group, node, stalls.get(key), topology)
            if waited > settings.operation_timeout:
                self._homes.waits.end(client, text + where)
            else:
                self._context.outside.warn(text if shown else text + where)
                shown = True

    # --- answers to questions -----------------------------------------------------------------------------------------

    def under_way(self, key: OpKey | None = None) -> list[wire.Waiting]:
        """Returns the waits here; only those with this key, if there is one, and then also operations that are over."""
        now = self._context.outside.clock()
        operations = self._operations.under_way
        if key is None:
            found = [self._operation(operation, now) for operation in operations.values()]
        else:
            found = [self._operation(operations[key], now, True)] if key in operations else self._over(key)
        participants = self._context.participants
        for plan, since, ranks in self._proposals.waits():
            awaited = participants.awaited(participants.members(plan.process_set))
            what = plan_in_words(plan.name)[: wire.MAX_LINE]
            found.append(wire.Waiting("plan", plan, what, now - since, tuple(ranks), awaited))
        found += self._homes.waits.under_way()
        return found if key is None else [one for one in found if one.key == key]

    def _operation(self, operation: Operation, now: float, signed: bool = False) -> wire.Waiting:
        away = set(() if operation.kind == "join" else self._context.participants.away(operation.members))
        signature = None if operation.recipe is None else operation.recipe.signature
        what = operation.what + ("" if signature is None else f" ({describe(signature)})")
        ranks = sorted(operation.parts)
        return wire.Waiting(
            "operation",
            operation.key,
            what[: wire.MAX_LINE],
            max(now - operation.since, 0.0),
            tuple(ranks),
            tuple(rank for rank in operation.members.set.ranks if rank not in away),
            operation.traffic(self._context.node, now),
            signatures=tuple(operation.parts[rank].signature for rank in ranks) if signed else (),
        )

    def _over(self, key: OpKey) -> list[wire.Waiting]:
        """Returns the record of an operation that is over here; nothing, as soon as that is forgotten."""
        context = self._context
        if not self._operations.is_over(key) or key.process_set not in context.participants:
            return []
        ranks = context.participants.members(key.process_set).local
        signature = self._operations.completed_as(key)
        signatures = () if signature is None else (signature,) * len(ranks)
        note = f"it is over on host {context.host} (node {context.node})"
        return [
            wire.Waiting("operation", key, key.in_words[: wire.MAX_LINE], 0.0, ranks, note=note, signatures=signatures)
        ]
