"""The homes on this node: who takes part in them, and which thread takes in what, when.

Each home takes one contribution at a time, in the kernel pool; so an algorithm is plain code on one thread, and the
state of a home has one owner at any time. (Those that are not `exclusive` let several threads at a home; that is their
point.)
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np

from fusion_rt import wire
from fusion_rt.algorithms import Place
from fusion_rt.codecs import layout_of
from fusion_rt.codecs.dense import Dense
from fusion_rt.dtypes import DTYPES
from fusion_rt.errors import WireError
from fusion_rt.trace_format import Kind
from fusiond.algorithms.home import Home
from fusiond.buckets.plans import PlanState
from fusiond.collectives.base import Array
from fusiond.core.contribution import NO_VALUES, Contribution
from fusiond.operations.thread_work import Act
from fusiond.shards.actions import Steps
from fusiond.shards.message_codecs import Codings
from fusiond.shards.messages import unpack
from fusiond.shards.node import Address, Here
from fusiond.shards.push_pull import CLOCKS_OF_A_JOIN, Sender, Senders
from fusiond.shards.shard import Box


class Boxes:
    """All homes on one node, by their addresses.

    Args:
        here: this node.
        codings: the codecs.
        senders: get the answers to what was posted here.
        wanted: called with what a neighbour of a replica's rank has sent, which shows how far that is.
        passed: see `Steps`.
    """

    def __init__(
        self,
        here: Here,
        codings: Codings,
        senders: Senders,
        wanted: Callable[[Box, Contribution], None],
        passed: Callable[[Box, int], None],
    ) -> None:
        self._here = here
        self._codings = codings
        self._wanted = wanted
        self._steps = Steps(here, codings, senders, self.arrived, self._wake, passed)
        self._boxes: dict[Address, Box] = {}
        self._gone: set[int] = set()
        self._joined: set[int] = set()  # of those that are gone, who may come back

    def __iter__(self) -> Iterator[Box]:
        return iter(self._boxes.values())

    def __getitem__(self, address: Address) -> Box:
        return self._boxes[address]

    def get(self, address: Address) -> Box | None:
        """The one at an address, if there is one."""
        return self._boxes.get(address)

    # --- plans --------------------------------------------------------------------------------------------------------

    def open(self, state: PlanState) -> None:
        """A plan is in force: makes those of its homes that are on this node."""
        plan = state.plan
        shards = state.spec.place is Place.SHARD
        for bucket in plan.buckets:
            if shards:
                if plan.homes[bucket.index] == self._here.node:
                    self._open(state, bucket, -1)
                continue
            for rank in state.members.local:
                self._open(state, bucket, state.members.set.ranks.index(rank))

    def _open(self, state: PlanState, bucket: wire.Bucket, rank: int) -> None:
        codec = None
        if state.spec.encodes:
            codec = self._codings.open(state, bucket, remembers=False)
        spans = tuple((tensor.start, tensor.start + tensor.numel, tensor.group) for tensor in bucket.tensors)
        leads = bucket.index == 0
        home = Home(rank, len(state.members.set.ranks), DTYPES[bucket.dtype], bucket.numel, spans, leads, codec)
        home.present -= {position for position, rank in enumerate(state.members.set.ranks) if rank in self._gone}
        home.joined = {position for position, rank in enumerate(state.members.set.ranks) if rank in self._joined}
        self._boxes[state.plan.id, bucket.index, rank] = Box(state, bucket, home)

    def drop(self, plan: int) -> None:
        """The plan is no longer in force. Threads that are at its homes finish, and nothing comes of it."""
        for key, box in self._boxes.items():
            if key[0] == plan:
                box.waiting.clear()
                box.later.clear()
        self._boxes = {key: box for key, box in self._boxes.items() if key[0] != plan}

    def clear(self) -> None:
        """The job cannot go on."""
        self._boxes.clear()

    # --- threads ------------------------------------------------------------------------------------------------------

    def came(self, parcel: wire.Piece, payload: memoryview) -> None:
        """A parcel has come from a peer. Raises `WireError` if too many wait."""
        box = self._boxes[parcel.plan, parcel.bucket, parcel.home]
        if len(box.waiting) > box.most_waiting:
            raise WireError(f"too many parcels wait at the home of bucket {parcel.bucket}")
        part = Contribution(
            box.ranks.index(parcel.rank), NO_VALUES, kind=parcel.kind, clock=parcel.clock, version=parcel.version,
            rates=parcel.rates, samples=parcel.samples, weight=parcel.weight, payload=payload,
            arrived=self._here.outside.clock(),
        )  # fmt: skip
        self.arrived((parcel.plan, parcel.bucket, parcel.home), part)

    def arrived(self, address: Address, part: Contribution) -> None:
        """Something is to be taken in."""
        box = self._boxes.get(address)
        if box is None:
            return  # its plan is no longer in force
        if part.kind != "want":
            box.waiting.append(part)
            self._turn(box)
        if part.kind in ("mix", "pass", "want") and part.rank != box.home.rank:
            self._wanted(box, part)

    def resume(self, plan: int) -> None:
        """The homes of a plan may begin what waits."""
        for box in list(self):
            if box.plan.plan.id == plan:
                self._turn(box)

    def _turn(self, box: Box) -> None:
        """Has threads take in what waits for a home."""
        if box.turning:
            return  # a small one has been taken in, on the spot: whoever began it goes on
        box.turning = True
        while box.may_begin() and not self._here.work.pauses(box.plan.plan.id):
            part = box.next()
            if part.kind == "seed":
                self.at(box, partial(_seed, box, part), math.inf)  # its optimizer may have to be imported
            else:
                self.at(box, partial(self._take_in, box, part), box.nbytes)
        box.turning = False

    def at(self, box: Box, work: Callable[[], list[Act]], nbytes: float) -> None:
        """Runs `work` on a home, and what it says afterwards in the event loop."""
        acts: list[Act] = []
        box.busy += 1

        def done() -> None:
            box.busy -= 1
            for act in acts:
                act()
            while box.later and not box.busy:
                box.later.popleft()()
            self._turn(box)

        self._here.do(box.plan.plan.id, lambda: acts.extend(work()), nbytes, done)

    def when_free(self, box: Box, then: Act) -> None:
        """Calls `then` when no thread is at a home: at once, or before anything else is taken in there."""
        if box.busy:
            box.later.append(then)
        else:
            then()

    # --- what the algorithm is told -----------------------------------------------------------------------------------

    def _take_in(self, box: Box, part: Contribution) -> list[Act]:
        """A thread of the kernel pool: the algorithm, and what follows from it, ready to be sent."""
        home, position = box.home, part.rank
        if part.payload is not None:
            part.values = self._decoded(box, part, part.payload)
        now = self._here.outside.clock()
        if part.kind == "reseed":
            _reseed(box, part.values)
        if part.kind in ("ask", "reseed"):  # of a shard; a replica has nothing to ask for
            return self._steps.prepared(box, [box.algorithm.asked(home, part)])
        if part.kind == "post":
            if position not in home.present and part.clock // CLOCKS_OF_A_JOIN > box.joins:
                # It had joined, and is back; else it posted this before it joined, and nobody waits for more of it.
                home.done[position] = max(home.done[position], home.slowest)
                home.present, home.joined = home.present | {position}, home.joined - {position}
            home.done[position] += 1
            home.heard[position] = part.clock + 1
            stale = max(home.version - part.version, 0)
            # At a replica only its own worker posts: there is nobody to be ahead of.
            ahead = max(home.done[position] - home.slowest, 0) if home.rank < 0 else 0
            self._here.trace.record(
                Kind.APPLIED, f"bucket {box.bucket.index}", stale, part.clock, box.plan.plan.id,
                peer=box.ranks[position],
            )  # fmt: skip
            box.notes[position] = stale, ahead, max(round(1000 * (now - part.arrived)), 0)
        nothing = part.kind == "post" and not part.samples
        steps = box.algorithm.nothing(home, part) if nothing else box.algorithm.received(home, part)
        acts = self._steps.prepared(box, steps)
        if len(home.slots) > box.most_waiting:
            raise WireError(
                f"contributions of {len(home.slots)} clocks wait at the home of bucket {box.bucket.index} of "
                f"{box.plan.plan.group!r}, the last one of rank {box.ranks[position]} and clock {part.clock}: "
                "that cannot be"
            )
        return acts

    def _decoded(self, box: Box, part: Contribution, payload: memoryview) -> Array:
        if part.kind == "told":
            return np.frombuffer(payload, np.int64)
        if part.kind == "reseed":
            return _dense(box, payload)
        if part.kind in ("ask", "pass") or not part.samples:
            return NO_VALUES
        return unpack(self._codings.decoder(box.plan, box.bucket), payload)

    def _wake(self, box: Box, at: float) -> None:
        """Has the algorithm look at a home again, at that time (s)."""

        def look() -> None:
            now = self._here.outside.clock()
            self.at(box, lambda: self._steps.prepared(box, box.algorithm.elapsed(box.home, now)), box.nbytes)

        def wake() -> None:
            if self._boxes.get((box.plan.plan.id, box.bucket.index, box.home.rank)) is box:
                self.when_free(box, look)  # what is at work may change what is due

        self._here.outside.call_later(max(at - self._here.outside.clock(), 0.0), wake)

    def gone(self, ranks: Iterable[int], joined: bool = False) -> None:
        """These ranks take part no longer; or, if they have joined, until all have."""
        for rank in ranks:
            self._gone.add(rank)
            (self._joined.add if joined else self._joined.discard)(rank)
            for box in list(self):
                if rank in box.ranks:
                    self.when_free(box, partial(self._leave, box, box.ranks.index(rank), joined))

    def _leave(self, box: Box, position: int, joined: bool) -> None:
        home = box.home
        home.joined = home.joined | {position} if joined else home.joined - {position}
        home.present = home.present - {position}
        self._without(box, position)

    def occupied(self, plan: int, rank: int, clock: int | None) -> None:
        """A rank waits in another operation, after it has contributed so many clocks to the shards of a plan; None: it
        does not any more."""
        for box in list(self):
            if box.plan.plan.id == plan and rank in box.ranks:
                self.when_free(box, partial(self._occupy, box, box.ranks.index(rank), clock))

    def _occupy(self, box: Box, position: int, clock: int | None) -> None:
        if clock is None:
            box.home.occupied.pop(position, None)
            return
        box.home.occupied[position] = clock
        self._without(box, position)

    def _without(self, box: Box, position: int) -> None:
        """What waits for a rank at a home may go on."""
        self.at(box, lambda: self._steps.prepared(box, box.algorithm.without(box.home, position)), box.nbytes)

    def returned(self, ranks: set[int]) -> None:
        """These ranks, which had joined, go on with all others."""
        self._gone -= ranks
        self._joined -= ranks
        for box in self:
            self.when_free(box, partial(_return, box, ranks))

    # --- for those who wait -------------------------------------------------------------------------------------------

    def withdraw(self, sender: Sender) -> bool:
        """Lets a worker have its arena back although it has not been answered; whether that is possible now."""
        box = self._boxes.get(sender.home_address)
        if box is None:
            return True
        if any(part is sender.post for part in box.waiting):
            box.waiting = deque(part for part in box.waiting if part is not sender.post)
            return True
        if box.busy:
            return False
        position = box.ranks.index(sender.rank)
        for slot in box.home.slots.values():
            if position in slot:
                slot[position].values = slot[position].values.copy()
        return True

    @staticmethod
    def awaited(box: Box) -> tuple[int, ...]:
        """The ranks that a home here waits for; none if that cannot be told now."""
        if box.busy:
            return ()
        if not box.seeded:
            return box.ranks[:1]
        return tuple(box.ranks[position] for position in box.algorithm.awaited(box.home))

    def statistics(self) -> dict[str, object]:
        """The homes here, the contributions they have taken in, and by rank how many came `late`."""
        late: Counter[str] = Counter()
        for box in self:
            for (what, position), count in list(box.home.noticed.items()):  # which threads may add to
                if what == "late":
                    late[str(box.ranks[position])] += count
        updates = sum(box.home.version for box in self)
        return {"homes": len(self._boxes), "updates": updates, "late": dict(late)}


def _seed(box: Box, part: Contribution) -> list[Act]:
    if box.home.value is None:  # else loaded before, which counts more
        box.begin(part.values if part.payload is None else _dense(box, part.payload))
    return []


def _reseed(box: Box, values: Array) -> None:
    """The home goes on with these values, and its optimizer with what it remembers."""
    assert box.home.value is not None
    np.copyto(box.home.value, values)
    for key, kept in box.home.aux.items():
        if key.startswith("w_bak/"):
            np.copyto(kept, values)
    box.told.clear()


def _dense(box: Box, payload: memoryview) -> Array:
    return np.array(Dense().open(layout_of(box.bucket)).decoded(0, payload, box.bucket.numel))


def _return(box: Box, ranks: set[int]) -> None:
    home = box.home
    back = {position for position, rank in enumerate(box.ranks) if rank in ranks}
    home.present, home.joined = home.present | back, home.joined - back
    box.joins += 1
    home.done = dict.fromkeys(home.done, max(home.done.values()))
