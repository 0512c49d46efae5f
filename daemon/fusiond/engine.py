"""The engine: what this node does about every operation, from the workers' submissions to their results. No I/O.

Events come in as method calls (a worker submitted, a peer's message came, time passed); what is to be done goes out
through an `Outside`. One thread calls it. An operation is gathered until all local members have submitted it, agreed
upon (`negotiation`) unless its signature is known, and then run as an `Exchange` (`running`, `collectives`), whose
chunks may come before any of that and wait.
"""

from __future__ import annotations

import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

from fusion_rt import codecs, wire
from fusion_rt.algorithms import parse
from fusion_rt.codecs import Codec
from fusion_rt.errors import FusionError
from fusion_rt.kernels.team import Team
from fusion_rt.settings import Settings
from fusion_rt.topology import GLOBAL_SET, Topology
from fusion_rt.wire import OpKey
from fusiond.algorithms import HomeAlgorithm
from fusiond.codec_service import CodecService
from fusiond.collectives.base import Array
from fusiond.collectives.cost import CostModel
from fusiond.homes import Homes
from fusiond.negotiation import DIRECT_KINDS, Coordinator, Outgoing
from fusiond.participants import Members, Participants
from fusiond.plans import Plans
from fusiond.requests import (
    NOTHING,
    Recipe,
    RequestError,
    check_proposal,
    make_recipe,
)
from fusiond.running import INLINE_WORK, Outside, Run, Runner
from fusiond.snapshots import Snapshots

COORDINATOR = 0  # the node whose daemon coordinates
_REMEMBERED = 1024  # failed operations kept so that late submissions and chunks meet the same error; completed ones too
_MAX_RECIPES = 4096  # signatures remembered
_MAX_EARLY = 4096  # operations of which peers may have sent chunks before our workers submitted them
_DEPARTURE_GRACE = 2.0  # seconds that an operation may still take to complete once one of its ranks has left


class Engine:
    """All operations of a node.

    Args:
        topology, node: who is where, and which node this is.
        settings: sizes and time-outs.
        outside: acts for the engine.
        on_job_failed: called with a sentence when the job cannot go on because of something noticed here.
        epoch: the membership epoch.
    """

    def __init__(
        self,
        topology: Topology,
        node: int,
        settings: Settings,
        outside: Outside,
        on_job_failed: Callable[[str], None],
        epoch: int = 0,
    ) -> None:
        self.topology = topology
        self.node = node
        self.participants = Participants(topology, node)
        self._settings = settings
        self._outside = outside
        self._on_job_failed = on_job_failed
        self._runs: dict[OpKey, Run] = {}
        self._runner = Runner(topology, node, settings, outside, self._runs, self._delivered, self._run_failed)
        self._plans = Plans(Team(settings.kernel_threads))
        self.homes = Homes(topology, node, settings, outside, self._home_failed, epoch)
        self.snapshots = Snapshots(settings, node, self._plans, self.homes, outside)
        self._proposals: dict[tuple[int, str, int], dict[int, int]] = {}  # proposal: handle by rank
        self._recipes: dict[wire.Signature, Recipe] = {}
        self._failed: OrderedDict[OpKey, str] = OrderedDict()
        self._over: OrderedDict[OpKey, wire.Signature] = OrderedDict()  # completed here, maybe not yet elsewhere
        self._approved: dict[tuple[int, int], wire.Signature] = {}  # by process set and digest
        self._failure = ""
        self._epoch = epoch
        self._completed = 0
        self._completed_bytes = 0
        self.codecs = CodecService(
            self._plans, self.homes, self._runs, outside, lambda: self._failure, self._codec_failed
        )
        self.coordinator: Coordinator | None = None
        if node == COORDINATOR:
            self.coordinator = Coordinator(self.participants, settings, outside.clock, outside.warn)

    @property
    def cost(self) -> CostModel:
        """What a message costs on this job's links."""
        return self._runner.cost

    @cost.setter
    def cost(self, measured: CostModel) -> None:
        self._runner.cost = measured

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
            if signature.process_set in self.participants:
                self._fail_everywhere(key, sentence)
            self._refuse(rank, submit.handle, sentence)
            return
        if len(recipe.members.nodes) > 1:
            again = partial(self.submit, rank, submit, memory)
            if not self.codecs.kernels_of(recipe.codec, [recipe.layout.dtype.name], again):
                return
        run = self._runs.get(key)
        if run is None:
            run = self._run(key, recipe.members)
        if rank in run.parts:
            raise RequestError(f"rank {rank} submitted tensor {submit.name!r} twice under one clock")
        if run.recipe is None:
            run.recipe = recipe
        run.parts[rank] = part
        if signature.kind == "join":
            self._join(rank)
        if run.recipe is not recipe and run.recipe.signature.common() != signature.common():
            self._disagree(run)
        else:
            self._advance(run)

    def propose(self, rank: int, handle: int, proposal: wire.Proposal) -> None:
        """A worker asks for a plan."""
        if self._failure:
            self._refuse(rank, handle, self._failure)
            return
        try:
            codec = codecs.parse(proposal.reduction.codec)
            members = self.participants.members(proposal.process_set)
            check_proposal(proposal, len(members.set.ranks))
        except FusionError as error:
            self._refuse(rank, handle, f"rank {rank} cannot plan {proposal.group!r}: {error}")
            return
        if rank not in members.local:
            self._refuse(rank, handle, f"rank {rank} is not in process set {proposal.process_set}")
            return
        if len(members.nodes) > 1:
            dtypes = {tensor.dtype for tensor in proposal.tensors}
            if not self.codecs.kernels_of(codec, dtypes, partial(self.propose, rank, handle, proposal)):
                return
        self._proposals.setdefault((proposal.process_set, proposal.group, proposal.clock), {})[rank] = handle
        self._to_coordinator(wire.PlanRequest(rank, proposal))

    def add_plan_memory(self, rank: int, plan: int, memory: Array) -> None:
        """A worker's arena has a segment (its bytes, uint8) for the buckets of a plan."""
        self._plans.add_memory(rank, plan, memory)

    def drop_plan_memory(self, rank: int, plan: int) -> None:
        """The worker has given that segment up."""
        self._plans.drop_memory(rank, plan)

    def ready(self, rank: int, ready: wire.Ready) -> None:
        """A worker's part of a planned bucket is in the arena."""
        state, bucket, part = self._plans.part(rank, ready)
        if isinstance(state.algorithm, HomeAlgorithm):
            if self._failure:
                self._refuse(rank, ready.handle, self._failure)
            else:
                self.homes.post(rank, ready, state, bucket.bucket, part)
            return
        key = OpKey(state.plan.process_set, ready.plan, bucket.name, ready.clock)
        if self._failure or key in self._failed:
            self._refuse(rank, ready.handle, self._failure or self._failed[key])
            return
        run = self._run(key, state.members)
        if rank in run.parts:
            raise RequestError(f"rank {rank} is ready twice in bucket {ready.bucket} of plan {ready.plan}")
        run.parts[rank] = part
        self._advance(run)

    def depart(self, ranks: Sequence[int]) -> None:
        """Ranks have left in good order, here or elsewhere."""
        self.participants.departed.update(ranks)
        self.homes.gone(ranks)

    def why_not_without(self, node: int, whole: bool) -> str:
        """Why this job cannot go on without a worker of that node, or the whole node; empty if it can."""
        plans = [state.plan for state in self._plans]
        synchronous = [plan.reduction.algorithm for plan in plans if parse(plan.reduction.algorithm).synchronous]
        if not plans or synchronous:
            return f"{synchronous[0] if synchronous else 'what is under way'} needs every rank"
        if whole and node == COORDINATOR:
            return "the first node coordinates the job"
        homes = [f"{b.index} of {p.group!r}" for p in plans if p.homes for b in p.buckets if p.homes[b.index] == node]
        return f"it has the homes of buckets {', '.join(homes)}" if whole and homes else ""

    def _join(self, rank: int) -> None:
        """A local rank has joined: what waits for it goes on without it."""
        for node in range(len(self.topology.hosts)):
            if node != self.node:
                self._outside.to_node(node, wire.Joined(rank))
        self._joined(rank)

    def _joined(self, rank: int) -> None:
        self.participants.joined.append(rank)
        self.homes.gone([rank])
        for run in list(self._runs.values()):
            if run.exchange is not None:
                self._tell_who_joined(run)
            elif run.kind != "join":
                self._advance(run)
        if self.coordinator is not None:
            self._send_all(self.coordinator.joined())

    # --- from the peers -----------------------------------------------------------------------------------------------

    def peer_message(self, node: int, message: wire.PeerMessage, payload: memoryview | None) -> None:
        """A peer's message that is about operations."""
        if self._failure:
            return
        if isinstance(message, wire.Chunk):
            assert payload is not None
            if message.key.clock // wire.CLOCKS_OF_AN_EPOCH == self._epoch:
                self._chunk(node, message, payload)
        elif isinstance(message, wire.Piece):
            assert payload is not None
            self.homes.peer(node, message, payload)
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
        elif isinstance(message, wire.Began):
            self._began(node, message)
        elif isinstance(message, wire.Joined) and message.rank in self.topology.ranks[node]:
            self._joined(message.rank)
        elif self.coordinator is not None:
            self._coordinate(node, message)

    def _coordinate(self, node: int, message: wire.PeerMessage) -> None:
        assert self.coordinator is not None
        answer = self.coordinator.handle(node, message)
        if answer is None:
            self._on_job_failed(
                f"node {node} (host {self.topology.hosts[node]}) sent a {type(message).__name__} that no node of this "
                "job would send"
            )
            return
        self._send_all(answer)

    def _submitted(self, key: OpKey) -> dict[int, wire.Signature]:
        """What local ranks have submitted of an operation that is under way, or has been recently."""
        run = self._runs.get(key)
        if run is not None:
            return {rank: part.signature for rank, part in run.parts.items()}
        signature = self._over.get(key)
        if signature in (None, NOTHING) or key.process_set not in self.participants:
            return {}
        assert signature is not None
        return dict.fromkeys(self.participants.members(key.process_set).local, signature)

    def tick(self) -> None:
        """Time has passed: ends what has waited too long. Called about once a second while anything is under way."""
        now = self._outside.clock()
        settings = self._settings
        for run in list(self._runs.values()):
            waited = now - run.since
            left = any(r in run.members.set.ranks and r not in run.parts for r in self.participants.departed)
            warn = waited > settings.stall_warning_time and run.inquired < run.since
            if warn or (
                now - run.inquired > _DEPARTURE_GRACE
                and (waited > settings.operation_timeout or (left and waited > _DEPARTURE_GRACE and run.parts))
            ):
                self._inquire(run, waited)
        self.homes.tick()
        if self.coordinator is not None:
            self._send_all(self.coordinator.tick())

    def fail_job(self, error: str) -> None:
        """The job cannot go on: everything under way, and everything later, fails with this sentence."""
        if self._failure:
            return
        self._failure = error
        self._runs.clear()
        self._proposals.clear()
        self.homes.fail()

    def end(self, error: str) -> None:
        """This membership epoch is over elsewhere: everything fails with this sentence, and the job may go on."""
        for key in list(self._runs):
            self._fail_here(key, f"{self._runs[key].what}: {error}")
        for waiting in self._proposals.values():
            for rank, handle in waiting.items():
                self._refuse(rank, handle, error)
        self.homes.end(error)
        self.fail_job(error)

    @property
    def idle(self) -> bool:
        """Whether nothing is under way that a tick could end."""
        nothing = not self._runs and not self._proposals and self.homes.idle
        return nothing and (self.coordinator is None or self.coordinator.idle)

    def statistics(self) -> dict[str, object]:
        """Operations `under_way` and `completed`, their `bytes` on this node, and the `plans` in force."""
        return {
            "under_way": len(self._runs),
            "completed": self._completed,
            "bytes": self._completed_bytes,
            "plans": self._plans.statistics(),
            "compression": self._plans.compression(),
            "homes": self.homes.statistics(),
            "process_sets": self.participants.statistics(),
            "latency_seconds": self.cost.latency,
            "seconds_per_byte": self.cost.seconds_per_byte,
            "coordinator": None if self.coordinator is None else self.coordinator.statistics(),
        }

    # --- agreeing -----------------------------------------------------------------------------------------------------

    def _advance(self, run: Run) -> None:
        """Something has changed about a run that has not started: goes on if everything local is there."""
        if run.exchange is not None or run.asked or run.disputed:
            return
        if len(run.parts) < len(run.members.local):
            if not self.participants.joined or run.kind == "join":
                return
            refusal = self._refused_after_join(run)
            if refusal:
                self._fail_everywhere(run.key, f"{run.what}: {refusal}")
                return
            away = self.participants.away(run.members)
            if any(rank not in run.parts and rank not in away for rank in run.members.local):
                return
            if not run.parts:
                self._stand_in(run)
                return
        if run.kind == "join" and any(r.parts and r is not run for r in self._global_runs()):
            return  # a rank may join before its operations are done; everybody stays joined until they are
        if run.key.plan:
            self._start_bucket(run)
        else:
            assert run.recipe is not None
            self._agree(run, run.recipe)

    def _global_runs(self) -> list[Run]:
        return [run for key, run in self._runs.items() if key.process_set == GLOBAL_SET]

    def _one_less(self) -> None:
        """A run is over, which a join may have waited for."""
        for run in self._global_runs() if self.participants.joined else ():
            if run.kind == "join":
                self._advance(run)

    def _refused_after_join(self, run: Run) -> str:
        """Why a run cannot do without the local ranks that have joined."""
        kind = run.kind
        if not run.parts:  # only peers know what it is
            signature = self._approved.get((run.key.process_set, run.peers_digest))
            kind = "allreduce" if signature is None else signature.kind
        elsewhere = [rank for rank in run.members.set.ranks if rank not in run.members.local]
        return self.participants.why_not(kind, run.members, {*run.parts, *elsewhere})

    def _agree(self, run: Run, recipe: Recipe) -> None:
        """All local members have submitted the same: starts, or asks the coordinator."""
        kind = recipe.signature.kind
        if len(recipe.members.nodes) == 1:
            if kind == "allreduce" and recipe.local_nbytes <= INLINE_WORK and recipe.reducer.op != "adasum":
                self._runner.reduce_at_once(run, recipe)
                return
            local = run.local()
            rows = [p.signature.shape[0] if p.signature.shape else 1 for p in local]
            if kind == "join":
                rows = self.participants.joined[-1:]
            self._start(run, rows, [p.splits for p in local])
            return
        run.digest = wire.digest(recipe.signature)
        if any(chunk.digest != run.digest for _, chunk, _ in run.early):
            self._disagree(run)
            return
        agreed = (run.key.process_set, run.digest)
        if run.early:  # no peer would have sent anything unless it were approved
            self._approved[agreed] = recipe.signature
        if agreed in self._approved and kind in DIRECT_KINDS:
            self._start(run, (), ())
        else:
            run.asked = True
            signatures = {rank: part.signature for rank, part in run.parts.items()}
            splits = {rank: part.splits for rank, part in run.parts.items() if part.splits}
            self._to_coordinator(wire.Request(run.key, signatures, splits))

    def _stand_in(self, run: Run) -> None:
        """All local members have joined, and peers have begun without them: passes on what passes through this node."""
        if run.key.plan:
            if self._plans.find(run.key.plan, run.key.name) is not None:
                self._start_bucket(run)
            return  # else it goes on when the plan has come
        signature = self._approved.get((run.key.process_set, run.peers_digest))
        if signature is not None:  # else it goes on when the verdict has come
            run.recipe = self._recipes.get(signature) or self._recipe(signature)
            run.digest = wire.digest(signature)
            self._start(run, (), ())

    def _verdict(self, verdict: wire.Verdict) -> None:
        run = self._runs.get(verdict.key)
        if verdict.signature is not None:  # the others' operation, while all ranks here have joined
            self._approved[verdict.key.process_set, wire.digest(verdict.signature)] = verdict.signature
            for waiting in [r for r in self._runs.values() if r.peers_digest and not r.parts]:
                self._advance(waiting)
            return
        if run is None or not run.asked:
            return
        assert run.recipe is not None
        self._approved[run.key.process_set, run.digest] = run.recipe.signature
        if run.exchange is None:  # else a peer's data came first
            self._start(run, verdict.rows, verdict.splits)

    def _plan_verdict(self, verdict: wire.PlanVerdict) -> None:
        waiting = self._proposals.pop((verdict.process_set, verdict.group, verdict.clock), {})
        plan = verdict.plan
        if plan is None:
            for rank, handle in waiting.items():
                self._refuse(rank, handle, verdict.error)
            return
        why = self._plans.install(plan, self.participants.members(plan.process_set))
        if why:
            self._outside.warn(why)
        state = self._plans.get(plan.id)
        if isinstance(state.algorithm, HomeAlgorithm) and self.homes.install(state):
            try:
                self.snapshots.restore(plan)
            except FusionError as error:
                self._on_job_failed(f"node {self.node} (host {self.topology.hosts[self.node]}): {error}")
        for rank, handle in waiting.items():
            self._outside.to_worker(rank, wire.Planned(handle, plan))
        for run in [r for r in self._runs.values() if r.key.plan == plan.id]:
            self._advance(run)

    # --- running ------------------------------------------------------------------------------------------------------

    def _start(self, run: Run, rows: Sequence[int], splits: Sequence[Sequence[int]]) -> None:
        """An operation outside a plan, on which all ranks agree, begins here."""
        assert run.recipe is not None
        self._take_effect(run, run.recipe.signature, rows)
        if self.participants.joined:
            self._tell_who_joined(run)
        try:
            self._runner.start_tensor(run, run.recipe, rows, splits)
        except RequestError as error:
            self._fail_everywhere(run.key, f"{run.what}: {error}")

    def _start_bucket(self, run: Run) -> None:
        found = self._plans.find(run.key.plan, run.key.name)
        assert found is not None
        if self.participants.joined:
            self._tell_who_joined(run)
        self._runner.start_bucket(run, *found)

    def _take_effect(self, run: Run, signature: wire.Signature, rows: Sequence[int]) -> None:
        """What an operation without data does on this node. All nodes do it before any of them completes it."""
        if signature.kind == "join":
            self.homes.returned(list(self.participants.joined))
            self.participants.joined.clear()
            run.answer = tuple(rows)
        elif signature.kind == "add_process_set":
            run.answer = (self.participants.add(signature.ranks),)
        elif signature.kind == "remove_process_set":
            removed = self.participants.find(signature.ranks)
            if removed is not None:  # else ranks removed it twice, and the clients know
                self._remove_set(removed)

    def _remove_set(self, process_set: int) -> None:
        for key in [key for key in self._runs if key.process_set == process_set]:
            self._fail_here(key, f"{self._runs[key].what} was under way when process set {process_set} was removed")
        self._plans.remove_set(process_set)
        self.homes.remove_set(process_set)
        if self.coordinator is not None:
            self.coordinator.forget_set(process_set)
        for signature in [s for s in self._recipes if s.process_set == process_set]:
            del self._recipes[signature]
        self.participants.remove(process_set)

    def _tell_who_joined(self, run: Run) -> None:
        """A run has begun here; nodes whose ranks have all joined have nothing else that would make them begin."""
        if run.key.process_set == GLOBAL_SET and run.parts and run.kind != "join":
            awaited = self.participants.awaited_nodes(run.members)
            for node in run.members.nodes:
                if node != self.node and node not in awaited:
                    self._outside.to_node(node, wire.Began(run.key, run.digest))

    def _began(self, node: int, message: wire.Began) -> None:
        run = self._runs.get(message.key)
        if run is None:
            if not self._may_begin(node, message.key):
                return
            run = self._run(message.key, self.participants.members(message.key.process_set))
        if not run.parts:
            run.peers_digest = message.digest
            self._advance(run)

    def _chunk(self, node: int, chunk: wire.Chunk, payload: memoryview) -> None:
        run = self._runs.get(chunk.key)
        if run is None:
            if not self._may_begin(node, chunk.key):
                return
            run = self._run(chunk.key, self.participants.members(chunk.key.process_set))
        if node not in run.members.nodes:
            return
        if run.digest and not chunk.key.plan and chunk.digest != run.digest:
            if not run.disputed:
                self._disagree(run)
        elif run.started:
            self._runner.receive(run, node, chunk, payload)
        else:
            run.early.append((node, chunk, payload))
            run.peers_digest = chunk.digest
            if run.asked and run.exchange is None:
                assert run.recipe is not None
                if run.recipe.signature.kind in DIRECT_KINDS:  # approved, or nothing would come; the verdict is late
                    self._approved[run.key.process_set, run.digest] = run.recipe.signature
                    self._start(run, (), ())
            elif self.participants.joined:
                self._advance(run)

    def _may_begin(self, node: int, key: OpKey) -> bool:
        """Whether a peer may be the first to say anything about an operation here."""
        if key in self._failed or key in self._over or self.participants.is_over(key.process_set):
            return False
        if key.process_set in self.participants and not self._too_early():
            return True
        self._on_job_failed(
            f"node {node} (host {self.topology.hosts[node]}) sent data of {key.name!r}, which has no place here: it is "
            "in an unknown process set, or one of too many operations under way"
        )
        return False

    def _too_early(self) -> bool:
        """Whether peers are ahead of the workers here in as many operations as they may be."""
        return len(self._runs) >= _MAX_EARLY and sum(not run.parts for run in self._runs.values()) >= _MAX_EARLY

    def _delivered(self, run: Run) -> None:
        """The workers have their results."""
        self._completed += 1
        self._completed_bytes += sum(part.source.nbytes for part in run.parts.values())
        if len(run.members.nodes) > 1:
            part = next(iter(run.parts.values()), None)
            self._over[run.key] = NOTHING if part is None else part.signature
            if len(self._over) > _REMEMBERED:
                self._over.popitem(last=False)
        self._one_less()

    # --- failing ------------------------------------------------------------------------------------------------------

    def _disagree(self, run: Run) -> None:
        """The ranks do not agree."""
        run.disputed = True
        self._inquire(run, 0.0)

    def _inquire(self, run: Run, waited: float) -> None:
        """Has the coordinator ask everybody, and tell everybody if something is wrong."""
        run.inquired = self._outside.clock()
        self._to_coordinator(wire.Mismatch(run.key, waited))

    def _codec_failed(self, codec: Codec, error: BaseException) -> None:
        self._on_job_failed(
            f"the daemon of host {self.topology.hosts[self.node]} cannot use the codec {codec}: {error}"
        )

    def _run_failed(self, run: Run, error: BaseException) -> None:
        host = self.topology.hosts[self.node]
        if isinstance(error, FusionError):
            self._fail_everywhere(run.key, f"{run.what} failed on node {self.node} (host {host}): {error}")
        else:  # a bug: say where it is
            text = "".join(traceback.format_exception(error))
            self._on_job_failed(f"the daemon of host {host} failed:\n{text}")

    def _home_failed(self, error: BaseException) -> None:
        host = self.topology.hosts[self.node]
        text = str(error) if isinstance(error, FusionError) else "".join(traceback.format_exception(error))
        self._on_job_failed(f"a home on host {host} failed: {text}")

    def _fail_everywhere(self, key: OpKey, error: str) -> None:
        for node in self.participants.members(key.process_set).nodes:
            if node != self.node:
                self._outside.to_node(node, wire.OpFailed(key, error))
        self._fail_here(key, error)

    def _fail_here(self, key: OpKey, error: str) -> None:
        self._failed.setdefault(key, error)
        while len(self._failed) > _REMEMBERED:
            self._failed.popitem(last=False)
        run = self._runs.pop(key, None)
        if run is not None and run.exchange is not None and run.started:
            run.exchange.abandon()
        for rank, part in (run.parts if run is not None else {}).items():
            self._refuse(rank, part.handle, error)
        self._one_less()

    def _refuse(self, rank: int, handle: int, error: str) -> None:
        self._outside.to_worker(rank, wire.Failed(handle, error))

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _recipe(self, signature: wire.Signature) -> Recipe:
        """What is known of every operation with this signature. Raises FusionError when none can be submitted."""
        if len(self._recipes) >= _MAX_RECIPES:
            self._recipes.clear()
        members = self.participants.members(signature.process_set)
        recipe = self._recipes[signature] = make_recipe(signature, members)
        return recipe

    def _run(self, key: OpKey, members: Members) -> Run:
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = Run(key, members, self._outside.clock())
        return run

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
