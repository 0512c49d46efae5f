"""The client: every request of a worker to its daemon."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import msgspec
import numpy as np

from fusion_rt import wire
from fusion_rt.client import joining
from fusion_rt.client.channel import Channel
from fusion_rt.client.clocks import Clocks
from fusion_rt.client.operation import Operation, Terms
from fusion_rt.client.own_memory import OwnMemory
from fusion_rt.core.dtypes import DTYPES
from fusion_rt.core.errors import FusionError, HorovodInternalError
from fusion_rt.core.topology import GLOBAL_SET, ProcessSet, Topology
from fusion_rt.host import stacks
from fusion_rt.host.arena import Arena, Region, Segment
from fusion_rt.local import array_codec, packets
from fusion_rt.tracing.format import Flush, Kind
from fusion_rt.tracing.recorder import Instrument

_SUBMITTED, _DONE = int(Kind.SUBMITTED), int(Kind.DONE)  # see `channel.py`
_UNANSWERED = 32  # small messages sent after another that the daemon need not say that it has

Where: TypeAlias = tuple[int, int] | wire.Address
"""The place of a tensor: segment id and offset in the arena, or its address."""


class Client:
    """A connection to the node's daemon, and the worker's arena.

    Args:
        path: the daemon's socket.
        job: id of the job.
        rank: this worker's rank.
        timeout: seconds for every process of the job to come up.
        previous: a client of the same job that has left; its connection is used again.
        listened: the daemon has listened before, so that it is not waited for if it does not now.
        formation: in an elastic job, the membership epoch in which this worker has a place; 0 in any other.

    Attributes:
        channel: the connection, and the operations under way.
        welcome: the daemon's answer to `Hello`.
        process_sets: by id.
        own_memory: says which tensors the daemon takes where they lie.

    Raises:
        DaemonGone: the daemon ends without an answer.
        FusionError: the daemon cannot be reached, refuses this worker, or the job does not come up in time.
    """

    def __init__(
        self,
        path: str,
        job: str,
        rank: int,
        timeout: float,
        previous: Client | None = None,
        listened: bool = False,
        formation: int = 0,
    ) -> None:
        self.job = job
        self.rank = rank
        self._pid = os.getpid()
        self._formation = formation
        sock = joining.connect(path, timeout, listened) if previous is None else previous.channel.socket
        self.channel: Channel = Channel(sock, rank)
        self.arena = Arena(self._offer, self._drop)
        self.own_memory = OwnMemory(packets.peer_credentials(sock)[0])
        self._in_flight: set[tuple[int, str]] = set()
        self._groups: dict[int, str] = {}  # keys, by id
        stacks_fd, stack_signal = stacks.offer()
        offer = self.own_memory.offer
        offered = (0, b"") if offer is None else (offer.address, offer.text)
        hello = wire.Hello(wire.PROTOCOL_VERSION, job, rank, os.getpid(), stack_signal, *offered, formation)
        try:
            self._say_hello(packets.Packet(wire.encode(hello), stacks_fd))
            self.welcome = joining.await_welcome(sock, rank, timeout, previous is not None, formation)
        except BaseException:
            sock.close()
            raise
        self.own_memory.welcome(self.welcome.by_address)
        self.channel.patience = self.welcome.patience
        self._clocks = Clocks(wire.first_clock(self.welcome.epoch))
        self._messages: dict[int, dict[str, Iterator[int]]] = {}  # numbers of the next ones, by group, and the ranks
        self._unanswered = 0
        self._answered: Operation | None = None  # the last small message of which the daemon is to say that it has it
        self.topology: Topology = self.welcome.topology
        self.process_sets = {GLOBAL_SET: ProcessSet(GLOBAL_SET, tuple(range(self.topology.size)))}

    def _say_hello(self, hello: packets.Packet) -> None:
        try:
            self.channel.send(hello)
        except HorovodInternalError as error:
            if self.channel.told:
                raise
            raise joining.DaemonGone(str(error)) from None

    @property
    def trace(self) -> Instrument:
        """The instrument that records this client's events."""
        return self.channel.trace

    @trace.setter
    def trace(self, trace: Instrument) -> None:
        self.channel.trace = trace

    @property
    def directory(self) -> str:
        """The daemon's directory, which is private to this user and the same for all workers of the node."""
        path: str = self.channel.socket.getpeername()
        return os.path.dirname(path)

    @property
    def is_elastic(self) -> bool:
        """Tells whether ranks may come and go while the job runs."""
        return self._formation > 0

    @property
    def joins(self) -> int:
        """Number of times that all ranks have joined."""
        return self._clocks.joins

    # --- operations -------------------------------------------------------------------------------------------------

    def submit(
        self,
        name: str | None,
        signature: wire.Signature,
        *,
        inline: bytes | None = None,
        place: Where | None = None,
        splits: tuple[int, ...] = (),
        receives: tuple[int, ...] = (),
        into: Where | None = None,
        seconds: float = 0.0,
        release: Callable[[Operation], None] | None = None,
        keeps: object = None,
    ) -> Operation:
        """Submits one operation on a tensor that is `inline` or lies at `place`.

        Places are (segment id, offset) in the arena, or an address that `own_memory` gave.

        An operation without a name is paired with those of other ranks by kind and order; several may be under way. In
        a group (`open_group`) operations have no names, and are paired by order alone; several threads may submit in
        different groups.

        Args:
            name: pairs it with those of the other ranks.
            signature: has to be the same on all ranks.
            inline: the tensor's bytes, at most `wire.MAX_INLINE`. A rank that only receives gives no tensor.
            place: where the tensor lies.
            splits: of an alltoall: rows for each rank.
            receives: in a group. Of an alltoall: rows from each rank. Of an allgather: the rows of each rank's tensor;
                of a reducescatter: those of each rank's result; the same on all ranks, and empty where all are equal.
            into: in a group: where the result goes.
            seconds: in a group: time after which it fails, unless it has ended; 0: it has as long as any may wait.
            release: see `Operation`; for one without a name.
            keeps: owner of memory that is given by address, which the daemon reads and writes: kept until it has ended.

        Raises:
            HorovodInternalError: the job has failed.
            ValueError: an operation of this name is still under way here.
            FusionError: too many names have been used, or there is no such group.
        """
        process_set = signature.process_set
        if wire.is_group(process_set):
            return self._submit_in_group(signature, inline, place, splits, receives, into, seconds, release, keeps)
        unnamed = name is None
        if name is None:
            name = f"{signature.kind}.noname"
        identity = (process_set, name)
        if identity in self._in_flight:
            self.channel.read_available()  # it may have ended, and nobody has looked
        if identity in self._in_flight:
            raise ValueError(
                f"an operation named {name!r} was submitted on rank {self.rank} while an earlier one of that name was "
                "still under way; wait for it with synchronize(), or give each its own name"
            )
        clock = self._clocks.next(process_set, name)
        operation = self.channel.begin(name)
        operation.keeps = keeps
        submit = wire.Submit(operation.handle, name, clock, signature, _placed(place), inline, splits)
        packet = packets.Packet(wire.encode(submit))
        self._clocks.count(process_set, name)
        if unnamed:
            operation.release = release
        else:
            self._in_flight.add(identity)
            operation.release = lambda _: self._in_flight.discard(identity)
        self._sent(operation, name, clock, _nbytes_of(signature) if inline is None else len(inline), packet)
        return operation

    def _submit_in_group(
        self,
        signature: wire.Signature,
        inline: bytes | None,
        place: Where | None,
        splits: tuple[int, ...],
        receives: tuple[int, ...],
        into: Where | None,
        seconds: float,
        release: Callable[[Operation], None] | None,
        keeps: object,
    ) -> Operation:
        key = self._groups.get(signature.process_set)
        if key is None:
            raise FusionError(f"rank {self.rank} has not opened group {signature.process_set}, or has closed it")
        if receives and signature.kind != "alltoall":
            signature, receives = _with_rows(signature, receives), ()
        clock = self._clocks.count_in_group(signature.process_set)
        operation = self.channel.begin(key)
        operation.release, operation.keeps = release, keeps
        where, target = _placed(place), _placed(into)
        submit = wire.Submit(operation.handle, key, clock, signature, where, inline, splits, receives, target, seconds)
        nbytes = _nbytes_of(signature) if inline is None else len(inline)
        self._sent(operation, key, clock, nbytes, packets.Packet(wire.encode(submit)))
        return operation

    def _sent(self, operation: Operation, name: str, clock: int, nbytes: int, packet: packets.Packet) -> None:
        operation.about = (name, clock, 0)
        self.channel.trace.record(_SUBMITTED, name, nbytes, clock, 0, Flush.ALONE)
        self.channel.send(packet)

    def open_group(self, key: str, ranks: Sequence[int]) -> int:
        """Opens a group of these ranks, of which this one is a member, and returns its id, the same on all of them.

        Only members know of it. Nothing is negotiated in it: an operation begins as soon as all members of a node have
        submitted it, and operations are paired by order. Nobody may use it before all members have opened it, which
        whoever opens it makes sure of.

        Args:
            key: its name, the same on all members, and used once as long as the job has the same ranks.
            ranks: in any order.

        Raises:
            HorovodInternalError: the key has been used before, or its id is that of another group.
        """
        members = tuple(sorted(ranks))
        operation = self.channel.begin(key)
        self._send(wire.OpenGroup(operation.handle, key, members))
        self.wait(operation)
        group = wire.group_id(key)
        self.process_sets[group] = ProcessSet(group, members)
        self._clocks.open_group(group)
        self._groups[group] = key
        return group

    def close_group(self, group: int) -> None:
        """Leaves a group. What is under way in it fails.

        Raises:
            KeyError: there is no such group.
        """
        operation = self.channel.begin(self._groups.pop(group))
        del self.process_sets[group]
        self._send(wire.CloseGroup(operation.handle, group))
        self.wait(operation)
        self._clocks.remove(group)
        self._messages.pop(group, None)

    def ready(
        self,
        name: str,
        plan: int,
        bucket: int,
        terms: Terms | None = None,
        nbytes: int = 0,
        flush: Flush = Flush.STEP,
    ) -> Operation:
        """Submits this worker's part of a planned bucket, which is in the arena.

        Args:
            name: of the bucket, for messages to people.
            plan, bucket: ids of the plan and of the bucket in it.
            terms: go with it.
            nbytes, flush: its size, and why it is submitted now; only recorded.

        Raises:
            HorovodInternalError: the job has failed.
        """
        terms = terms or Terms()
        clock = self._clocks.next(-plan, bucket) if terms.kind == "seed" else self._clocks.count(-plan, bucket)
        operation = self.channel.begin(name)
        about = operation.about = (f"bucket {bucket}", clock, plan)
        self.channel.trace.record(_SUBMITTED, about[0], nbytes, clock, plan, flush)
        message = wire.Ready(operation.handle, plan, bucket, clock, *terms)
        self.channel.send(packets.Packet(wire.encode(message)))
        return operation

    def awaits_answers(self, plan: int) -> None:
        """Tells that this worker waits for all that it has posted to the homes of a plan, and posts nothing until then,
        where homes would think that it goes on."""
        self._send(wire.AwaitsAnswers(plan))

    def next_clock(self, plan: int, bucket: int) -> int:
        """The clock of the next `ready` of a planned bucket."""
        return self._clocks.next(-plan, bucket)

    def propose(self, proposal: wire.Proposal) -> Operation:
        """Asks for a plan; the answer is the operation's `plan`."""
        operation = self.channel.begin(proposal.group)
        self._send(wire.Propose(operation.handle, proposal))
        return operation

    def send_to(
        self,
        group: int,
        rank: int,
        tag: int,
        *,
        inline: bytes | None = None,
        place: Where | None = None,
        nbytes: int = 0,
        seconds: float = 0.0,
        release: Callable[[Operation], None] | None = None,
        keeps: object = None,
    ) -> Operation:
        """Sends a message to one rank of a group, which has to receive it with `receive_from`.

        A message that is `inline` is away when this returns, and its operation has ended, unless too many of them have
        not been received. Any other one has ended when the other rank has it: only then may its memory be used again.

        Args:
            group: id of the process set.
            rank: whom it is for, in the job.
            tag: 0 or more; only a receive with the same tag takes it.
            inline: the message, at most `wire.MAX_INLINE` bytes.
            place: else the place of its `nbytes` bytes, in the arena or in this process's own memory.
            seconds: after which it fails unless it was received; 0: as long as any operation may wait.
            release: see `Operation`; not called where the operation has ended when this returns.
            keeps: see `submit`.

        Raises:
            HorovodInternalError: the job has failed.
            ValueError: it is for this rank itself.
        """
        self._not_myself(rank)
        name = f"message {self.rank} to {rank}"
        if inline is not None and self._needs_no_answer():
            if self.channel.failure is not None:
                raise HorovodInternalError(self.channel.failure)
            operation = Operation(0, name)
            operation.done = True
        else:
            operation = self.channel.begin(name)
            operation.release = release
            operation.keeps = keeps
            if inline is not None:
                self._answered = operation
        clock = self._number(group, name)
        operation.about = (name, clock, 0)
        nbytes = nbytes if inline is None else len(inline)
        self.channel.trace.record(_SUBMITTED, name, nbytes, clock, 0, Flush.ALONE)
        self._send(wire.SendTo(operation.handle, group, rank, tag, clock, nbytes, _placed(place), inline, seconds))
        if operation.done:
            self.channel.trace.record(_DONE, name, 0, clock)
        return operation

    def receive_from(
        self,
        group: int,
        rank: int | None,
        tag: int,
        nbytes: int,
        *,
        place: Where | None = None,
        seconds: float = 0.0,
        release: Callable[[Operation], None] | None = None,
        keeps: object = None,
    ) -> Operation:
        """Receives a message of at most `nbytes` bytes: the first with this tag that no other receive has taken.

        The operation's `sizes` are the rank, in the job, that has sent it, and its bytes.

        Args:
            group: id of the process set.
            rank: who sends it, in the job; None: any rank of the group.
            tag: of the message.
            place: where it goes, in the arena or in this process's own memory; None: it is the operation's `inline`,
                and is not longer than `wire.MAX_INLINE`.
            seconds: after which it fails unless the message is there; 0: as long as any operation may wait.
            release: see `Operation`.
            keeps: see `submit`.

        Raises:
            HorovodInternalError: the job has failed.
            ValueError: it is from this rank itself.
        """
        source = wire.ANYBODY if rank is None else rank
        self._not_myself(source)
        name = f"message to {self.rank}" if rank is None else f"message {rank} to {self.rank}"
        operation = self.channel.begin(name)
        operation.release = release
        operation.keeps = keeps
        clock = self._number(group, name)
        operation.about = (name, clock, 0)
        self.channel.trace.record(_SUBMITTED, name, nbytes, clock, 0, Flush.ALONE)
        self._send(wire.ReceiveFrom(operation.handle, group, source, tag, clock, nbytes, _placed(place), seconds))
        return operation

    def _number(self, group: int, name: str) -> int:
        """Returns the number of a message between two ranks. Threads may ask for it concurrently."""
        of_group = self._messages.get(group) or self._messages.setdefault(group, {})
        numbers = of_group.get(name)
        if numbers is None:
            first = wire.first_clock(self.welcome.epoch)
            numbers = of_group.setdefault(name, itertools.count(first))
        return next(numbers)

    def _not_myself(self, rank: int) -> None:
        if rank == self.rank:
            raise ValueError(f"rank {rank} can neither send to itself nor receive from itself")

    def _needs_no_answer(self) -> bool:
        """Counts a small message, and returns whether the daemon need not say that it has it.

        It says so of some of them, and of all as long as it has not said it of the last of these: so it has never more
        than a few that it was not asked to keep.
        """
        if self._answered is not None and not self.poll(self._answered):
            return False
        self._unanswered = (self._unanswered + 1) % _UNANSWERED
        return self._unanswered > 0

    def poll(self, operation: Operation) -> bool:
        """Returns whether the operation has ended; reads what has arrived, without waiting."""
        return self.channel.poll(operation)

    def wait(self, operation: Operation) -> Operation:
        """Waits until the operation has ended.

        Raises:
            HorovodInternalError: it failed, on all ranks.
        """
        return self.channel.wait(operation)

    def join(self) -> int:
        """Waits until every rank has joined; until then this one contributes nothing to the others' all-reduces.

        Returns: the last rank that joined.

        Raises:
            HorovodInternalError: it failed, on all ranks.
        """
        last = self.wait(self.submit("join", wire.Signature("join"))).sizes[0]
        self._clocks.joined()
        return last

    def add_process_set(self, ranks: Sequence[int]) -> ProcessSet:
        """Makes a new process set of these ranks; every rank of the job has to ask for it.

        Raises:
            HorovodInternalError: the ranks do not agree, or there is no such set; on all ranks.
        """
        members = tuple(sorted(ranks))
        operation = self.wait(self.submit("process_set", wire.Signature("add_process_set", ranks=members)))
        added = ProcessSet(operation.sizes[0], members)
        self.process_sets[added.id] = added
        return added

    def remove_process_set(self, process_set: int) -> None:
        """Removes a process set; every rank of the job has to ask for it.

        Raises:
            HorovodInternalError: the ranks do not agree; on all ranks.
        """
        members = self.process_sets[process_set].ranks
        self.wait(self.submit("process_set", wire.Signature("remove_process_set", ranks=members)))
        del self.process_sets[process_set]
        self._clocks.remove(process_set)

    # --- codec state, timeline, statistics ----------------------------------------------------------------------------

    def save_state(self, process_set: int, group: str, common: bool = False) -> dict[str, Any]:
        """Returns the codec state of a group of tensors on this node, by name; arrays that may be written to.

        Args:
            common: only the part that is the same on all nodes, which is small.

        Raises:
            HorovodInternalError: the codecs are at work.
        """
        operation = self.channel.begin(group)
        self._send(wire.SaveState(operation.handle, process_set, group, common))
        output = self.wait(operation).output
        data = bytearray(operation.inline or b"") if output is None else output.view
        return array_codec.read(np.frombuffer(data, np.uint8))

    def load_state(self, process_set: int, group: str, state: Mapping[str, Any], common: bool = False) -> None:
        """Restores codec state that `save_state` returned.

        Args:
            common: the state has no residuals; does nothing where as many steps have been taken.

        Raises:
            HorovodInternalError: the state is not of the active plan, or the codecs are at work.
        """
        nbytes = array_codec.nbytes_of(state)
        region = self.allocate(nbytes)
        array_codec.write(state, np.frombuffer(region.view, np.uint8)[:nbytes])
        operation = self.channel.begin(group)
        place = wire.Place(region.segment, region.offset)
        self._send(wire.LoadState(operation.handle, process_set, group, place, nbytes, common))
        try:
            self.wait(operation)
        finally:
            self.arena.free(region)

    def start_timeline(self, path: str, mark_cycles: bool) -> str:
        """Asks for a timeline in the file at an absolute path. Returns why there is none, or an empty text."""
        operation = self.channel.begin("timeline")
        self._send(wire.StartTimeline(operation.handle, path, mark_cycles))
        return (self.wait(operation).inline or b"").decode()

    def stop_timeline(self) -> None:
        """Waits until the timeline's file is complete; there may be none."""
        operation = self.channel.begin("timeline")
        self._send(wire.StopTimeline(operation.handle))
        self.wait(operation)

    def compression(self) -> dict[str, dict[str, float]]:
        """Returns the statistics of compression on this node, by group and in "total"."""
        operation = self.channel.begin("compression")
        self._send(wire.CompressionRequest(operation.handle))
        told: dict[str, dict[str, float]] = json.loads(self.wait(operation).inline or b"{}")
        return told

    def staleness(self) -> dict[str, Any]:
        """Returns statistics of the staleness of this node's workers' contributions, and of those to its homes."""
        operation = self.channel.begin("staleness")
        self._send(wire.StalenessRequest(operation.handle))
        told: dict[str, Any] = json.loads(self.wait(operation).inline or b"{}")
        return told

    def traffic(self) -> dict[str, int]:
        """Returns the bytes of payload that this node has `sent` to other nodes, and `received`."""
        operation = self.channel.begin("traffic")
        self._send(wire.TrafficRequest(operation.handle))
        told: dict[str, int] = json.loads(self.wait(operation).inline or b"{}")
        return told

    # --- the arena ----------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Region:
        """Allocates a region of the arena; free it with `arena.free`."""
        return self.arena.allocate(nbytes)

    def plan_segment(self, plan: wire.Plan, nbytes: int = 0) -> tuple[int, Segment]:
        """Makes a segment of the arena for the plan's buckets, at least `nbytes` long; returns its id and itself."""
        return self.arena.new_segment(max(plan.nbytes, nbytes, 1), plan.id)

    def _offer(self, segment_id: int, segment: Segment, plan: int) -> None:
        fd = segment.fd
        segment.fd = -1  # the packet owns the descriptor now; the mapping does not need it
        self._send(wire.AddSegment(segment_id, segment.nbytes, plan), fd)

    def _drop(self, segment_id: int) -> None:
        if self.channel.failure is None:
            self._send(wire.DropSegment(segment_id))

    # --- leaving ------------------------------------------------------------------------------------------------------

    def leave(self, error: str = "") -> bool:
        """Leaves the job; `error` is this worker's unhandled exception, if that is why it leaves.

        Returns: whether it may come back, by a client that has this one as `previous`. In an elastic job also after a
        failure of which the daemon has told, since that outlives it.
        """
        if self._pid != os.getpid():  # in a forked child: the connection is the parent's to end
            return False
        returnable = self.channel.failure is None or bool(self._formation and self.channel.told)
        if returnable:
            try:
                self._send(wire.Bye(error))
            except (HorovodInternalError, OSError):
                returnable = False  # the daemon is gone already
        self.channel.told = False  # else it would be said again
        self.channel.leave("fusion_rt has been shut down on this rank")
        self.arena.close()
        return returnable

    def close(self, error: str = "") -> None:
        """Leaves the job, if it has not yet, and closes the connection."""
        self.leave(error)
        if self._pid == os.getpid():
            self.channel.close()
        else:
            self.channel.socket.close()

    def abandon(self) -> None:
        """Closes a forked child's copy of the connection, which remains the parent's.

        Without this the daemon would not notice the parent's death before the child's.
        """
        self.channel.failure = "the connection belongs to the parent of this forked process"
        self.channel.socket.close()

    def _send(self, message: wire.WorkerMessage, fd: int = -1) -> None:
        self.channel.send(packets.Packet(wire.encode(message), fd))


@lru_cache(maxsize=4096)
def _with_rows(signature: wire.Signature, rows: tuple[int, ...]) -> wire.Signature:
    return msgspec.structs.replace(signature, rows=rows)


def _placed(where: Where | None) -> wire.Place | wire.Address | None:
    return wire.Place(*where) if isinstance(where, tuple) else where


def _nbytes_of(signature: wire.Signature) -> int:
    return math.prod(signature.shape) * DTYPES[signature.dtype].itemsize if signature.dtype else 0
