"""The mesh: which nodes go on, agreed upon, and what a new coordinator is told."""

from __future__ import annotations

from typing import Annotated

import msgspec

from fusion_rt.wire.basics import MAX_RANKS, Count, Rank, Text
from fusion_rt.wire.coordinator import Mismatch, OpFailed, PlanRequest, PlanVerdict, Request, Verdict
from fusion_rt.wire.operations import Signature
from fusion_rt.wire.plans import Plan, Proposal


class Loss(msgspec.Struct, frozen=True, array_like=True):
    """A node that is lost, or one of its workers.

    Attributes:
        rank: the worker; -1: the whole node.
        why: a sentence that names it.
    """

    node: Rank
    why: Text
    rank: Annotated[int, msgspec.Meta(ge=-1, lt=MAX_RANKS)] = -1


class View(msgspec.Struct, frozen=True, array_like=True):
    """Which nodes go on with the job: the `number`th agreement about it, and all that has been lost so far, in order.
    The lowest of the nodes that have workers left coordinates."""

    number: Count
    nodes: tuple[Rank, ...]
    lost: tuple[Loss, ...] = ()


class Suspected(msgspec.Struct, tag="suspected", array_like=True):
    """To the node that decides: this seems to be lost, as seen from node `by`; the sender's view has this number."""

    number: Count
    by: Rank
    losses: tuple[Loss, ...]


class Canvass(msgspec.Struct, tag="canvass", array_like=True):
    """The sender wants to decide the view of this number: phase 1 of a Paxos whose acceptors are the nodes of the view
    before. `ballot` grows from attempt to attempt, and no two nodes have the same."""

    number: Count
    ballot: Count


class Support(msgspec.Struct, tag="support", array_like=True):
    """Answers `Canvass`: the sender accepts nothing of a lower ballot any more.

    Attributes:
        accepted: what it has accepted so far, and in which ballot; None and 0 if nothing.
        losses: what it has noticed itself.
    """

    number: Count
    ballot: Count
    accepted_ballot: Count = 0
    accepted: View | None = None
    losses: tuple[Loss, ...] = ()


class ViewProposal(msgspec.Struct, tag="view_proposal", array_like=True):
    """Phase 2: the nodes are to accept this view."""

    ballot: Count
    view: View


class ViewAccepted(msgspec.Struct, tag="view_accepted", array_like=True):
    """Answers `ViewProposal`."""

    number: Count
    ballot: Count


class ViewRefused(msgspec.Struct, tag="view_refused", array_like=True):
    """Answers `Canvass` and `ViewProposal`: the sender has answered a higher `ballot`."""

    number: Count
    ballot: Count


class NewView(msgspec.Struct, tag="new_view", array_like=True):
    """A view has been decided. Whoever begins it tells all others: what the sender says from here on is of it."""

    view: View


class MadePlan(msgspec.Struct, frozen=True, array_like=True):
    """A plan in force: the clock at which it was proposed, and what local ranks proposed."""

    clock: Count
    plan: Plan
    proposals: dict[Rank, Proposal]


class Handover(msgspec.Struct, tag="handover", array_like=True):
    """To the coordinator of a new view: what the sender's node knows, and what it waits for.

    Attributes:
        epoch, number: the membership epoch, and the view.
        next_set, sets: the id of the next process set, and the ranks of those that there are.
        approved: signatures that all ranks have agreed on.
        verdicts: the latest that said more than that.
        failed: why the latest operations failed, and the latest proposals.
        last_plan, plans: the highest id of a plan, and the plans in force.
        requests, mismatches, proposals: those without an answer.
    """

    epoch: Count
    number: Count
    next_set: Count
    sets: dict[Count, tuple[Rank, ...]]
    approved: tuple[Signature, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    failed: tuple[OpFailed | PlanVerdict, ...] = ()
    last_plan: Count = 0
    plans: tuple[MadePlan, ...] = ()
    requests: tuple[Request, ...] = ()
    mismatches: tuple[Mismatch, ...] = ()
    proposals: tuple[PlanRequest, ...] = ()


class Settled(msgspec.Struct, tag="settled", array_like=True):
    """From the coordinator of a new view, once all nodes have handed over: it decides from here on. Process sets that
    are not in `sets` are no longer there, and the next one gets the id `next_set`."""

    epoch: Count
    number: Count
    next_set: Count
    sets: tuple[Count, ...]
