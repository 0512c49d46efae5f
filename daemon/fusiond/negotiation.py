"""The coordinator: checks that the ranks agree, fixes plans, and tells everybody what did not fit. No I/O.

Node 0's daemon runs it. It takes requests of nodes and returns messages for nodes; it is asked

- before an operation whose signature it has not approved before (an approved all-reduce needs no round trip: a node
  that submitted something else notices by the digest in the data), and always before one that needs the others' sizes;
- for every plan;
- when a node found a disagreement, waited too long, or waits while ranks leave. It then inquires what every rank has
  submitted, and sends everybody the same sentence, which says which rank disagrees about what, or who is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from fusion_rt import algorithms, wire
from fusion_rt.settings import Settings
from fusion_rt.topology import Topology
from fusion_rt.wire import OpKey
from fusiond import planning
from fusiond.handing_over import Inherited
from fusiond.participants import Participants
from fusiond.waiting import stragglers

Outgoing = list[tuple[int, wire.PeerMessage]]
PlanKey = tuple[int, str, int]  # process set, group, clock

# Kinds in which every node contributes to every result: data that does not match is noticed before anything completes.
DIRECT_KINDS = frozenset({"allreduce", "reducescatter", "barrier"})


@dataclass
class _Pending:
    """An operation that some nodes have asked for, or that an inquiry is about.

    Attributes:
        waited: seconds, at most, as nodes have told.
        ending: its time is up, and it is being found out where those are that are missing.
        where: that, once it is known.
    """

    requests: dict[int, wire.Request] = field(default_factory=dict)
    reports: dict[int, Mapping[int, wire.Signature]] | None = None
    traffic: dict[int, Sequence[wire.Traffic]] = field(default_factory=dict)
    waited: float = 0.0
    ending: bool = False
    where: str | None = None


@dataclass
class _PendingPlan:
    since: float
    proposals: dict[int, wire.Proposal] = field(default_factory=dict)
    warned: bool = False
    ending: bool = False


@dataclass
class _Made:
    """The plan in force of a group: what its first rank proposed, and who has it."""

    plan: wire.Plan
    proposal_rank: int
    proposal: wire.Proposal
    holders: set[int]


class Coordinator:
    """Decides for all nodes.

    Args:
        participants: shared with the engine, which keeps it up to date.
        settings: largest bucket, and time-outs.
        clock: now, in seconds.
        warn: tells people that something is late.
        locate: finds out where ranks are, calls back with lines to go after a sentence, and sends what that returns, or
            returns it at once.

    Attributes:
        seconds_per_byte: of the links to other nodes, as far as they have been measured.
    """

    def __init__(
        self,
        participants: Participants,
        settings: Settings,
        clock: Callable[[], float],
        warn: Callable[[str], None],
        locate: Callable[[Sequence[int], Callable[[str], Outgoing]], Outgoing] = lambda ranks, finish: finish(""),
    ) -> None:
        self._participants = participants
        self._topology = participants.topology
        self._settings = settings
        self._clock = clock
        self._warn = warn
        self._locate = locate
        self._approved: set[tuple[int, int]] = set()  # process set and digest
        self._pending: dict[OpKey, _Pending] = {}
        self._plans: dict[PlanKey, _PendingPlan] = {}
        self._made: dict[tuple[int, str], _Made] = {}
        self._next_plan = 1
        self._verdicts: dict[OpKey, wire.Verdict] = {}  # of the view before, which some nodes may not have heard
        self.seconds_per_byte: dict[int, float] = {}

    def take_over(self, inherited: Inherited) -> Outgoing:
        """Goes on where the coordinator of the view before stopped."""
        self._next_plan = inherited.next_plan
        self._approved |= inherited.approved
        self._verdicts = inherited.verdicts
        for plan_key, made in inherited.plans.items():
            first = min(made.proposals, default=-1)
            if first >= 0:  # else nobody who proposed it is left
                members = self._participants.members(plan_key[0])
                self._made[plan_key] = _Made(made.plan, first, made.proposals[first], set(members.set.ranks))
        return list(inherited.news)

    def handle(self, node: int, message: wire.PeerMessage) -> Outgoing | None:
        """What to send because of a node's message; None when no node of this job would send it."""
        if not self._makes_sense(node, message):
            return None
        if isinstance(message, wire.PlanRequest):
            process_set = message.proposal.process_set
        else:
            assert isinstance(message, (wire.Request, wire.Mismatch, wire.Report))
            process_set = message.key.process_set
        if process_set not in self._participants:  # it has been removed since
            return []
        if isinstance(message, wire.Request):
            return self.request(node, message)
        if isinstance(message, wire.Mismatch):
            return self.mismatch(message)
        if isinstance(message, wire.Report):
            return self.report(node, message)
        return self.plan_request(message)

    def _makes_sense(self, node: int, message: wire.PeerMessage) -> bool:
        """Whether a message is about a process set that there is or was, and about ranks of its sender."""
        if isinstance(message, wire.PlanRequest):
            process_set, ranks = message.proposal.process_set, {message.rank}
        elif isinstance(message, (wire.Request, wire.Report)):
            process_set, ranks = message.key.process_set, set(message.signatures)
        elif isinstance(message, wire.Mismatch):
            process_set, ranks = message.key.process_set, set()
        else:
            return False
        if process_set not in self._participants:
            return self._participants.is_over(process_set)
        members = self._participants.members(process_set)
        local = set(members.set.local(self._topology, node))
        if isinstance(message, wire.Request):
            awaited = {rank for rank in local if self._participants.is_awaited(rank, members)}
            return bool(ranks) and ranks <= local and awaited <= ranks
        return ranks <= local

    def request(self, node: int, request: wire.Request) -> Outgoing:
        """A node's local ranks have all submitted an operation."""
        key = request.key
        signature = next(iter(request.signatures.values()))
        if key in self._verdicts:
            return [(node, self._verdicts[key])]
        approved = signature.kind in DIRECT_KINDS and (key.process_set, wire.digest(signature)) in self._approved
        if approved and key not in self._pending:
            return [(node, wire.Verdict(key))]
        pending = self._pending.setdefault(key, _Pending())
        pending.requests[node] = request
        refusal = self._refused_after_join(key, pending)
        if refusal:
            return refusal
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
        pending.traffic[node] = report.traffic
        nodes = self._nodes(report.key)
        if len(pending.reports) < len(nodes):
            return []
        waited = pending.waited
        missing = self._absent(report.key, pending)
        late = waited > self._settings.operation_timeout
        if pending.where is not None and not missing:  # they have come while it was found out where they are
            pending.ending, pending.where, late = False, None, False
        error = self._explain(report.key, pending, waited if late else 0.0)
        if error and not (late and missing and pending.where is None):
            del self._pending[report.key]
            return [(n, wire.OpFailed(report.key, error + (pending.where or ""))) for n in nodes]
        if not error and waited > self._settings.stall_warning_time:
            self._stalled(self._explain(report.key, pending, waited), missing)
        pending.reports, pending.waited = None, 0.0
        pending.traffic.clear()
        if error and not pending.ending:
            pending.ending = True
            return self._locate(missing, partial(self._look_again, report.key, pending, waited))
        if not pending.requests and not pending.ending:
            del self._pending[report.key]
        return self._decide(report.key, pending)

    def _look_again(self, key: OpKey, pending: _Pending, waited: float, where: str) -> Outgoing:
        """It is known where those are that are missing; they may have come meanwhile, and so it is asked once more."""
        if self._pending.get(key) is not pending:  # it has been decided
            return []
        pending.where, pending.waited = where, max(pending.waited, waited)
        return self._inquire(key, pending)

    def _stalled(self, text: str, missing: Sequence[int]) -> None:
        """Warns of something, with where the ranks are that it waits for."""

        def warn(where: str) -> Outgoing:
            self._warn(text + where)
            return []

        self._locate(missing, warn)

    def joined(self) -> Outgoing:
        """A rank has joined: what waits for it goes on without it, or fails."""
        out: Outgoing = []
        for key, pending in list(self._pending.items()):
            if pending.requests and key in self._pending:
                out += self._refused_after_join(key, pending) or self._decide(key, pending)
        for plan_key, waiting in list(self._plans.items()):
            out += self._decide_plan(plan_key, waiting)
        return out

    def plan_request(self, request: wire.PlanRequest) -> Outgoing:
        """One rank proposes a plan."""
        proposal = request.proposal
        plan_key = (proposal.process_set, proposal.group, proposal.clock)
        made = self._made.get(plan_key[:2])
        if made is not None and request.rank not in made.holders:  # it had joined while the others made their plan
            error = planning.disagreement({made.proposal_rank: made.proposal, request.rank: proposal}, self._topology)
            made.holders.add(request.rank)
            verdict = wire.PlanVerdict(*plan_key, None if error else made.plan, error)
            return [(self._topology.node_of(request.rank), verdict)]
        pending = self._plans.setdefault(plan_key, _PendingPlan(self._clock()))
        pending.proposals[request.rank] = proposal
        return self._decide_plan(plan_key, pending)

    def _decide_plan(self, plan_key: PlanKey, pending: _PendingPlan) -> Outgoing:
        """Makes the plan once every rank that is awaited has proposed it."""
        algorithm = next(iter(pending.proposals.values())).reduction.algorithm
        if algorithms.parse(algorithm).synchronous:
            why = self._participants.why_not_since(algorithm, self._participants.members(plan_key[0]))
            if why:
                return self._plan_verdict(plan_key, None, f"no plan for {plan_key[1]!r}: {why}")
        if self._missing(plan_key, pending):
            return []
        error = planning.disagreement(pending.proposals, self._topology)
        if error:
            return self._plan_verdict(plan_key, None, error)
        first = min(pending.proposals)
        merged = planning.merge(pending.proposals)
        threshold = self._settings.fusion_threshold
        plan = planning.make_plan(self._next_plan, merged, threshold, self._homes(merged))
        self._next_plan += 1
        self._made[plan_key[:2]] = _Made(plan, first, pending.proposals[first], set(pending.proposals))
        return self._plan_verdict(plan_key, plan, "")

    def _homes(self, proposal: wire.Proposal) -> dict[int, float]:
        """The nodes that are to have homes of the proposal's buckets, and their shares; none if these have no homes of
        their own. Collaborating workers may be anywhere, so there a node's share is what its link carries."""
        spec = algorithms.parse(proposal.reduction.algorithm)
        if spec.place is not algorithms.Place.SHARD:
            return {}
        nodes = self._participants.members(proposal.process_set).nodes
        if self._settings.shard_hosts:
            hosts = self._participants.topology.homes(self._settings.shard_hosts)
            nodes = tuple(node for node in hosts if node not in self._participants.lost_nodes)
        times = self.seconds_per_byte
        if not isinstance(spec, algorithms.Collaborative) or not all(time > 0 for time in times.values()) or not times:
            return dict.fromkeys(nodes, 1.0)
        fastest = min(times.values())  # of the first node itself, which was not measured, we know no better
        return {node: fastest / times.get(node, fastest) for node in nodes}

    def _missing(self, plan_key: PlanKey, pending: _PendingPlan) -> list[int]:
        members = self._participants.members(plan_key[0])
        awaited = [rank for rank in members.set.ranks if self._participants.is_awaited(rank, members)]
        return [rank for rank in awaited if rank not in pending.proposals]

    def tick(self) -> Outgoing:
        """Ends proposals that have waited too long, or wait for a rank that has left."""
        out: Outgoing = []
        for plan_key, pending in list(self._plans.items()):
            missing = self._missing(plan_key, pending)
            waited = self._clock() - pending.since
            gone = [rank for rank in missing if rank in self._participants.departed]
            who = self._topology.describe(gone or missing)
            if gone and waited > 1:
                out += self._plan_verdict(plan_key, None, f"no plan for {plan_key[1]!r}: {who} has left the job")
            elif waited > self._settings.operation_timeout and not pending.ending:
                pending.ending = True
                error = f"no plan for {plan_key[1]!r}: {who} did not propose it within {waited:.0f} s"
                out += self._locate(missing, partial(self._end_plan, plan_key, pending, error))
            elif waited > self._settings.stall_warning_time and not pending.warned:
                pending.warned = True
                self._stalled(f"the plan of {plan_key[1]!r} has waited {waited:.0f} s for {who}", missing)
        return out

    def _end_plan(self, plan_key: PlanKey, pending: _PendingPlan, error: str, where: str) -> Outgoing:
        if self._plans.get(plan_key) is not pending:  # it has been made meanwhile
            return []
        return self._plan_verdict(plan_key, None, error + where)

    def under_way(self) -> list[wire.Waiting]:
        """The plans that wait for proposals, as who asks is told."""
        return [
            wire.Waiting(
                "plan",
                OpKey(process_set, 0, group, clock),
                f"the plan of {group!r}"[: wire.MAX_LINE],
                self._clock() - pending.since,
                awaits=tuple(self._missing((process_set, group, clock), pending)),
            )
            for (process_set, group, clock), pending in self._plans.items()
        ]

    def forget(self, key: OpKey) -> None:
        """An operation has failed."""
        self._pending.pop(key, None)

    def forget_set(self, process_set: int) -> None:
        """A process set has been removed."""
        for key in [key for key in self._pending if key.process_set == process_set]:
            del self._pending[key]
        for plan_key in [key for key in self._plans if key[0] == process_set]:
            del self._plans[plan_key]
        for made in [key for key in self._made if key[0] == process_set]:
            del self._made[made]

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
        members = self._participants.members(key.process_set)
        awaited = members.nodes if signature.kind == "join" else self._participants.awaited_nodes(members)
        if any(node not in pending.requests for node in awaited):
            return []
        del self._pending[key]
        verdict = self._verdict(key, pending)
        self._approved.add(agreed)
        out: Outgoing = []
        for node in members.nodes:
            asked = node in pending.requests
            out.append((node, verdict if asked else wire.Verdict(key, signature=signature)))
        for other in list(self._pending.items()) if direct else ():
            out += self._decide(*other)
        return out

    def _refused_after_join(self, key: OpKey, pending: _Pending) -> Outgoing:
        """Fails an operation that ranks which have joined cannot take part in, and that cannot do without them."""
        members = self._participants.members(key.process_set)
        submitted = self._submitted(pending)
        kind = next(iter(submitted.values())).kind
        why = self._participants.why_not(kind, members, submitted)
        if not why:
            return []
        del self._pending[key]
        return [(node, wire.OpFailed(key, f"tensor {key.name!r}: {why}")) for node in members.nodes]

    def _nodes(self, key: OpKey) -> tuple[int, ...]:
        return self._participants.members(key.process_set).nodes

    @staticmethod
    def _submitted(pending: _Pending) -> dict[int, wire.Signature]:
        return {rank: s for request in pending.requests.values() for rank, s in request.signatures.items()}

    def _inquire(self, key: OpKey, pending: _Pending) -> Outgoing:
        if pending.reports is not None:  # an inquiry is under way already
            return []
        pending.reports = {}
        return [(node, wire.Inquiry(key)) for node in self._nodes(key)]

    def _verdict(self, key: OpKey, pending: _Pending) -> wire.Verdict:
        signatures = self._submitted(pending)
        if next(iter(signatures.values())).kind == "join":
            return wire.Verdict(key, tuple(self._participants.joined[-1:]))
        members = [r for r in self._participants.members(key.process_set).set.ranks if r in signatures]
        splits = {rank: s for request in pending.requests.values() for rank, s in request.splits.items()}
        rows = tuple(signatures[rank].shape[0] if signatures[rank].shape else 1 for rank in members)
        return wire.Verdict(key, rows, tuple(splits.get(rank, ()) for rank in members))

    def _plan_verdict(self, plan_key: PlanKey, plan: wire.Plan | None, error: str) -> Outgoing:
        del self._plans[plan_key]
        verdict = wire.PlanVerdict(*plan_key, plan, error)
        nodes = set(self._participants.members(plan_key[0]).nodes)
        return [(node, verdict) for node in sorted(nodes.union(() if plan is None else plan.homes))]

    def _explain(self, key: OpKey, pending: _Pending, waited: float) -> str:
        text = explain(
            key, self._known(pending), self._awaited(key), self._topology, self._participants.departed, waited
        )
        late = stragglers(pending.traffic) if text and waited else ()
        return "; ".join([text, *(straggler.describe(self._topology) for straggler in late)])

    def _known(self, pending: _Pending) -> dict[int, wire.Signature]:
        """What ranks have submitted, as far as nodes have told."""
        submitted = self._submitted(pending)
        for report in (pending.reports or {}).values():
            submitted.update(report)
        return submitted

    def _awaited(self, key: OpKey) -> list[int]:
        members = self._participants.members(key.process_set)
        return [rank for rank in members.set.ranks if self._participants.is_awaited(rank, members)]

    def _absent(self, key: OpKey, pending: _Pending) -> list[int]:
        """The ranks that an operation waits for."""
        known = self._known(pending)
        return [rank for rank in self._awaited(key) if rank not in known]


def explain(
    key: OpKey,
    submitted: Mapping[int, wire.Signature],
    awaited: Sequence[int],
    topology: Topology,
    departed: set[int],
    waited: float,
) -> str:
    """Why an operation fails: what the ranks submitted under its name, or which of them did not.

    Args:
        awaited: the ranks without which it cannot run.
        waited: seconds, or 0 while its time is not up.

    Returns: a sentence; empty when nothing is wrong, as far as that tells.
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
    missing = [rank for rank in awaited if rank not in submitted]
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
    if signature.ranks:
        words.append(f"of the ranks {list(signature.ranks)}")
    if signature.parts:
        words.append(f"of {len(signature.parts)} tensors {[list(shape) for shape in signature.parts[:8]]}")
    if signature.dtype:
        words.append(f"{signature.dtype} {list(signature.shape)}")
    if (signature.prescale, signature.postscale) != (1.0, 1.0):
        words.append(f"scaled by {signature.prescale:g} before and {signature.postscale:g} after")
    if signature.codec != "dense":
        words.append(f"with {signature.codec}")
    return " ".join(words)
