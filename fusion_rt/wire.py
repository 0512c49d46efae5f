"""The messages between processes: typed, limited in size, and validated when they are decoded.

Two channels use them. The *local channel* joins a worker to its node's daemon (Unix SEQPACKET, one message a packet);
the *mesh* joins daemons (ZeroMQ, a message in the first frame, a payload in the second). Messages are msgspec structs
in MessagePack, encoded as tagged arrays: decoding is validation, and nothing received is ever unpickled.

Every decoder here refuses what is longer than its limit before it looks at it, and raises `WireError` for everything
that is not a well-formed message; no other exception leaves it.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Annotated, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec

from fusion_rt.errors import WireError
from fusion_rt.topology import Topology

PROTOCOL_VERSION = 1
MAX_PACKET = 64 * 1024  # bytes of a local message; a longer one travels in a memfd (see `local.py`)
MAX_MESSAGE = 64 * 1024 * 1024  # bytes of any encoded message
MAX_INLINE = 8 * 1024  # bytes of a tensor that travels inside a local message instead of in the arena
MAX_NAME = 1024
MAX_RANKS = 65536
MAX_DIMS = 64
MAX_GROUPS = 64  # parameter groups of an optimizer that a home has
MAX_TEXT = 256 * 1024  # characters
MAX_LINE = 512  # characters of a line about where a worker is
MAX_FRAMES = 32  # calls of a thread that are told
MAX_THREADS = 8  # threads of a worker
MAX_LOCATED = 16  # workers of a node
MAX_WAITING = 256  # operations of a node
CLOCKS_OF_AN_EPOCH = 1 << 36  # clocks of a membership epoch: what comes late from the one before is told by its clock

Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**48)]
Shape: TypeAlias = Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_DIMS)]
Kind: TypeAlias = Literal[
    "allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "join",
    "add_process_set", "remove_process_set",
]  # fmt: skip
Op: TypeAlias = Literal["sum", "average", "min", "max", "product", "adasum"]
Rates: TypeAlias = Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_GROUPS)]
Line: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_LINE)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


class Signature(msgspec.Struct, frozen=True, array_like=True):
    """What ranks have to agree on before an operation runs, apart from its name.

    Attributes:
        kind: the collective; `join` and those that add and remove a process set are barriers with an effect.
        dtype: name of an entry of `dtypes.DTYPES`; empty for an operation without data.
        shape: dimensions of this rank's tensor. Ranks may differ in the first one in an allgather and an alltoall.
        op: how the elements of different ranks are combined, for allreduce and reducescatter.
        prescale, postscale: factors applied to each rank's elements before and to the result after combining.
        root: the rank whose tensor is broadcast; 0 otherwise.
        process_set: id of the set of ranks that take part.
        codec: spec of the codec between nodes.
        parts: shapes of the tensors that were fused into this one, which then is flat; empty when it is a single one.
            A first dimension in which ranks may differ is 0 there.
        ranks: members of the process set that is added or removed.
    """

    kind: Kind
    dtype: Name = ""
    shape: Shape = ()
    op: Op = "sum"
    prescale: float = 1.0
    postscale: float = 1.0
    root: Rank = 0
    process_set: Count = 0
    codec: Name = "dense"
    parts: tuple[Shape, ...] = ()
    ranks: tuple[Rank, ...] = ()

    def common(self) -> Signature:
        """The part that must be equal on all ranks: without the first dimension where ranks may differ in it."""
        if self.kind in ("allgather", "alltoall") and self.shape:
            return msgspec.structs.replace(self, shape=(0, *self.shape[1:]))
        return self


@lru_cache(maxsize=4096)
def digest(signature: Signature) -> int:
    """64 bits that stand for a signature in data messages, so that a mismatch cannot be reduced unnoticed."""
    packed = msgspec.msgpack.encode(signature.common())
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "big") >> 1


class OpKey(NamedTuple):
    """Identifies one run of one operation, the same on all nodes.

    Attributes:
        process_set: id of the process set.
        plan: id of the plan for a planned bucket, 0 for any other operation.
        name: the tensor's name, or the bucket's index in its plan.
        clock: how many operations of this name the worker had submitted before.
    """

    process_set: int
    plan: int
    name: str
    clock: int


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where in a worker's arena a tensor lies: segment id and offset in bytes."""

    segment: Count
    offset: Count


# --- the plan ---------------------------------------------------------------------------------------------------------


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """A named tensor that is to be part of a plan.

    Attributes:
        together: tensors of one dtype with the same number here share a bucket with nothing else; 0: no wish.
        sparse: how many of its dimensions are sparse on this rank; 0: it is dense, or there is none yet.
        group: index of the optimizer's parameter group that it is in.
    """

    name: Name
    dtype: Name
    shape: Shape
    together: Count = 0
    sparse: Count = 0
    group: Count = 0


class PlannedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor's place in a bucket: elements [start, start + numel), its shape there, and its parameter group."""

    name: Name
    start: Count
    numel: Count
    shape: Shape = ()
    group: Count = 0


class Bucket(msgspec.Struct, frozen=True):
    """Tensors fused into one contiguous fusion buffer of `numel` elements, `offset` bytes into the plan's segment."""

    index: Count
    dtype: Name
    numel: Count
    offset: Count
    tensors: tuple[PlannedTensor, ...]


class OptimizerSpec(msgspec.Struct, frozen=True):
    """An optimizer of `torch.optim`, for a home that takes the steps.

    Attributes:
        name: of its class.
        groups: arguments of each parameter group, as JSON, without the learning rate, which comes with each gradient.
    """

    name: Name
    groups: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_GROUPS)]


class Reduction(msgspec.Struct, frozen=True):
    """How the buckets of a plan are combined; `optimizer`: where a home applies gradients."""

    op: Op = "average"
    prescale: float = 1.0
    postscale: float = 1.0
    codec: Name = "dense"
    algorithm: Name = "allreduce"
    optimizer: OptimizerSpec | None = None


class Plan(msgspec.Struct, frozen=True):
    """The agreed, ordered list of buckets of one group of tensors; `id` grows with every plan of a job.

    `sparse`: tensors that are sparse on some rank, and so are in no bucket on any. `homes`: the node of each bucket's
    home, if buckets have one home each.
    """

    id: Annotated[int, msgspec.Meta(ge=1)]
    group: Name
    process_set: Count
    reduction: Reduction
    buckets: tuple[Bucket, ...]
    nbytes: Count
    sparse: tuple[TensorSpec, ...] = ()
    homes: tuple[Rank, ...] = ()


class Proposal(msgspec.Struct, frozen=True):
    """What one rank asks to have planned: tensors in the order in which their gradients arrived there."""

    group: Name
    process_set: Count
    clock: Count
    reduction: Reduction
    tensors: tuple[TensorSpec, ...]


# --- where a worker is ------------------------------------------------------------------------------------------------


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """A call in a stack. `source`: the line, if it could be read; `inner`: how many calls inside it are left out."""

    file: Line
    line: Count
    function: Line
    source: Line = ""
    inner: Count = 0


class ThreadStack(msgspec.Struct, frozen=True, array_like=True):
    """The Python stack of a thread, the most recent call first; `more`: how many calls at its end are left out."""

    name: Line
    frames: Annotated[tuple[Frame, ...], msgspec.Meta(max_length=MAX_FRAMES)]
    more: Count = 0


class Whereabouts(msgspec.Struct, frozen=True, array_like=True):
    """Where a worker is.

    Attributes:
        pid: 0 if there is none.
        state: of its process, in words.
        why_not: why there are no stacks; empty when there are.
        threads: the main thread first.
    """

    rank: Rank
    pid: Count
    state: Line
    why_not: Line = ""
    threads: Annotated[tuple[ThreadStack, ...], msgspec.Meta(max_length=MAX_THREADS)] = ()


# --- local channel: worker to daemon ----------------------------------------------------------------------------------


class Hello(msgspec.Struct, tag="hello", array_like=True):
    """First message of a worker. A memfd may be attached, into which it writes its stacks (`stacks.py`).

    Attributes:
        stack_signal: the signal on which it does so; 0: it does not.
        main_thread: the ident of its main thread.
    """

    version: int
    job: Name
    rank: Rank
    pid: Count
    stack_signal: Annotated[int, msgspec.Meta(ge=0, lt=65)] = 0
    main_thread: Annotated[int, msgspec.Meta(ge=0, lt=2**62)] = 0


class AddSegment(msgspec.Struct, tag="segment", array_like=True):
    """Offers a sealed memfd (attached) as a segment of the worker's arena; `plan` when it holds a plan's buckets."""

    segment: Count
    nbytes: Count
    plan: Count = 0


class DropSegment(msgspec.Struct, tag="drop", array_like=True):
    """The daemon may unmap a segment; the worker has no operation in it."""

    segment: Count


class Submit(msgspec.Struct, tag="submit", array_like=True):
    """One operation on one tensor, which lies in the arena (`place`) or in the message (`inline`).

    `splits`: for alltoall, rows for each rank of the process set.
    """

    handle: Count
    name: Name
    clock: Count
    signature: Signature
    place: Place | None = None
    inline: Annotated[bytes, msgspec.Meta(max_length=MAX_INLINE)] | None = None
    splits: tuple[Count, ...] = ()


class Propose(msgspec.Struct, tag="propose", array_like=True):
    """Asks for a plan; answered with `Planned`."""

    handle: Count
    proposal: Proposal


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """This worker's part of a planned bucket is in the arena: the only message a bucket costs in a step.

    Attributes:
        rescale: what the residual of each of its tensors is multiplied by first, when learning rates have changed.
        rates: learning rate of each parameter group, for a home that applies gradients.
        samples: how many samples it comes from; 0: it is nothing, and the home is only asked for what it has.
        seed: it is no contribution, but what the bucket's home begins with.
    """

    handle: Count
    plan: Count
    bucket: Count
    clock: Count
    rescale: tuple[float, ...] = ()
    rates: Rates = ()
    samples: Count = 1
    seed: bool = False


class SaveState(msgspec.Struct, tag="save", array_like=True):
    """Asks for what the codecs of a group's plan remember on this node; the result is `named_arrays`.

    `common`: only for what is the same on all nodes, without residuals.
    """

    handle: Count
    process_set: Count
    group: Name
    common: bool = False


class LoadState(msgspec.Struct, tag="load", array_like=True):
    """Gives that back (`nbytes` bytes in the arena), for the plan in force, or else for the next one of the group.

    `common`: it has no residuals, which start at zero; nothing happens where as many steps have been taken already.
    """

    handle: Count
    process_set: Count
    group: Name
    place: Place
    nbytes: Count
    common: bool = False


class CompressionRequest(msgspec.Struct, tag="compression", array_like=True):
    """Asks what compression has saved and cost on this node; the result is JSON."""

    handle: Count


class StalenessRequest(msgspec.Struct, tag="staleness", array_like=True):
    """Asks how stale this node's contributions have been; the result is JSON."""

    handle: Count


class Bye(msgspec.Struct, tag="bye", array_like=True):
    """The worker leaves. It may come back with another `Hello` on the same connection.

    `error` is its unhandled exception, with traceback, if that is why.
    """

    error: Text = ""


class StatusRequest(msgspec.Struct, tag="status", array_like=True):
    """Asks for the daemon's statistics (also before, and instead of, a `Hello`)."""


class StopRequest(msgspec.Struct, tag="stop", array_like=True):
    """Asks the daemon to end the job (also before, and instead of, a `Hello`)."""

    reason: Text = ""


class HangRequest(msgspec.Struct, tag="hang", array_like=True):
    """Asks what waits for whom in the job, and where these are; answered with `Status`. From tools, as `StatusRequest`.

    `everyone`: also where all other ranks are.
    """

    everyone: bool = False


ToolMessage: TypeAlias = StatusRequest | StopRequest | HangRequest
WorkerMessage: TypeAlias = (
    Hello | AddSegment | DropSegment | Submit | Propose | Ready | SaveState | LoadState | CompressionRequest
    | StalenessRequest | Bye | StatusRequest | StopRequest | HangRequest
)  # fmt: skip

# --- local channel: daemon to worker ----------------------------------------------------------------------------------


class Welcome(msgspec.Struct, tag="welcome", array_like=True):
    """Every process of the job is up; answers `Hello`. `epoch`: how often all of them have left and come back."""

    topology: Topology
    node: Count
    fusion_threshold: Count
    algorithm: Name
    compression: Name
    epoch: Count = 0


class Done(msgspec.Struct, tag="done", array_like=True):
    """An operation is complete. The result lies where the input lay, in `inline`, or in an attached memfd.

    `sizes`: for allgather, rows that came from each rank; for alltoall likewise (the received splits); for a join, the
    last rank that joined; for a new process set, its id; from a bucket's home, 1 where the result is to be added to
    what the worker has, 0 where it replaces it.
    `nbytes`: length of the attached memfd, 0 when there is none.
    """

    handle: Count
    inline: bytes | None = None
    sizes: tuple[Count, ...] = ()
    nbytes: Count = 0


class Planned(msgspec.Struct, tag="planned", array_like=True):
    """The plan that a proposal led to."""

    handle: Count
    plan: Plan


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """One operation failed, on all ranks; the job goes on."""

    handle: Count
    message: Text


class JobFailed(msgspec.Struct, tag="job_failed", array_like=True):
    """The job cannot go on; every operation under way and every later one fails with this text."""

    message: Text


class Status(msgspec.Struct, tag="statistics", array_like=True):
    """The daemon's statistics, as JSON."""

    json: Text


DaemonMessage: TypeAlias = Welcome | Done | Planned | Failed | JobFailed | Status

# --- mesh: daemon to daemon -------------------------------------------------------------------------------------------


class PeerHello(msgspec.Struct, tag="peer_hello", array_like=True):
    """First message to a peer. `tokens`: routing ids under which the peer may open payload connections to us."""

    version: int
    job: Name
    node: Rank
    tokens: tuple[Annotated[bytes, msgspec.Meta(max_length=64)], ...]


class Heartbeat(msgspec.Struct, tag="hb", array_like=True):
    """The sender's event loop turns."""


class Ack(msgspec.Struct, tag="ack", array_like=True):
    """Nothing else was there to carry the acknowledgements that stand before every control message."""


class Reopen(msgspec.Struct, tag="reopen", array_like=True):
    """The sender's payload connection of this number to you is broken, and it asks for a new token."""

    number: Annotated[int, msgspec.Meta(ge=1)]


class Reopened(msgspec.Struct, tag="reopened", array_like=True):
    """Answers `Reopen`: a new token, and how many messages have come on that connection so far."""

    number: Annotated[int, msgspec.Meta(ge=1)]
    token: Annotated[bytes, msgspec.Meta(max_length=64)]
    received: Count


class Leaving(msgspec.Struct, tag="leaving", array_like=True):
    """The sender's daemon ends: its connections will not come back."""


class GivenUp(msgspec.Struct, tag="given_up", array_like=True):
    """The last word to a peer that the sender has given up, and why: nothing that it sends is taken any more."""

    why: Text


class Probe(msgspec.Struct, tag="probe", array_like=True):
    """Asks for an `Echo`, to measure the link. Travels like a chunk: its payload is the next frame."""

    serial: Count


class Echo(msgspec.Struct, tag="echo", array_like=True):
    serial: Count


class Up(msgspec.Struct, tag="up", array_like=True):
    """To the coordinator: this node's workers have said hello, in this membership epoch, and its connections stand."""

    epoch: Count = 0


class NewEpoch(msgspec.Struct, tag="epoch", array_like=True):
    """All workers of the sender's node have left and come back: what it sends from here on is about this epoch."""

    epoch: Count


class Start(msgspec.Struct, tag="start", array_like=True):
    """From the coordinator: every node is up; the measured cost model that all nodes use from now on.

    Attributes:
        latency: seconds that a message without payload takes one way.
        seconds_per_byte: further seconds for each byte of payload.
    """

    latency: float
    seconds_per_byte: float


class Request(msgspec.Struct, tag="request", array_like=True):
    """To the coordinator: all local workers submitted this operation; their signatures and splits by rank."""

    key: OpKey
    signatures: dict[Rank, Signature]
    splits: dict[Rank, tuple[Count, ...]]


class Verdict(msgspec.Struct, tag="verdict", array_like=True):
    """From the coordinator: the ranks agree, the operation may start.

    Attributes:
        rows: first dimension of every rank's tensor by position in the process set; for a join, the last rank to join.
        splits: of every rank, likewise. Both are empty for an operation that was approved before.
        signature: for a node all of whose ranks have joined: what the others run.
    """

    key: OpKey
    rows: tuple[Count, ...] = ()
    splits: tuple[tuple[Count, ...], ...] = ()
    signature: Signature | None = None


class PlanRequest(msgspec.Struct, tag="plan_request", array_like=True):
    """To the coordinator: what one rank proposes."""

    rank: Rank
    proposal: Proposal


class PlanVerdict(msgspec.Struct, tag="plan_verdict", array_like=True):
    """From the coordinator: the plan of a group, or why its proposals do not fit together."""

    process_set: Count
    group: Name
    clock: Count
    plan: Plan | None = None
    error: Text = ""


class Mismatch(msgspec.Struct, tag="mismatch", array_like=True):
    """To the coordinator: the ranks do not agree about this operation, or wait for some that do not submit it."""

    key: OpKey
    waited: float = 0.0


class Inquiry(msgspec.Struct, tag="inquiry", array_like=True):
    """From the coordinator: which of your ranks have submitted this operation, and as what?"""

    key: OpKey


class Report(msgspec.Struct, tag="report", array_like=True):
    """To the coordinator: the answer to an `Inquiry`. `traffic`: with the peers, once data is exchanged."""

    key: OpKey
    signatures: dict[Rank, Signature]
    traffic: tuple[Traffic, ...] = ()


class Locate(msgspec.Struct, tag="locate", array_like=True):
    """Where are these ranks of yours? And which of these operations are over on your node? Answered with `Located`."""

    serial: Count
    ranks: Annotated[tuple[Rank, ...], msgspec.Meta(max_length=MAX_LOCATED)]
    keys: Annotated[tuple[OpKey, ...], msgspec.Meta(max_length=MAX_WAITING)] = ()


class Located(msgspec.Struct, tag="located", array_like=True):
    """Where they are, and which operations are over there."""

    serial: Count
    found: Annotated[tuple[Whereabouts, ...], msgspec.Meta(max_length=MAX_LOCATED)]
    over: Annotated[tuple[OpKey, ...], msgspec.Meta(max_length=MAX_WAITING)] = ()


class WaitingRequest(msgspec.Struct, tag="waiting?", array_like=True):
    """What is under way on your node? Answered with `WaitingHere`."""

    serial: Count


class Traffic(msgspec.Struct, frozen=True, array_like=True):
    """What has gone between a node and its peer `node` in one operation, as the former sees it.

    Attributes:
        sent, received: chunks.
        unsent: chunks that wait for the peer's credit.
        silent: seconds since a chunk came from there, or since the operation began here.
    """

    node: Rank
    sent: Count
    received: Count
    unsent: Count
    silent: float


class Waiting(msgspec.Struct, frozen=True, array_like=True):
    """Something under way on a node.

    Attributes:
        kind: an operation (also a planned bucket's), a proposal of a plan, or a contribution to a bucket's home.
        key: which; of a proposal, its group and clock; of a home, the plan and the bucket, and the clock is the rank of
            the home plus 1.
        what: for people.
        seconds: since it began here, or last made progress.
        submitted: local ranks that have submitted it, and wait.
        awaits: ranks, of any node, without which it cannot be done; of a home, those that it lacks.
        traffic: with the peers, once data is exchanged.
        note: what else is known here.
    """

    kind: Literal["operation", "plan", "home"]
    key: OpKey
    what: Line
    seconds: float
    submitted: tuple[Rank, ...] = ()
    awaits: tuple[Rank, ...] = ()
    traffic: tuple[Traffic, ...] = ()
    note: Line = ""


class WaitingHere(msgspec.Struct, tag="waiting", array_like=True):
    """What is under way on the sender's node, and its daemon's process; `more`: how much has no room here."""

    serial: Count
    pid: Count
    waiting: Annotated[tuple[Waiting, ...], msgspec.Meta(max_length=MAX_WAITING)]
    more: Count = 0


class OpFailed(msgspec.Struct, tag="op_failed", array_like=True):
    """One operation fails on all ranks."""

    key: OpKey
    error: Text


class Abort(msgspec.Struct, tag="abort", array_like=True):
    """The job cannot go on, because of what happened on the sender's node."""

    error: Text


class Departed(msgspec.Struct, tag="departed", array_like=True):
    """Ranks have shut down in good order; operations that still need them fail."""

    ranks: tuple[Rank, ...]


class Loss(msgspec.Struct, frozen=True, array_like=True):
    """A node that is lost, or one of its workers.

    Attributes:
        rank: the worker; -1: the whole node.
        why: a sentence that names it.
    """

    node: Rank
    why: Text
    rank: Annotated[int, msgspec.Meta(ge=-1, lt=MAX_RANKS)] = -1


class View(msgspec.Struct, frozen=True, array_like=True):
    """Which nodes go on with the job: the `number`th agreement about it, and all that has been lost so far, in order.
    The lowest of the nodes that have workers left coordinates."""

    number: Count
    nodes: tuple[Rank, ...]
    lost: tuple[Loss, ...] = ()


class Suspected(msgspec.Struct, tag="suspected", array_like=True):
    """To the node that decides: this seems to be lost, as seen from node `by`; the sender's view has this number."""

    number: Count
    by: Rank
    losses: tuple[Loss, ...]


class Canvass(msgspec.Struct, tag="canvass", array_like=True):
    """The sender wants to decide the view of this number: phase 1 of a Paxos whose acceptors are the nodes of the view
    before. `ballot` grows from attempt to attempt, and no two nodes have the same."""

    number: Count
    ballot: Count


class Support(msgspec.Struct, tag="support", array_like=True):
    """Answers `Canvass`: the sender accepts nothing of a lower ballot any more.

    Attributes:
        accepted: what it has accepted so far, and in which ballot; None and 0 if nothing.
        losses: what it has noticed itself.
    """

    number: Count
    ballot: Count
    accepted_ballot: Count = 0
    accepted: View | None = None
    losses: tuple[Loss, ...] = ()


class ViewProposal(msgspec.Struct, tag="view_proposal", array_like=True):
    """Phase 2: the nodes are to accept this view."""

    ballot: Count
    view: View


class ViewAccepted(msgspec.Struct, tag="view_accepted", array_like=True):
    """Answers `ViewProposal`."""

    number: Count
    ballot: Count


class ViewRefused(msgspec.Struct, tag="view_refused", array_like=True):
    """Answers `Canvass` and `ViewProposal`: the sender has answered a higher `ballot`."""

    number: Count
    ballot: Count


class NewView(msgspec.Struct, tag="new_view", array_like=True):
    """A view has been decided. Whoever begins it tells all others: what the sender says from here on is of it."""

    view: View


class MadePlan(msgspec.Struct, frozen=True, array_like=True):
    """A plan in force: the clock at which it was proposed, and what local ranks proposed."""

    clock: Count
    plan: Plan
    proposals: dict[Rank, Proposal]


class Handover(msgspec.Struct, tag="handover", array_like=True):
    """To the coordinator of a new view: what the sender's node knows, and what it waits for.

    Attributes:
        epoch, number: the membership epoch, and the view.
        next_set, sets: the id of the next process set, and the ranks of those that there are.
        approved: signatures that all ranks have agreed on.
        verdicts: the latest that said more than that.
        failed: why the latest operations failed, and the latest proposals.
        last_plan, plans: the highest id of a plan, and the plans in force.
        requests, mismatches, proposals: those without an answer.
    """

    epoch: Count
    number: Count
    next_set: Count
    sets: dict[Count, tuple[Rank, ...]]
    approved: tuple[Signature, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    failed: tuple[OpFailed | PlanVerdict, ...] = ()
    last_plan: Count = 0
    plans: tuple[MadePlan, ...] = ()
    requests: tuple[Request, ...] = ()
    mismatches: tuple[Mismatch, ...] = ()
    proposals: tuple[PlanRequest, ...] = ()


class Settled(msgspec.Struct, tag="settled", array_like=True):
    """From the coordinator of a new view, once all nodes have handed over: it decides from here on. Process sets that
    are not in `sets` are no longer there, and the next one gets the id `next_set`."""

    epoch: Count
    number: Count
    next_set: Count
    sets: tuple[Count, ...]


class Joined(msgspec.Struct, tag="joined", array_like=True):
    """A rank has joined: until all have, it contributes nothing to all-reduces and takes part in nothing else."""

    rank: Rank


class Began(msgspec.Struct, tag="began", array_like=True):
    """To a node whose ranks have all joined: the sender has begun an operation, in which every node passes on data."""

    key: OpKey
    digest: int


class Chunk(msgspec.Struct, tag="c", array_like=True):
    """A part of an operation's data; its payload is the next frame.

    Attributes:
        key: the operation.
        digest: the signature's digest (`wire.digest`), or the plan's bucket digest.
        part: which part of the data, in the collective's own terms (a ring's segment, a sender's rank).
        start: first element within the part.
        hop: how many nodes the part has passed through.
    """

    key: OpKey
    digest: int
    part: Count
    start: Count
    hop: Count


class Credit(msgspec.Struct, tag="k", array_like=True):
    """The receiver has consumed `chunks` further chunks of an operation: the sender may send as many more."""

    key: OpKey
    chunks: Count


class Piece(msgspec.Struct, tag="p", array_like=True):
    """A piece of a parcel, which is what travels to or from a bucket's home; its payload is the next frame.

    Attributes:
        epoch: the membership epoch.
        plan, bucket: which bucket.
        kind: what the parcel is: a worker's contribution (`post`), what a home begins with (`seed`), a home's answer to
            a contribution (`answer`, or `refused` with a sentence), or what one rank's home tells another's (`mix`,
            `mean`), or the home of the first bucket those of the others (`told`: int64 numbers).
        home: the rank whose home it concerns; -1: the only one that the bucket has.
        rank: the worker that posted, or is answered; of what homes tell each other, the rank of the one that sends.
        clock: the worker's, of the contribution.
        version: of the home: the one that a contribution is based on, or that an answer has.
        nbytes: of the parcel; `start`: the first one of this piece.
        rates, samples: as in `Ready`.
        weight: push-sum weight.
        notes: with an answer: whether it is to be added, whether it is coded, and how stale the contribution was: its
            version's lag, its clock's distance from the slowest's, and how long it waited to be read (ms).
    """

    epoch: Count
    plan: Count
    bucket: Count
    kind: Literal["post", "seed", "answer", "refused", "mix", "mean", "told"]
    home: Annotated[int, msgspec.Meta(ge=-1, lt=MAX_RANKS)]
    rank: Rank
    clock: Count
    version: Count
    nbytes: Count
    start: Count = 0
    rates: Rates = ()
    samples: Count = 1
    weight: float = 1.0
    notes: Annotated[tuple[Count, ...], msgspec.Meta(max_length=8)] = ()


PeerMessage: TypeAlias = (
    PeerHello | Heartbeat | Ack | Reopen | Reopened | Leaving | GivenUp | Probe | Echo | Up | NewEpoch | Start
    | Request | Verdict | PlanRequest | PlanVerdict | Mismatch | Inquiry | Report | Locate | Located | WaitingRequest
    | WaitingHere | OpFailed | Abort | Departed | Joined | Began | Chunk | Credit | Piece
    | Suspected | Canvass | Support | ViewProposal | ViewAccepted | ViewRefused | NewView | Handover | Settled
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_worker_decoder: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)
_daemon_decoder: msgspec.msgpack.Decoder[DaemonMessage] = msgspec.msgpack.Decoder(DaemonMessage)
_peer_decoder: msgspec.msgpack.Decoder[PeerMessage] = msgspec.msgpack.Decoder(PeerMessage)
encode = _encoder.encode
_Message = TypeVar("_Message")


def decode_worker_message(data: bytes | memoryview) -> WorkerMessage:
    """What a worker, or a tool such as `fusiond status`, sent to the daemon.

    Raises:
        WireError: the bytes are longer than MAX_MESSAGE or not such a message.
    """
    return _decode(_worker_decoder, data)


def decode_daemon_message(data: bytes | memoryview) -> DaemonMessage:
    """What the daemon sent to a worker. Raises `WireError` as `decode_worker_message` does."""
    return _decode(_daemon_decoder, data)


def decode_peer_message(data: bytes | memoryview) -> PeerMessage:
    """What another daemon sent. Raises `WireError` as `decode_worker_message` does."""
    return _decode(_peer_decoder, data)


def _decode(decoder: msgspec.msgpack.Decoder[_Message], data: bytes | memoryview) -> _Message:
    if len(data) > MAX_MESSAGE:
        raise WireError(f"a message of {len(data)} bytes is longer than the limit of {MAX_MESSAGE}")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"not a message of this protocol (version {PROTOCOL_VERSION}): {error}") from None
