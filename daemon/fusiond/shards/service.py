"""The parameter service: the parts of this package, joined, as the engine uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from fusion_rt import wire
from fusion_rt.core.errors import FusionError, WireError
from fusiond.buckets.plans import BucketState, PlanState
from fusiond.collectives.base import Array
from fusiond.core.contribution import Contribution
from fusiond.core.dispatch import Handlers
from fusiond.operations.context import Context
from fusiond.operations.thread_work import Act, ThreadWork
from fusiond.shards.checkpoint import Checkpoints, Then, group_of
from fusiond.shards.messages import joined
from fusiond.shards.mirrors import KeptPlan, KeptShards, Mirrors
from fusiond.shards.node import TO_MIRRORS, ThisNode
from fusiond.shards.push_pull import PushPullClients
from fusiond.shards.reassembly import Reassembly
from fusiond.shards.server import HomeServer
from fusiond.shards.staleness import Meters
from fusiond.shards.waits import Occupied, Operations, Waits


class ParameterService:
    """All homes of one engine, and the contributions of its workers to homes anywhere.

    Attributes:
        occupied: ranks that wait in other operations.
        waits: what local ranks wait for at homes, and what the homes here wait for.

    Args:
        context, work: the engine's.
        epoch: the membership epoch.
        failed: called with an exception when something cannot be gone on with.
        operations: see `Occupied`.
        kept: shards that outlive a formation, of the one before, and then of this one.
    """

    def __init__(
        self,
        context: Context,
        work: ThreadWork,
        epoch: int,
        failed: Callable[[BaseException], None],
        operations: Operations,
        kept: KeptShards | None = None,
    ) -> None:
        self._plans: dict[int, PlanState] = {}
        self._latest = 0  # plan that has been active
        self._here = ThisNode(context, epoch, work, failed)
        self._clients = PushPullClients(self._here, lambda plan, rank: self.occupied.answered(plan, rank))
        self._server = HomeServer(
            self._here,
            self._clients,
            lambda hosted, part: self.occupied.wanted(hosted, part),
            lambda hosted, clock: self.occupied.passed(hosted, clock),
        )
        self._mirrors = Mirrors(self._here)
        self._kept = kept or KeptShards()
        work.resume = self._server.resume
        self.occupied = Occupied(self._here, self._clients, self._server, operations)
        self.waits = Waits(self._here, self._clients, self._server)
        self._reassembly = Reassembly(self._here)
        self._checkpoints = Checkpoints(self._here, self._clients, self._server)

    # --- plans --------------------------------------------------------------------------------------------------------

    def install(self, state: PlanState) -> bool:
        """A plan becomes active whose buckets have homes; it replaces the one that its group had. Returns whether it is
        new: a rank that had joined may have asked for it again."""
        plan = state.plan
        if plan.id in self._plans:
            return False
        for old in [p.plan.id for p in self._plans.values() if group_of(p) == group_of(state)]:
            self._drop(old, f"the plan of {plan.group!r} was replaced")
        self._plans[plan.id] = state
        self._latest = max(self._latest, plan.id)
        self._clients.open(state)
        self._server.open(state)
        self._mirrors.open(state)
        self._kept.drop(group_of(state))
        self.occupied.open(state)
        self._checkpoints.begin(state, partial(self._begun, plan.group))
        for node, piece, payload in self._reassembly.kept():
            try:
                self.peer(node, piece, payload)
            except FusionError as error:  # whoever brought the plan has nothing to do with it
                host = self._here.context.topology.describe_node(node)
                self._here.failed(
                    WireError(f"what {host} sent before the plan {plan.id} was there makes no sense: {error}")
                )
                return False
        return True

    def _begun(self, group: str, error: BaseException | None) -> None:
        """The state that was kept for a plan of a group is loaded."""
        if isinstance(error, FusionError):
            self._here.outside.warn(f"a state was loaded for {group!r}, and its homes start without: {error}")
        elif error is not None:
            raise error

    def remove_set(self, process_set: int) -> None:
        """Drops the plans of a process set that has been removed."""
        for plan in [p.plan.id for p in self._plans.values() if p.plan.process_set == process_set]:
            self._drop(plan, f"process set {process_set} was removed")
        self._checkpoints.remove_set(process_set)

    def _drop(self, plan: int, why: str) -> None:
        del self._plans[plan]
        self._clients.drop(plan, why)
        self._server.drop(plan)
        self._mirrors.drop(plan)
        self.occupied.drop(plan)
        self._reassembly.drop(plan)
        self._here.requests.drop(plan)
        self._here.answers.drop(plan)

    # --- contributions and answers ------------------------------------------------------------------------------------

    def post(self, rank: int, state: PlanState, bucket: BucketState, posted: Contribution) -> None:
        """A worker's contribution, or the seed of a home, is in the arena.

        Raises:
            RequestError: no worker of ours would post that.
        """
        index = bucket.bucket.index
        if self._here.failure:
            self._here.outside.to_worker(rank, wire.Failed(posted.handle, self._here.failure))
            return
        client = self._clients.begin(rank, state, bucket.bucket, posted)
        if client is None:
            return
        node = state.plan.homes[index] if state.plan.homes else self._here.node
        if node != self._here.node:
            self._clients.send(client, posted, node)
        else:
            self._server.arrived(client.home_address, posted)

    def handlers(self) -> Handlers:
        """Returns the handlers of the peers' messages about homes."""
        return {wire.Piece: self.peer, wire.PieceTaken: self._taken}

    def peer(self, node: int, piece: wire.Piece, payload: memoryview) -> None:
        """A piece of a message has come.

        Raises:
            WireError: there can be no such message.
        """
        if piece.epoch != self._here.epoch or self._here.failure:
            return
        state = self._plans.get(piece.plan)
        if piece.after:
            self.occupied.completed(piece.after)
        if state is None:
            if piece.plan > self._latest:
                self._reassembly.keep(node, piece, payload)
            else:
                self._here.took(node, piece, len(payload))
            return
        whole = self._reassembly.add(node, state, piece, payload)
        if whole is None:
            return
        if piece.kind == "refused":
            self._clients.refused(piece, bytes(joined(whole)).decode(errors="replace"))
        elif piece.kind == "answer":
            self._clients.came(node, piece, whole)
        elif piece.kind in ("image", "update"):
            self._mirrors.came(node, piece, whole)
        else:
            self._server.came(piece, whole)

    def _taken(self, node: int, message: wire.PieceTaken) -> None:
        """A node has taken in what was sent to it. Raises `WireError` if it cannot say so."""
        if message.epoch == self._here.epoch and not self._here.failure:
            self._here.room(message.kind).taken(message.plan, node, message.nbytes)
            if message.kind in TO_MIRRORS:
                self._server.mirrored(node, message)

    # --- membership and time ------------------------------------------------------------------------------------------

    def gone(self, ranks: Iterable[int], joined: bool = False) -> None:
        """These ranks take part no longer; or, if they have joined, until all have."""
        ranks = list(ranks)
        if not joined:
            self._here.lose(ranks)
        self._server.gone(ranks, joined)

    def returned(self, ranks: Iterable[int]) -> None:
        """These ranks, which had joined, go on with all others. They have taken different numbers of steps, so all
        ranks count their clocks from a new base, which is the same on all nodes."""
        self._clients.rebase()
        self._server.returned(set(ranks))

    def operation_completed(self, mark: int) -> None:
        """An operation that is not of homes is completed on this node; `mark`: `wire.mark` of it."""
        self._here.after = mark
        self.occupied.completed(mark)

    def end(self, error: str) -> None:
        """Answers all workers that wait with this sentence: this membership epoch is over elsewhere."""
        self._clients.end(error)

    def tick(self) -> None:
        """Time has passed."""
        self.occupied.tick()

    def fail(self, error: str) -> None:
        """Forgets everything under way: the job cannot go on, for this reason."""
        self._here.failure = error
        for state in self._plans.values():
            if state.plan.reduction.survives:
                id = state.plan.id
                hosted = [hosted for hosted in self._server if hosted.plan is state]
                homes = [(one.bucket.index, one.history) for one in hosted if one.history is not None]
                clients = [client for client in self._clients if client.plan is state]
                mirrors = list(self._mirrors.of(id))
                kept = KeptPlan(self._here.epoch, id, homes, mirrors, clients, self._here.work)
                self._kept.keep(group_of(state), kept)
        self.occupied.clear()
        self._clients.forget()
        self._server.clear()
        self._mirrors.clear()
        self._reassembly.clear()
        self._here.requests.clear()
        self._here.answers.clear()
        self._here.work.forget()

    @property
    def idle(self) -> bool:
        """True if no local worker waits for an answer."""
        return self._clients.idle

    @property
    def meters(self) -> Meters:
        """The meters of the contributions of local workers."""
        return self._clients.meters

    def statistics(self) -> dict[str, object]:
        """Returns the statistics of the homes here (`HomeServer`) and of local workers' contributions (`Meters`)."""
        room = {"requests": self._here.requests.statistics(), "answers": self._here.answers.statistics()}
        return {**self._server.statistics(), "room": room, **self.meters.statistics()}

    def hold(self, plan: int) -> None:
        """Has the homes of a plan take nothing in before `release`, or before they have loaded a state."""
        self._server.hold(plan)

    def release(self, plan: int) -> None:
        """Has the homes of a plan take in what waits."""
        self._server.release(plan)

    # --- state --------------------------------------------------------------------------------------------------------

    def when_quiet(self, plan: int, then: Act) -> None:
        """Calls `then` when no thread is at work for the plan: at once, or before anything else is taken in at its
        homes."""
        self._here.work.when_quiet(plan, then)

    def save(self, plan: int, into: dict[str, Array], then: Then) -> None:
        """Has a thread copy the state of a plan's homes on this node, and what its workers have not sent, all as of one
        moment at which no thread is at work for the plan.

        Args:
            into: gets the copies. The keys begin with `home:BUCKET:RANK:` and `sender:BUCKET:RANK:`.
            then: called in the event loop, with the exception if that fails.
        """
        self.when_quiet(plan, partial(self._checkpoints.save, plan, into, then))

    def recall(self, asked: wire.RecallShards, then: Callable[[Callable[[], dict[str, Array]]], None]) -> None:
        """Calls `then`, when that is possible, with what returns the shards that were kept of a formation before: to be
        called by a thread (`KeptShards.recall`)."""
        group = asked.process_set, asked.group
        get = partial(self._kept.recall, group, asked.epoch, asked.plan, asked.clock)
        self._kept.when_quiet(group, lambda: then(get))

    def forget_unsent(self, process_set: int, group: str) -> None:
        """Has the codecs of local contributions begin anew, in the active plan of a group; homes are as they were.
        Raises `WireError` if something is under way."""
        plan = self._plan_of(process_set, group)
        if plan is not None:
            self._clients.forget_unsent(plan.plan.id)

    def load(self, process_set: int, group: str, state: Mapping[str, Array], then: Then) -> None:
        """Loads such a state into the active plan of a group, or into its next one. A state of another optimizer fails
        the job: the thread that makes the optimizer notices it.

        Args:
            state: stays as it is until `then` is called, in the event loop. That gets an error if the state is of other
                buckets, or damaged, or something is under way. Nothing has changed then. It is not called any more when
                the job cannot go on.
        """
        copies: dict[str, Array] = {}

        def copied() -> None:
            plan = self._plan_of(process_set, group)
            if plan is None:
                self._checkpoints.keep(process_set, group, copies)
                then(None)
            else:
                self._checkpoints.restore(plan, copies, partial(loaded, plan.plan.id))

        def loaded(plan: int, error: BaseException | None) -> None:
            if error is None:
                self.occupied.restored(plan)
            then(error)

        def copy() -> None:
            copies.update((key, value.copy()) for key, value in state.items())

        self._here.do(0, copy, sum(value.nbytes for value in state.values()), copied)

    def _plan_of(self, process_set: int, group: str) -> PlanState | None:
        """Returns the active plan of a group; None if there is none."""
        return next((plan for plan in self._plans.values() if group_of(plan) == (process_set, group)), None)
