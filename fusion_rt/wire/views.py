"""Messages of the mesh by which nodes agree on a view of the job, and hand over to a new coordinator."""

from __future__ import annotations

import msgspec

from fusion_rt.wire.basics import Count, Rank, Text
from fusion_rt.wire.coordinator import Mismatch, OpFailed, PlanRequest, PlanVerdict, Request, Verdict
from fusion_rt.wire.operations import Signature
from fusion_rt.wire.plans import Plan, Proposal


class Loss(msgspec.Struct, frozen=True, array_like=True):
    """The failure of a node, or of one of its workers.

    Attributes:
        rank: the worker; None: the whole node.
        why: a sentence that names the node or the worker.
    """

    node: Rank
    why: Text
    rank: Rank | None = None


class View(msgspec.Struct, frozen=True, array_like=True):
    """The nodes that go on with the job, by the `number`th agreement.

    `lost`: all failures so far, in order. The lowest of the nodes that have workers left is the coordinator.
    """

    number: Count
    nodes: tuple[Rank, ...]
    lost: tuple[Loss, ...] = ()


class Suspected(msgspec.Struct, tag="suspected", array_like=True):
    """To the node that decides: reports failures, as seen from node `by`. `number`: of the sender's view."""

    number: Count
    by: Rank
    losses: tuple[Loss, ...]


class Canvass(msgspec.Struct, tag="canvass", array_like=True):
    """Phase 1 of a Paxos that decides the view of this number; the acceptors are the nodes of the view before.

    `ballot` grows from attempt to attempt, and no two nodes have the same.
    """

    number: Count
    ballot: Count


class Support(msgspec.Struct, tag="support", array_like=True):
    """Answers `Canvass`: the sender accepts nothing of a lower ballot any more.

    Attributes:
        accepted_ballot, accepted: the view that it has accepted so far, and in which ballot; 0 and None if none.
        losses: failures that it has noticed itself.
    """

    number: Count
    ballot: Count
    accepted_ballot: Count = 0
    accepted: View | None = None
    losses: tuple[Loss, ...] = ()


class ViewProposal(msgspec.Struct, tag="view_proposal", array_like=True):
    """Phase 2 of the Paxos: asks the nodes to accept this view."""

    ballot: Count
    view: View


class ViewAnswer(msgspec.Struct, tag="view_answer", array_like=True):
    """Answers `ViewProposal`, and a `Canvass` that is refused.

    Attributes:
        accepts: the sender accepts the view; else it has answered a higher `ballot`.
    """

    number: Count
    ballot: Count
    accepts: bool


class NewView(msgspec.Struct, tag="new_view", array_like=True):
    """Begins a view that has been decided; each node sends this to all others when it begins the view.

    Everything that the node sends after this message belongs to this view.
    """

    view: View


class MadePlan(msgspec.Struct, frozen=True, array_like=True):
    """An active plan: the clock at which it was proposed, and the proposal of the lowest local rank, if one has."""

    clock: Count
    plan: Plan
    proposals: dict[Rank, Proposal]


class Handover(msgspec.Struct, tag="handover", array_like=True):
    """To the coordinator of a new view: the sender's control state, and the requests that it waits for.

    Attributes:
        epoch, number: the membership epoch, and the number of the view.
        next_set, sets: the id of the next process set, and the ranks of the present ones, by id.
        approved: signatures that all ranks have agreed on.
        verdicts: the latest ones with rows, splits or a signature.
        failed: why the latest operations and proposals failed.
        last_plan, plans: the highest id of a plan, and the active plans.
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
    """From the coordinator of a new view, once all nodes have handed over: it decides from now on.

    Process sets that are not in `sets` have been removed, and the next one gets the id `next_set`.
    """

    epoch: Count
    number: Count
    next_set: Count
    sets: tuple[Count, ...]
