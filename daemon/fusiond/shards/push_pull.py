"""The contributions that local workers push to homes anywhere, and the answers that they pull from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from fusion_rt import wire
from fusion_rt.codecs import BucketCodec
from fusion_rt.core.errors import WireError
from fusion_rt.local.saved_state import State
from fusion_rt.tracing.format import Kind
from fusiond.buckets.plans import PlanState
from fusiond.collectives.base import Array
from fusiond.core.contribution import Contribution
from fusiond.core.errors import RequestError
from fusiond.shards.messages import copied, joined, open_codec, pack, unpack
from fusiond.shards.node import Address, Reservation, ThisNode
from fusiond.shards.staleness import Meters


@dataclass(slots=True)
class PushPullClient:
    """The client side of one bucket: a local worker that contributes to its home.

    Attributes:
        plan, bucket, rank: which.
        codec: of its contributions to a home elsewhere.
        clock: that of its next contribution.
        posted: one more than that of its last one.
        passing: the clock before is passed, and not over yet.
        version: of the home, in the last answer.
        post: what it has posted and is not answered yet; `awaited`: its clock; and since when (s).
        awaits: its worker, which may go on without the answer, has said that it does not.
        queued: what it has posted waits for room on the way to its home.
        busy: a thread reads what it has posted, or writes its answer.
        failed: why it has failed, and so nothing more of it is exchanged; empty if it has not.
        before: what its codec remembered before its last contribution was encoded, and that one's clock, where this may
            be taken back after a loss.
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
    awaits: bool = False
    queued: bool = False
    busy: bool = False
    failed: str = ""
    before: tuple[int, State] | None = None

    @property
    def home(self) -> int:
        """The position of the rank to whose home it posts, or `wire.SHARD`."""
        return wire.SHARD if self.plan.plan.homes else self.plan.members.set.ranks.index(self.rank)

    @property
    def waits(self) -> bool:
        """True if something of it is not over at its home."""
        return self.post is not None or self.passing

    @property
    def is_awaited(self) -> bool:
        """True if its worker waits for an answer, and does not go on without."""
        return self.post is not None and (self.awaits or self.plan.spec.waits_for_answers)

    @property
    def home_address(self) -> Address:
        return self.plan.plan.id, self.bucket.index, self.home

    def opened(self) -> BucketCodec:
        """Opens the codec of its contributions, which every rank rounds by draws of its own."""
        return open_codec(self.plan, self.bucket, self.plan.members.set.ranks.index(self.rank))

    def saved(self) -> State:
        """Returns its state: its `counts`, clock and version, and `codec/KEY` of its codec, if there is one yet."""
        state: State = {"counts": np.array([self.clock, self.version], np.int64)}
        return state if self.codec is None else state | _of_codec(self.codec.state_dict())

    def saved_at(self, clock: int) -> State:
        """Returns what its codec remembers of all contributions before a clock, and of no other ones."""
        if self.before is not None and self.before[0] >= clock:
            return _of_codec({key: value.copy() for key, value in self.before[1].items()})
        return {} if self.codec is None else _of_codec(self.codec.state_dict())

    def opened_from(self, entries: Mapping[str, Array]) -> BucketCodec | None:
        """Opens the codec with which it goes on from saved entries, on a thread; None if it had none. An entry `moved`
        says that they are from other buckets, and so not all that this one's codec has. Raises `CodecError`."""
        state = {key.removeprefix("codec/"): value for key, value in entries.items() if key not in ("counts", "moved")}
        if not state:
            return None
        codec = self.opened()
        codec.load_state_dict(state, partial="moved" in entries)
        return codec

    def release(self) -> Contribution:
        """Ends the wait for an answer; returns what was posted."""
        assert self.post is not None
        post, self.post, self.awaits = self.post, None, False
        return post


def _of_codec(state: Mapping[str, Array]) -> State:
    return {f"codec/{key}": value for key, value in state.items()}


class PushPullClients:
    """All clients of one node, by their addresses.

    Args:
        here: this node.
        over: called with a plan, and a rank that has been answered in one of its buckets.

    Attributes:
        meters: of the contributions that have been answered.
    """

    def __init__(self, here: ThisNode, over: Callable[[int, int], None]) -> None:
        self._here = here
        self._over = over
        self._clients: dict[Address, PushPullClient] = {}
        self._of: dict[tuple[int, int], list[PushPullClient]] = {}  # by plan and local rank, in the order of buckets
        self.meters = Meters()

    def __iter__(self) -> Iterator[PushPullClient]:
        return iter(self._clients.values())

    def __getitem__(self, address: Address) -> PushPullClient:
        return self._clients[address]

    def get(self, address: Address) -> PushPullClient | None:
        """Returns the client at an address, if there is one."""
        return self._clients.get(address)

    def of(self, plan: int, rank: int) -> list[PushPullClient]:
        """Returns the clients of a local rank, in the order of buckets."""
        return self._of.get((plan, rank), [])

    @property
    def idle(self) -> bool:
        """True if nobody waits for an answer."""
        return not any(client.is_awaited for client in self)

    # --- plans --------------------------------------------------------------------------------------------------------

    def open(self, state: PlanState) -> None:
        """A plan becomes active."""
        for bucket in state.plan.buckets:
            for rank in state.members.local:
                client = PushPullClient(state, bucket, rank)
                self._clients[state.plan.id, bucket.index, rank] = client
                self._of.setdefault((state.plan.id, rank), []).append(client)

    def drop(self, plan: int, why: str) -> None:
        """Drops a plan that is no longer active: workers that wait are told why."""
        for client in self:
            if client.plan.plan.id == plan and client.post is not None:
                bucket, group = client.bucket.index, client.plan.plan.group
                sentence = f"rank {client.rank} was waiting for the home of bucket {bucket} of {group!r} when {why}"
                self.fail(client, client.post, sentence)
        self._clients = {key: client for key, client in self._clients.items() if key[0] != plan}
        self._of = {key: clients for key, clients in self._of.items() if key[0] != plan}

    # --- posts --------------------------------------------------------------------------------------------------------

    def begin(self, rank: int, state: PlanState, bucket: wire.Bucket, posted: Contribution) -> PushPullClient | None:
        """A worker's contribution, or the seed of a home, is in the arena: notes its clock and the version that it is
        based on. Returns its client; None if that has failed before, which the worker is told.

        Raises:
            RequestError: no worker of ours would post that.
        """
        plan = state.plan
        client = self._clients[plan.id, bucket.index, rank]
        if client.failed:
            self.fail(client, posted, client.failed)
            return None
        if client.post is not None:
            raise RequestError(f"rank {rank} is ready twice in bucket {bucket.index} of plan {plan.id}")
        if posted.kind == "post" and not posted.samples and not plan.homes:
            raise RequestError(f"rank {rank} has nothing to mix in bucket {bucket.index} of plan {plan.id}")
        if posted.kind == "post" and (wrong := state.wrong_rates(bucket.index, posted.rates)):
            raise RequestError(f"rank {rank} posts to bucket {bucket.index} of plan {plan.id}, and {wrong}")
        if posted.kind == "reseed" and not plan.homes:  # whatever is under way is of before that, on all nodes
            client.clock, client.passing = wire.first_clock_after_join(client.clock), False
        client.post, client.since = posted, self._here.outside.clock()
        posted.clock, posted.version, posted.arrived = client.clock, client.version, client.since
        client.awaited = client.clock
        if posted.kind == "post":
            client.clock += 1
            client.posted, client.passing = client.clock, False
        return client

    def send(self, client: PushPullClient, posted: Contribution, node: int) -> None:
        """Sends a contribution to its home, on another node, when there is room for it; until then it stays in the
        arena."""
        encoded = client.plan.buckets[client.bucket.index].decoder.max_encoded_nbytes(client.bucket.numel)
        nbytes = posted.values.nbytes if posted.kind != "post" else min(posted.values.nbytes, encoded)

        def leave() -> None:
            client.queued = False
            if client.post is posted:
                self._leave(client, posted, node, room)
            else:  # its worker has its arena back
                room.end()

        room = self._here.room(posted.kind).reserve(client.plan.plan.id, (node,), nbytes, leave)
        client.queued = not room.granted
        if room.granted:
            leave()

    def _leave(self, client: PushPullClient, posted: Contribution, node: int, room: Reservation) -> None:
        """Encodes a contribution, and sends it."""
        source, rescale = posted.values, posted.rescale
        message = wire.Piece(
            self._here.epoch, client.plan.plan.id, client.bucket.index, posted.kind, client.home, client.rank,
            posted.clock, posted.version, 0, 0, posted.rates, posted.samples,
        )  # fmt: skip
        plain = message.kind in ("seed", "reseed", "has")
        payload: list[memoryview] = []

        def encode() -> None:
            if client.codec is None:
                client.codec = client.opened()
            codec = client.codec
            if rescale:
                codec.scale_residual(rescale)
            if message.kind != "post" or not message.samples:  # a rank that asks, or has no gradient, sends nothing
                payload.append(copied(source) if plain else memoryview(b""))
                return
            if client.plan.plan.reduction.survives and client.plan.spec.synchronous and codec.codec.stateful:
                client.before = message.clock, codec.state_dict()
            name = f"bucket {message.bucket}"
            self._here.context.trace.record(Kind.ENCODE_BEGIN, name, source.nbytes, message.clock, message.plan)
            payload.append(pack(codec, source))
            client.plan.note_message(codec, len(payload[0]))
            self._here.context.trace.record(Kind.ENCODE_END, name, len(payload[0]), message.clock, message.plan)

        def send() -> None:
            client.busy = False
            self._here.send(node, message, payload[0])
            room.end()
            if message.kind == "seed":
                self.seeded(posted, message.plan, message.bucket, client.rank)

        client.busy = True
        self._here.do(message.plan, encode, source.nbytes, send)

    def rebase(self) -> None:
        """Makes all clients count their clocks from a new base, the same on all nodes whatever they have posted."""
        for client in self:
            client.clock = wire.first_clock_after_join(client.clock)

    def forget_unsent(self, plan: int) -> None:
        """Has the codecs of a plan's contributions begin anew. Raises `WireError` if something is under way."""
        clients = [client for client in self if client.plan.plan.id == plan]
        for client in clients:
            if client.busy or client.queued:
                raise under_way(client)
        for client in clients:
            client.codec = client.before = None

    # --- answers ------------------------------------------------------------------------------------------------------

    def place(self, plan: int, bucket: int, rank: int) -> Array | None:
        """Returns the memory for a worker's answer; None if it waits for none (any more). Called by any thread."""
        client = self._clients.get((plan, bucket, rank))
        post = None if client is None else client.post
        return None if post is None else post.values

    def came(self, node: int, message: wire.Piece, payloads: list[memoryview]) -> None:
        """An answer of a home on another node has come, in these pieces."""
        client = self._waiting(message)
        if client is None or client.post is None or client.busy:
            self._here.took(node, message, message.nbytes)
            return  # it has failed in the meantime; or it is a second answer
        if client.post.kind == "has":
            self.answered(message)
            return
        place = client.post.values
        codecs = client.plan.buckets[client.bucket.index]
        assert message.terms is not None
        decoder = codecs.decoder if message.terms.coded else codecs.codec

        def decode() -> None:
            payload = joined(payloads)
            name = f"bucket {message.bucket}"
            self._here.context.trace.record(Kind.DECODE_BEGIN, name, len(payload), message.clock, message.plan)
            np.copyto(place, unpack(decoder, payload))
            self._here.context.trace.record(Kind.DECODE_END, name, len(payload), message.clock, message.plan)

        def answered() -> None:
            client.busy = False
            self._here.took(node, message, message.nbytes)
            self.answered(message)

        client.busy = True
        self._here.do(message.plan, decode, place.nbytes, answered)

    def answered(self, message: wire.Piece) -> None:
        """The answer to a worker's contribution is in its arena."""
        client = self._waiting(message)
        if client is None or client.post is None:
            return  # it has failed in the meantime
        terms, told = message.terms, tuple[int, ...]()
        if client.post.kind != "has":  # to which the home has told nothing
            assert terms is not None
            client.version, told = message.version, (int(terms.added),)
            if terms.staleness is not None:
                self.meters.note(terms.staleness)
        if (weight := round(message.weight / wire.WEIGHT_UNIT)) != wire.WEIGHT_OF_ONE:
            told += (weight,)
        self._done(client, message.clock, told)

    def seeded(self, posted: Contribution, plan: int, bucket: int, rank: int) -> None:
        """The seed of a home is copied: the worker may have its arena back."""
        client = self._clients.get((plan, bucket, rank))
        if client is not None and client.post is posted:
            self._done(client, posted.clock, ())

    def _done(self, client: PushPullClient, clock: int, told: tuple[int, ...]) -> None:
        plan, name = client.plan.plan.id, f"bucket {client.bucket.index}"
        self._here.context.trace.record(Kind.ANSWERED, name, 0, clock, plan, peer=client.rank)
        self._here.outside.to_worker(client.rank, wire.Done(client.release().handle, None, told))
        self._over(plan, client.rank)

    def refused(self, message: wire.Piece, why: str) -> None:
        """A home has refused a worker's contribution."""
        client = self._waiting(message)
        if client is not None:
            self.fail(client, client.release(), why)

    def _waiting(self, message: wire.Piece) -> PushPullClient | None:
        """Returns the client that waits for this answer; None if none does (any more)."""
        client = self._clients.get((message.plan, message.bucket, message.rank))
        if client is None or client.post is None or client.awaited != message.clock:
            return None
        return client

    # --- failures -----------------------------------------------------------------------------------------------------

    def end(self, error: str) -> None:
        """Answers all workers that wait with this sentence."""
        for client in self:
            if client.post is not None:
                self.fail(client, client.release(), error)

    def forget(self) -> None:
        """Forgets all contributions that are not answered."""
        for client in self:
            client.post = None

    def fail(self, client: PushPullClient, post: Contribution, why: str) -> None:
        """Tells a worker that what it has posted has failed, when no thread reads or writes it any more."""

        def tell() -> None:
            self._here.outside.to_worker(client.rank, wire.Failed(post.handle, why))

        if client.busy:
            self._here.work.when_quiet(client.plan.plan.id, tell)
        else:
            tell()


def under_way(client: PushPullClient) -> WireError:
    """Returns the error of a worker whose state is touched while it posts."""
    return WireError(
        f"rank {client.rank} is posting to bucket {client.bucket.index} of {client.plan.plan.group!r}; load the state "
        "of an optimizer between step() and the next backward(), on all ranks of a host before one of them goes on "
        "(hvd.barrier())"
    )
