"""The homes on this node, and what local workers have posted to homes anywhere. No I/O.

A contribution goes from the worker's arena to its home (encoded, where that is on another node), is taken in by the
algorithm, and is answered into the arena. Each home takes one contribution at a time, in the kernel pool; so an
algorithm is plain code on one thread, and the state of a home has one owner at any time. (Those that are not
`exclusive` let several threads at a home; that is their point.)
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
from msgspec.structs import replace

from fusion_rt import codecs, wire
from fusion_rt.algorithms import Choco, Partial, Place, Signal, parse
from fusion_rt.codecs import BucketCodec
from fusion_rt.codecs.dense import Dense
from fusion_rt.codecs.feedback import FeedbackBucketCodec
from fusion_rt.dtypes import DTYPES
from fusion_rt.errors import FusionError, WireError
from fusion_rt.settings import Settings
from fusion_rt.topology import Topology
from fusiond import shard_optimizer
from fusiond.algorithms.home import Answer, Home, HomeAlgorithm, Part, Refuse, Send, Step, Tell, Wake
from fusiond.collectives.base import Array
from fusiond.parcels import Assembly, open_codec, pack, pieces, unpack
from fusiond.plans import PlanState, layout_of
from fusiond.requests import Part as Posted
from fusiond.requests import RequestError
from fusiond.running import INLINE_WORK, Outside
from fusiond.staleness import Meters

_MAX_EARLY = 4096  # pieces that may come before their plan
_MAX_EARLY_BYTES = 1 << 32  # of their payloads
_MAX_OPEN = 8  # parcels from a rank to a home, or back, that may be incomplete
_MAX_WAITING = 64  # parts that may wait at a home, besides 16 of each rank
_MAX_SENTENCE = 64 * 1024  # bytes of why a contribution is refused
_CLOCKS_OF_A_JOIN = 1 << 30  # more than a rank posts between two joins
Address: TypeAlias = tuple[int, int, int]  # plan, bucket, and a home's rank (-1: shard) or a worker's rank
Act: TypeAlias = Callable[[], None]


@dataclass(slots=True)
class Sender:
    """A local worker's side of one bucket.

    Attributes:
        codec: of its contributions to a home elsewhere.
        clock: how many it has posted.
        version: of the home, in the last answer.
        post: what it has posted and is not answered yet; `awaited`: its clock; and since when (s).
        busy: a thread reads what it has posted, or writes its answer.
        failed: why it has been given up, and so nothing more of it is exchanged.
    """

    codec: BucketCodec | None = None
    clock: int = 0
    version: int = 0
    post: Posted | None = None
    awaited: int = 0
    since: float = 0.0
    warned: bool = False
    busy: bool = False
    failed: str = ""


@dataclass(slots=True, eq=False)
class Arrival:
    """A parcel for a home: its `values`, or, of a peer, its `payload`; when it came (s)."""

    parcel: wire.Piece
    values: Array | None
    payload: memoryview | None
    came: float


@dataclass(slots=True)
class Box:
    """A home on this node, and what waits for it.

    Attributes:
        busy: how many threads are at work on it.
        later: what is to be done when there is none; until then nothing is taken in.
        closed: it is being restored.
        turning: what waits is being handed to threads.
        notes: of the contribution of each rank that is not answered yet: its staleness, its clock's distance from the
            slowest's, and how long it waited to be read (ms).
        told: what the node of each rank was told last, to which differences are sent.
    """

    plan: PlanState
    bucket: wire.Bucket
    home: Home
    waiting: deque[Arrival] = field(default_factory=deque)
    busy: int = 0
    later: deque[Act] = field(default_factory=deque)
    closed: bool = False
    turning: bool = False
    notes: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    told: dict[int, Array] = field(default_factory=dict)

    @property
    def algorithm(self) -> HomeAlgorithm[Any]:
        assert isinstance(self.plan.algorithm, HomeAlgorithm)
        return self.plan.algorithm

    @property
    def seeded(self) -> bool:
        """Whether contributions can be taken in."""
        return self.home.rank >= 0 or self.home.value is not None

    @property
    def nbytes(self) -> int:
        """Of the home."""
        return self.home.elements * self.home.dtype.itemsize

    def may_begin(self) -> bool:
        """Whether a thread may take in what has waited longest."""
        if not self.waiting or self.later or self.closed:
            return False
        if self.busy and (self.algorithm.exclusive or not self.seeded):
            return False
        return self.seeded or any(arrival.parcel.kind == "seed" for arrival in self.waiting)

    def next(self) -> Arrival:
        """What is to be taken in now: its seed first."""
        if not self.seeded:
            for arrival in self.waiting:
                if arrival.parcel.kind == "seed":
                    self.waiting.remove(arrival)
                    return arrival
        return self.waiting.popleft()


class Homes:
    """All homes of one engine.

    Args:
        topology, node: who is where, and which node this is.
        settings: sizes and time-outs.
        outside: acts for it.
        failed: called with an exception when something cannot be gone on with.
        epoch: the membership epoch.
    """

    def __init__(
        self,
        topology: Topology,
        node: int,
        settings: Settings,
        outside: Outside,
        failed: Callable[[BaseException], None],
        epoch: int,
    ) -> None:
        self._topology = topology
        self._node = node
        self._settings = settings
        self._outside = outside
        self._failed = failed
        self._epoch = epoch
        self._plans: dict[int, PlanState] = {}
        self._latest = 0
        self._boxes: dict[Address, Box] = {}
        self._senders: dict[Address, Sender] = {}
        self._decoders: dict[tuple[int, int], BucketCodec] = {}
        self._assemblies: dict[tuple[object, ...], Assembly] = {}
        self._early: deque[tuple[int, wire.Piece, memoryview]] = deque()
        self._early_bytes = 0
        self._gone: set[int] = set()
        self._jobs: Counter[int] = Counter()  # by plan: how many are under way
        self._quiet: list[tuple[int, Act]] = []  # plan, and what is to be done when no job of it is under way
        self._loaded: dict[tuple[int, str], dict[str, Array]] = {}
        self.meters = Meters()
        self._over = False

    # --- plans --------------------------------------------------------------------------------------------------------

    def install(self, state: PlanState) -> bool:
        """A plan is in force whose buckets have homes; it replaces the one that its group had. Returns whether it is
        new: a rank that had joined may have asked for it again."""
        plan = state.plan
        if plan.id in self._plans:
            return False
        for old in [p.plan.id for p in self._plans.values() if _group(p) == _group(state)]:
            self._drop(old, f"the plan of {plan.group!r} was replaced")
        self._plans[plan.id] = state
        self._latest = max(self._latest, plan.id)
        spec = parse(plan.reduction.algorithm)
        for bucket in plan.buckets:
            self._senders |= {(plan.id, bucket.index, rank): Sender() for rank in state.members.local}
            if spec.place is Place.SHARD:
                if plan.homes[bucket.index] == self._node:
                    self._open(state, bucket, -1)
                continue
            for rank in state.members.local:
                self._open(state, bucket, state.members.set.ranks.index(rank))
        loaded = self._loaded.pop(_group(state), None)
        if loaded is not None:
            try:
                self._restore(state, loaded)
            except FusionError as error:
                self._outside.warn(f"a state was loaded for {plan.group!r}, and its homes start without: {error}")
        early, self._early, self._early_bytes = self._early, deque(), 0
        for node, piece, payload in early:
            try:
                self.peer(node, piece, payload)
            except FusionError as error:  # whoever brought the plan has nothing to do with it
                host = self._topology.describe_node(node)
                self._failed(WireError(f"what {host} sent before the plan {plan.id} was there makes no sense: {error}"))
                return False
        return True

    def remove_set(self, process_set: int) -> None:
        """Drops the plans of a process set that has been removed."""
        for plan in [p.plan.id for p in self._plans.values() if p.plan.process_set == process_set]:
            self._drop(plan, f"process set {process_set} was removed")
        self._loaded = {key: state for key, state in self._loaded.items() if key[0] != process_set}

    def _drop(self, plan: int, why: str) -> None:
        """Threads that are at its homes finish, and nothing comes of it."""
        group = self._plans.pop(plan).plan.group
        for (of, bucket, rank), sender in self._senders.items():
            if of == plan and sender.post is not None:
                sentence = f"rank {rank} was waiting for the home of bucket {bucket} of {group!r} when {why}"
                self._outside.to_worker(rank, wire.Failed(sender.post.handle, sentence))
        for key, box in self._boxes.items():
            if key[0] == plan:
                box.waiting.clear()
                box.later.clear()
        self._boxes = {key: box for key, box in self._boxes.items() if key[0] != plan}
        self._senders = {key: sender for key, sender in self._senders.items() if key[0] != plan}
        self._decoders = {key: decoder for key, decoder in self._decoders.items() if key[0] != plan}
        self._assemblies = {key: assembly for key, assembly in self._assemblies.items() if key[1] != plan}

    def _open(self, state: PlanState, bucket: wire.Bucket, rank: int) -> None:
        codec = None
        if isinstance(parse(state.plan.reduction.algorithm), Choco):
            codec = open_codec(self._codec(state), layout_of(bucket), remembers=False)
        spans = tuple((tensor.start, tensor.start + tensor.numel, tensor.group) for tensor in bucket.tensors)
        leads = bucket.index == 0
        home = Home(rank, len(state.members.set.ranks), DTYPES[bucket.dtype], bucket.numel, spans, leads, codec)
        home.present -= {position for position, rank in enumerate(state.members.set.ranks) if rank in self._gone}
        self._boxes[state.plan.id, bucket.index, rank] = Box(state, bucket, home)

    # --- from local workers -------------------------------------------------------------------------------------------

    def post(self, rank: int, ready: wire.Ready, state: PlanState, bucket: wire.Bucket, posted: Posted) -> None:
        """A worker's contribution, or the seed of a home, is in the arena."""
        plan = state.plan
        sender = self._senders[plan.id, bucket.index, rank]
        if sender.failed:
            self._outside.to_worker(rank, wire.Failed(posted.handle, sender.failed))
            return
        if sender.post is not None:
            raise RequestError(f"rank {rank} is ready twice in bucket {bucket.index} of plan {plan.id}")
        shard = bool(plan.homes)
        home = -1 if shard else state.members.set.ranks.index(rank)
        node = plan.homes[bucket.index] if shard else self._node
        kind: Literal["seed", "post"] = "seed" if ready.seed else "post"
        if (ready.seed or not ready.samples) and not shard:
            raise RequestError(
                f"rank {rank} asks for the shard of bucket {bucket.index} of plan {plan.id}: it has none"
            )
        if kind == "post" and ready.samples and (wrong := _wrong_rates(state, bucket, ready.rates)):
            raise RequestError(f"rank {rank} posts to bucket {bucket.index} of plan {plan.id}, and {wrong}")
        sender.post, sender.since, sender.warned = posted, self._outside.clock(), False
        sender.awaited = sender.clock
        parcel = wire.Piece(
            self._epoch, plan.id, bucket.index, kind, home, rank, sender.clock, sender.version, 0, 0, ready.rates,
            ready.samples,
        )  # fmt: skip
        if kind == "post" and ready.samples:
            sender.clock += 1
        if node == self._node:
            values = posted.source.copy() if ready.seed else posted.source
            self._arrived(Arrival(parcel, values, None, sender.since))
            if ready.seed:
                self._answered(parcel, ())
            return
        if sender.codec is None:
            sender.codec = open_codec(self._codec(state), layout_of(bucket))
        codec = sender.codec
        payload: list[memoryview] = []

        def encode() -> None:
            if ready.seed or not ready.samples:  # who only asks for what the home has sends nothing
                payload.append(memoryview(posted.source.tobytes() if ready.seed else b""))
                return
            if ready.rescale and isinstance(codec, FeedbackBucketCodec):
                codec.scale_residual(ready.rescale)
            payload.append(pack(codec, posted.source))

        def send() -> None:
            sender.busy = False
            self._send(node, parcel, payload[0])
            if ready.seed:
                self._answered(parcel, ())

        sender.busy = True
        self._do(plan.id, encode, posted.source.nbytes, send)

    def _waiting(self, parcel: wire.Piece) -> Sender | None:
        """Who waits for this answer; None if nobody does (any more)."""
        sender = self._senders.get((parcel.plan, parcel.bucket, parcel.rank))
        if sender is None or sender.post is None or sender.awaited != parcel.clock:
            return None
        return sender

    def _answered(self, parcel: wire.Piece, notes: Sequence[int]) -> None:
        """The answer to a local worker's contribution is in its arena.

        Args:
            notes: whether it is to be added; and what the meters note, if it was a contribution.
        """
        sender = self._waiting(parcel)
        if sender is None or sender.post is None:
            return  # it has failed in the meantime
        handle, sender.post = sender.post.handle, None
        if parcel.kind == "answer":
            sender.version = parcel.version
            if len(notes) > 1:
                self.meters.note(*notes[1:])
        self._outside.to_worker(parcel.rank, wire.Done(handle, None, tuple(notes[:1])))

    def _refused(self, parcel: wire.Piece, why: str) -> None:
        sender = self._waiting(parcel)
        if sender is not None and sender.post is not None:
            handle, sender.post = sender.post.handle, None
            self._outside.to_worker(parcel.rank, wire.Failed(handle, why))

    # --- from peers ---------------------------------------------------------------------------------------------------

    def peer(self, node: int, piece: wire.Piece, payload: memoryview) -> None:
        """A piece of a parcel has come.

        Raises:
            WireError: there can be no such parcel.
        """
        if piece.epoch != self._epoch or self._over or piece.plan not in self._plans:
            if piece.epoch == self._epoch and piece.plan > self._latest and not self._over:
                self._early_bytes += len(payload)
                if len(self._early) >= _MAX_EARLY or self._early_bytes > _MAX_EARLY_BYTES:
                    raise WireError(
                        f"more than {_MAX_EARLY} pieces, or {_MAX_EARLY_BYTES} bytes, came before their plan"
                    )
                self._early.append((node, piece, payload))
            return
        state = self._plans[piece.plan]
        self._check(node, state, piece)
        if piece.start or len(payload) != piece.nbytes:
            key = (node, piece.plan, piece.bucket, piece.home, piece.rank, piece.kind, piece.clock)
            assembly = self._assemblies.get(key)
            if assembly is None:
                if sum(other[:5] == key[:5] for other in self._assemblies) >= _MAX_OPEN:
                    raise WireError(f"too many parcels of rank {piece.rank} and bucket {piece.bucket} are incomplete")
                assembly = self._assemblies[key] = Assembly(piece)
            whole = assembly.add(piece, payload)
            if whole is None:
                return
            del self._assemblies[key]
            payload = whole
        if piece.kind == "refused":
            self._refused(piece, bytes(payload).decode(errors="replace"))
        elif piece.kind == "answer":
            self._answer_came(state, piece, payload)
        else:
            box = self._boxes[piece.plan, piece.bucket, piece.home]
            if len(box.waiting) > _most_waiting(box.home):
                raise WireError(f"too many parcels wait at the home of bucket {piece.bucket}")
            self._arrived(Arrival(piece, None, payload, self._outside.clock()))

    def _check(self, node: int, state: PlanState, piece: wire.Piece) -> None:
        plan, ranks = state.plan, state.members.set.ranks
        fits = piece.bucket < len(plan.buckets) and piece.rank in ranks
        if fits and plan.homes:
            home = plan.homes[piece.bucket]
            if piece.kind in ("answer", "refused"):
                fits = home == node and piece.rank in state.members.local
            elif piece.kind == "told":
                fits = isinstance(parse(plan.reduction.algorithm), Partial)  # nobody else's homes tell others anything
                fits = fits and plan.homes[0] == node and home == self._node and piece.bucket > 0
                fits = fits and piece.nbytes % 8 == 0
            else:
                fits = piece.kind in ("post", "seed") and home == self._node
                fits = fits and self._topology.node_of(piece.rank) == node
            fits = fits and piece.home == -1
        elif fits:
            fits = piece.kind in ("mix", "mean") and self._topology.node_of(piece.rank) == node
            fits = fits and 0 <= piece.home < len(ranks) and ranks[piece.home] in state.members.local
        if not fits:
            raise WireError(f"no {piece.kind} of rank {piece.rank} for bucket {piece.bucket} can come from it")
        bucket = plan.buckets[piece.bucket]
        what = f"the {piece.kind} of rank {piece.rank} for bucket {piece.bucket}"
        limit = bucket.numel * DTYPES[bucket.dtype].itemsize
        if piece.kind == "seed" and piece.nbytes != limit:
            raise WireError(f"{what} has {piece.nbytes} bytes instead of {limit}")
        if piece.kind == "refused":
            limit = _MAX_SENTENCE
        elif piece.kind == "told":
            limit = 8 * (1 + 2 * len(ranks))
        elif piece.kind != "seed":
            limit = max(limit, self._decoder(state, bucket).max_encoded_nbytes(bucket.numel))
        if piece.nbytes > limit:
            raise WireError(f"{what} has {piece.nbytes} bytes, and {limit} is the most")
        if piece.kind == "answer" and (
            len(piece.notes) not in (2, 5) or piece.notes[:2] not in ((0, 0), (1, 0), (1, 1))
        ):
            raise WireError(f"{what} has the notes {list(piece.notes)}, which say nothing")
        if piece.kind == "post" and piece.samples and (wrong := _wrong_rates(state, bucket, piece.rates)):
            raise WireError(f"{what} cannot be taken in: {wrong}")
        if not (0 < piece.weight < math.inf):
            raise WireError(f"{what} has the weight {piece.weight}, which has to be above 0")

    def _answer_came(self, state: PlanState, parcel: wire.Piece, payload: memoryview) -> None:
        sender = self._waiting(parcel)
        if sender is None or sender.post is None or sender.busy:
            return  # it has failed in the meantime; or it is a second answer
        place = sender.post.source
        bucket = state.plan.buckets[parcel.bucket]
        decoder = self._decoder(state, bucket) if parcel.notes[1] else Dense().open(layout_of(bucket))

        def decode() -> None:
            np.copyto(place, unpack(decoder, payload))

        def answered() -> None:
            sender.busy = False
            self._answered(parcel, (parcel.notes[0], *parcel.notes[2:]))

        sender.busy = True
        self._do(parcel.plan, decode, place.nbytes, answered)

    # --- at a home ----------------------------------------------------------------------------------------------------

    def _arrived(self, arrival: Arrival) -> None:
        parcel = arrival.parcel
        box = self._boxes.get((parcel.plan, parcel.bucket, parcel.home))
        if box is not None:  # else its plan is no longer in force
            box.waiting.append(arrival)
            self._turn(box)

    def _turn(self, box: Box) -> None:
        """Has threads take in what waits for a home."""
        if box.turning:
            return  # a small one has been taken in, on the spot: whoever began it goes on
        box.turning = True
        while box.may_begin() and not any(plan == box.plan.plan.id for plan, _ in self._quiet):
            arrival = box.next()
            if arrival.parcel.kind == "seed":
                self._at(box, partial(self._seed, box, arrival), math.inf)  # its optimizer may have to be imported
            else:
                self._at(box, partial(self._take_in, box, arrival), box.nbytes)
        box.turning = False

    def _at(self, box: Box, work: Callable[[], list[Act]], nbytes: float) -> None:
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

        self._do(box.plan.plan.id, lambda: acts.extend(work()), nbytes, done)

    def _when_free(self, box: Box, then: Act) -> None:
        """Calls `then` when no thread is at a home: at once, or before anything else is taken in there."""
        if box.busy:
            box.later.append(then)
        else:
            then()

    def _seed(self, box: Box, arrival: Arrival) -> list[Act]:
        state, home = box.plan, box.home
        if home.value is not None:  # loaded before, which counts more
            return []
        values = arrival.values
        if values is None:
            assert arrival.payload is not None
            values = np.array(Dense().open(layout_of(box.bucket)).decoded(0, arrival.payload, box.bucket.numel))
        self._begin(state, box, values)
        return []

    def _begin(self, state: PlanState, box: Box, value: Array) -> None:
        """The home begins with this value."""
        if parse(state.plan.reduction.algorithm).signal is Signal.GRADIENT:
            box.home.optimizer = shard_optimizer.make(state.plan.reduction.optimizer, box.bucket, value)
        box.home.value = value

    def _take_in(self, box: Box, arrival: Arrival) -> list[Act]:
        """A thread of the kernel pool: the algorithm, and what follows from it, ready to be sent."""
        parcel, home = arrival.parcel, box.home
        position = box.plan.members.set.ranks.index(parcel.rank)
        values = arrival.values
        if values is None:
            assert arrival.payload is not None
            asks = parcel.kind == "post" and not parcel.samples
            if parcel.kind == "told":
                values = np.frombuffer(arrival.payload, np.int64)
            else:
                values = np.zeros(0) if asks else unpack(self._decoder(box.plan, box.bucket), arrival.payload)
        now = self._outside.clock()
        part = Part(
            parcel.kind, position, parcel.clock, parcel.version, values, parcel.rates, parcel.samples, parcel.weight,
            arrival.came,
        )  # fmt: skip
        if parcel.kind == "post" and not parcel.samples:  # of a shard; a replica has nothing to ask for
            return self._prepared(box, [box.algorithm.asked(home, part)])
        if parcel.kind == "post":
            if position not in home.present:  # it had joined, and is back
                home.done[position] = max(home.done[position], home.slowest)
                home.present = home.present | {position}
            home.done[position] += 1
            stale = max(home.version - parcel.version, 0)
            # At a replica only its own worker posts: there is nobody to be ahead of.
            ahead = max(home.done[position] - home.slowest, 0) if home.rank < 0 else 0
            box.notes[position] = stale, ahead, max(round(1000 * (now - arrival.came)), 0)
        acts = self._prepared(box, box.algorithm.received(home, part))
        if len(home.slots) > _most_waiting(home):
            raise WireError(
                f"contributions of {len(home.slots)} clocks wait at the home of bucket {box.bucket.index} of "
                f"{box.plan.plan.group!r}, the last one of rank {parcel.rank} and clock {parcel.clock}: that cannot be"
            )
        return acts

    def _prepared(self, box: Box, steps: Iterable[Step]) -> list[Act]:
        """What the event loop is to do for these steps. Values are encoded, or where they belong, when this returns."""
        acts: list[Act] = []
        for step in steps:
            if isinstance(step, Answer):
                acts.append(self._prepared_answer(box, step))
            elif isinstance(step, Send):
                acts.extend(self._prepared_send(box, step))
            elif isinstance(step, Refuse):
                acts.append(partial(self._refuse, box, step))
            elif isinstance(step, Tell):
                acts.extend(self._prepared_tell(box, step))
            else:
                acts.append(partial(self._wake_later, box, step))
        return acts

    def _prepared_answer(self, box: Box, step: Answer) -> Act:
        rank = box.plan.members.set.ranks[step.part.rank]
        notes = box.notes.pop(step.part.rank, ())
        parcel = wire.Piece(
            self._epoch, box.plan.plan.id, box.bucket.index, "answer", box.home.rank, rank, step.part.clock,
            box.home.version, 0, 0,
        )  # fmt: skip
        if self._topology.node_of(rank) == self._node:
            sender = self._senders.get((parcel.plan, parcel.bucket, rank))
            post = None if sender is None else sender.post  # it may be over, while this thread is here
            if post is not None:
                np.copyto(post.source, step.values)
            return partial(self._answered, parcel, (int(step.added), *notes))
        added, coded, payload = self._encoded(box, step)
        parcel = replace(parcel, notes=(added, coded, *notes))
        return partial(self._send, self._topology.node_of(rank), parcel, payload)

    def _encoded(self, box: Box, step: Answer) -> tuple[int, int, memoryview]:
        """An answer to another node: whether it is added there, whether it is coded, and its bytes.

        A lossy codec sends the difference to what that node has been told, so that what it leaves out comes later
        (dual-way sparsification: Yan et al., ICPP 2020).
        """
        decoder = self._decoder(box.plan, box.bucket)
        if decoder.lossless:
            return int(step.added), 0, memoryview(step.values.tobytes())
        if step.added:
            return 1, 1, pack(self._encoder(box), step.values)
        told = box.told.get(step.part.rank)
        if told is None or not step.part.samples:  # who asks for what the home has gets every bit of it
            told = box.told[step.part.rank] = step.values.copy()  # another thread may be at work on the home
            return 0, 0, memoryview(told.tobytes())
        codec = self._encoder(box)
        payload = pack(codec, step.values - told)
        told += unpack(codec, payload)
        return 1, 1, payload

    def _prepared_send(self, box: Box, step: Send) -> list[Act]:
        ranks = box.plan.members.set.ranks
        parcel = wire.Piece(
            self._epoch, box.plan.plan.id, box.bucket.index, "mean" if step.kind == "mean" else "mix", 0,
            ranks[box.home.rank], step.clock, box.home.version, 0, 0, weight=step.weight,
        )  # fmt: skip
        nodes = {position: self._topology.node_of(ranks[position]) for position in step.ranks}
        acts: list[Act] = []
        here = [position for position, node in nodes.items() if node == self._node]
        if here:
            values = step.values.copy()  # what was posted may be overwritten before its neighbours have read it
            for position in here:
                arrival = Arrival(replace(parcel, home=position), values, None, self._outside.clock())
                acts.append(partial(self._arrived, arrival))
        if len(here) < len(nodes):
            payload = step.payload
            if payload is None:
                payload = pack(self._encoder(box), step.values)
            for position, node in nodes.items():
                if node != self._node:
                    acts.append(partial(self._send, node, replace(parcel, home=position), memoryview(payload)))
        return acts

    def _prepared_tell(self, box: Box, step: Tell) -> list[Act]:
        plan = box.plan.plan
        acts: list[Act] = []
        for bucket, node in enumerate(plan.homes):
            if bucket == box.bucket.index:
                continue
            parcel = wire.Piece(
                self._epoch, plan.id, bucket, "told", -1, box.plan.members.set.ranks[0], step.clock, 0, 0, 0
            )
            if node == self._node:
                acts.append(partial(self._arrived, Arrival(parcel, step.numbers, None, self._outside.clock())))
            else:
                acts.append(partial(self._send, node, parcel, memoryview(step.numbers.tobytes())))
        return acts

    def _refuse(self, box: Box, step: Refuse) -> None:
        rank = box.plan.members.set.ranks[step.part.rank]
        parcel = wire.Piece(
            self._epoch, box.plan.plan.id, box.bucket.index, "refused", box.home.rank, rank, step.part.clock, 0, 0, 0
        )
        why = f"bucket {box.bucket.index} of {box.plan.plan.group!r}: {step.why}"
        if self._topology.node_of(rank) == self._node:
            self._refused(parcel, why)
        else:
            self._send(self._topology.node_of(rank), parcel, memoryview(why.encode()))

    def _wake_later(self, box: Box, step: Wake) -> None:
        def look() -> None:
            now = self._outside.clock()
            self._at(box, lambda: self._prepared(box, box.algorithm.elapsed(box.home, now)), box.nbytes)

        def wake() -> None:
            if self._boxes.get((box.plan.plan.id, box.bucket.index, box.home.rank)) is box:
                self._when_free(box, look)  # what is at work may change what is due

        self._outside.call_later(max(step.at - self._outside.clock(), 0.0), wake)

    # --- membership and time ------------------------------------------------------------------------------------------

    def gone(self, ranks: Iterable[int]) -> None:
        """These ranks take part no longer."""
        for rank in ranks:
            self._gone.add(rank)
            for box in list(self._boxes.values()):
                members = box.plan.members.set.ranks
                if rank in members:
                    self._when_free(box, partial(self._leave, box, members.index(rank)))

    def _leave(self, box: Box, position: int) -> None:
        if position in box.home.present:
            box.home.present = box.home.present - {position}
            self._at(box, lambda: self._prepared(box, box.algorithm.gone(box.home, position)), box.nbytes)

    def returned(self, ranks: Iterable[int]) -> None:
        """These ranks, which had joined, go on with all others. They have taken different numbers of steps, so all
        ranks count their clocks from a new base, which is the same on all nodes."""
        back = set(ranks)
        self._gone -= back
        for sender in self._senders.values():
            sender.clock = (sender.clock // _CLOCKS_OF_A_JOIN + 1) * _CLOCKS_OF_A_JOIN
        for box in self._boxes.values():
            self._when_free(box, partial(self._return, box, back))

    def _return(self, box: Box, ranks: set[int]) -> None:
        home = box.home
        home.present = home.present | {p for p, rank in enumerate(box.plan.members.set.ranks) if rank in ranks}
        home.done = dict.fromkeys(home.done, max(home.done.values()))

    def end(self, error: str) -> None:
        """Whoever waits for an answer gets this sentence instead: this membership epoch is over elsewhere."""
        for (_, _, rank), sender in self._senders.items():
            if sender.post is not None:
                handle, sender.post = sender.post.handle, None
                self._outside.to_worker(rank, wire.Failed(handle, error))

    def tick(self) -> None:
        """Warns of what has waited long, and ends what has waited too long."""
        now = self._outside.clock()
        for (plan, bucket, rank), sender in list(self._senders.items()):
            if sender.post is None:
                continue
            waited = now - sender.since
            if waited > self._settings.operation_timeout:
                why = self._what_waits(plan, bucket, rank, waited)
                if not sender.busy and self._withdrawn(plan, bucket, rank):  # else at the next tick
                    handle, sender.post = sender.post.handle, None
                    sender.failed = why
                    self._outside.to_worker(rank, wire.Failed(handle, why))
            elif waited > self._settings.stall_warning_time and not sender.warned:
                sender.warned = True
                self._outside.warn(self._what_waits(plan, bucket, rank, waited))

    def _home_of(self, plan: int, bucket: int, rank: int) -> tuple[Box | None, int]:
        """The home that a local rank posts to, if it is on this node; and the rank's position."""
        state = self._plans[plan]
        position = state.members.set.ranks.index(rank)
        return self._boxes.get((plan, bucket, -1 if state.plan.homes else position)), position

    def _withdrawn(self, plan: int, bucket: int, rank: int) -> bool:
        """Lets a worker have its arena back although it has not been answered; whether that is possible now."""
        box, position = self._home_of(plan, bucket, rank)
        if box is None:
            return True
        mine = [a for a in box.waiting if a.values is not None and (a.parcel.rank, a.parcel.kind) == (rank, "post")]
        for arrival in mine:
            box.waiting.remove(arrival)
        if mine or box.busy:
            return bool(mine)
        for slot in box.home.slots.values():
            if position in slot:
                slot[position].values = slot[position].values.copy()
        return True

    def _what_waits(self, plan: int, bucket: int, rank: int, waited: float) -> str:
        state = self._plans[plan]
        text = f"rank {rank} has waited {waited:.0f} s for the home of bucket {bucket} of {state.plan.group!r}"
        if state.plan.homes:
            text += f", which is on {self._topology.describe_node(state.plan.homes[bucket])}"
        box, _ = self._home_of(plan, bucket, rank)
        ranks = state.members.set.ranks
        if box is None or box.busy:
            return text  # a thread may be changing what would be told
        if not box.seeded:
            return f"{text}; it has nothing to begin with, which has to come from {self._topology.describe(ranks[:1])}"
        awaited = [ranks[position] for position in box.algorithm.awaited(box.home)]
        return f"{text}; it waits for {self._topology.describe(awaited)}" if awaited else text

    def fail(self) -> None:
        """The job cannot go on."""
        self._over = True
        for sender in self._senders.values():
            sender.post = None
        self._boxes.clear()
        self._assemblies.clear()
        self._early.clear()
        self._quiet.clear()

    @property
    def idle(self) -> bool:
        """Whether no local worker waits for an answer."""
        return all(sender.post is None for sender in self._senders.values())

    def statistics(self) -> dict[str, object]:
        """The homes here, the contributions they have taken in, by rank how many came `late`; and the meters."""
        late: Counter[str] = Counter()
        for box in self._boxes.values():
            for (what, position), count in list(box.home.noticed.items()):  # which threads may add to
                if what == "late":
                    late[str(box.plan.members.set.ranks[position])] += count
        return {
            "homes": len(self._boxes),
            "updates": sum(box.home.version for box in self._boxes.values()),
            "late": dict(late),
            **self.meters.statistics(),
        }

    # --- state --------------------------------------------------------------------------------------------------------

    def when_quiet(self, plan: int, then: Act) -> None:
        """Calls `then` when no thread is at work for the plan: at once, or before anything else is taken in at its
        homes."""
        if self._jobs[plan]:
            self._quiet.append((plan, then))
        else:
            then()

    def _job_done(self, plan: int) -> None:
        self._jobs[plan] -= 1
        if self._jobs[plan]:
            return
        del self._jobs[plan]
        asked = [then for of, then in self._quiet if of == plan]
        if asked:
            self._quiet = [quiet for quiet in self._quiet if quiet[0] != plan]
            for then in asked:
                then()
            for key, box in list(self._boxes.items()):
                if key[0] == plan:
                    self._turn(box)

    def save(self, plan: int) -> dict[str, Array]:
        """What the homes of a plan on this node remember, and what its workers have not sent; copies. The keys begin
        with `home:BUCKET:RANK:` and `sender:BUCKET:RANK:`."""
        state: dict[str, Array] = {}
        for (of, bucket, rank), box in self._boxes.items():
            if of == plan:
                state |= {f"home:{bucket}:{rank}:{key}": value for key, value in _home_state(box.home).items()}
        for (of, bucket, rank), sender in self._senders.items():
            if of == plan:
                found: dict[str, Array] = {"counts": np.array([sender.clock, sender.version], np.int64)}
                if sender.codec is not None:
                    found |= {f"codec/{key}": value for key, value in sender.codec.state_dict().items()}
                state |= {f"sender:{bucket}:{rank}:{key}": value for key, value in found.items()}
        return state

    def load(self, process_set: int, group: str, state: Mapping[str, Array]) -> None:
        """Gives that back, to the plan in force or to the next one of its group. A state of another optimizer fails the
        job: that is noticed by the thread that makes the optimizer.

        Raises:
            FusionError: it is of other buckets, or damaged, or something is under way. Nothing has changed then.
        """
        found = next((p for p in self._plans.values() if _group(p) == (process_set, group)), None)
        if found is None:
            self._loaded[process_set, group] = {key: value.copy() for key, value in state.items()}
        else:
            self._restore(found, state)

    def _restore(self, plan: PlanState, state: Mapping[str, Array]) -> None:
        homes: list[tuple[Box, dict[str, Array]]] = []
        senders: list[tuple[Sender, list[int], BucketCodec | None]] = []
        for (kind, bucket, rank), entries in _by_owner(state).items():
            address = (plan.plan.id, bucket, rank)
            if kind == "home" and address in self._boxes:
                _check_home(self._boxes[address], entries)
                homes.append((self._boxes[address], {key: value.copy() for key, value in entries.items()}))
            elif kind == "sender" and address in self._senders:
                counts, codec = _counts(entries.pop("counts", None), 2, f"rank {rank} in bucket {bucket}"), None
                if self._senders[address].busy:
                    raise WireError(
                        f"rank {rank} is posting to bucket {bucket} of {plan.plan.group!r}; load the state of an "
                        "optimizer between step() and the next backward()"
                    )
                if entries:
                    codec = open_codec(self._codec(plan), layout_of(plan.plan.buckets[bucket]))
                    codec.load_state_dict({key.removeprefix("codec/"): v for key, v in entries.items()})
                senders.append((self._senders[address], counts, codec))
            else:
                raise WireError(f"the saved state is of another job: it has the {kind} of bucket {bucket}, rank {rank}")
        for sender, (clock, version), codec in senders:
            sender.clock, sender.version, sender.codec = clock, version, codec
        for box, entries in homes:
            box.closed = True
            work = partial(self._restore_home, box, entries)
            self._when_free(box, partial(self._at, box, work, math.inf))  # as in `_turn`

    def _restore_home(self, box: Box, entries: Mapping[str, Array]) -> list[Act]:
        home = box.home
        value = entries.get("value")
        if value is not None:
            value = value.astype(home.dtype.storage)
            if home.rank < 0:
                self._begin(box.plan, box, value)
            else:
                home.value = value
        home.version = int(entries["version"][0])
        home.done = dict(enumerate(int(count) for count in entries["done"]))
        home.aux = {key.removeprefix("aux/"): v for key, v in entries.items() if key.startswith("aux/")}
        home.scratch.clear()
        optimizer = {key.removeprefix("optimizer/"): v for key, v in entries.items() if key.startswith("optimizer/")}
        if home.optimizer is not None:
            home.optimizer.load(optimizer)
        box.told.clear()
        return [partial(setattr, box, "closed", False)]

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _codec(self, state: PlanState) -> codecs.Codec:
        return codecs.parse(state.plan.reduction.codec)

    def _decoder(self, state: PlanState, bucket: wire.Bucket) -> BucketCodec:
        """Decodes parcels of a bucket. That changes nothing, and so several threads may do it at the same time."""
        key = state.plan.id, bucket.index
        decoder = self._decoders.get(key)
        if decoder is None:
            decoder = self._decoders[key] = open_codec(self._codec(state), layout_of(bucket), remembers=False)
        return decoder

    def _encoder(self, box: Box) -> BucketCodec:
        """Encodes what a home says, once: a codec that selects has scratch memory of its own even if what it leaves out
        is lost."""
        codec = self._codec(box.plan)
        if codec.stateful:
            return open_codec(codec, layout_of(box.bucket), remembers=False)
        return self._decoder(box.plan, box.bucket)

    def _send(self, node: int, parcel: wire.Piece, payload: memoryview) -> None:
        if not self._over:
            for piece, data in pieces(parcel, payload, self._settings.chunk_bytes):
                self._outside.send_piece(node, piece, data)

    def _do(self, plan: int, work: Act, nbytes: float, then: Callable[[], None]) -> None:
        """Runs `work` for a plan, in the kernel pool if it is much, and `then` in the event loop."""
        self._jobs[plan] += 1

        def done(error: BaseException | None) -> None:
            if self._over:
                return
            if error is None:
                then()
                self._job_done(plan)
            else:
                self._failed(error)

        if nbytes > INLINE_WORK:
            self._outside.run_jobs([work], done)
            return
        try:
            work()
        except Exception as error:  # reported like one from the pool
            done(error)
        else:
            done(None)


def _group(state: PlanState) -> tuple[int, str]:
    return state.plan.process_set, state.plan.group


def _most_waiting(home: Home) -> int:
    """More parts than ever wait at a home: ranks that are ahead of others are so by a few clocks for each of them."""
    return _MAX_WAITING + 16 * home.ranks


def _wrong_rates(state: PlanState, bucket: wire.Bucket, rates: Sequence[float]) -> str:
    """Why a home cannot take a step at these learning rates; empty if it can."""
    if parse(state.plan.reduction.algorithm).signal is not Signal.GRADIENT:
        return ""
    groups = 1 + max((tensor.group for tensor in bucket.tensors), default=0)
    if len(rates) < groups:
        return f"it has {len(rates)} learning rates for at least {groups} parameter groups"
    if not all(math.isfinite(rate) for rate in rates):
        return f"its learning rates {list(rates)} are not all finite"
    return ""


def _by_owner(state: Mapping[str, Array]) -> dict[tuple[str, int, int], dict[str, Array]]:
    """The entries of a saved state by what they are of: its kind, bucket and rank. Raises `WireError`."""
    found: dict[tuple[str, int, int], dict[str, Array]] = {}
    for key, value in state.items():
        kind, of, whose, name = (*key.split(":", 3), "", "", "")[:4]
        if not name or not of.isdecimal() or not whose.removeprefix("-").isdecimal():
            raise WireError(f"{key!r} cannot be in a saved state; it is damaged, or of another program")
        found.setdefault((kind, int(of), int(whose)), {})[name] = value
    return found


def _counts(saved: Array | None, how_many: int, of: str) -> list[int]:
    """So many numbers, as they were saved. Raises `WireError` if they are something else."""
    if saved is None or saved.shape != (how_many,) or saved.dtype != np.int64:
        raise WireError(f"the saved state does not have the {how_many} counts of {of}")
    if not all(0 <= count < 2**48 for count in saved.tolist()):
        raise WireError(f"the saved state has the counts {saved.tolist()} of {of}, which cannot be")
    return [int(count) for count in saved]


def _check_home(box: Box, entries: Mapping[str, Array]) -> None:
    """Raises `WireError` unless a home can go on from this."""
    home, of = box.home, f"the home of bucket {box.bucket.index}"
    _counts(entries.get("version"), 1, of)
    _counts(entries.get("done"), home.ranks, of)
    value = entries.get("value")
    if value is not None and value.shape != (home.elements,):
        raise WireError(f"bucket {box.bucket.index} has {home.elements} elements, and {value.size} were saved")
    for key, array in entries.items():
        kind, _, name = key.partition("/")
        known = key in ("version", "done", "value") or (name and kind in ("aux", "optimizer"))
        if not known or array.dtype.kind not in "iuf":
            raise WireError(f"{key!r} of {of} cannot be in a saved state; it is damaged, or of another program")


def _home_state(home: Home) -> dict[str, Array]:
    state: dict[str, Array] = {
        "version": np.array([home.version], np.int64),
        "done": np.array([home.done[rank] for rank in range(home.ranks)], np.int64),
    }
    if home.value is not None:
        state["value"] = home.value.copy()
    state |= {f"aux/{key}": value.copy() for key, value in home.aux.items()}
    if home.optimizer is not None:
        state |= {f"optimizer/{key}": value for key, value in home.optimizer.state().items()}
    return state
