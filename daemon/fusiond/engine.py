"""The engine: what this node does about every operation, from the workers' submissions to their results. No I/O.

Events come in as method calls (a worker submitted, a peer's message came, time passed); what is to be done goes out
through an `Outside`. One thread calls it. An operation is gathered until all local members have submitted it, agreed
upon (`negotiation`) unless its signature is known, and then run as an `Exchange` (`collectives`), whose chunks may
come before any of that and wait.
"""

from __future__ import annotations

import math
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fusion_rt import codecs, wire
from fusion_rt.dtypes import DTYPES
from fusion_rt.errors import FusionError
from fusion_rt.settings import Settings
from fusion_rt.topology import GLOBAL_SET, ProcessSet, Topology
from fusion_rt.wire import OpKey
from fusiond import algorithms
from fusiond.algorithms.base import Algorithm, Work
from fusiond.collectives.base import Array, Exchange, Job, Reducer, Result
from fusiond.collectives.cost import CostModel
from fusiond.flow import FlowPort
from fusiond.negotiation import DIRECT_KINDS, Coordinator, Outgoing
from fusiond.requests import (
    Members,
    Part,
    Recipe,
    RequestError,
    check_proposal,
    collective_exchange,
    make_recipe,
    outputs_of,
    reducer_of,
)

COORDINATOR = 0  # the node whose daemon coordinates
_INLINE_WORK = 128 * 1024  # bytes; a smaller local part is done at once, where a thread's hand-over would cost more
_REMEMBERED = 1024  # failed operations kept so that late submissions and chunks meet the same error; completed ones too
_MAX_RECIPES = 4096  # signatures remembered
_MAX_EARLY = 4096  # operations of which peers may have sent chunks before our workers submitted them
_DEPARTURE_GRACE = 2.0  # seconds that an operation may still take to complete once one of its ranks has left


class Outside(Protocol):
    """What the engine makes happen."""

    def to_worker(self, rank: int, message: wire.DaemonMessage, result: Result | None = None) -> None:
        """Sends a message to a local worker, with the memfd of a large result."""

    def to_node(self, node: int, message: wire.PeerMessage) -> None:
        """Sends a control message to a peer."""

    def send_chunk(self, node: int, chunk: wire.Chunk, payload: bytes | memoryview) -> bool:
        """Sends a chunk; returns whether its payload is borrowed until credit for it comes."""

    def run_jobs(self, jobs: Sequence[Job], then: Callable[[BaseException | None], None]) -> None:
        """Runs jobs outside the event loop, then `then` inside."""

    def clock(self) -> float:
        """Seconds, from any origin."""


@dataclass
class PlanState:
    """A plan in force. `codecs` hold a bucket's residual, if its codec has one, from step to step."""

    plan: wire.Plan
    members: Members
    algorithm: Algorithm
    reducers: list[Reducer]
    codecs: list[codecs.BucketCodec]
    names: list[str]


@dataclass(slots=True)
class Run:
    """One operation under way on this node."""

    key: OpKey
    members: Members
    since: float
    plan: PlanState | None = None
    parts: dict[int, Part] = field(default_factory=dict)
    recipe: Recipe | None = None  # of the first part that came; None for a planned bucket
    asked: bool = False  # the coordinator has been asked
    digest: int = 0
    exchange: Exchange | None = None
    port: FlowPort | None = None
    started: bool = False
    shared: Array | None = None  # the result that goes to workers in messages
    early: deque[tuple[int, wire.Chunk, memoryview]] = field(default_factory=deque)
    disputed: bool = False  # it cannot start here: submissions or a peer's data do not fit
    inquired: float = -math.inf  # when the coordinator was last asked what is wrong

    @property
    def complete(self) -> bool:
        return len(self.parts) == len(self.members.local)


class Engine:
    """All operations of a node.

    Args:
        topology, node: who is where, and which node this is.
        settings: sizes and time-outs.
        outside: acts for the engine.
        on_job_failed: called with a sentence when the job cannot go on because of something noticed here.
    """

    def __init__(
        self,
        topology: Topology,
        node: int,
        settings: Settings,
        outside: Outside,
        on_job_failed: Callable[[str], None],
    ) -> None:
        self.topology = topology
        self.node = node
        self.cost = CostModel()
        self._settings = settings
        self._outside = outside
        self._on_job_failed = on_job_failed
        everyone = ProcessSet(GLOBAL_SET, tuple(range(topology.size)))
        self._sets = {GLOBAL_SET: everyone}
        self._members: dict[int, Members] = {}
        self._runs: dict[OpKey, Run] = {}
        self._plans: dict[int, PlanState] = {}
        self._plan_memory: dict[tuple[int, int], Array] = {}  # plan and rank: the plan's segment in that worker's arena
        self._proposals: dict[tuple[int, str, int], dict[int, int]] = {}  # proposal: handle by rank
        self._recipes: dict[wire.Signature, Recipe] = {}
        self._failed: OrderedDict[OpKey, str] = OrderedDict()
        self._over: OrderedDict[OpKey, wire.Signature] = OrderedDict()  # completed here, maybe not yet elsewhere
        self._approved: set[tuple[int, int]] = set()
        self._departed: set[int] = set()
        self._failure = ""
        self._completed = 0
        self._completed_bytes = 0
        self._all_reduce = algorithms.make("allreduce")  # of tensors outside a plan
        self.coordinator: Coordinator | None = None
        if node == COORDINATOR:
            self.coordinator = Coordinator(
                topology, self._sets, settings.fusion_threshold, settings.operation_timeout, outside.clock
            )

    # --- from the local workers ---------------------------------------------------------------------------------------

    def submit(self, rank: int, submit: wire.Submit, memory: Array | None) -> None:
        """A worker submits an operation; `memory` is its tensor's bytes (uint8) in the arena, if it is there."""
        signature = submit.signature
        key = OpKey(signature.process_set, 0, submit.name, submit.clock)
        if self._failure or key in self._failed:
            self._refuse(rank, submit.handle, self._failure or self._failed[key])
            return
        try:
            recipe = self._recipes.get(signature) or self._recipe(signature)
            part = recipe.part(rank, submit, memory)
        except FusionError as error:
            # The other ranks may have submitted the same and would wait for this one: it fails for all.
            sentence = f"rank {rank} submitted tensor {submit.name!r} wrongly: {error}"
            if signature.process_set in self._sets:
                self._fail_everywhere(key, sentence)
            self._refuse(rank, submit.handle, sentence)
            return
        run = self._runs.get(key)
        if run is None:
            run = self._run(key, recipe.members)
        if rank in run.parts:
            raise RequestError(f"rank {rank} submitted tensor {submit.name!r} twice under one clock")
        if run.recipe is None:
            run.recipe = recipe
        run.parts[rank] = part
        if run.recipe is not recipe and run.recipe.signature.common() != signature.common():
            self._disagree(run)
        elif len(run.parts) == len(recipe.members.local) and not run.disputed:
            self._agree(run, recipe)

    def propose(self, rank: int, handle: int, proposal: wire.Proposal) -> None:
        """A worker asks for a plan."""
        if self._failure:
            self._refuse(rank, handle, self._failure)
            return
        try:
            check_proposal(proposal)
            algorithms.make(proposal.reduction.algorithm)
            codecs.parse(proposal.reduction.codec)
            members = self._members_of(proposal.process_set)
        except FusionError as error:
            self._refuse(rank, handle, f"rank {rank} cannot plan {proposal.group!r}: {error}")
            return
        if rank not in members.local:
            self._refuse(rank, handle, f"rank {rank} is not in process set {proposal.process_set}")
            return
        self._proposals.setdefault((proposal.process_set, proposal.group, proposal.clock), {})[rank] = handle
        self._to_coordinator(wire.PlanRequest(rank, proposal))

    def add_plan_memory(self, rank: int, plan: int, memory: Array) -> None:
        """A worker's arena has a segment (its bytes, uint8) for the buckets of a plan."""
        state = self._plans.get(plan)
        if state is None or len(memory) < state.plan.nbytes or rank not in state.members.local:
            raise RequestError(f"rank {rank} offers memory for plan {plan}, which is not its plan in force")
        self._plan_memory[plan, rank] = memory

    def drop_plan_memory(self, rank: int, plan: int) -> None:
        """The worker has given that segment up."""
        self._plan_memory.pop((plan, rank), None)

    def ready(self, rank: int, ready: wire.Ready) -> None:
        """A worker's part of a planned bucket is in the arena."""
        state = self._plans.get(ready.plan)
        memory = self._plan_memory.get((ready.plan, rank))
        if state is None or memory is None or ready.bucket >= len(state.names):
            raise RequestError(
                f"rank {rank} is ready in bucket {ready.bucket} of plan {ready.plan}, which is not in force"
            )
        key = OpKey(state.plan.process_set, ready.plan, state.names[ready.bucket], ready.clock)
        if self._failure or key in self._failed:
            self._refuse(rank, ready.handle, self._failure or self._failed[key])
            return
        run = self._run(key, state.members)
        if rank in run.parts:
            raise RequestError(f"rank {rank} is ready twice in bucket {ready.bucket} of plan {ready.plan}")
        run.plan = state
        bucket = state.plan.buckets[ready.bucket]
        storage = state.reducers[ready.bucket].dtype.storage
        values = memory[bucket.offset : bucket.offset + bucket.numel * storage.itemsize].view(storage)
        run.parts[rank] = Part(ready.handle, values, values)
        if state.algorithm.ready(len(run.parts), len(state.members.local)):
            self._start(run, state.algorithm.exchange, state.reducers[ready.bucket], state.codecs[ready.bucket])

    def depart(self, ranks: Sequence[int]) -> None:
        """Ranks have left in good order, here or elsewhere."""
        self._departed.update(ranks)
        if self.coordinator is not None:
            self.coordinator.departed.update(ranks)

    # --- from the peers -----------------------------------------------------------------------------------------------

    def peer_message(self, node: int, message: wire.PeerMessage, payload: memoryview | None) -> None:
        """A peer's message that is about operations."""
        if self._failure:
            return
        if isinstance(message, wire.Chunk):
            assert payload is not None
            self._chunk(node, message, payload)
        elif isinstance(message, wire.Credit):
            run = self._runs.get(message.key)
            if run is not None and run.port is not None and node in run.members.nodes:
                run.port.credit(run.members.nodes.index(node), message.chunks)
        elif isinstance(message, wire.Verdict):
            self._verdict(message)
        elif isinstance(message, wire.PlanVerdict):
            self._plan_verdict(message)
        elif isinstance(message, wire.OpFailed):
            self._fail_here(message.key, message.error)
        elif isinstance(message, wire.Inquiry):
            self._to_coordinator(wire.Report(message.key, self._submitted(message.key)))
        elif self.coordinator is not None:
            self._coordinate(node, message)

    def _coordinate(self, node: int, message: wire.PeerMessage) -> None:
        assert self.coordinator is not None
        if not self._makes_sense(node, message):
            self._on_job_failed(
                f"node {node} (host {self.topology.hosts[node]}) sent a {type(message).__name__} that no node of this "
                "job would send"
            )
        elif isinstance(message, wire.Request):
            self._send_all(self.coordinator.request(node, message))
        elif isinstance(message, wire.Mismatch):
            self._send_all(self.coordinator.mismatch(message))
        elif isinstance(message, wire.Report):
            self._send_all(self.coordinator.report(node, message))
        elif isinstance(message, wire.PlanRequest):
            self._send_all(self.coordinator.plan_request(message))

    def _makes_sense(self, node: int, message: wire.PeerMessage) -> bool:
        """Whether a message to the coordinator is about a process set that there is, and about ranks of its sender."""
        if isinstance(message, wire.PlanRequest):
            process_set, ranks = message.proposal.process_set, {message.rank}
        elif isinstance(message, (wire.Request, wire.Report)):
            process_set, ranks = message.key.process_set, set(message.signatures)
        elif isinstance(message, wire.Mismatch):
            process_set, ranks = message.key.process_set, set()
        else:
            return False
        if process_set not in self._sets:
            return False
        members = self._sets[process_set].local(self.topology, node)
        return ranks == set(members) if isinstance(message, wire.Request) else ranks.issubset(members)

    def _submitted(self, key: OpKey) -> dict[int, wire.Signature]:
        """What local ranks have submitted of an operation that is under way, or has been recently."""
        run = self._runs.get(key)
        if run is not None:
            return {rank: part.signature for rank, part in run.parts.items()}
        signature = self._over.get(key)
        return {} if signature is None else dict.fromkeys(self._members_of(key.process_set).local, signature)

    def tick(self) -> None:
        """Time has passed: ends what has waited too long. Called about once a second while anything is under way."""
        now = self._outside.clock()
        for run in list(self._runs.values()):
            waited = now - run.since
            left = self._departed and any(
                r not in run.parts for r in self._departed.intersection(run.members.set.ranks)
            )
            if now - run.inquired > _DEPARTURE_GRACE and (
                waited > self._settings.operation_timeout or (left and waited > _DEPARTURE_GRACE and run.parts)
            ):
                self._inquire(run, waited)
        if self.coordinator is not None:
            self._send_all(self.coordinator.tick())

    def fail_job(self, error: str) -> None:
        """The job cannot go on: everything under way, and everything later, fails with this sentence."""
        if self._failure:
            return
        self._failure = error
        self._runs.clear()
        self._proposals.clear()

    @property
    def idle(self) -> bool:
        """Whether nothing is under way that a tick could end."""
        return not self._runs and not self._proposals and (self.coordinator is None or self.coordinator.idle)

    def statistics(self) -> dict[str, object]:
        """Operations `under_way` and `completed`, their `bytes` on this node, and the `plans` in force."""
        return {
            "under_way": len(self._runs),
            "completed": self._completed,
            "bytes": self._completed_bytes,
            "plans": [
                {"id": s.plan.id, "group": s.plan.group, "buckets": len(s.names), "nbytes": s.plan.nbytes}
                for s in self._plans.values()
            ],
            "latency_seconds": self.cost.latency,
            "seconds_per_byte": self.cost.seconds_per_byte,
            "coordinator": None if self.coordinator is None else self.coordinator.statistics(),
        }

    # --- agreeing -----------------------------------------------------------------------------------------------------

    def _agree(self, run: Run, recipe: Recipe) -> None:
        """All local members have submitted the same: starts, or asks the coordinator."""
        if len(recipe.members.nodes) == 1:
            if recipe.signature.kind == "allreduce" and recipe.local_nbytes <= _INLINE_WORK:
                self._reduce_at_once(run, recipe)
                return
            ordered = [run.parts[r] for r in recipe.members.set.ranks]
            rows = [p.signature.shape[0] if p.signature.shape else 1 for p in ordered]
            self._start_dynamic(run, recipe, rows, [p.splits for p in ordered])
            return
        run.digest = wire.digest(recipe.signature)
        if any(chunk.digest != run.digest for _, chunk, _ in run.early):
            self._disagree(run)
            return
        agreed = (run.key.process_set, run.digest)
        if run.early:  # no peer would have sent anything unless it were approved
            self._approved.add(agreed)
        if agreed in self._approved and recipe.signature.kind in DIRECT_KINDS:
            self._start_dynamic(run, recipe, (), ())
        else:
            run.asked = True
            signatures = {rank: part.signature for rank, part in run.parts.items()}
            splits = {rank: part.splits for rank, part in run.parts.items() if part.splits}
            self._to_coordinator(wire.Request(run.key, signatures, splits))

    def _reduce_at_once(self, run: Run, recipe: Recipe) -> None:
        """A small all-reduce of workers of this node: nothing to exchange, and no thread that would be faster."""
        local = [run.parts[rank] for rank in recipe.members.local]
        outputs, run.shared = outputs_of(local)
        recipe.reducer.whole([part.source for part in local], outputs)
        self._deliver(run, ())

    def _verdict(self, verdict: wire.Verdict) -> None:
        run = self._runs.get(verdict.key)
        if run is None or not run.asked:
            return
        self._approved.add((run.key.process_set, run.digest))
        if run.exchange is not None:  # a peer's data came first
            return
        assert run.recipe is not None
        self._start_dynamic(run, run.recipe, verdict.rows, verdict.splits)

    def _plan_verdict(self, verdict: wire.PlanVerdict) -> None:
        waiting = self._proposals.pop((verdict.process_set, verdict.group, verdict.clock), {})
        plan = verdict.plan
        if plan is None:
            for rank, handle in waiting.items():
                self._refuse(rank, handle, verdict.error)
            return
        for old in [s.plan.id for s in self._plans.values() if _identity(s.plan) == _identity(plan)]:
            del self._plans[old]
            for rank in self._members_of(plan.process_set).local:
                self.drop_plan_memory(rank, old)
        members = self._members_of(plan.process_set)
        codec = codecs.parse(plan.reduction.codec)
        self._plans[plan.id] = PlanState(
            plan,
            members,
            algorithms.make(plan.reduction.algorithm),
            [reducer_of(plan.reduction, DTYPES[b.dtype], len(members.set.ranks)) for b in plan.buckets],
            [codec.open(codecs.Layout(DTYPES[b.dtype], b.numel)) for b in plan.buckets],
            [str(b.index) for b in plan.buckets],
        )
        for rank, handle in waiting.items():
            self._outside.to_worker(rank, wire.Planned(handle, plan))

    # --- running ------------------------------------------------------------------------------------------------------

    def _start_dynamic(self, run: Run, recipe: Recipe, rows: Sequence[int], splits: Sequence[Sequence[int]]) -> None:
        if recipe.signature.kind == "allreduce":
            self._start(run, self._all_reduce.exchange, recipe.reducer, recipe.codec.open(recipe.layout))
            return
        port = self._port(run)
        local = [run.parts[rank] for rank in run.members.local]
        outputs, run.shared = outputs_of(local)
        try:
            run.exchange = collective_exchange(port, recipe, self.topology, local, outputs, rows, splits)
        except RequestError as error:
            self._fail_everywhere(run.key, f"tensor {run.key.name!r}: {error}")
            return
        self._run_jobs(run)

    def _start(self, run: Run, make: Callable[[Work], Exchange], reducer: Reducer, codec: codecs.BucketCodec) -> None:
        local = [run.parts[rank] for rank in run.members.local]
        outputs, run.shared = outputs_of(local)
        work = Work(self._port(run), reducer, codec, self.cost, [p.source for p in local], outputs)
        run.exchange = make(work)
        self._run_jobs(run)

    def _port(self, run: Run) -> FlowPort:
        run.port = FlowPort(
            run.key,
            run.digest,
            run.members.nodes,
            self.node,
            self.cost.chunk_bytes(self._settings.chunk_bytes),
            self._settings.window_bytes,
            self._outside.send_chunk,
            lambda node, chunks: self._outside.to_node(node, wire.Credit(run.key, chunks)),
            lambda: self._finished(run),
        )
        return run.port

    def _run_jobs(self, run: Run) -> None:
        assert run.exchange is not None
        small = run.exchange.local_nbytes <= _INLINE_WORK
        jobs = run.exchange.jobs(1 if small else self._settings.kernel_threads)
        if jobs and not small:
            self._outside.run_jobs(jobs, lambda error: self._jobs_done(run, error))
            return
        try:
            for job in jobs:
                job()
        except Exception as error:  # reported like one from the pool
            self._jobs_done(run, error)
        else:
            self._jobs_done(run, None)

    def _jobs_done(self, run: Run, error: BaseException | None) -> None:
        if self._runs.get(run.key) is not run:
            return  # it has failed in the meantime
        if error is not None:
            self._exchange_failed(run, error)
            return
        run.started = True
        run.since = self._outside.clock()
        try:
            assert run.exchange is not None
            run.exchange.start()
            while run.early and self._runs.get(run.key) is run:
                self._receive(run, *run.early.popleft())
        except Exception as failure:
            self._exchange_failed(run, failure)

    def _chunk(self, node: int, chunk: wire.Chunk, payload: memoryview) -> None:
        run = self._runs.get(chunk.key)
        if run is None:
            if chunk.key in self._failed:
                return
            if chunk.key.process_set not in self._sets or self._too_early():
                self._on_job_failed(
                    f"node {node} (host {self.topology.hosts[node]}) sent data of {chunk.key.name!r}, which has no "
                    "place here: it is in an unknown process set, or one of too many operations under way"
                )
                return
            run = self._run(chunk.key, self._members_of(chunk.key.process_set))
        if node not in run.members.nodes:
            return
        if run.complete and not chunk.key.plan and chunk.digest != run.digest:
            if not run.disputed:
                self._disagree(run)
        elif not run.started:
            run.early.append((node, chunk, payload))
            if run.asked and run.exchange is None:
                assert run.recipe is not None
                if run.recipe.signature.kind in DIRECT_KINDS:  # approved, or nothing would come; the verdict is late
                    self._approved.add((run.key.process_set, run.digest))
                    self._start_dynamic(run, run.recipe, (), ())
        else:
            try:
                self._receive(run, node, chunk, payload)
            except Exception as error:
                self._exchange_failed(run, error)

    def _too_early(self) -> bool:
        """Whether peers are ahead of the workers here in as many operations as they may be."""
        return len(self._runs) >= _MAX_EARLY and sum(not run.parts for run in self._runs.values()) >= _MAX_EARLY

    def _receive(self, run: Run, node: int, chunk: wire.Chunk, payload: memoryview) -> None:
        assert run.exchange is not None
        assert run.port is not None
        run.since = self._outside.clock()
        position = run.members.nodes.index(node)
        run.exchange.receive(position, chunk, payload)
        run.port.consumed(position, len(payload))

    def _finished(self, run: Run) -> None:
        """The exchange has finished and nothing of it is under way: delivers, unless the operation has failed."""
        if self._runs.get(run.key) is run:
            assert run.exchange is not None
            self._deliver(run, run.exchange.results)

    def _deliver(self, run: Run, results: Sequence[Result]) -> None:
        del self._runs[run.key]
        self._completed += 1
        if len(run.members.nodes) > 1:
            self._over[run.key] = run.parts[run.members.local[0]].signature
            if len(self._over) > _REMEMBERED:
                self._over.popitem(last=False)
        inline = None if run.shared is None else run.shared.tobytes()
        for index, rank in enumerate(run.members.local):
            part = run.parts[rank]
            self._completed_bytes += part.source.nbytes
            if not results:
                self._outside.to_worker(rank, wire.Done(part.handle, inline if part.place is None else None))
                continue
            result = results[index if len(results) > 1 else 0]
            small = None if result.segment else result.array.tobytes()
            nbytes = result.segment.nbytes if result.segment else 0
            self._outside.to_worker(rank, wire.Done(part.handle, small, result.sizes, nbytes), result)
        for result in results:
            if result.segment is not None:
                result.segment.close()

    # --- failing ------------------------------------------------------------------------------------------------------

    def _disagree(self, run: Run) -> None:
        """The ranks do not agree."""
        run.disputed = True
        self._inquire(run, 0.0)

    def _inquire(self, run: Run, waited: float) -> None:
        """Has the coordinator ask everybody, and tell everybody if something is wrong."""
        run.inquired = self._outside.clock()
        self._to_coordinator(wire.Mismatch(run.key, waited))

    def _exchange_failed(self, run: Run, error: BaseException) -> None:
        if isinstance(error, FusionError):
            what = f"bucket {run.key.name} of plan {run.key.plan}" if run.key.plan else f"tensor {run.key.name!r}"
            host = self.topology.hosts[self.node]
            self._fail_everywhere(run.key, f"{what} failed on node {self.node} (host {host}): {error}")
        else:  # a bug: say where it is
            text = "".join(traceback.format_exception(error))
            self._on_job_failed(f"the daemon of host {self.topology.hosts[self.node]} failed:\n{text}")

    def _fail_everywhere(self, key: OpKey, error: str) -> None:
        for node in self._members_of(key.process_set).nodes:
            if node != self.node:
                self._outside.to_node(node, wire.OpFailed(key, error))
        self._fail_here(key, error)

    def _fail_here(self, key: OpKey, error: str) -> None:
        self._failed.setdefault(key, error)
        while len(self._failed) > _REMEMBERED:
            self._failed.popitem(last=False)
        run = self._runs.pop(key, None)
        for rank, part in (run.parts if run is not None else {}).items():
            self._refuse(rank, part.handle, error)

    def _refuse(self, rank: int, handle: int, error: str) -> None:
        self._outside.to_worker(rank, wire.Failed(handle, error))

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _recipe(self, signature: wire.Signature) -> Recipe:
        """What is known of every operation with this signature. Raises FusionError when none can be submitted."""
        if len(self._recipes) >= _MAX_RECIPES:
            self._recipes.clear()
        recipe = self._recipes[signature] = make_recipe(signature, self._members_of(signature.process_set))
        return recipe

    def _run(self, key: OpKey, members: Members) -> Run:
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = Run(key, members, self._outside.clock())
        return run

    def _members_of(self, process_set: int) -> Members:
        members = self._members.get(process_set)
        if members is None:
            found = self._sets.get(process_set)
            if found is None:
                raise RequestError(f"there is no process set {process_set}")
            members = Members(found, found.nodes(self.topology), found.local(self.topology, self.node))
            self._members[process_set] = members
        return members

    def _to_coordinator(self, message: wire.PeerMessage) -> None:
        if self.node == COORDINATOR:
            self._coordinate(self.node, message)
        else:
            self._outside.to_node(COORDINATOR, message)

    def _send_all(self, messages: Outgoing) -> None:
        for node, message in messages:
            if node == self.node:
                self.peer_message(node, message, None)
            else:
                self._outside.to_node(node, message)


def _identity(plan: wire.Plan) -> tuple[int, str]:
    return plan.process_set, plan.group
