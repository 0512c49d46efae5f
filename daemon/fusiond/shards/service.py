"""The parameter service: the parts of this package, joined, as the engine uses them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from fusion_rt import wire
from fusion_rt.codecs import BucketCodec
from fusion_rt.core.errors import FusionError, WireError
from fusion_rt.local.saved_state import State, StateOwner, by_owner, counts
from fusiond.buckets.plans import BucketState, PlanState
from fusiond.collectives.base import Array
from fusiond.core.contribution import Contribution
from fusiond.core.dispatch import Handlers
from fusiond.operations.context import Context
from fusiond.operations.thread_work import Act, ThreadWork
from fusiond.shards.hosted_home import HostedHome, RestoredCodecs
from fusiond.shards.messages import joined
from fusiond.shards.mirrors import Mirror, Mirrors, ShardHistory
from fusiond.shards.node import TO_MIRRORS, ThisNode
from fusiond.shards.push_pull import PushPullClient, PushPullClients, under_way
from fusiond.shards.reassembly import Reassembly
from fusiond.shards.server import HomeServer
from fusiond.shards.staleness import Meters
from fusiond.shards.waits import Occupied, Operations, Waits

Then: TypeAlias = Callable[[BaseException | None], None]
"""Called in the event loop, with the exception if something has failed."""


@dataclass(frozen=True)
class EndedShards:
    """The shards of a plan on one node, its mirrors of others, and the contributions of its workers, as they were when
    the job could not go on.

    Attributes:
        homes: by bucket; those that had begun.
        mirrors: of homes on another node.
        clients: of local workers, with what their codecs have not sent.
    """

    homes: Sequence[tuple[int, ShardHistory]]
    mirrors: Sequence[Mirror]
    clients: Sequence[PushPullClient]

    def saved_at(self, clock: int) -> State:
        """Returns what all of them had when all contributions before a clock counted, and no other ones
        (`fusion_rt.local.saved_state`). Those of which that is not known are left out. To be called by one thread."""
        found: State = {}
        for bucket, history in self.homes:
            found |= StateOwner("home", bucket).keyed(history.state_at(clock) or {})
        for mirror in self.mirrors:
            found |= StateOwner("mirror", mirror.bucket.index).keyed(mirror.state_at(clock) or {})
        for client in self.clients:
            found |= StateOwner("sender", client.bucket.index, client.rank).keyed(client.saved_at(clock))
        return found


class ParameterService:
    """All homes of one engine, and the contributions of its workers to homes anywhere.

    Attributes:
        occupied: ranks that wait in other operations.
        waits: what local ranks wait for at homes, and what the homes here wait for.
        ended: by plan, shards that outlive their formation, once the job cannot go on.

    Args:
        context, work: the engine's.
        epoch: the membership epoch.
        failed: called with an exception when something cannot be gone on with.
        operations: see `Occupied`.
    """

    def __init__(
        self,
        context: Context,
        work: ThreadWork,
        epoch: int,
        failed: Callable[[BaseException], None],
        operations: Operations,
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
        self.ended: dict[int, EndedShards] = {}
        work.resume = self._server.resume
        self.occupied = Occupied(self._here, self._clients, self._server, operations)
        self.waits = Waits(self._here, self._clients, self._server)
        self._reassembly = Reassembly(self._here)

    # --- plans --------------------------------------------------------------------------------------------------------

    def install(self, state: PlanState, loaded: Mapping[str, Array] | None = None) -> bool:
        """A plan becomes active whose buckets have homes; it replaces the one that its group had. Returns whether it is
        new: a rank that had joined may have asked for it again.

        Args:
            loaded: the state that its homes and its workers' contributions go on from, if they do; see `restore`.
        """
        plan = state.plan
        if plan.id in self._plans:
            return False
        for old in [p.plan.id for p in self._plans.values() if p.group == state.group]:
            self._drop(old, f"the plan of {plan.group!r} was replaced")
        self._plans[plan.id] = state
        self._latest = max(self._latest, plan.id)
        self._clients.open(state)
        self._server.open(state)
        self._mirrors.open(state)
        self.occupied.open(state)
        if loaded:
            self.restore(state, loaded, partial(self._begun, plan.group))
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
                self.ended[id] = EndedShards(homes, list(self._mirrors.of(id)), clients)
                self._here.work.when_all_quiet(partial(_let_go, [history for _, history in homes]))
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

    def save(self, plan: int, into: State, then: Then, senders: bool = True) -> None:
        """Has a thread copy the state of a plan's homes on this node, and what its workers have not sent, all as of one
        moment at which no thread is at work for the plan.

        Args:
            into: gets the copies (`fusion_rt.local.saved_state`).
            senders: also of what the workers have not sent.
            then: called in the event loop, with the exception if that fails.
        """
        self.when_quiet(plan, partial(self._save, plan, into, then, senders))

    def _save(self, plan: int, into: State, then: Then, senders: bool) -> None:
        homes = [hosted for hosted in self._server if hosted.plan.plan.id == plan]
        clients = [client for client in self._clients if senders and client.plan.plan.id == plan]

        def copy() -> None:
            for hosted in homes:
                into.update(StateOwner("home", hosted.bucket.index, hosted.home.rank).keyed(hosted.saved()))
            for client in clients:
                into.update(StateOwner("sender", client.bucket.index, client.rank).keyed(client.saved()))

        if homes or clients:
            self._server.at_all(plan, homes, copy, then)
        else:
            then(None)

    def restore(self, plan: PlanState, state: Mapping[str, Array], then: Then) -> None:
        """Loads a saved state, whose arrays become those of homes, into an active plan. A thread opens and loads
        codecs, and nothing is taken in at the plan's homes meanwhile. A state of another optimizer fails the job: the
        thread that makes the optimizer notices it.

        Args:
            then: called in the event loop, with a `FusionError` if the state is of other buckets, or damaged, or
                something is under way: nothing has changed then. It is not called when the job cannot go on.
        """
        try:
            homes, clients = self._owners(plan, state)
        except FusionError as error:
            then(error)
            return
        of_homes: list[RestoredCodecs] = []
        of_clients: list[BucketCodec | None] = []

        def load() -> None:
            of_homes.extend(hosted.opened(entries) for hosted, entries in homes)
            of_clients.extend(client.opened_from(entries) for client, _, entries in clients)

        def loaded(error: BaseException | None) -> None:
            # They may have posted meanwhile.
            error = error or next((under_way(one) for one, _, _ in clients if one.busy or one.queued), None)
            if error is None:
                for (client, (clock, version), _), codec in zip(clients, of_clients, strict=True):
                    client.clock, client.version, client.codec = clock, version, codec
                for (hosted, entries), of_codecs in zip(homes, of_homes, strict=True):
                    hosted.closed = True
                    work = partial(_restore, hosted, entries, of_codecs)
                    self._server.when_free(hosted, partial(self._server.at, hosted, work, math.inf))  # as for a seed
                self.occupied.restored(plan.plan.id)
            then(error)

        of_plan = [hosted for hosted in self._server if hosted.plan is plan]
        self.when_quiet(plan.plan.id, partial(self._server.at_all, plan.plan.id, of_plan, load, loaded))

    def _owners(
        self, plan: PlanState, state: Mapping[str, Array]
    ) -> tuple[list[tuple[HostedHome, State]], list[tuple[PushPullClient, list[int], State]]]:
        """Returns the homes of a saved state with their entries, and the clients with their counts and entries. Raises
        `WireError` for a state that cannot be loaded now."""
        homes: list[tuple[HostedHome, State]] = []
        clients: list[tuple[PushPullClient, list[int], State]] = []
        for (kind, bucket, rank), entries in by_owner(state).items():
            address = (plan.plan.id, bucket, rank)
            hosted, client = self._server.get(address), self._clients.get(address)
            if kind == "home" and hosted is not None:
                hosted.check(entries)
                homes.append((hosted, entries))
            elif kind == "sender" and client is not None:
                numbers = counts(entries.get("counts"), 2, f"rank {rank} in bucket {bucket}")
                if client.busy or client.queued:
                    raise under_way(client)
                clients.append((client, numbers, entries))
            else:
                raise WireError(f"the saved state is of another job: it has the {kind} of bucket {bucket}, rank {rank}")
        return homes, clients

    def forget_unsent(self, plan: int) -> None:
        """Has the codecs of local contributions to a plan's homes begin anew; homes are as they were. Raises
        `WireError` if something is under way."""
        self._clients.forget_unsent(plan)


def _restore(hosted: HostedHome, entries: State, codecs: RestoredCodecs) -> list[Act]:
    hosted.restore(entries, codecs)
    return [partial(setattr, hosted, "closed", False)]


def _let_go(homes: Iterable[ShardHistory]) -> None:
    """Drops contributions, which are in the arenas of workers, when no thread works on them any more."""
    for history in homes:
        history.home.slots.clear()
        history.home.waiting.clear()
