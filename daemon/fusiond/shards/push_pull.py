"""What local workers have posted to homes anywhere, and wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fusion_rt import wire
from fusion_rt.codecs import BucketCodec, layout_of
from fusion_rt.codecs.dense import Dense
from fusion_rt.trace_format import Kind
from fusiond.buckets.plans import PlanState
from fusiond.collectives.base import Array
from fusiond.core.contribution import Contribution
from fusiond.core.errors import RequestError
from fusiond.shards.checks import wrong_rates
from fusiond.shards.message_codecs import Codings
from fusiond.shards.messages import pack, unpack
from fusiond.shards.node import Address, Here
from fusiond.shards.staleness import Meters

CLOCKS_OF_A_JOIN = 1 << 30  # more than a rank posts between two joins


@dataclass(slots=True)
class Sender:
    """A local worker's side of one bucket.

    Attributes:
        plan, bucket, rank: which.
        codec: of its contributions to a home elsewhere.
        clock: that of its next contribution.
        posted: one more than that of its last one.
        passing: the clock before is passed, and not over yet.
        version: of the home, in the last answer.
        post: what it has posted and is not answered yet; `awaited`: its clock; and since when (s).
        busy: a thread reads what it has posted, or writes its answer.
        failed: why it has been given up, and so nothing more of it is exchanged.
    """

    plan: PlanState
    bucket: wire.Bucket
    rank: int
    codec: BucketCodec | None = None
    clock: int = 0
    posted: int = 0
    passing: bool = False
    version: int = 0
    post: Contribution | None = None
    awaited: int = 0
    since: float = 0.0
    busy: bool = False
    failed: str = ""

    @property
    def home(self) -> int:
        """The rank of the home that it posts to; -1: a shard."""
        return -1 if self.plan.plan.homes else self.plan.members.set.ranks.index(self.rank)

    @property
    def waits(self) -> bool:
        """Whether something of it is not over at its home."""
        return self.post is not None or self.passing

    @property
    def home_address(self) -> Address:
        return self.plan.plan.id, self.bucket.index, self.home

    def release(self) -> Contribution:
        """It waits no longer; returns what it had posted."""
        assert self.post is not None
        post, self.post = self.post, None
        return post


class Senders:
    """All senders of one node, by their addresses.

    Args:
        here: this node.
        codings: the codecs.
        over: called with a plan, and a rank that has been answered in one of its buckets.

    Attributes:
        meters: of what has been answered.
    """

    def __init__(self, here: Here, codings: Codings, over: Callable[[int, int], None]) -> None:
        self._here = here
        self._codings = codings
        self._over = over
        self._senders: dict[Address, Sender] = {}
        self.meters = Meters()

    def __iter__(self) -> Iterator[Sender]:
        return iter(self._senders.values())

    def __getitem__(self, address: Address) -> Sender:
        return self._senders[address]

    def get(self, address: Address) -> Sender | None:
        """The one at an address, if there is one."""
        return self._senders.get(address)

    def of(self, plan: int, rank: int) -> list[Sender]:
        """Those of a local rank, in the order of buckets."""
        return [sender for (of, _, whose), sender in self._senders.items() if (of, whose) == (plan, rank)]

    @property
    def idle(self) -> bool:
        """Whether nobody waits for an answer."""
        return all(sender.post is None for sender in self)

    # --- plans --------------------------------------------------------------------------------------------------------

    def open(self, state: PlanState) -> None:
        """A plan is in force."""
        for bucket in state.plan.buckets:
            for rank in state.members.local:
                self._senders[state.plan.id, bucket.index, rank] = Sender(state, bucket, rank)

    def drop(self, plan: int, why: str) -> None:
        """The plan is no longer in force: whoever waits is told why."""
        for sender in self:
            if sender.plan.plan.id == plan and sender.post is not None:
                bucket, group = sender.bucket.index, sender.plan.plan.group
                sentence = f"rank {sender.rank} was waiting for the home of bucket {bucket} of {group!r} when {why}"
                self.fail(sender, sender.post, sentence)
        self._senders = {key: sender for key, sender in self._senders.items() if key[0] != plan}

    # --- posts --------------------------------------------------------------------------------------------------------

    def begin(self, rank: int, state: PlanState, bucket: wire.Bucket, posted: Contribution) -> Sender | None:
        """A worker's contribution, or the seed of a home, is in the arena: notes its clock and the version that it is
        based on. Returns whose it is; None if it has been given up, which the worker is told.

        Raises:
            RequestError: no worker of ours would post that.
        """
        plan = state.plan
        sender = self._senders[plan.id, bucket.index, rank]
        if sender.failed:
            self.fail(sender, posted, sender.failed)
            return None
        if sender.post is not None:
            raise RequestError(f"rank {rank} is ready twice in bucket {bucket.index} of plan {plan.id}")
        if (posted.kind != "post" or not posted.samples) and not plan.homes:
            raise RequestError(
                f"rank {rank} asks for the shard of bucket {bucket.index} of plan {plan.id}: it has none"
            )
        if posted.kind == "post" and (wrong := wrong_rates(state, bucket, posted.rates)):
            raise RequestError(f"rank {rank} posts to bucket {bucket.index} of plan {plan.id}, and {wrong}")
        sender.post, sender.since = posted, self._here.outside.clock()
        posted.clock, posted.version, posted.arrived = sender.clock, sender.version, sender.since
        sender.awaited = sender.clock
        if posted.kind == "post":
            sender.clock += 1
            sender.posted, sender.passing = sender.clock, False
        return sender

    def send(self, sender: Sender, posted: Contribution, node: int) -> None:
        """Sends what was posted to its home, on another node."""
        if sender.codec is None:
            sender.codec = self._codings.open(sender.plan, sender.bucket)
        codec, source, rescale = sender.codec, posted.values, posted.rescale
        parcel = wire.Piece(
            self._here.epoch, sender.plan.plan.id, sender.bucket.index, posted.kind, sender.home, sender.rank,
            posted.clock, posted.version, 0, 0, posted.rates, posted.samples,
        )  # fmt: skip
        seed = parcel.kind in ("seed", "reseed")
        payload: list[memoryview] = []

        def encode() -> None:
            if rescale:
                codec.scale_residual(rescale)
            if parcel.kind != "post" or not parcel.samples:  # who asks, or has no gradient, sends nothing
                payload.append(memoryview(source.tobytes() if seed else b""))
                return
            name = f"bucket {parcel.bucket}"
            self._here.trace.record(Kind.ENCODE_BEGIN, name, source.nbytes, parcel.clock, parcel.plan)
            payload.append(pack(codec, source))
            self._here.trace.record(Kind.ENCODE_END, name, len(payload[0]), parcel.clock, parcel.plan)

        def send() -> None:
            sender.busy = False
            self._here.send(node, parcel, payload[0])
            if parcel.kind == "seed":
                self.seeded(sender, posted)

        sender.busy = True
        self._here.do(parcel.plan, encode, source.nbytes, send)

    def rebase(self) -> None:
        """All count their clocks from a new base, the same on all nodes, however many they have posted so far."""
        for sender in self:
            sender.clock = (sender.clock // CLOCKS_OF_A_JOIN + 1) * CLOCKS_OF_A_JOIN

    # --- answers ------------------------------------------------------------------------------------------------------

    def place(self, plan: int, bucket: int, rank: int) -> Array | None:
        """Where a worker's answer goes; None if it waits for none (any more). Called by any thread."""
        sender = self._senders.get((plan, bucket, rank))
        post = None if sender is None else sender.post
        return None if post is None else post.values

    def came(self, parcel: wire.Piece, payload: memoryview) -> None:
        """An answer of a home on another node has come."""
        sender = self._waiting(parcel)
        if sender is None or sender.post is None or sender.busy:
            return  # it has failed in the meantime; or it is a second answer
        place = sender.post.values
        coded = parcel.notes[1]
        decoder = self._codings.decoder(sender.plan, sender.bucket) if coded else Dense().open(layout_of(sender.bucket))

        def decode() -> None:
            name = f"bucket {parcel.bucket}"
            self._here.trace.record(Kind.DECODE_BEGIN, name, len(payload), parcel.clock, parcel.plan)
            np.copyto(place, unpack(decoder, payload))
            self._here.trace.record(Kind.DECODE_END, name, len(payload), parcel.clock, parcel.plan)

        def answered() -> None:
            sender.busy = False
            self.answered(parcel, (parcel.notes[0], *parcel.notes[2:]))

        sender.busy = True
        self._here.do(parcel.plan, decode, place.nbytes, answered)

    def answered(self, parcel: wire.Piece, notes: Sequence[int]) -> None:
        """The answer to a worker's contribution is in its arena.

        Args:
            notes: whether it is to be added; and what the meters note, if it was a contribution.
        """
        sender = self._waiting(parcel)
        if sender is None:
            return  # it has failed in the meantime
        sender.version = parcel.version
        if len(notes) > 1:
            self.meters.note(*notes[1:])
        self._done(sender, parcel.clock, tuple(notes[:1]))

    def seeded(self, sender: Sender, posted: Contribution) -> None:
        """What a home begins with is on its way: the worker may have its arena back."""
        if sender.post is posted:
            self._done(sender, posted.clock, ())

    def _done(self, sender: Sender, clock: int, notes: tuple[int, ...]) -> None:
        plan, name = sender.plan.plan.id, f"bucket {sender.bucket.index}"
        self._here.trace.record(Kind.ANSWERED, name, 0, clock, plan, peer=sender.rank)
        self._here.outside.to_worker(sender.rank, wire.Done(sender.release().handle, None, notes))
        self._over(plan, sender.rank)

    def refused(self, parcel: wire.Piece, why: str) -> None:
        """A home has refused a worker's contribution."""
        sender = self._waiting(parcel)
        if sender is not None:
            self.fail(sender, sender.release(), why)

    def _waiting(self, parcel: wire.Piece) -> Sender | None:
        """Who waits for this answer; None if nobody does (any more)."""
        sender = self._senders.get((parcel.plan, parcel.bucket, parcel.rank))
        if sender is None or sender.post is None or sender.awaited != parcel.clock:
            return None
        return sender

    # --- failures -----------------------------------------------------------------------------------------------------

    def end(self, error: str) -> None:
        """Whoever waits for an answer gets this sentence instead."""
        for sender in self:
            if sender.post is not None:
                self.fail(sender, sender.release(), error)

    def forget(self) -> None:
        """Nobody waits for an answer any more."""
        for sender in self:
            sender.post = None

    def fail(self, sender: Sender, post: Contribution, why: str) -> None:
        """Tells a worker that what it has posted has failed, when no thread reads or writes it any more."""

        def tell() -> None:
            self._here.outside.to_worker(sender.rank, wire.Failed(post.handle, why))

        if sender.busy:
            self._here.work.when_quiet(sender.plan.plan.id, tell)
        else:
            tell()
