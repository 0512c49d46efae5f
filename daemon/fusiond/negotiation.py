"""The coordinator: checks that the ranks agree, fixes plans, and tells everybody what did not fit. No I/O.

Node 0's daemon runs it. It takes requests of nodes and returns messages for nodes; it is asked

- before an operation whose signature it has not approved before (an approved all-reduce needs no round trip: a node
  that submitted something else notices by the digest in the data), and always before one that needs the others' sizes;
- for every plan;
- when a node found a disagreement, waited too long, or waits while ranks leave. It then inquires what every rank has
  submitted, and sends everybody the same sentence, which says which rank disagrees about what, or who is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fusion_rt import wire
from fusion_rt.topology import ProcessSet, Topology
from fusion_rt.wire import OpKey
from fusiond import planning

Outgoing = list[tuple[int, wire.PeerMessage]]
PlanKey = tuple[int, str, int]  # process set, group, clock

# Kinds in which every node contributes to every result: data that does not match is noticed before anything completes.
DIRECT_KINDS = frozenset({"allreduce", "reducescatter", "barrier"})


@dataclass
class _Pending:
    """An operation that some nodes have asked for, or that an inquiry is about."""

    requests: dict[int, wire.Request] = field(default_factory=dict)
    reports: dict[int, Mapping[int, wire.Signature]] | None = None
    waited: float = 0.0


@dataclass
class _PendingPlan:
    since: float
    proposals: dict[int, wire.Proposal] = field(default_factory=dict)


class Coordinator:
    """Decides for all nodes.

    Args:
        topology: of this membership epoch.
        process_sets: by id; shared with the engine.
        threshold: largest bucket in bytes.
        timeout: seconds that a proposal may wait for other ranks.
        clock: now, in seconds.
    """

    def __init__(
        self,
        topology: Topology,
        process_sets: Mapping[int, ProcessSet],
        threshold: int,
        timeout: float,
        clock: Callable[[], float],
    ) -> None:
        self._topology = topology
        self._sets = process_sets
        self._threshold = threshold
        self._timeout = timeout
        self._clock = clock
        self._approved: set[tuple[int, int]] = set()  # process set and digest
        self._pending: dict[OpKey, _Pending] = {}
        self._plans: dict[PlanKey, _PendingPlan] = {}
        self._next_plan = 1
        self.departed: set[int] = set()

    def request(self, node: int, request: wire.Request) -> Outgoing:
        """A node's local ranks have all submitted an operation."""
        key = request.key
        signature = next(iter(request.signatures.values()))
        approved = signature.kind in DIRECT_KINDS and (key.process_set, wire.digest(signature)) in self._approved
        if approved and key not in self._pending:
            return [(node, wire.Verdict(key))]
        pending = self._pending.setdefault(key, _Pending())
        pending.requests[node] = request
        if any(wire.digest(s) != wire.digest(signature) for s in self._submitted(pending).values()):
            return self._inquire(key, pending)
        return self._decide(key, pending)

    def mismatch(self, message: wire.Mismatch) -> Outgoing:
        """A node found that ranks disagree about an operation, or has waited too long for some."""
        pending = self._pending.setdefault(message.key, _Pending())
        pending.waited = max(pending.waited, message.waited)
        return self._inquire(message.key, pending)

    def report(self, node: int, report: wire.Report) -> Outgoing:
        """A node answers an inquiry."""
        pending = self._pending.get(report.key)
        if pending is None or pending.reports is None:
            return []
        pending.reports[node] = report.signatures
        nodes = self._nodes(report.key)
        if len(pending.reports) < len(nodes):
            return []
        error = self._explain(report.key, pending)
        if error:
            del self._pending[report.key]
            return [(n, wire.OpFailed(report.key, error)) for n in nodes]
        pending.reports, pending.waited = None, 0.0
        if not pending.requests:
            del self._pending[report.key]
        return self._decide(report.key, pending)

    def plan_request(self, request: wire.PlanRequest) -> Outgoing:
        """One rank proposes a plan."""
        proposal = request.proposal
        plan_key = (proposal.process_set, proposal.group, proposal.clock)
        pending = self._plans.setdefault(plan_key, _PendingPlan(self._clock()))
        pending.proposals[request.rank] = proposal
        members = self._sets[proposal.process_set].ranks
        if len(pending.proposals) < len(members):
            return []
        error = planning.disagreement(pending.proposals, self._topology)
        if error:
            return self._plan_verdict(plan_key, None, error)
        plan = planning.make_plan(self._next_plan, pending.proposals[members[0]], self._threshold)
        self._next_plan += 1
        return self._plan_verdict(plan_key, plan, "")

    def tick(self) -> Outgoing:
        """Ends proposals that have waited too long, or wait for a rank that has left."""
        out: Outgoing = []
        for plan_key, pending in list(self._plans.items()):
            missing = [r for r in self._sets[plan_key[0]].ranks if r not in pending.proposals]
            waited = self._clock() - pending.since
            gone = [rank for rank in missing if rank in self.departed]
            if waited > self._timeout or (gone and waited > 1):
                who = self._topology.describe(gone or missing)
                why = "has left the job" if gone else f"did not propose it within {waited:.0f} s"
                out += self._plan_verdict(plan_key, None, f"no plan for {plan_key[1]!r}: {who} {why}")
        return out

    @property
    def idle(self) -> bool:
        """Whether no proposal waits for other ranks, so that time cannot end anything."""
        return not self._plans

    def statistics(self) -> dict[str, int]:
        """Numbers of `pending` operations and plans, `approved` signatures and `plans` made."""
        return {
            "pending": len(self._pending) + len(self._plans),
            "approved": len(self._approved),
            "plans": self._next_plan - 1,
        }

    def _decide(self, key: OpKey, pending: _Pending) -> Outgoing:
        """Lets an operation start that all nodes have asked about, or whose signature has been approved meanwhile."""
        if not pending.requests or pending.reports is not None:
            return []
        signature = next(iter(next(iter(pending.requests.values())).signatures.values()))
        agreed = (key.process_set, wire.digest(signature))
        direct = signature.kind in DIRECT_KINDS
        if direct and agreed in self._approved:  # not every node will ask
            del self._pending[key]
            return [(node, wire.Verdict(key)) for node in pending.requests]
        nodes = self._nodes(key)
        if len(pending.requests) < len(nodes):
            return []
        del self._pending[key]
        verdict = self._verdict(key, pending)
        self._approved.add(agreed)
        out: Outgoing = [(node, verdict) for node in nodes]
        for other in list(self._pending.items()) if direct else ():
            out += self._decide(*other)
        return out

    def _nodes(self, key: OpKey) -> tuple[int, ...]:
        return self._sets[key.process_set].nodes(self._topology)

    @staticmethod
    def _submitted(pending: _Pending) -> dict[int, wire.Signature]:
        return {rank: s for request in pending.requests.values() for rank, s in request.signatures.items()}

    def _inquire(self, key: OpKey, pending: _Pending) -> Outgoing:
        if pending.reports is not None:  # an inquiry is under way already
            return []
        pending.reports = {}
        return [(node, wire.Inquiry(key)) for node in self._nodes(key)]

    def _verdict(self, key: OpKey, pending: _Pending) -> wire.Verdict:
        members = self._sets[key.process_set].ranks
        signatures = self._submitted(pending)
        splits = {rank: s for request in pending.requests.values() for rank, s in request.splits.items()}
        rows = tuple(signatures[rank].shape[0] if signatures[rank].shape else 1 for rank in members)
        return wire.Verdict(key, rows, tuple(splits.get(rank, ()) for rank in members))

    def _plan_verdict(self, plan_key: PlanKey, plan: wire.Plan | None, error: str) -> Outgoing:
        del self._plans[plan_key]
        verdict = wire.PlanVerdict(*plan_key, plan, error)
        return [(node, verdict) for node in self._sets[plan_key[0]].nodes(self._topology)]

    def _explain(self, key: OpKey, pending: _Pending) -> str:
        submitted = self._submitted(pending)
        for report in (pending.reports or {}).values():
            submitted.update(report)
        waited = pending.waited if pending.waited > self._timeout else 0.0
        return explain(key, submitted, self._sets[key.process_set], self._topology, self.departed, waited)


def explain(
    key: OpKey,
    submitted: Mapping[int, wire.Signature],
    members: ProcessSet,
    topology: Topology,
    departed: set[int],
    waited: float,
) -> str:
    """Why an operation fails: what the ranks submitted under its name, or which of them did not.

    Empty when nothing is wrong, as far as that tells: nobody has left, and `waited` (s) is 0, so that time is not up.
    """
    what = f"bucket {key.name} of plan {key.plan}" if key.plan else f"tensor {key.name!r}"
    by_signature: dict[wire.Signature, list[int]] = {}
    for rank in sorted(submitted):
        by_signature.setdefault(submitted[rank].common(), []).append(rank)
    if len(by_signature) > 1:
        shown = "; ".join(
            f"{topology.describe(ranks)}: {describe(submitted[ranks[0]])}" for ranks in by_signature.values()
        )
        return f"the ranks do not agree about {what}: {shown}. Every rank has to submit the same operation"
    missing = [rank for rank in members.ranks if rank not in submitted]
    gone = [rank for rank in missing if rank in departed]
    if gone:
        return f"{what} waits for {topology.describe(gone)}, which left the job without submitting it"
    if not waited:
        return ""
    if missing:
        return (
            f"{what} waited {waited:.0f} s for {topology.describe(missing)}, which did not submit it "
            f"(submitted by {topology.describe(submitted)})"
        )
    return f"{what} made no progress for {waited:.0f} s although every rank has submitted it"


def describe(signature: wire.Signature) -> str:
    """A signature in words: `allreduce sum float32 [4, 2]`."""
    words: list[str] = [signature.kind]
    if signature.kind in ("allreduce", "reducescatter"):
        words.append(signature.op)
    if signature.kind == "broadcast":
        words.append(f"from root {signature.root}")
    if signature.dtype:
        words.append(f"{signature.dtype} {list(signature.shape)}")
    if (signature.prescale, signature.postscale) != (1.0, 1.0):
        words.append(f"scaled by {signature.prescale:g} before and {signature.postscale:g} after")
    if signature.codec != "dense":
        words.append(f"with {signature.codec}")
    return " ".join(words)
