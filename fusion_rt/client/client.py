"""The client: every request of a worker to its daemon."""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, TypeVar

import msgspec
import numpy as np

from fusion_rt import wire
from fusion_rt.client import joining
from fusion_rt.client.adoption import Adoptions
from fusion_rt.client.channel import NO_LIMIT, Channel, Completion, Operation
from fusion_rt.client.messages import Messages, Where, placed
from fusion_rt.client.operation_clocks import Clocks
from fusion_rt.client.own_memory import OwnMemory
from fusion_rt.core.dtypes import DTYPES
from fusion_rt.core.errors import ArenaShortage, FusionError, HorovodInternalError
from fusion_rt.core.topology import GLOBAL_SET, ProcessSet, Topology
from fusion_rt.host import stacks
from fusion_rt.host.arena import LEAST_LEFT, Arena, Region, Segment
from fusion_rt.local import array_codec, packets
from fusion_rt.settings import Settings
from fusion_rt.tracing.format import Flush, Kind
from fusion_rt.tracing.recorder import Instrument

LEFT = "fusion_rt has been shut down on this rank"  # why operations fail that a worker has under way when it leaves
_SUBMITTED = int(Kind.SUBMITTED)  # see `channel.py`
_LOOK = 2.0  # seconds between two attempts to allocate while memory is short; each operation that ends begins one, too
_LOOK_FOR_OTHERS = 0.1  # the same where no operation of this worker will give memory back
_OTHERS = 2.0  # seconds for which memory is waited for that others are about to give back
_LEFT = 256 << 20  # bytes that are left to the script and the daemon as long as operations will give some back
_ONE_SHORTAGE = 60.0  # seconds without any, after which there is another one to warn of

_log = logging.getLogger(__name__)
Made = TypeVar("Made")


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
        adoptions: the tensors that were moved into the arena (`FUSION_MEMORY=adopt`).
        messages: from one rank to another.
        watch: called with the kind of each operation that is begun here; None: not called.
        settle: called when memory is short; takes the results that have come and that nobody has asked for yet, if
            they give memory of the arena back. None: there are none.
        wait, poll: the channel's.

    Raises:
        DaemonGone: the daemon ends without an answer.
        FusionError: the daemon cannot be reached, refuses this worker, or the job does not come up in time; or a thread
            still waits for an operation of `previous`.
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
        if previous is None:
            sock = joining.connect(path, timeout, listened)
        elif previous.channel.await_reader(timeout):
            sock = previous.channel.socket
        else:
            raise FusionError(
                f"rank {rank} cannot come back to job {job!r}: one of its threads still waits for an operation from "
                "before it left; end that thread"
            )
        self.channel: Channel = Channel(sock, rank, is_elastic=formation > 0)
        self.wait, self.poll = self.channel.wait, self.channel.poll
        self.arena = Arena(self._offer, self._drop)
        self.arena.left = self._left
        self.own_memory = OwnMemory(packets.peer_credentials(sock)[0])
        self.watch: Callable[[str], None] | None = None
        self.settle: Callable[[], None] | None = None
        self._short = -math.inf  # when memory was last short, on time.monotonic's clock
        self._in_flight: set[tuple[int, str]] = set()
        self._groups: dict[int, str] = {}  # keys, by id
        stacks_fd, stack_signal = stacks.offer()
        offer = self.own_memory.offer
        offered = (0, b"") if offer is None else (offer.address, offer.text)
        hello = wire.Hello(wire.PROTOCOL_VERSION, job, rank, os.getpid(), stack_signal, *offered, formation)
        try:
            self._say_hello(wire.encode(hello), stacks_fd)
            self.welcome = joining.await_welcome(sock, rank, timeout, previous is not None, formation)
        except BaseException:
            sock.close()
            raise
        self.own_memory.welcome(self.welcome.by_address)
        self.adoptions = Adoptions(self.arena, Settings.from_env().memory == "adopt")
        self.channel.patience = self.welcome.patience
        self.channel.clocks = Clocks(wire.first_clock(self.welcome.epoch))
        self.messages = Messages(self.channel, rank, wire.first_clock(self.welcome.epoch))
        self.topology: Topology = self.welcome.topology
        self.process_sets = {GLOBAL_SET: ProcessSet(GLOBAL_SET, tuple(range(self.topology.size)))}

    def _say_hello(self, hello: bytes, fd: int) -> None:
        try:
            self.channel.send(hello, fd)
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
        return self.channel.is_elastic

    @property
    def joins(self) -> int:
        """Number of times that all ranks have joined."""
        return self.channel.clocks.joins

    def check(self) -> None:
        """Raises `HorovodInternalError` if the job has failed, or this worker has left it: the connection may be that
        of another client then."""
        if self.channel.failure is not None:
            raise HorovodInternalError(self.channel.failure)

    # --- operations -------------------------------------------------------------------------------------------------

    def submit(
        self,
        name: str | None,
        signature: wire.Signature,
        *,
        inline: bytes | None = None,
        place: Where | None = None,
        splits: tuple[int, ...] = (),
        keeps: object = None,
    ) -> Operation:
        """Submits one operation on a tensor that is `inline` or lies at `place`.

        Places are (segment id, offset) in the arena, or an address that `own_memory` gave.

        An operation without a name is paired with those of other ranks by order, whatever its kind; several may be
        under way. Operations of groups are for `submit_in_group`.

        Args:
            name: pairs it with those of the other ranks.
            signature: has to be the same on all ranks.
            inline: the tensor's bytes, at most `wire.MAX_INLINE`. A rank that only receives gives no tensor.
            place: where the tensor lies.
            splits: of an alltoall: rows for each rank.
            keeps: owner of memory that is given by address, which the daemon reads and writes: kept until it has ended.

        Raises:
            HorovodInternalError: the job has failed.
            ValueError: an operation of this name is still under way here.
            FusionError: the name comes again after very many others (`Clocks`).
        """
        if self.watch is not None:
            self.watch(signature.kind)
        process_set = signature.process_set
        is_named = name is not None
        if name is None:
            name = signature.kind + wire.UNNAMED
        identity = (process_set, name)
        if identity in self._in_flight:
            self.channel.read_available()  # it may have ended unnoticed
        if identity in self._in_flight:
            raise ValueError(
                f"an operation named {name!r} was submitted on rank {self.rank} while an earlier one of that name was "
                "still under way; wait for it with synchronize(), or give each its own name"
            )
        clock = self.channel.clocks.next_named(process_set, name)
        operation = self.channel.begin(name)
        operation.keeps = keeps
        submit = wire.Submit(operation.handle, name, clock, signature, placed(place), inline, splits)
        message = wire.encode(submit)
        self.channel.clocks.count_named(process_set, name)
        if is_named:
            self._in_flight.add(identity)
            operation.release = lambda _: self._in_flight.discard(identity)
        self._sent(operation, name, clock, _nbytes_of(signature) if inline is None else len(inline), message)
        return operation

    def submit_in_group(
        self,
        signature: wire.Signature,
        *,
        inline: bytes | None = None,
        place: Where | None = None,
        splits: tuple[int, ...] = (),
        receives: tuple[int, ...] = (),
        into: Where | None = None,
        completion: Completion = NO_LIMIT,
    ) -> Operation:
        """Submits one operation of a group (`open_group`): paired by order, and without a name. Several threads may
        submit in different groups.

        Args:
            signature, inline, place: as for `submit`; its process set is the group.
            splits: of an alltoall: rows for each rank.
            receives: of an alltoall: rows from each rank. Of an allgather: the rows of each rank's tensor; of a
                reducescatter: those of each rank's result; the same on all ranks, and empty where all are equal.
            into: where the result goes.
            completion: its time, and its end.

        Raises:
            HorovodInternalError: the job has failed.
            FusionError: there is no such group.
        """
        if self.watch is not None:
            self.watch(signature.kind)
        key = self._groups.get(signature.process_set)
        if key is None:
            raise FusionError(f"rank {self.rank} has not opened group {signature.process_set}, or has closed it")
        if receives and signature.kind != "alltoall":
            signature, receives = _with_rows(signature, receives), ()
        clock = self.channel.clocks.count_in_group(signature.process_set)
        operation = self.channel.begin(key)
        operation.release, operation.keeps, operation.lent = completion.release, completion.keeps, completion.lent
        where, target = placed(place), placed(into)
        submit = wire.Submit(
            operation.handle, key, clock, signature, where, inline, splits, receives, target, completion.seconds
        )
        nbytes = _nbytes_of(signature) if inline is None else len(inline)
        self._sent(operation, key, clock, nbytes, wire.encode(submit))
        return operation

    def _sent(self, operation: Operation, name: str, clock: int, nbytes: int, message: bytes) -> None:
        operation.about = (name, clock, 0)
        self.channel.trace.record(_SUBMITTED, name, nbytes, clock, 0, Flush.ALONE)
        self.channel.send(message)

    def open_group(self, key: str, ranks: Sequence[int]) -> int:
        """Opens a group of these ranks, of which this one is a member, and returns its id, the same on all of them.

        Only members know of it. Nothing is negotiated in it: an operation begins as soon as all members of a node have
        submitted it, and operations are paired by order. It must not be used before all members have opened it, which
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
        self.channel.clocks.open_group(group)
        self._groups[group] = key
        return group

    def close_group(self, group: int) -> None:
        """Leaves a group. Its operations under way fail.

        Raises:
            KeyError: there is no such group.
        """
        operation = self.channel.begin(self._groups.pop(group))
        del self.process_sets[group]
        self._send(wire.CloseGroup(operation.handle, group))
        self.wait(operation)
        self.channel.clocks.remove(group)
        self.messages.forget(group)

    def awaits_answers(self, plan: int) -> None:
        """Tells that this worker waits for all that it has posted to the homes of a plan, and posts nothing until then,
        where homes would think that it goes on."""
        self._send(wire.AwaitsAnswers(plan))

    def propose(self, proposal: wire.Proposal) -> Operation:
        """Asks for a plan; the answer is the operation's `plan`."""
        if self.watch is not None:
            self.watch("optimizer step")
        operation = self.channel.begin(proposal.group)
        self._send(wire.Propose(operation.handle, proposal))
        return operation

    def join(self) -> int:
        """Waits until every rank has joined; until then this one contributes nothing to the others' all-reduces.

        Returns: the last rank that joined.

        Raises:
            HorovodInternalError: it failed, on all ranks.
        """
        clocks = self.channel.clocks
        last, first = self.wait(self.submit("join", wire.Signature("join"), splits=(clocks.after_join(),))).sizes
        clocks.joined(first)
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
        self.channel.clocks.remove(process_set)

    # --- codec state, timeline, statistics ----------------------------------------------------------------------------

    def save_state(
        self, process_set: int, group: str, common: bool = False, ended: wire.EndedPlan | None = None
    ) -> dict[str, Any]:
        """Returns the state of a group of tensors on this node (`local.saved_state`); arrays that may be written to.

        Args:
            common: only the part that is the same on all nodes, which is small.
            ended: what shards here, and mirrors of others, had when the formation before ended; see `wire.SaveState`.

        Raises:
            HorovodInternalError: the codecs are at work, or the job cannot go on.
        """
        operation = self.channel.begin(group)
        self._send(wire.SaveState(operation.handle, process_set, group, common, ended))
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

    def relay_port(self, node: int, port: int) -> int:
        """Returns a port of this host's loopback that leads to a port of the loopback of a node; on that node, the port
        itself, which others may then ask for.

        Raises:
            FusionError: there is none.
        """
        operation = self.channel.begin("a port")
        self._send(wire.RelayPort(operation.handle, node, port))
        answer = (self.wait(operation).inline or b"").decode()
        if not answer.isdecimal():
            raise FusionError(answer)
        return int(answer)

    def stop_timeline(self) -> None:
        """Waits until the timeline's file is complete; there may be none."""
        operation = self.channel.begin("timeline")
        self._send(wire.StopTimeline(operation.handle))
        self.wait(operation)

    def compression(self) -> dict[str, dict[str, float]]:
        """Returns the statistics of compression on this node, by group and in "total"."""
        operation = self.channel.begin("compression")
        self._send(wire.StatisticsRequest(operation.handle, "compression"))
        told: dict[str, dict[str, float]] = json.loads(self.wait(operation).inline or b"{}")
        return told

    def staleness(self) -> dict[str, Any]:
        """Returns statistics of the staleness of this node's workers' contributions, and of those to its homes."""
        operation = self.channel.begin("staleness")
        self._send(wire.StatisticsRequest(operation.handle, "staleness"))
        told: dict[str, Any] = json.loads(self.wait(operation).inline or b"{}")
        return told

    def traffic(self) -> dict[str, int]:
        """Returns the bytes of payload that this node has `sent` to other nodes, and `received`."""
        operation = self.channel.begin("traffic")
        self._send(wire.StatisticsRequest(operation.handle, "traffic"))
        told: dict[str, int] = json.loads(self.wait(operation).inline or b"{}")
        return told

    # --- the arena ----------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Region:
        """Allocates a region of the arena; free it with `arena.free`.

        If memory is short on this host, it waits as long as operations under way give some back.

        Raises:
            HorovodInternalError: as `check`.
            ArenaShortage: no operation under way gives memory back.
            ArenaError: as `Segment.create`.
        """
        self.check()
        return self._with_room(partial(self.arena.allocate, nbytes))

    def plan_segment(self, plan: wire.Plan, nbytes: int = 0) -> tuple[int, Segment]:
        """Makes a segment of the arena for the plan's buckets, at least `nbytes` long; returns its id and itself.
        Waits, and raises, as `allocate` does."""
        return self._with_room(partial(self.arena.new_segment, max(plan.nbytes, nbytes, 1), plan.id))

    def _with_room(self, make: Callable[[], Made]) -> Made:
        """Allocates, as soon as there is enough memory. Raises as `allocate`."""
        alone = 0.0  # when no operation was seen that gives memory back
        while True:
            try:
                return make()
            except ArenaShortage as short:
                error = short
            if self.settle is not None:
                self.settle()
            if self.arena.has_returned:
                continue
            if self.arena.drop_spare():
                self.traffic()  # the answer comes when the daemon has unmapped them, too
                continue
            lent = self.channel.lent()
            if lent:
                alone = 0.0
                self._warn(error, lent)
            elif not alone:
                gc.collect()  # tensors in cycles hold memory of the arena
                alone = time.monotonic()
            elif time.monotonic() > alone + _OTHERS:
                raise ArenaShortage(f"{error}; no operation under way on rank {self.rank} will give memory back")
            self.channel.read_until(_Returned(self), _LOOK if lent else _LOOK_FOR_OTHERS)
            self.check()

    def _left(self) -> int:
        """Returns the bytes that an allocation leaves to the host: to the other workers of the node as much as this one
        has lent to operations, since these end only when the others have begun them, too."""
        lent = sum(self.channel.lent())
        return max(_LEFT, lent * (self.topology.local_size(self.rank) - 1)) if lent else LEAST_LEFT

    def _warn(self, short: ArenaShortage, lent: Sequence[int]) -> None:
        """Warns once for each shortage, however many allocations it concerns."""
        now, before = time.monotonic(), self._short
        self._short = now
        if now > before + _ONE_SHORTAGE:
            _log.warning(
                "rank %d waits for shared memory: %s. It goes on when operations under way have ended: %d of them give "
                "%.0f MiB back. To wait less, wait for results before more operations are begun",
                *(self.rank, short, len(lent), sum(lent) / 2**20),
            )

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
        self.channel.leave(LEFT)
        self.adoptions.close()
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
        self.channel.send(wire.encode(message), fd)


class _Returned:
    """Memory that may have come back to a client's arena from now on, or will not any more."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._under_way = client.channel.under_way

    @property
    def done(self) -> bool:
        client = self._client
        return (
            client.arena.has_returned
            or client.channel.under_way != self._under_way
            or client.channel.failure is not None
        )


@lru_cache(maxsize=4096)
def _with_rows(signature: wire.Signature, rows: tuple[int, ...]) -> wire.Signature:
    return msgspec.structs.replace(signature, rows=rows)


def _nbytes_of(signature: wire.Signature) -> int:
    return math.prod(signature.shape) * DTYPES[signature.dtype].itemsize if signature.dtype else 0
