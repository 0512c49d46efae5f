"""The homes on this node, the ranks that take part in them, and the threads that work on them.

Each home takes one contribution at a time, in the kernel pool; so an algorithm is plain code on one thread, and the
state of a home has one owner at any time. (Those that are not `exclusive` let several threads at a home; that is their
point.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from fusion_rt import wire
from fusion_rt.codecs.base import Array, BucketCodec
from fusion_rt.core import scratch
from fusion_rt.core.dtypes import DTYPES
from fusion_rt.core.errors import WireError
from fusion_rt.tracing.format import Kind
from fusiond.algorithms.home import Answer, Home, HomeAlgorithm, Passed, Refuse, Send, Step, Tell, Wake
from fusiond.buckets.plans import PlanState
from fusiond.core.contribution import NO_VALUES, Contribution
from fusiond.operations.thread_work import Act
from fusiond.shards.hosted_home import NEIGHBOURS, HostedHome, WaitingPart
from fusiond.shards.messages import copied, joined, open_codec, pack, unpack
from fusiond.shards.mirrors import mirror_of
from fusiond.shards.node import Address, Reservation, ThisNode
from fusiond.shards.push_pull import PushPullClient, PushPullClients


class Actions:
    """Carries out the steps that an algorithm yields (`Step`) for all homes on one node: turns them into calls that the
    event loop makes. The thread that works on the home does this; it encodes values, or copies them to where they
    belong.

    Args:
        here: this node.
        clients: get the answers to what was posted here.
        arrived: takes what is for another home on this node.
        wake: has a home looked at again, at that time (s).
        passed: is told of a clock that is over, which the rank of a home has passed.
    """

    def __init__(
        self,
        here: ThisNode,
        clients: PushPullClients,
        arrived: Callable[[Address, Contribution], None],
        wake: Callable[[HostedHome, float], None],
        passed: Callable[[HostedHome, int], None],
    ) -> None:
        self._here = here
        self._clients = clients
        self._arrived = arrived
        self._calls: dict[type[Step], Callable[[HostedHome, Any], Sequence[Act]]] = {
            Answer: self._answer,
            Send: self._send,
            Refuse: lambda hosted, step: [partial(self._refuse, hosted, step)],
            Passed: lambda hosted, step: [partial(passed, hosted, step.part.clock)],
            Tell: self._tell,
            Wake: lambda hosted, step: [partial(wake, hosted, step.at)],
        }

    def prepared(self, hosted: HostedHome, steps: Iterable[Step]) -> list[Act]:
        """Returns the calls that the event loop makes for these steps. Values are then encoded, or in place."""
        return [act for step in steps for act in self._calls[type(step)](hosted, step)]

    def _piece(
        self, hosted: HostedHome, kind: wire.PieceKind, home: int, rank: int, clock: int, weight: float = 1.0
    ) -> wire.Piece:
        """Returns a message of a home, without its values."""
        plan, bucket, version = hosted.plan.plan.id, hosted.bucket.index, hosted.home.version
        return wire.Piece(self._here.epoch, plan, bucket, kind, home, rank, clock, version, 0, weight=weight)

    def _answer(self, hosted: HostedHome, step: Answer) -> list[Act]:
        rank, node = hosted.ranks[step.part.rank], hosted.nodes[step.part.rank]
        staleness = hosted.staleness.pop(step.part.rank, None)
        message = self._piece(hosted, "answer", hosted.home.rank, rank, step.part.clock, step.weight)
        if node == self._here.node:
            place = self._clients.place(message.plan, message.bucket, rank)
            if place is not None:  # else it is over, while this thread is here
                np.copyto(place, step.values)
            message = replace(message, terms=wire.AnswerTerms(step.added, staleness=staleness))
            return [partial(self._clients.answered, message)]
        added, coded, payload = self._encoded(hosted, step)
        message = replace(message, terms=wire.AnswerTerms(added, coded, staleness))
        return [partial(self._here.send, node, message, payload)]

    def _encoded(self, hosted: HostedHome, step: Answer) -> tuple[bool, bool, memoryview]:
        """Encodes an answer to another node. Returns whether it is added there, whether it is coded, and its bytes."""
        if hosted.decoder.lossless:
            return step.added, False, hosted.copy_of(step.values)
        return self._difference(hosted, step)

    def _difference(self, hosted: HostedHome, step: Answer) -> tuple[bool, bool, memoryview]:
        """Encodes an answer by a lossy codec: as the difference to what that node has been told, so that what the codec
        leaves out comes later (dual-way sparsification: Yan et al., ICPP 2020). Returns the same as `_encoded`."""
        rank = step.part.rank
        codec = self._encoder(hosted, rank, step.added)
        if step.added:
            return True, True, self._packed(hosted, codec, step.values)
        told = hosted.told.get(rank)
        if told is None or step.part.kind == "ask":  # a question for the home's values gets every bit of them
            told = hosted.told[rank] = step.values.copy()  # another thread may be at work on the home
            return False, False, copied(told)
        payload = self._packed(hosted, codec, np.subtract(step.values, told, out=hosted.home.empty()))
        told += unpack(codec, payload)
        hosted.algorithm.told(hosted.home, step.part, told)
        return True, True, payload

    def _encoder(self, hosted: HostedHome, position: int, added: bool = False) -> BucketCodec:
        """Returns the codec of what a home sends to a rank, or to its `NEIGHBOURS`.

        It adds what it has not sent to the next only where that is `added`: a difference to what the rank was told has
        it already. All ranks' answers are rounded by the same draws, so that those who are told the same stay alike.
        """
        codec = hosted.encoders.get((position, added))
        if codec is None:
            codec = open_codec(hosted.plan, hosted.bucket, hosted.home.ranks, remembers=added)
            hosted.encoders[position, added] = codec
        return codec

    def heard(self, hosted: HostedHome, part: Contribution) -> list[Act]:
        """A worker has said what it has. Returns the calls that tell it that this is known."""
        rank, node = hosted.ranks[part.rank], hosted.nodes[part.rank]
        message = replace(self._piece(hosted, "answer", hosted.home.rank, rank, part.clock), terms=wire.AnswerTerms())
        hosted.algorithm.told(hosted.home, part, part.values)
        if node == self._here.node:
            return [partial(self._clients.answered, message)]
        if not hosted.decoder.lossless:
            hosted.told[part.rank] = part.values
        return [partial(self._here.send, node, message, memoryview(b""))]

    def _packed(self, hosted: HostedHome, codec: BucketCodec, values: Array) -> memoryview:
        """Returns all values of a bucket as bytes of their own, which the statistics count."""
        payload = pack(codec, values)
        hosted.plan.note_message(codec, len(payload))
        return payload

    def _send(self, hosted: HostedHome, step: Send) -> list[Act]:
        here, ranks = self._here, hosted.ranks
        message = self._piece(hosted, step.kind, 0, ranks[hosted.home.rank], step.clock, step.weight)
        nodes = {position: hosted.nodes[position] for position in step.ranks}
        acts: list[Act] = []
        local = [position for position, node in nodes.items() if node == here.node]
        if local:
            values = scratch.copied(step.values)  # a post may be overwritten before its neighbours have read it
            for position in local:
                part = Contribution(
                    hosted.home.rank, values, kind=step.kind, clock=step.clock, version=hosted.home.version,
                    weight=step.weight, arrived=here.outside.clock(),
                )  # fmt: skip
                acts.append(partial(self._arrived, (hosted.plan.plan.id, hosted.bucket.index, position), part))
        if len(local) < len(nodes):
            payload = step.payload
            if payload is None:
                payload = self._packed(hosted, self._encoder(hosted, NEIGHBOURS), step.values)
            elif hosted.home.codec is not None and len(payload):
                hosted.plan.note_message(hosted.home.codec, len(payload))
            for position, node in nodes.items():
                if node != here.node:
                    acts.append(partial(here.send, node, replace(message, home=position), memoryview(payload)))
        return acts

    def _tell(self, hosted: HostedHome, step: Tell) -> list[Act]:
        here, plan = self._here, hosted.plan.plan
        acts: list[Act] = []
        for bucket, node in enumerate(plan.homes):
            if bucket == hosted.bucket.index:
                continue
            if node == here.node:
                now = here.outside.clock()
                part = Contribution(0, step.numbers, kind="told", clock=step.clock, arrived=now)
                acts.append(partial(self._arrived, (plan.id, bucket, wire.SHARD), part))
            else:
                message = replace(self._piece(hosted, "told", wire.SHARD, hosted.ranks[0], step.clock), bucket=bucket)
                acts.append(partial(here.send, node, message, memoryview(step.numbers.tobytes())))
        return acts

    def _refuse(self, hosted: HostedHome, step: Refuse) -> None:
        rank, node = hosted.ranks[step.part.rank], hosted.nodes[step.part.rank]
        message = self._piece(hosted, "refused", hosted.home.rank, rank, step.part.clock)
        why = f"bucket {hosted.bucket.index} of {hosted.plan.plan.group!r}: {step.why}"
        if node == self._here.node:
            self._clients.refused(message, why)
        else:
            self._here.send(node, message, memoryview(why.encode()))


class HomeServer:
    """All homes on one node, by their addresses.

    Args:
        here: this node.
        clients: get the answers to what was posted here.
        wanted: called with what a neighbour of a replica's rank has sent, which shows how far that is.
        passed: see `Actions`.
    """

    def __init__(
        self,
        here: ThisNode,
        clients: PushPullClients,
        wanted: Callable[[HostedHome, Contribution], None],
        passed: Callable[[HostedHome, int], None],
    ) -> None:
        self._here = here
        self._clients = clients
        self._wanted = wanted
        self._actions = Actions(here, clients, self.arrived, self._wake, passed)
        self._homes: dict[Address, HostedHome] = {}
        self._of: dict[int, list[HostedHome]] = {}  # by plan
        self._gone: set[int] = set()
        self._joined: set[int] = set()  # of ranks that are gone, which may come back

    def __iter__(self) -> Iterator[HostedHome]:
        return iter(self._homes.values())

    def __getitem__(self, address: Address) -> HostedHome:
        return self._homes[address]

    def get(self, address: Address) -> HostedHome | None:
        """Returns the home at an address, if there is one."""
        return self._homes.get(address)

    # --- plans --------------------------------------------------------------------------------------------------------

    def open(self, state: PlanState) -> None:
        """A plan becomes active: makes its homes on this node."""
        plan = state.plan
        shards = state.spec.at_shards
        for bucket in plan.buckets:
            if shards:
                if plan.homes[bucket.index] == self._here.node:
                    self._open(state, bucket, wire.SHARD)
                continue
            for rank in state.members.local:
                self._open(state, bucket, state.members.set.ranks.index(rank))

    def _open(self, state: PlanState, bucket: wire.Bucket, rank: int) -> None:
        spans = tuple((tensor.start, tensor.start + tensor.numel, tensor.group) for tensor in bucket.tensors)
        leads = bucket.index == 0
        home = Home(rank, len(state.members.set.ranks), DTYPES[bucket.dtype], bucket.numel, spans, leads)
        home.present -= {position for position, rank in enumerate(state.members.set.ranks) if rank in self._gone}
        home.joined = {position for position, rank in enumerate(state.members.set.ranks) if rank in self._joined}
        nodes = tuple(self._here.context.topology.node_of(rank) for rank in state.members.set.ranks)
        hosted = HostedHome(state, bucket, home, nodes)
        hosted.mirror = mirror_of(state, self._here.node)
        self._homes[state.plan.id, bucket.index, rank] = hosted
        self._of.setdefault(state.plan.id, []).append(hosted)
        if state.spec.encodes and not hosted.decoder.lossless:
            self.at(hosted, partial(_open_own_codec, hosted), hosted.nbytes)

    def drop(self, plan: int) -> None:
        """The plan is no longer active. Threads that are at its homes finish, and nothing comes of it."""
        for hosted in self._of.pop(plan, ()):
            hosted.waiting.clear()
            hosted.later.clear()
            hosted.held.clear()
        self._homes = {key: hosted for key, hosted in self._homes.items() if key[0] != plan}

    def clear(self) -> None:
        """The job cannot go on."""
        self._homes.clear()
        self._of.clear()

    # --- threads ------------------------------------------------------------------------------------------------------

    def came(self, message: wire.Piece, payloads: list[memoryview]) -> None:
        """A message has come from a peer, in pieces. Raises `WireError` if too many wait."""
        hosted = self._homes[message.plan, message.bucket, message.home]
        if len(hosted.waiting) > hosted.most_waiting:
            raise WireError(f"too many messages wait at the home of bucket {message.bucket}")
        part = Contribution(
            hosted.ranks.index(message.rank), NO_VALUES, kind=message.kind, clock=message.clock,
            version=message.version, rates=message.rates, samples=message.samples, weight=message.weight,
            payload=payloads, arrived=self._here.outside.clock(),
        )  # fmt: skip
        self.arrived((message.plan, message.bucket, message.home), part, message)

    def arrived(self, address: Address, part: Contribution, message: wire.Piece | None = None) -> None:
        """Queues a part for a home here, if its plan is active.

        Args:
            message: in which it came, if it is from another node.
        """
        hosted = self._homes.get(address)
        if hosted is None:
            return  # its plan is no longer active
        if part.kind != "want":
            room = self._room(hosted, part, partial(self._turn, hosted))
            hosted.waiting.append(WaitingPart(part, room, message))
            self._turn(hosted)
        if part.kind in ("mix", "whole", "pass", "want") and part.rank != hosted.home.rank:
            self._wanted(hosted, part)

    def _room(self, hosted: HostedHome, part: Contribution | None, then: Act) -> Reservation:
        """Returns room for all that may be sent when a part is taken in, or, without one, when the algorithm is asked
        about a home. A shard that survives tells its mirror of it, too. So it does of its seed, which then waits for
        room on the way to the mirror, where nothing waits."""
        is_seed, is_own = part is not None and part.kind == "seed", part is not None and part.rank == hosted.home.rank
        positions = () if is_seed else hosted.algorithm.addressees(hosted.home, part)
        nodes = {hosted.nodes[position] for position in positions}
        if (positions or is_seed) and hosted.mirror is not None:
            nodes.add(hosted.mirror)
        most = hosted.nbytes
        if hosted.mirror is None:  # to which all is sent as it is
            most = min(most, hosted.decoder.max_encoded_nbytes(hosted.home.elements))
        room = self._here.requests if is_own else self._here.answers
        return room.reserve(hosted.plan.plan.id, nodes - {self._here.node}, most, then)

    def hold(self, plan: int) -> None:
        """The homes of a plan are to take nothing in."""
        for hosted in self._of.get(plan, ()):
            hosted.closed = True

    def release(self, plan: int) -> None:
        """The homes of a plan may take in what waits."""
        for hosted in list(self._of.get(plan, ())):
            hosted.closed = False
            self._turn(hosted)

    def resume(self, plan: int) -> None:
        """The homes of a plan may begin what waits."""
        for hosted in list(self):
            if hosted.plan.plan.id == plan:
                self._turn(hosted)

    def _turn(self, hosted: HostedHome) -> None:
        """Hands the parts that wait for a home to threads."""
        if hosted.turning:
            return  # a small one has been taken in, on the spot: whoever began it goes on
        hosted.turning = True
        while hosted.may_begin() and not self._here.work.pauses(hosted.plan.plan.id):
            one = hosted.next()
            if one is None:
                break
            if one.part.kind == "seed":  # its optimizer may have to be imported
                self.at(hosted, partial(self._seed, hosted, one.part), math.inf, one)
            else:
                self.at(hosted, partial(self._take_in, hosted, one.part), hosted.nbytes, one)
        hosted.turning = False

    def at(
        self, hosted: HostedHome, work: Callable[[], list[Act]], nbytes: float, waited: WaitingPart | None = None
    ) -> None:
        """Runs `work` on a home, and then the calls that it returns in the event loop: those of a home that has a
        mirror when the mirror has all that they may tell of. `waited`: the part that it takes in."""
        acts: list[Act] = []
        hosted.busy += 1

        def done() -> None:
            hosted.busy -= 1
            if waited is not None:
                acts.append(waited.room.end)
                if waited.message is not None:
                    self._here.took(hosted.nodes[waited.part.rank], waited.message, waited.message.nbytes)
            if hosted.outbox:
                self._tell_mirror(hosted, hosted.mirror)
            if hosted.sent > hosted.mirrored:
                hosted.held.append((hosted.sent, acts))
            else:
                for act in acts:
                    act()
            self._freed(hosted)

        self._here.do(hosted.plan.plan.id, lambda: acts.extend(work()), nbytes, done)

    def at_all(
        self, plan: int, homes: Sequence[HostedHome], work: Act, then: Callable[[BaseException | None], None]
    ) -> None:
        """Runs `work`, which reads all homes of a plan, on a thread, and `then` in the event loop. No thread may be at
        work for the plan now; none will be meanwhile."""
        for hosted in homes:
            hosted.busy += 1

        def done(error: BaseException | None) -> None:
            if self._here.failure:
                return
            then(error)
            for hosted in homes:
                hosted.busy -= 1
                self._freed(hosted)

        self._here.work.alone(plan, work, math.inf, done)

    def _freed(self, hosted: HostedHome) -> None:
        """A thread has left a home."""
        while hosted.later and not hosted.busy:
            hosted.later.popleft()()
        self._turn(hosted)

    def _tell_mirror(self, hosted: HostedHome, mirror: int | None) -> None:
        """Tells a home's mirror what a thread has done there."""
        assert mirror is not None
        while hosted.outbox:  # to which threads may add
            one = hosted.outbox.popleft()
            hosted.sent += 1
            message = wire.Piece(
                self._here.epoch, hosted.plan.plan.id, hosted.bucket.index, one.kind, wire.SHARD,
                hosted.ranks[one.rank], hosted.sent, one.clock, 0, 0, one.rates, one.samples,
            )  # fmt: skip
            self._here.send(mirror, message, joined(one.payloads))

    def mirrored(self, node: int, message: wire.PieceTaken) -> None:
        """A mirror has all that it was told up to a message. Raises `WireError` if it cannot say so."""
        hosted = self._homes.get((message.plan, message.bucket, wire.SHARD))
        if hosted is None:
            return  # its plan is no longer active
        if node != hosted.mirror or message.clock > hosted.sent:
            raise WireError(f"it has no mirror of {message.clock} messages of bucket {message.bucket}")
        hosted.mirrored = max(hosted.mirrored, message.clock)
        while hosted.held and hosted.held[0][0] <= hosted.mirrored:
            for act in hosted.held.popleft()[1]:
                act()
        self._turn(hosted)

    def when_free(self, hosted: HostedHome, then: Act) -> None:
        """Calls `then` when no thread is at a home: at once, or before anything else is taken in there."""
        if hosted.busy:
            hosted.later.append(then)
        else:
            then()

    # --- calls of the algorithm ---------------------------------------------------------------------------------------

    def _take_in(self, hosted: HostedHome, part: Contribution) -> list[Act]:
        """Gives a part to the algorithm, and prepares what follows, on a thread of the kernel pool."""
        home, position = hosted.home, part.rank
        if part.payload is not None:
            part.values, part.payload = self._decoded(hosted, part, joined(part.payload)), None
        if part.kind == "has":
            return self._actions.heard(hosted, part)
        if part.kind in ("ask", "reseed"):
            return self._asked(hosted, part)
        if part.clock < hosted.since:  # of before all ranks have set their parameters
            return []
        if part.kind == "post":
            if position not in home.present:
                _come_back(hosted, part)
            home.done[position] += 1
            home.heard[position] = part.clock + 1
            stale = max(home.version - part.version, 0)
            # At a replica only its own worker posts: there is no other to be ahead of.
            ahead = max(home.done[position] - home.slowest, 0) if home.is_shard else 0
            self._here.context.trace.record(
                Kind.APPLIED, f"bucket {hosted.bucket.index}", stale, part.clock, hosted.plan.plan.id,
                peer=hosted.ranks[position],
            )  # fmt: skip
            waited = self._here.outside.clock() - part.arrived
            hosted.staleness[position] = wire.Staleness(stale, ahead, max(round(1000 * waited), 0))
        nothing = part.kind == "post" and not part.samples
        steps = hosted.algorithm.nothing(home, part) if nothing else hosted.algorithm.received(home, part)
        acts = self._actions.prepared(hosted, steps)
        if len(home.slots) > hosted.most_waiting:
            raise _too_many(hosted, part)
        return acts

    def _asked(self, hosted: HostedHome, part: Contribution) -> list[Act]:
        """Answers a worker that asks for what a home has, or has set it."""
        if part.kind == "reseed":
            hosted.reseed(part)
        return self._actions.prepared(hosted, [hosted.algorithm.asked(hosted.home, part)])

    def _decoded(self, hosted: HostedHome, part: Contribution, payload: memoryview) -> Array:
        if part.kind == "told":
            return np.frombuffer(payload, np.int64)
        if part.kind in ("reseed", "has", "whole"):
            return self._plain(hosted, payload)
        if part.kind in ("ask", "pass") or not part.samples:
            return NO_VALUES
        return unpack(hosted.decoder, payload)

    def _plain(self, hosted: HostedHome, payload: memoryview) -> Array:
        """Returns a copy of the values in a message that has them as they are."""
        return np.array(unpack(hosted.plan.buckets[hosted.bucket.index].codec, payload))

    def _seed(self, hosted: HostedHome, part: Contribution) -> list[Act]:
        if hosted.home.value is None:  # else loaded before, which counts more
            hosted.begin(part.values.copy() if part.payload is None else self._plain(hosted, joined(part.payload)))
            hosted.was_set()
        rank, plan, bucket = hosted.ranks[part.rank], hosted.plan.plan.id, hosted.bucket.index
        return [partial(self._clients.seeded, part, plan, bucket, rank)]

    def _wake(self, hosted: HostedHome, at: float) -> None:
        """Makes the algorithm look at a home again, at that time (s)."""

        def look() -> None:
            now = self._here.outside.clock()
            self._ask(hosted, lambda algorithm, home: algorithm.elapsed(home, now))

        def wake() -> None:
            if self._homes.get((hosted.plan.plan.id, hosted.bucket.index, hosted.home.rank)) is hosted:
                self.when_free(hosted, look)  # running work may change the work that is due

        self._here.outside.call_later(max(at - self._here.outside.clock(), 0.0), wake)

    def gone(self, ranks: Iterable[int], joined: bool = False) -> None:
        """These ranks take part no longer; or, if they have joined, until all have."""
        for rank in ranks:
            self._gone.add(rank)
            (self._joined.add if joined else self._joined.discard)(rank)
            for hosted in list(self):
                if rank in hosted.ranks:
                    self.when_free(hosted, partial(self._leave, hosted, hosted.ranks.index(rank), joined))

    def _leave(self, hosted: HostedHome, position: int, joined: bool) -> None:
        home = hosted.home
        home.joined = home.joined | {position} if joined else home.joined - {position}
        home.present = home.present - {position}
        self._without(hosted, position)

    def occupied(self, plan: int, rank: int, clock: int | None) -> None:
        """A rank waits in another operation, after it has contributed so many clocks to the shards of a plan; None: it
        does not any more."""
        for hosted in list(self._of.get(plan, ())):
            if rank in hosted.ranks:
                self.when_free(hosted, partial(self._occupy, hosted, hosted.ranks.index(rank), clock))

    def _occupy(self, hosted: HostedHome, position: int, clock: int | None) -> None:
        if clock is None:
            hosted.home.occupied.pop(position, None)
            return
        hosted.home.occupied[position] = clock
        self._without(hosted, position)

    def _ask(self, hosted: HostedHome, ask: Callable[[HomeAlgorithm[Any], Home], Iterable[Step]]) -> None:
        """Asks the algorithm about a home, on a thread, when there is room for the steps that follow."""

        def look() -> list[Act]:
            return [*self._actions.prepared(hosted, ask(hosted.algorithm, hosted.home)), room.end]

        begin = partial(self.at, hosted, look, hosted.nbytes)
        room = self._room(hosted, None, partial(self.when_free, hosted, begin))
        if room.granted:
            begin()

    def _without(self, hosted: HostedHome, position: int) -> None:
        """Lets parts that wait for a rank at a home go on."""
        self._ask(hosted, lambda algorithm, home: algorithm.without(home, position))

    def returned(self, ranks: set[int]) -> None:
        """These ranks, which had joined, go on with all others."""
        self._gone -= ranks
        self._joined -= ranks
        for hosted in self:
            self.when_free(hosted, partial(_return, hosted, ranks))

    # --- waiting ranks ------------------------------------------------------------------------------------------------

    def withdraw(self, client: PushPullClient) -> bool:
        """Lets a worker have its arena back although it has not been answered. Returns whether that is possible now."""
        hosted = self._homes.get(client.home_address)
        if hosted is None:
            return True
        for one in list(hosted.waiting):
            if one.part is client.post:
                hosted.waiting.remove(one)
                one.room.end()
                return True
        if hosted.busy:
            return False
        position = hosted.ranks.index(client.rank)
        for slot in hosted.home.slots.values():
            if position in slot:
                slot[position].values = scratch.copied(slot[position].values)
        return True

    @staticmethod
    def awaited(hosted: HostedHome) -> tuple[int, ...]:
        """Returns the ranks that a home here waits for; none if that cannot be told now."""
        if hosted.busy:
            return ()
        if not hosted.seeded:
            return hosted.ranks[:1]
        return tuple(hosted.ranks[position] for position in hosted.algorithm.awaited(hosted.home))

    def statistics(self) -> dict[str, object]:
        """Returns the number of `homes` here, of their `updates`, and by rank of contributions that came `late`."""
        late: Counter[str] = Counter()
        for hosted in self:
            for (what, position), count in list(hosted.home.noticed.items()):  # which threads may add to
                if what == "late":
                    late[str(hosted.ranks[position])] += count
        updates = sum(hosted.home.version for hosted in self)
        return {"homes": len(self._homes), "updates": updates, "late": dict(late)}


def _open_own_codec(hosted: HostedHome) -> list[Act]:
    """Opens the codec by which the algorithm encodes, before anything is taken in."""
    hosted.home.codec = open_codec(hosted.plan, hosted.bucket, hosted.home.rank, remembers=False)
    return []


def _come_back(hosted: HostedHome, part: Contribution) -> None:
    """Has a rank that had joined take part again, if this was posted after it is back, and not before it joined: of
    that nobody waits for more."""
    home, position = hosted.home, part.rank
    if part.clock // wire.CLOCKS_OF_A_JOIN > hosted.joins:
        home.done[position] = max(home.done[position], home.slowest)
        home.present, home.joined = home.present | {position}, home.joined - {position}


def _too_many(hosted: HostedHome, part: Contribution) -> WireError:
    return WireError(
        f"contributions of {len(hosted.home.slots)} clocks wait at the home of bucket {hosted.bucket.index} of "
        f"{hosted.plan.plan.group!r}, the last one of rank {hosted.ranks[part.rank]} and clock {part.clock}: "
        "that cannot be"
    )


def _return(hosted: HostedHome, ranks: set[int]) -> None:
    home = hosted.home
    back = {position for position, rank in enumerate(hosted.ranks) if rank in ranks}
    home.present, home.joined = home.present | back, home.joined - back
    hosted.joins += 1
    home.done = dict.fromkeys(home.done, max(home.done.values()))
    hosted.algorithm.returned(home)
