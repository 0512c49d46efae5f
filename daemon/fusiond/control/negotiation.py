"""The coordinator: checks that the ranks agree, fixes plans, and tells all nodes its decisions. No I/O.

Node 0's daemon runs it, until a view has another coordinator. It takes requests of nodes and returns messages for
nodes; it is asked

- before an operation whose signature it has not approved before (an approved all-reduce needs no round trip: a node
  that submitted something else notices by the digest in the data), and always before one that needs the others' sizes;
- for every plan;
- when a node found a disagreement, waited too long, or waits while ranks leave: then it inquires (`inquiries`), and
  the answers end the operation or let it go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from fusion_rt import algorithms, wire
from fusion_rt.core import plugins
from fusion_rt.settings import Settings
from fusion_rt.wire import OpKey
from fusiond.control import planning
from fusiond.control.handover import Inherited
from fusiond.control.inquiries import Inquiries
from fusiond.control.questions import Questions
from fusiond.control.waiting import Subject, explain_order
from fusiond.core.participants import Participants

Outgoing: TypeAlias = list[tuple[int, wire.PeerMessage]]
PlanKey: TypeAlias = tuple[int, str, int]  # process set, group, clock


class Approved:
    """The signatures, by process set and digest, that all ranks have agreed on, in memory that does not grow.

    One that was added is always found. Few others are found, too, and that does no harm: ranks that submit something
    else under a name notice by the digest in the data, as they do where both signatures were approved.
    """

    _BITS = 1 << 20

    def __init__(self) -> None:
        self._bits = bytearray(self._BITS // 8)
        self._count = 0

    def add(self, agreed: tuple[int, int]) -> None:
        self._count += agreed not in self
        place, bit = self._place(agreed)
        self._bits[place] |= bit

    def __contains__(self, agreed: tuple[int, int]) -> bool:
        place, bit = self._place(agreed)
        return bool(self._bits[place] & bit)

    def __len__(self) -> int:
        return self._count

    def _place(self, agreed: tuple[int, int]) -> tuple[int, int]:
        number = hash(agreed) % self._BITS
        return number // 8, 1 << number % 8


@dataclass
class _Made:
    """The active plan of a group: its first rank's proposal, and the ranks that have it."""

    plan: wire.Plan
    proposal_rank: int
    proposal: wire.Proposal
    holders: set[int]


class Nodes(Protocol):
    """The way from a coordinator to the nodes, and to people."""

    def send(self, messages: Outgoing) -> None:
        """Sends messages to nodes that are not the answer to one."""

    def warn(self, text: str) -> None:
        """Tells people that something is late."""


class Coordinator:
    """Decides for all nodes.

    Args:
        participants: shared with the engine, which keeps it up to date.
        settings: largest bucket, and time-outs.
        questions: ask the nodes about disputed and late operations.
        nodes: are told.

    Attributes:
        seconds_per_byte: of the links to other nodes, as far as they have been measured.
    """

    def __init__(
        self,
        participants: Participants,
        settings: Settings,
        questions: Questions,
        nodes: Nodes,
    ) -> None:
        self._participants = participants
        self._topology = participants.topology
        self._settings = settings
        self._approved = Approved()
        self._pending: dict[OpKey, dict[int, wire.Request]] = {}  # questions of nodes without an answer yet
        self._inquiries = Inquiries(participants, settings, questions, self)
        self._nodes = nodes
        self.warn = nodes.warn
        self._plans: dict[PlanKey, dict[int, wire.Proposal]] = {}  # proposals, by rank
        self._made: dict[tuple[int, str], _Made] = {}
        self._misnamed: dict[tuple[int, str], str] = {}  # why there are no plans of a group
        self._next_plan = 1
        self._verdicts: dict[OpKey, wire.Verdict] = {}  # of the view before, which some nodes may not have heard
        self.seconds_per_byte: dict[int, float] = {}

    @property
    def has_plans(self) -> bool:
        """Tells whether any plan is active."""
        return bool(self._made)

    def take_over(self, inherited: Inherited) -> Outgoing:
        """Goes on where the coordinator of the view before stopped."""
        self._next_plan = inherited.next_plan
        for agreed in inherited.approved:
            self._approved.add(agreed)
        self._verdicts = inherited.verdicts
        for plan_key, made in inherited.plans.items():
            first = min(made.proposals, default=-1)
            if first >= 0:  # else no node that proposed it is left
                members = self._participants.members(plan_key[0])
                self._made[plan_key] = _Made(made.plan, first, made.proposals[first], set(members.set.ranks))
        return list(inherited.news)

    def handle(self, node: int, message: wire.PeerMessage) -> Outgoing | None:
        """Returns the messages to send after a node's message; None when no node of this job would send it."""
        if isinstance(message, wire.PlanRequest):
            process_set, ranks = message.proposal.process_set, {message.rank}
        elif isinstance(message, wire.Request):
            process_set, ranks = message.key.process_set, set(message.signatures)
        elif isinstance(message, wire.Mismatch):
            process_set, ranks = message.key.process_set, set()
        else:
            return None
        if process_set not in self._participants:  # it has been removed since, or never was there
            return [] if self._participants.is_over(process_set) else None
        members = self._participants.members(process_set)
        local = set(members.set.local(self._topology, node))
        if not ranks <= local:
            return None
        if isinstance(message, wire.Request):
            complete = ranks.issuperset(local.intersection(self._participants.awaited(members)))
            return self.request(node, message) if ranks and complete else None
        return self.mismatch(message) if isinstance(message, wire.Mismatch) else self.plan_request(message)

    def request(self, node: int, request: wire.Request) -> Outgoing:
        """A node's local ranks have all submitted an operation."""
        key = request.key
        signature = next(iter(request.signatures.values()))
        if key in self._verdicts:
            return [(node, self._verdicts[key])]
        approved = wire.KINDS[signature.kind].complete and (key.process_set, wire.digest(signature)) in self._approved
        if approved and key not in self._pending and ("operation", key) not in self._inquiries:
            return [(node, wire.Verdict(key))]
        for other in wire.in_its_place(key):
            if other in self._pending:
                return self._refuse_order(other, key, request)
        self._pending.setdefault(key, {})[node] = request
        refusal = self._refused_after_join(key)
        if refusal:
            return refusal
        if any(wire.digest(s) != wire.digest(signature) for s in self._submitted(key).values()):
            self._inquiries.inquire(("operation", key))
            return []
        return self._decide(key)

    def _refuse_order(self, other: OpKey, key: OpKey, request: wire.Request) -> Outgoing:
        """Fails two operations of different kinds without a name that should be one."""
        submitted = {other: self._submitted(other), key: request.signatures}
        why = explain_order(submitted, self._topology)
        nodes = self._participants.members(key.process_set).nodes
        for each in submitted:
            self.forget(each)
        return [(node, wire.OpFailed(each, why)) for each in submitted for node in nodes]

    def mismatch(self, message: wire.Mismatch) -> Outgoing:
        """A node found that ranks disagree about something, or has waited too long for some."""
        if message.kind == "operation" or _plan_key(message.key) in self._plans:  # else it has been decided
            self._inquiries.inquire((message.kind, message.key), message.waited)
        return []

    def submitted(self, subject: Subject) -> Mapping[int, wire.Signature | None]:
        """See `Inquirer`."""
        kind, key = subject
        return self._submitted(key) if kind == "operation" else dict.fromkeys(self._plans.get(_plan_key(key), ()))

    def conclude(self, subject: Subject, error: str, missing: Sequence[int]) -> None:
        """An inquiry is over: its subject fails, or goes on if nothing is wrong."""
        kind, key = subject
        if error and kind == "plan":
            self._nodes.send(self._plan_verdict(_plan_key(key), None, error))
        elif error:
            self.forget(key)
            nodes = self._participants.members(key.process_set).nodes
            self._nodes.send([(node, wire.OpFailed(key, error, tuple(missing))) for node in nodes])
        elif kind == "operation":
            self._nodes.send(self._decide(key))

    def joined(self) -> Outgoing:
        """A rank has joined: operations that wait for it go on without it, or fail."""
        out: Outgoing = []
        for key in list(self._pending):
            out += self._refused_after_join(key) or self._decide(key)
        for plan_key in list(self._plans):
            out += self._decide_plan(plan_key)
        return out

    def plan_request(self, request: wire.PlanRequest) -> Outgoing:
        """One rank proposes a plan."""
        proposal = request.proposal
        plan_key = (proposal.process_set, proposal.group, proposal.clock)
        made = self._made.get(plan_key[:2])
        # It had joined while the others made their plan.
        if made is not None and request.rank not in made.holders and not proposal.anew:
            error = planning.disagreement({made.proposal_rank: made.proposal, request.rank: proposal}, self._topology)
            made.holders.add(request.rank)
            verdict = wire.PlanVerdict(*plan_key, None if error else made.plan, error)
            return [(self._topology.node_of(request.rank), verdict)]
        if why := self._misnamed.get(plan_key[:2]):
            return [(self._topology.node_of(request.rank), wire.PlanVerdict(*plan_key, None, why))]
        self._plans.setdefault(plan_key, {})[request.rank] = proposal
        return self._refused_order(plan_key, request) or self._decide_plan(plan_key)

    def _refused_order(self, plan_key: PlanKey, request: wire.PlanRequest) -> Outgoing:
        """Refuses the plans of two groups if one rank has made the same optimizer for one of them, and another rank for
        the other: with optimizers in different orders, each would wait for the other."""
        proposal = request.proposal
        for other, proposals in list(self._plans.items()):
            for rank, theirs in proposals.items() if other[0] == plan_key[0] and other[1] != plan_key[1] else ():
                if proposal.identity and theirs.identity == proposal.identity and rank != request.rank:
                    why = planning.misordered({rank: theirs, request.rank: proposal}, self._topology)
                    out: Outgoing = []
                    for each in (other, plan_key):
                        self._misnamed[each[:2]] = why
                        out += self._plan_verdict(each, None, why)
                    return out
        return []

    def _decide_plan(self, plan_key: PlanKey) -> Outgoing:
        """Makes the plan once every rank that is awaited has proposed it."""
        proposals = self._plans[plan_key]
        members = self._participants.members(plan_key[0])
        reduction = next(iter(proposals.values())).reduction
        if lacking := plugins.missing(reduction.packages):
            why = f"no plan for {plan_key[1]!r}: on the node that decides for all {lacking}"
            return self._plan_verdict(plan_key, None, why)
        algorithm = reduction.algorithm
        if algorithms.parse(algorithm).synchronous:
            why = self._participants.why_not_since(algorithm, members)
            if why:
                return self._plan_verdict(plan_key, None, f"no plan for {plan_key[1]!r}: {why}")
        if not proposals.keys() >= set(self._participants.awaited(members)):
            return []
        error = planning.disagreement(proposals, self._topology)
        if error:
            return self._plan_verdict(plan_key, None, error)
        first = min(proposals)
        merged = planning.merge(proposals)
        threshold = self._settings.fusion_threshold
        homes = planning.home_shares(merged, self._participants, self._settings.shard_hosts, self.seconds_per_byte)
        plan = planning.make_plan(self._next_plan, merged, threshold, homes)
        self._next_plan += 1
        self._made[plan_key[:2]] = _Made(plan, first, proposals[first], set(proposals))
        return self._plan_verdict(plan_key, plan, "")

    def end(self) -> None:
        """Another coordinator decides from now on."""
        self._inquiries.end()

    def forget(self, key: OpKey) -> None:
        """An operation has failed."""
        self._pending.pop(key, None)
        self._inquiries.forget(("operation", key))

    def forget_set(self, process_set: int) -> None:
        """A process set has been removed."""
        for key in [key for key in self._pending if key.process_set == process_set]:
            self.forget(key)
        for subject in [subject for subject in self._inquiries if subject[1].process_set == process_set]:
            self._inquiries.forget(subject)
        for plan_key in [key for key in self._plans if key[0] == process_set]:
            del self._plans[plan_key]
        for made in [key for key in self._made if key[0] == process_set]:
            del self._made[made]
        self._misnamed = {key: why for key, why in self._misnamed.items() if key[0] != process_set}

    def statistics(self) -> dict[str, int]:
        """Numbers of `pending` operations and plans, `approved` signatures and `plans` made."""
        return {
            "pending": len({*self._pending, *(key for kind, key in self._inquiries if kind == "operation")})
            + len(self._plans),
            "approved": len(self._approved),
            "plans": self._next_plan - 1,
        }

    def _decide(self, key: OpKey) -> Outgoing:
        """Lets an operation start that all nodes have asked about, or whose signature has been approved meanwhile."""
        requests = self._pending.get(key)
        if requests is None or self._inquiries.awaits_answers(("operation", key)):
            return []
        signature = next(iter(next(iter(requests.values())).signatures.values()))
        agreed = (key.process_set, wire.digest(signature))
        direct = wire.KINDS[signature.kind].complete
        if direct and agreed in self._approved:  # not every node will ask
            self.forget(key)
            return [(node, wire.Verdict(key)) for node in requests]
        members = self._participants.members(key.process_set)
        awaited = members.nodes if signature.kind == "join" else self._participants.awaited_nodes(members)
        if any(node not in requests for node in awaited):
            return []
        verdict = self._verdict(key, requests)
        self.forget(key)
        self._approved.add(agreed)
        out: Outgoing = []
        for node in members.nodes:
            out.append((node, verdict if node in requests else wire.Verdict(key, signature=signature)))
        for other in list(self._pending) if direct else ():
            out += self._decide(other)
        return out

    def _refused_after_join(self, key: OpKey) -> Outgoing:
        """Fails an operation that ranks which have joined cannot take part in, and that cannot do without them."""
        submitted = self._submitted(key)
        if not submitted:  # it has been decided
            return []
        members = self._participants.members(key.process_set)
        kind = next(iter(submitted.values())).kind
        why = self._participants.why_not(kind, members, submitted)
        if not why:
            return []
        self.forget(key)
        return [(node, wire.OpFailed(key, f"tensor {key.name!r}: {why}")) for node in members.nodes]

    def _submitted(self, key: OpKey) -> dict[int, wire.Signature]:
        """Returns the ranks' submissions, as far as nodes have asked."""
        requests = self._pending.get(key, {}).values()
        return {rank: signature for request in requests for rank, signature in request.signatures.items()}

    def _verdict(self, key: OpKey, requests: Mapping[int, wire.Request]) -> wire.Verdict:
        signatures = self._submitted(key)
        if next(iter(signatures.values())).kind == "join":
            after = max(clocks for request in requests.values() for clocks in (*request.splits.values(), ()))
            return wire.Verdict(key, (*self._participants.joined[-1:], *after))
        members = [r for r in self._participants.members(key.process_set).set.ranks if r in signatures]
        splits = {rank: s for request in requests.values() for rank, s in request.splits.items()}
        rows = tuple(signatures[rank].shape[0] if signatures[rank].shape else 1 for rank in members)
        return wire.Verdict(key, rows, tuple(splits.get(rank, ()) for rank in members))

    def _plan_verdict(self, plan_key: PlanKey, plan: wire.Plan | None, error: str) -> Outgoing:
        del self._plans[plan_key]
        self._inquiries.forget(("plan", subject_of(plan_key)))
        verdict = wire.PlanVerdict(*plan_key, plan, error)
        nodes = set(self._participants.members(plan_key[0]).nodes)
        return [(node, verdict) for node in sorted(nodes.union(() if plan is None else plan.homes))]


def subject_of(plan_key: PlanKey) -> OpKey:
    """The key of a proposal that waits for a plan."""
    process_set, group, clock = plan_key
    return OpKey(process_set, 0, group, clock)


def _plan_key(key: OpKey) -> PlanKey:
    return key.process_set, key.name, key.clock
