"""The handover to the coordinator of a new view: the nodes' states are put together. No I/O.

The coordinator before may have died at any point: some nodes may have heard its last words, others not. An order that
one node has heard holds for all; one that no node has heard is decided anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fusion_rt import wire
from fusion_rt.wire import OpKey
from fusiond.core.participants import Participants

PLANS_OF_A_VIEW = 1 << 24  # ids of plans of a view begin at its number times this, whatever the view before has given


@dataclass
class Inherited:
    """Beginning of a coordinator: the state that it takes over from the one before.

    Attributes:
        next_plan: id of the next plan.
        approved: process sets and digests of signatures that all ranks have agreed on.
        verdicts: those that said more than that, by operation.
        plans: the active ones, by process set and group, with all proposals that are known.
        news: orders that nodes have not heard yet.
        open: their questions without an answer.
    """

    next_plan: int = 1
    approved: set[tuple[int, int]] = field(default_factory=set)
    verdicts: dict[OpKey, wire.Verdict] = field(default_factory=dict)
    plans: dict[tuple[int, str], wire.MadePlan] = field(default_factory=dict)
    news: list[tuple[int, wire.PeerMessage]] = field(default_factory=list)
    open: list[tuple[int, wire.PeerMessage]] = field(default_factory=list)


def settle_sets(handovers: Mapping[int, wire.Handover], participants: Participants) -> tuple[int, tuple[int, ...]]:
    """The id of the next process set, and the ids of those that all nodes with workers have. A set that only some have
    heard of was never used, and one that only some have removed is removed: both operations have failed."""
    nodes = participants.everyone.nodes
    known = [set(handover.sets) for node, handover in handovers.items() if node in nodes]
    return max(handover.next_set for handover in handovers.values()), tuple(sorted(set.intersection(*known)))


def inherit(handovers: Mapping[int, wire.Handover], participants: Participants, number: int) -> Inherited:
    """Puts together the handovers of the nodes of view `number`; the process sets are settled."""
    found = Inherited()
    found.next_plan = max(1, number * PLANS_OF_A_VIEW, *(handover.last_plan + 1 for handover in handovers.values()))
    for handover in handovers.values():
        found.approved.update((s.process_set, wire.digest(s)) for s in handover.approved)
        found.verdicts.update((verdict.key, verdict) for verdict in handover.verdicts)
    _plans(handovers, participants, found)
    _failed(handovers, participants, found)
    for node, handover in handovers.items():
        asked: list[wire.PeerMessage] = [*handover.requests, *handover.mismatches, *handover.proposals]
        found.open += [(node, message) for message in asked]
    return found


def _plans(handovers: Mapping[int, wire.Handover], participants: Participants, found: Inherited) -> None:
    """The latest plan of each group; nodes that have not heard of it are told."""
    heard: dict[int, set[int]] = {}
    for node, handover in handovers.items():
        for made in handover.plans:
            heard.setdefault(made.plan.id, set()).add(node)
            key = (made.plan.process_set, made.plan.group)
            known = found.plans.get(key)
            if known is None or known.plan.id < made.plan.id:
                found.plans[key] = made
            elif known.plan.id == made.plan.id:
                proposals = {**known.proposals, **made.proposals}
                found.plans[key] = wire.MadePlan(max(known.clock, made.clock), known.plan, proposals)
    for (process_set, group), made in list(found.plans.items()):
        if process_set not in participants:
            del found.plans[process_set, group]
            continue
        nodes = {*participants.members(process_set).nodes, *made.plan.homes}.intersection(handovers)
        verdict = wire.PlanVerdict(process_set, group, made.clock, made.plan)
        found.news += [(node, verdict) for node in sorted(nodes - heard[made.plan.id])]


def _failed(handovers: Mapping[int, wire.Handover], participants: Participants, found: Inherited) -> None:
    """Fails operations on all nodes that have failed on some."""
    heard: dict[tuple[object, ...], set[int]] = {}
    texts: dict[tuple[object, ...], wire.OpFailed | wire.PlanVerdict] = {}
    for node, handover in handovers.items():
        for failed in handover.failed:
            one = isinstance(failed, wire.OpFailed)
            key = (*failed.key,) if one else (failed.process_set, failed.group, failed.clock)  # type: ignore[union-attr]
            heard.setdefault(key, set()).add(node)
            texts.setdefault(key, failed)
    for key, nodes in heard.items():
        process_set = key[0]
        assert isinstance(process_set, int)
        if process_set in participants:
            missing = set(participants.members(process_set).nodes).intersection(handovers) - nodes
            found.news += [(node, texts[key]) for node in sorted(missing)]
