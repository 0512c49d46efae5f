"""The homes on this node, the ranks that take part in them, and the threads that work on them.

Each home takes one contribution at a time, in the kernel pool; so an algorithm is plain code on one thread, and the
state of a home has one owner at any time. (Those that are not `exclusive` let several threads at a home; that is their
point.)
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from fusion_rt import wire
from fusion_rt.core.dtypes import DTYPES
from fusion_rt.core.errors import WireError
from fusion_rt.tracing.format import Kind
from fusiond.algorithms.home import Home, HomeAlgorithm, Step
from fusiond.buckets.plans import PlanState
from fusiond.collectives.base import Array
from fusiond.core.contribution import NO_VALUES, Contribution
from fusiond.operations.thread_work import Act
from fusiond.shards.actions import Actions
from fusiond.shards.hosted_home import HostedHome
from fusiond.shards.messages import MessageCodecs, joined, unpack
from fusiond.shards.mirrors import mirror_of
from fusiond.shards.node import Address, ThisNode
from fusiond.shards.push_pull import PushPullClient, PushPullClients


class HomeServer:
    """All homes on one node, by their addresses.

    Args:
        here: this node.
        codecs: the codecs.
        clients: get the answers to what was posted here.
        wanted: called with what a neighbour of a replica's rank has sent, which shows how far that is.
        passed: see `Actions`.
    """

    def __init__(
        self,
        here: ThisNode,
        codecs: MessageCodecs,
        clients: PushPullClients,
        wanted: Callable[[HostedHome, Contribution], None],
        passed: Callable[[HostedHome, int], None],
    ) -> None:
        self._here = here
        self._codecs = codecs
        self._wanted = wanted
        self._actions = Actions(here, codecs, clients, self.arrived, self._wake, passed)
        self._homes: dict[Address, HostedHome] = {}
        self._of: dict[int, list[HostedHome]] = {}  # by plan
        self._gone: set[int] = set()
        self._joined: set[int] = set()  # of those that are gone, who may come back

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
                    self._open(state, bucket, -1)
                continue
            for rank in state.members.local:
                self._open(state, bucket, state.members.set.ranks.index(rank))

    def _open(self, state: PlanState, bucket: wire.Bucket, rank: int) -> None:
        codec = None
        if state.spec.encodes and not self._codecs.decoder(state, bucket).lossless:
            codec = self._codecs.open(state, bucket, rank, remembers=False)
        spans = tuple((tensor.start, tensor.start + tensor.numel, tensor.group) for tensor in bucket.tensors)
        leads = bucket.index == 0
        home = Home(rank, len(state.members.set.ranks), DTYPES[bucket.dtype], bucket.numel, spans, leads, codec)
        home.present -= {position for position, rank in enumerate(state.members.set.ranks) if rank in self._gone}
        home.joined = {position for position, rank in enumerate(state.members.set.ranks) if rank in self._joined}
        nodes = tuple(self._here.topology.node_of(rank) for rank in state.members.set.ranks)
        hosted = HostedHome(state, bucket, home, nodes)
        hosted.mirror = mirror_of(state, self._here.node)
        self._homes[state.plan.id, bucket.index, rank] = hosted
        self._of.setdefault(state.plan.id, []).append(hosted)

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
        self.arrived((message.plan, message.bucket, message.home), part)

    def arrived(self, address: Address, part: Contribution) -> None:
        """Queues a part for a home here, if its plan is active."""
        hosted = self._homes.get(address)
        if hosted is None:
            return  # its plan is no longer active
        if part.kind != "want":
            hosted.waiting.append(part)
            self._turn(hosted)
        if part.kind in ("mix", "whole", "pass", "want") and part.rank != hosted.home.rank:
            self._wanted(hosted, part)

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
            part = hosted.next()
            if part.kind == "seed":
                self.at(hosted, partial(self._seed, hosted, part), math.inf)  # its optimizer may have to be imported
            else:
                self.at(hosted, partial(self._take_in, hosted, part), hosted.nbytes)
        hosted.turning = False

    def at(self, hosted: HostedHome, work: Callable[[], list[Act]], nbytes: float) -> None:
        """Runs `work` on a home, and then the calls that it returns in the event loop: those of a home that has a
        mirror when the mirror has all that they may tell of."""
        acts: list[Act] = []
        hosted.busy += 1

        def done() -> None:
            hosted.busy -= 1
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
                self._here.epoch, hosted.plan.plan.id, hosted.bucket.index, one.kind, -1, hosted.ranks[one.rank],
                hosted.sent, one.clock, 0, 0, one.rates, one.samples,
            )  # fmt: skip
            self._here.send(mirror, message, joined(one.payloads))

    def mirrored(self, node: int, message: wire.Mirrored) -> None:
        """A mirror has all that it was told up to a number. Raises `WireError` if it cannot say so."""
        hosted = self._homes.get((message.plan, message.bucket, -1))
        if hosted is None:
            return  # its plan is no longer active
        if node != hosted.mirror or message.number > hosted.sent:
            raise WireError(f"it has no mirror of {message.number} messages of bucket {message.bucket}")
        hosted.mirrored = max(hosted.mirrored, message.number)
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
            # At a replica only its own worker posts: there is nobody to be ahead of.
            ahead = max(home.done[position] - home.slowest, 0) if home.rank < 0 else 0
            self._here.trace.record(
                Kind.APPLIED, f"bucket {hosted.bucket.index}", stale, part.clock, hosted.plan.plan.id,
                peer=hosted.ranks[position],
            )  # fmt: skip
            waited = self._here.outside.clock() - part.arrived
            hosted.notes[position] = stale, ahead, max(round(1000 * waited), 0)
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
        return unpack(self._codecs.decoder(hosted.plan, hosted.bucket), payload)

    def _plain(self, hosted: HostedHome, payload: memoryview) -> Array:
        """Returns a copy of the values in a message that has them as they are."""
        return np.array(unpack(self._codecs.plain(hosted.plan, hosted.bucket), payload))

    def _seed(self, hosted: HostedHome, part: Contribution) -> list[Act]:
        if hosted.home.value is None:  # else loaded before, which counts more
            hosted.begin(part.values if part.payload is None else self._plain(hosted, joined(part.payload)))
            hosted.was_set()
        return []

    def _wake(self, hosted: HostedHome, at: float) -> None:
        """Makes the algorithm look at a home again, at that time (s)."""

        def look() -> None:
            now = self._here.outside.clock()
            self._ask(hosted, lambda algorithm, home: algorithm.elapsed(home, now))

        def wake() -> None:
            if self._homes.get((hosted.plan.plan.id, hosted.bucket.index, hosted.home.rank)) is hosted:
                self.when_free(hosted, look)  # what is at work may change what is due

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
        """Asks the algorithm about a home, on a thread, and carries out the steps that follow."""
        self.at(hosted, lambda: self._actions.prepared(hosted, ask(hosted.algorithm, hosted.home)), hosted.nbytes)

    def _without(self, hosted: HostedHome, position: int) -> None:
        """Lets parts that wait for a rank at a home go on."""
        self._ask(hosted, lambda algorithm, home: algorithm.without(home, position))

    def returned(self, ranks: set[int]) -> None:
        """These ranks, which had joined, go on with all others."""
        self._gone -= ranks
        self._joined -= ranks
        for hosted in self:
            self.when_free(hosted, partial(_return, hosted, ranks))

    # --- for those who wait -------------------------------------------------------------------------------------------

    def withdraw(self, client: PushPullClient) -> bool:
        """Lets a worker have its arena back although it has not been answered. Returns whether that is possible now."""
        hosted = self._homes.get(client.home_address)
        if hosted is None:
            return True
        if any(part is client.post for part in hosted.waiting):
            hosted.waiting = deque(part for part in hosted.waiting if part is not client.post)
            return True
        if hosted.busy:
            return False
        position = hosted.ranks.index(client.rank)
        for slot in hosted.home.slots.values():
            if position in slot:
                slot[position].values = slot[position].values.copy()
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
