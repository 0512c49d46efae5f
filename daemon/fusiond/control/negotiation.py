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
from dataclasses import dataclass, field
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
class _Pending:
    """An operation that nodes have asked about and not been told.

    Attributes:
        requests: by node.
        signature: of the first rank of which a node has asked; `agreed`: its process set and digest.
        differ: another rank has submitted something else.
        missing: nodes that have to ask and have not.
    """

    signature: wire.Signature
    agreed: tuple[int, int]
    missing: set[int]
    requests: dict[int, wire.Request] = field(default_factory=dict)
    differ: bool = False

    def add(self, node: int, request: wire.Request) -> None:
        """Takes in a node's request."""
        self.requests[node] = request
        self.missing.discard(node)
        for signature in request.signatures.values():
            if signature != self.signature and wire.digest(signature) != self.agreed[1]:
                self.differ = True


@dataclass
class _Proposed:
    """Proposals of one plan.

    Attributes:
        kinds: by digest, one of each kind: the lowest rank that has made it, and the proposal.
        ranks: the digest of each rank's.
        missing: ranks that have to propose and have not.
    """

    missing: set[int]
    kinds: dict[bytes, tuple[int, wire.Proposal]] = field(default_factory=dict)
    ranks: dict[int, bytes] = field(default_factory=dict)

    def add(self, rank: int, proposal: wire.Proposal) -> None:
        """Takes in a rank's proposal; a copy of one that is here is not kept."""
        kind = self.ranks[rank] = planning.kind_of(proposal)
        if kind not in self.kinds or rank < self.kinds[kind][0]:
            self.kinds[kind] = rank, proposal
        self.missing.discard(rank)

    def add_alike(self, rank: int, like: int) -> None:
        """Takes in that a rank proposes what another one has."""
        kind = self.ranks[rank] = self.ranks[like]
        lowest, proposal = self.kinds[kind]
        self.kinds[kind] = min(lowest, rank), proposal
        self.missing.discard(rank)

    @property
    def different(self) -> dict[int, wire.Proposal]:
        """One proposal of each kind, by rank; the lowest of all ranks is among them."""
        return dict(self.kinds.values())


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
        self._pending: dict[OpKey, _Pending] = {}
        self._alike: dict[tuple[int, int], set[OpKey]] = {}  # the keys of those with equal signatures
        self._inquiries = Inquiries(participants, settings, questions, self)
        self._nodes = nodes
        self.warn = nodes.warn
        self._plans: dict[PlanKey, _Proposed] = {}
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
        elif isinstance(message, wire.PlanRequestAlike):
            process_set, ranks = message.process_set, {message.rank, message.like}
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
            away = self._participants.away(members)
            complete = all(rank in ranks or rank in away or rank in self._participants.lost for rank in local)
            return self.request(node, message) if ranks and complete else None
        if isinstance(message, wire.PlanRequestAlike):
            return self.plan_request_alike(message)
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
        pending = self._pending.get(key)
        if pending is None:
            agreed = key.process_set, wire.digest(signature)
            pending = self._pending[key] = _Pending(signature, agreed, self._nodes_of(key, signature.kind))
            self._alike.setdefault(agreed, set()).add(key)
        pending.add(node, request)
        refusal = self._refused_after_join(key)
        if refusal:
            return refusal
        if pending.differ:
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
        if kind == "operation":
            return self._submitted(key)
        proposed = self._plans.get(_plan_key(key))
        return {} if proposed is None else dict.fromkeys(proposed.ranks)

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
        for key, pending in list(self._pending.items()):
            pending.missing &= self._nodes_of(key, pending.signature.kind)
            out += self._refused_after_join(key) or self._decide(key)
        for plan_key, proposed in list(self._plans.items()):
            proposed.missing &= self._ranks_of(plan_key)
            out += self._refused_algorithm(plan_key) or self._decide_plan(plan_key)
        return out

    def _nodes_of(self, key: OpKey, kind: wire.Kind) -> set[int]:
        """Returns the nodes that have to ask about an operation."""
        members = self._participants.members(key.process_set)
        return set(members.nodes if kind == "join" else self._participants.awaited_nodes(members))

    def _ranks_of(self, plan_key: PlanKey) -> set[int]:
        """Returns the ranks that have to propose a plan."""
        return set(self._participants.awaited(self._participants.members(plan_key[0])))

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
        proposed = self._plans.get(plan_key)
        is_first = proposed is None
        if proposed is None:
            proposed = self._plans[plan_key] = _Proposed(self._ranks_of(plan_key))
        kinds = len(proposed.kinds)
        proposed.add(request.rank, proposal)
        refused = self._refused_order(plan_key, request) if len(proposed.kinds) > kinds else []
        return refused or (self._refused_algorithm(plan_key) if is_first else []) or self._decide_plan(plan_key)

    def plan_request_alike(self, request: wire.PlanRequestAlike) -> Outgoing:
        """A rank proposes what another one of its node has proposed before."""
        plan_key = (request.process_set, request.group, request.clock)
        proposed = self._plans.get(plan_key)
        if proposed is None or request.like not in proposed.ranks:  # it has been decided, and the node is told
            return []
        proposed.add_alike(request.rank, request.like)
        return self._decide_plan(plan_key)

    def _refused_order(self, plan_key: PlanKey, request: wire.PlanRequest) -> Outgoing:
        """Refuses the plans of two groups if one rank has made the same optimizer for one of them, and another rank for
        the other: with optimizers in different orders, each would wait for the other."""
        proposal = request.proposal
        for other, proposed in list(self._plans.items()):
            alike = proposed.different if other[0] == plan_key[0] and other[1] != plan_key[1] else {}
            for rank, theirs in alike.items():
                if proposal.identity and theirs.identity == proposal.identity and rank != request.rank:
                    why = planning.misordered({rank: theirs, request.rank: proposal}, self._topology)
                    out: Outgoing = []
                    for each in (other, plan_key):
                        self._misnamed[each[:2]] = why
                        out += self._plan_verdict(each, None, why)
                    return out
        return []

    def _refused_algorithm(self, plan_key: PlanKey) -> Outgoing:
        """Refuses a plan that cannot be made here, or not any more."""
        members = self._participants.members(plan_key[0])
        _, proposal = next(iter(self._plans[plan_key].kinds.values()))
        reduction = proposal.reduction
        if lacking := plugins.missing(reduction.packages):
            why = f"no plan for {plan_key[1]!r}: on the node that decides for all {lacking}"
            return self._plan_verdict(plan_key, None, why)
        algorithm = reduction.algorithm
        if algorithms.parse(algorithm).synchronous:
            why = self._participants.why_not_since(algorithm, members)
            if why:
                return self._plan_verdict(plan_key, None, f"no plan for {plan_key[1]!r}: {why}")
        return []

    def _decide_plan(self, plan_key: PlanKey) -> Outgoing:
        """Makes the plan once every rank that is awaited has proposed it."""
        proposed = self._plans[plan_key]
        if proposed.missing:
            return []
        proposals = proposed.different
        error = planning.disagreement(proposals, self._topology)
        if error:
            return self._plan_verdict(plan_key, None, error)
        first = min(proposals)
        merged = planning.merge(proposals)
        threshold = self._settings.fusion_threshold
        homes = planning.home_shares(merged, self._participants, self._settings.shard_hosts, self.seconds_per_byte)
        plan = planning.make_plan(self._next_plan, merged, threshold, homes)
        self._next_plan += 1
        self._made[plan_key[:2]] = _Made(plan, first, proposals[first], set(proposed.ranks))
        return self._plan_verdict(plan_key, plan, "")

    def end(self) -> None:
        """Another coordinator decides from now on."""
        self._inquiries.end()

    def forget(self, key: OpKey) -> None:
        """An operation has failed."""
        pending = self._pending.pop(key, None)
        if pending is not None:
            alike = self._alike[pending.agreed]
            alike.discard(key)
            if not alike:
                del self._alike[pending.agreed]
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
        pending = self._pending.get(key)
        if pending is None or self._inquiries.awaits_answers(("operation", key)):
            return []
        requests, signature, agreed = pending.requests, pending.signature, pending.agreed
        direct = wire.KINDS[signature.kind].complete
        if direct and agreed in self._approved:  # not every node will ask
            self.forget(key)
            verdict = wire.Verdict(key)
            return [(node, verdict) for node in requests]
        if pending.missing:
            return []
        verdict = self._verdict(key, requests)
        self.forget(key)
        self._approved.add(agreed)
        without = wire.Verdict(key, signature=signature)
        nodes = self._participants.members(key.process_set).nodes
        out: Outgoing = [(node, verdict if node in requests else without) for node in nodes]
        for other in list(self._alike.get(agreed, ())) if direct else ():
            out += self._decide(other)
        return out

    def _refused_after_join(self, key: OpKey) -> Outgoing:
        """Fails an operation that ranks which have joined cannot take part in, and that cannot do without them."""
        pending = self._pending.get(key)
        if pending is None or not self._participants.joined:
            return []
        members = self._participants.members(key.process_set)
        why = self._participants.why_not(pending.signature.kind, members, self._submitted(key))
        if not why:
            return []
        self.forget(key)
        return [(node, wire.OpFailed(key, f"tensor {key.name!r}: {why}")) for node in members.nodes]

    def _submitted(self, key: OpKey) -> dict[int, wire.Signature]:
        """Returns the ranks' submissions, as far as nodes have asked."""
        pending = self._pending.get(key)
        requests = () if pending is None else pending.requests.values()
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
