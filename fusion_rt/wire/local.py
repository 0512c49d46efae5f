"""Messages of the local channel, between a worker, or a tool, and its node's daemon."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from fusion_rt.core.topology import Topology
from fusion_rt.host.process_memory import OFFER_BYTES
from fusion_rt.wire.basics import MAX_INLINE, MAX_PATH, MAX_RANKS, Count, Line, Name, PostKind, Rank, Rates, Text
from fusion_rt.wire.operations import Address, Place, Signature
from fusion_rt.wire.plans import Plan, Proposal
from fusion_rt.wire.relayed import PortNumber
from fusion_rt.wire.rings import MAX_RING_PIECE

# --- worker to daemon -------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, tag="hello", array_like=True):
    """The first message of a worker. A memfd may be attached, into which the worker writes its stack (`stacks.py`).

    Attributes:
        stack_signal: the signal on which it writes its stack; 0: it does not.
        offer_address, offer_text: of the worker's `process_memory.OfferedText`; without a text it makes none.
        formation: in an elastic job, the number of the membership epoch that the launcher has given it a place in.
    """

    version: int
    job: Name
    rank: Rank
    pid: Count
    stack_signal: Annotated[int, msgspec.Meta(ge=0, lt=65)] = 0
    offer_address: Count = 0
    offer_text: Annotated[bytes, msgspec.Meta(max_length=OFFER_BYTES)] = b""
    formation: Count = 0


class AddSegment(msgspec.Struct, tag="segment", array_like=True):
    """Offers a sealed memfd (attached) as a segment of the worker's arena.

    `plan`: id of the plan whose buckets it holds, or 0.
    """

    segment: Count
    nbytes: Count
    plan: Count = 0


class DropSegment(msgspec.Struct, tag="drop", array_like=True):
    """The daemon may unmap a segment; the worker has no operation in it."""

    segment: Count


class OpenGroup(msgspec.Struct, tag="open_group", array_like=True):
    """This worker is a member of the group of these ranks (ascending), whose id is that of its key (`group_id`).

    Answered with `Done`, or `Failed` where another group has the id. It must not be used before all members have opened
    it.
    """

    handle: Count
    key: Name
    ranks: tuple[Rank, ...]


class CloseGroup(msgspec.Struct, tag="close_group", array_like=True):
    """This worker leaves a group: its operations under way fail. Answered with `Done`."""

    handle: Count
    group: Count


class Submit(msgspec.Struct, tag="submit", array_like=True):
    """Submits one operation on one tensor, which is in the worker's memory (`place`) or in the message (`inline`).

    Attributes:
        splits: for alltoall, rows for each rank of the process set; for a join, the first clock that is free here.
        receives: for alltoall in a group, rows from each rank of it.
        into: where in the worker's memory the result goes, in a group; None: where the tensor lies, or into the answer.
        seconds: time after which it fails, in a group; 0: it has as long as any operation may wait.
    """

    handle: Count
    name: Name
    clock: Count
    signature: Signature
    place: Place | Address | None = None
    inline: Annotated[bytes, msgspec.Meta(max_length=MAX_INLINE)] | None = None
    splits: tuple[Count, ...] = ()
    receives: tuple[Count, ...] = ()
    into: Place | Address | None = None
    seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0


ANYBODY = -1  # source of a receive that takes a message of any rank


class SendTo(msgspec.Struct, tag="send", array_like=True):
    """Sends a message to one rank of a group. Answered with `Done` when its memory may be used again.

    Attributes:
        handle: 0: it is `inline`, and no answer is wanted.
        rank: the rank (in the job) that it is for.
        clock: its number among the messages from this rank to that one.
        place, inline: `nbytes` bytes in the worker's memory or in the message.
        seconds: after which it fails unless it was received; 0: as long as any operation may wait.
    """

    handle: Count
    group: Count
    rank: Rank
    tag: Count
    clock: Count
    nbytes: Count
    place: Place | Address | None = None
    inline: Annotated[bytes, msgspec.Meta(max_length=MAX_INLINE)] | None = None
    seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class ReceiveFrom(msgspec.Struct, tag="receive", array_like=True):
    """Receives a message of at most `nbytes` bytes, the first with this tag that no other receive has taken.

    Answered with `Done`, whose `sizes` are the rank that sent it and its bytes.

    Attributes:
        rank: the rank (in the job) that sends it, or `ANYBODY`.
        clock: its number among the receives from that rank; only recorded.
        place: where it goes in the worker's memory; None: into `Done`, and then `nbytes` is at most `MAX_INLINE`.
        seconds: as of `SendTo`.
    """

    handle: Count
    group: Count
    rank: Annotated[int, msgspec.Meta(ge=ANYBODY, lt=MAX_RANKS)]
    tag: Count
    clock: Count
    nbytes: Count
    place: Place | Address | None = None
    seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class Propose(msgspec.Struct, tag="propose", array_like=True):
    """Asks for a plan; answered with `Planned`."""

    handle: Count
    proposal: Proposal


OWN, OF_NODE, ELSEWHERE, PART = range(4)
Share: TypeAlias = Annotated[int, msgspec.Meta(ge=OWN, le=PART)]


def part_of_node(elements: int, position: int, count: int) -> tuple[int, int]:
    """Returns the first element, and the end, of one rank's part of a bucket that the ranks of its node share.

    All parts are equally long but for the last ones, which may be shorter, or empty.

    Args:
        elements: of the bucket.
        position: the rank's among those of its node that take part, in order of local_rank.
        count: how many these are.
    """
    length = -(-elements // count)
    return min(elements, position * length), min(elements, (position + 1) * length)


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """This worker's part of a planned bucket is in the arena: the only message a bucket costs in a step.

    Attributes:
        rescale: factor by which the residual of each of its tensors is multiplied first, when learning rates have
            changed.
        rates: learning rate of each parameter group, for a home that applies gradients.
        samples: how many samples it comes from; 0: it is a contribution without a gradient, which only counts as one.
        kind: a contribution (`post`), the first value of the bucket's home (`seed`), a value that replaces the home's
            (`reseed`), a request for the home's value (`ask`), or the value that this worker has (`has`), which the
            home did not give it: from a checkpoint.
        urgency: the less, the sooner this worker needs it; 0: as soon as an operation that it waits for.
        tray: what it has selected itself lies from this byte of the plan's segment on (`codecs.worker_selection`); 0:
            its gradient lies in its place as usual.
        share: whose contributions are in the arena: `OWN`; `OF_NODE`, those of all ranks of its node, combined and with
            the prescale applied; `PART`, this worker's part (`part_of_node`) of that; `ELSEWHERE`, nobody's, since this
            worker's are in what another rank of its node submits. The result is written into each worker's arena
            whatever its share, unless only a part is asked for.
        passes: number of backward passes of the step of which it is the last, the same on all ranks; 0: unknown.
        gives_up: why this worker has no part of this step, which then fails on all ranks; empty: it has one.
        asks_for_part: with the share `PART`: it needs no more than this part of the result, and the rest of its place
            in the arena has no meaning then.
        loss_scale: by which the script has multiplied its loss, and so this gradient. A codec with memory remembers
            gradients without it; the result has it again.
    """

    handle: Count
    plan: Count
    bucket: Count
    clock: Count
    rescale: tuple[float, ...] = ()
    rates: Rates = ()
    samples: Count = 1
    kind: PostKind = "post"
    urgency: Count = 0
    tray: Count = 0
    share: Share = OWN
    passes: Count = 0
    gives_up: Text = ""
    asks_for_part: bool = False
    loss_scale: float = 1.0


class AwaitsAnswers(msgspec.Struct, tag="awaits", array_like=True):
    """The worker waits for all that it has posted to homes of a plan, and posts nothing more to them until it has the
    answers. There is no answer. For algorithms whose workers go on without them otherwise."""

    plan: Count


class EndedPlan(msgspec.Struct, array_like=True):
    """A plan of the formation before, as of a clock.

    Attributes:
        epoch, plan: its membership epoch, and its id.
        clock: one more than that of the last contribution that is to count in its shards.
    """

    epoch: Count
    plan: Count
    clock: Count


class SaveState(msgspec.Struct, tag="save", array_like=True):
    """Asks for the state of a group's plan on this node; the result is named arrays (`local.saved_state`).

    Attributes:
        common: only the part that is the same on all nodes, without residuals.
        ended: the state of shards, and of contributions to them, as the formation before has left it; nothing if that
            had another plan. None: the state as it is.
    """

    handle: Count
    process_set: Count
    group: Name
    common: bool = False
    ended: EndedPlan | None = None


class LoadState(msgspec.Struct, tag="load", array_like=True):
    """Restores codec state (`nbytes` bytes in the arena) for the group's active plan, or else for its next one.

    `common`: the state has no residuals, which start at zero; ignored where as many steps have been taken already. An
    empty state, which is not `common`, has all codecs of gradients begin anew, those of contributions to homes, too.
    """

    handle: Count
    process_set: Count
    group: Name
    place: Place
    nbytes: Count
    common: bool = False


class StatisticsRequest(msgspec.Struct, tag="numbers", array_like=True):
    """Asks for statistics of this node; the result is JSON.

    Attributes:
        about: what `compression` has saved and cost; the `staleness` of its contributions to homes; the `traffic`, in
            bytes, to other nodes and from them.
    """

    handle: Count
    about: Literal["compression", "staleness", "traffic"]


class StartTimeline(msgspec.Struct, tag="timeline", array_like=True):
    """Asks for a timeline in the file `path` (absolute), on the daemon's host.

    The result is a sentence that says why there is none, or empty. Ignored from ranks other than 0, unless each rank
    has a timeline.
    """

    handle: Count
    path: Annotated[str, msgspec.Meta(max_length=MAX_PATH)]
    mark_cycles: bool = False


class StopTimeline(msgspec.Struct, tag="no_timeline", array_like=True):
    """Asks for the end of the timeline; answered when its file is complete."""

    handle: Count


class RelayPort(msgspec.Struct, tag="relay_port", array_like=True):
    """Asks for a port of this host's loopback that leads to `port` of the loopback of `node`. On its own node it lets
    others do so. The result is the port, as text; a sentence if there is none.
    """

    handle: Count
    node: Rank
    port: PortNumber


class Ping(msgspec.Struct, tag="ping", array_like=True):
    """A worker that waits asks whether the daemon is alive; answered with `Pong`."""


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
    """Asks for the waits between ranks of the job, and where these ranks are. From tools, as `StatusRequest`.

    Answered with `Status`. `everyone`: also where all other ranks are.
    """

    everyone: bool = False


class JobRequest(msgspec.Struct, tag="job", array_like=True):
    """Asks for the live figures of all nodes of the job; answered with `Status`. From tools, as `StatusRequest`."""


class JobRingsRequest(msgspec.Struct, tag="job_rings", array_like=True):
    """Asks which rings all nodes of the job have; answered with `Status`. From tools, as `StatusRequest`."""


class JobRingRequest(msgspec.Struct, tag="job_ring", array_like=True):
    """Asks for `nbytes` bytes of a node's ring, from `offset` on; answered with `Status`. From tools."""

    node: Rank
    name: Line
    offset: Count
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_RING_PIECE)]


ToolMessage: TypeAlias = StatusRequest | StopRequest | HangRequest | JobRequest | JobRingsRequest | JobRingRequest
WorkerMessage: TypeAlias = (
    Hello | AddSegment | DropSegment | OpenGroup | CloseGroup | Submit | SendTo | ReceiveFrom | Propose | Ready
    | AwaitsAnswers | SaveState | LoadState | StatisticsRequest
    | StartTimeline | StopTimeline | RelayPort | Ping | Bye
    | StatusRequest | StopRequest | HangRequest | JobRequest | JobRingsRequest | JobRingRequest
)  # fmt: skip

# --- daemon to worker -------------------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, tag="welcome", array_like=True):
    """Answers `Hello`: every process of the job is up.

    Attributes:
        epoch: of the membership: see `first_epoch`.
        latency (s), seconds_per_byte: of the worst link between nodes; 0 where there is none.
        ring: mean latency (s) and seconds a byte of the slowest link of a ring of all nodes, where these are visited in
            a measured order; None: the worst link is in it.
        patience: seconds without an answer after which a worker that waits takes the daemon for stuck; 0: never.
        by_address: the daemon has found the worker's offer, so that tensors may lie at an `Address`.
    """

    topology: Topology
    node: Count
    fusion_threshold: Count
    algorithm: Name
    compression: Name
    epoch: Count = 0
    latency: float = 0.0
    seconds_per_byte: float = 0.0
    patience: float = 0.0
    by_address: bool = False
    ring: tuple[float, float] | None = None


class Pong(msgspec.Struct, tag="pong", array_like=True):
    """The daemon is alive."""


class Done(msgspec.Struct, tag="done", array_like=True):
    """An operation is complete. The result lies where the input lay or was to go, in `inline`, or in an attached memfd.

    `sizes`: for allgather, rows that came from each rank; for alltoall likewise (the received splits); for a join, the
    last rank that joined; for a new process set, its id; for a message, the rank that sent it and its bytes; from a
    bucket's home, 1 where the result is to be added to what the worker has, 0 where it replaces it, and, where that is
    not 1, how much what the worker has then counts in a mean of all ranks, in units of `WEIGHT_UNIT`.
    `nbytes`: length of the attached memfd, 0 when there is none.
    """

    handle: Count
    inline: bytes | None = None
    sizes: tuple[Count, ...] = ()
    nbytes: Count = 0


class Planned(msgspec.Struct, tag="planned", array_like=True):
    """Answers `Propose`: the plan that the proposal led to."""

    handle: Count
    plan: Plan


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """One operation failed, on all ranks; the job goes on.

    `missing`: the ranks that had not submitted it when its time was up.
    """

    handle: Count
    message: Text
    missing: tuple[Rank, ...] = ()


class JobFailed(msgspec.Struct, tag="job_failed", array_like=True):
    """The job cannot go on; every operation under way and every later one fails with this text.

    `formation`: in an elastic job, the number of the membership epoch that cannot.
    """

    message: Text
    formation: Count = 0


class Status(msgspec.Struct, tag="statistics", array_like=True):
    """The daemon's statistics, as JSON."""

    json: Text


DaemonMessage: TypeAlias = Welcome | Pong | Done | Planned | Failed | JobFailed | Status
