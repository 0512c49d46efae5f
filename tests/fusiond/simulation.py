"""A whole job in one thread: an engine for each node, a network that delivers in any order, and workers with arenas.

The seed decides the order of concurrent events: deliveries of different connections, jobs of the kernel pool, and the
next action of each worker. Two things are as bad as they can be:

- A payload that the network has borrowed is read when it is delivered, not when it is sent.
- A worker overwrites its memory as soon as it is told that the operation is done.
"""

from __future__ import annotations

import math
import os
import random
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fusion_rt import wire
from fusion_rt.core.dtypes import DTYPES, DType
from fusion_rt.core.errors import WireError
from fusion_rt.core.topology import ProcessSet, Topology
from fusion_rt.host.process_memory import Process
from fusion_rt.kernels.ordinary import Operand, Remote
from fusion_rt.settings import Settings
from fusion_rt.tracing.recorder import NULL, Instrument
from fusiond.core.participants import Participants
from fusiond.core.result import Result
from fusiond.core.tracing import Job
from fusiond.engine.engine import Engine
from fusiond.engine.keeper import Left
from fusiond.operations.context import Context
from fusiond.transport import flow_control

Array = npt.NDArray[Any]
GARBAGE = 0xA5


class Node:
    """One node's `Effects`: messages to nodes go to the network, messages to workers are kept."""

    def __init__(self, job: SimulatedJob, node: int) -> None:
        self._job = job
        self.node = node
        self.engine = Engine(self.context(), left=job.former[node] if job.former else None)
        self.failure = ""

    def context(self, trace: Instrument = NULL) -> Context:
        """The surroundings of an engine on this node."""
        topology = self._job.topology
        return Context(topology, self.node, self._job.settings, self, Participants(topology, self.node), trace)

    def to_worker(self, rank: int, message: wire.DaemonMessage, result: Result | None = None) -> None:
        assert self._job.topology.node_of(rank) == self.node
        data = result.array.copy() if result is not None and result.segment is not None else None
        self._job.answered(rank, wire.decode_daemon_message(wire.encode(message)), data)

    def to_node(self, node: int, message: wire.PeerMessage) -> None:
        assert node != self.node
        self._job.sent.append((self.node, node, message))
        self._job.post(self.node, node, "control", wire.encode(message), None)

    def send_chunk(self, node: int, chunk: wire.Chunk, payload: bytes | memoryview, urgency: int) -> bool:
        assert len(payload) <= self._job.settings.chunk_bytes
        self._job.urgencies.add((self.node, chunk.key.name, urgency))
        borrowed = len(payload) >= self._job.borrow_from
        self._job.post_payload(self.node, node, wire.encode(chunk), payload if borrowed else bytes(payload))
        return borrowed

    def send_piece(self, node: int, piece: wire.Piece, payload: memoryview) -> None:
        assert len(payload) <= self._job.settings.chunk_bytes
        self._job.post_payload(self.node, node, wire.encode(piece), payload)

    def when_received(self, then: Callable[[], None]) -> None:
        self._job.when_delivered(self.node, then)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> object:
        self._job.timers.append((self._job.now + seconds, callback))
        return None

    def run_jobs(self, jobs: Sequence[Job], then: Callable[[BaseException | None], None]) -> None:
        assert jobs, "the kernel pool calls back after the last of its jobs"

        def later() -> None:
            error = None
            for job in jobs:
                try:
                    job()
                except Exception as failure:
                    error = failure
            then(error)

        self._job.deferred.append(later)

    def has_kernels(self, dtype: DType, conversions: Sequence[tuple[DType, DType]]) -> bool:
        return self._job.has_kernels

    def run_on_files(self, job: Job, then: Callable[[BaseException | None], None]) -> None:
        if self._job.files_answer:
            self.run_jobs([job], then)
        else:
            self._job.waiting_for_files.append(lambda: self.run_jobs([job], then))

    def locate(self, ranks: Sequence[int], then: Callable[[list[wire.Whereabouts]], None]) -> None:
        asked = [self._job.whereabouts[rank] for rank in ranks if rank in self._job.whereabouts]
        self._job.deferred.append(lambda: then(asked))

    def warn(self, text: str) -> None:
        self._job.warnings.append(text)

    def clock(self) -> float:
        return self._job.now

    def job_failed(self, error: str) -> None:
        self.failure = error
        self.engine.fail_job(error)


class SimulatedJob:
    """A job of `len(local_sizes)` nodes with those numbers of workers.

    The network keeps the order of what goes from one node to another on the control connection, and on each of
    `settings.connections` payload connections, and no other order.

    Args:
        ranks: of each node's workers; by default they fill the nodes in order.
        process_sets: besides the one that holds every rank.
        by_address: ranks whose tensors are in their own memory, which is this process's, and not in an arena.
        left: of the nodes, the state that the formation before has left.
        settings: those of the daemons that are not the default.
    """

    def __init__(
        self,
        local_sizes: Sequence[int],
        seed: int = 0,
        ranks: Sequence[tuple[int, ...]] = (),
        process_sets: Sequence[ProcessSet] = (),
        by_address: Collection[int] = (),
        left: Sequence[Left] = (),
        **settings: Any,
    ) -> None:
        starts = [sum(local_sizes[:node]) for node in range(len(local_sizes))]
        filled = [tuple(range(start, start + n)) for start, n in zip(starts, local_sizes, strict=True)]
        self.topology = Topology(tuple(f"host{n}" for n in range(len(local_sizes))), tuple(ranks or filled))
        self.settings = Settings(
            **{"chunk_bytes": 4096, "window_bytes": 4 * 4096, "fusion_threshold": 1024, **settings}
        )
        self.by_address = by_address
        self.former = left
        self._process = Process(os.getpid(), "a worker") if by_address else None
        self.now = 0.0
        self.borrow_from = flow_control.BORROW_FROM
        self.answers: dict[int, list[tuple[wire.DaemonMessage, Array | None]]] = {}
        self.warnings: list[str] = []
        self.whereabouts: dict[int, wire.Whereabouts] = {}  # of the ranks that say where they are
        self.deferred: deque[Callable[[], None]] = deque()
        self.has_kernels = True  # what is in this process's memory does not change what is simulated
        self.files_answer = True
        self.waiting_for_files: list[Callable[[], None]] = []  # what has begun while they did not
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.urgencies: set[tuple[int, str, int]] = set()  # of chunks: node, name of the operation, urgency
        self.sent: list[tuple[int, int, wire.PeerMessage]] = []  # control messages: from, to, what
        self.payload_bytes = [0] * len(local_sizes)
        self.lost: set[tuple[int, int]] = set()  # from and to: payloads sent there never arrive
        self._channels: dict[tuple[int, int, str], deque[tuple[bytes, Any]]] = {}
        self._awaited: list[tuple[dict[tuple[int, int, str], int], Callable[[], None]]] = []  # payloads by channel
        self._chunks = 0
        self._scripts: dict[int, deque[Callable[[], object]]] = {}
        self._memory: dict[tuple[int, int], Array] = {}  # rank and handle: the tensor's bytes in the rank's arena
        self._given: dict[tuple[int, int], Array] = {}  # the tensor's bytes, where the result goes somewhere else
        self._random = random.Random(seed)
        self._handles = 0
        self.nodes = [Node(self, node) for node in range(len(local_sizes))]
        for node in self.nodes:
            for members in process_sets:
                assert node.engine.participants.add(members.ranks) == members.id

    @property
    def size(self) -> int:
        return self.topology.size

    @property
    def ranks(self) -> range:
        return range(self.size)

    def engine(self, rank: int) -> Engine:
        return self.nodes[self.topology.node_of(rank)].engine

    # --- the network --------------------------------------------------------------------------------------------------

    def post(self, source: int, target: int, channel: str, message: bytes, payload: Any) -> None:
        if channel == "control" or (source, target) not in self.lost:
            self._channels.setdefault((source, target, channel), deque()).append((message, payload))

    def post_payload(self, source: int, target: int, message: bytes, payload: bytes | memoryview) -> None:
        self.payload_bytes[source] += len(payload)
        self._chunks += 1
        self.post(source, target, f"payload{self._chunks % (self.settings.connections or 1)}", message, payload)

    def when_delivered(self, source: int, then: Callable[[], None]) -> None:
        """Calls back once all payloads that a node has sent so far have been delivered."""
        left = {key: len(queue) for key, queue in self._channels.items() if key[0] == source and key[2] != "control"}
        self._awaited.append((left, then))
        self._call_who_waits()

    def _call_who_waits(self) -> None:
        over = [then for left, then in self._awaited if not any(left.values())]
        self._awaited = [(left, then) for left, then in self._awaited if any(left.values())]
        self.deferred += over

    def step(self) -> bool:
        """Delivers a message, runs a deferred job, or runs a worker's next action; returns False when all is done."""
        channels = [key for key, queue in self._channels.items() if queue]
        scripts = [rank for rank, script in self._scripts.items() if script]
        choices = len(channels) + len(scripts) + bool(self.deferred)
        if not choices:
            return False
        pick = self._random.randrange(choices)
        if pick < len(channels):
            self._deliver(channels[pick])
        elif pick < len(channels) + len(scripts):
            self._scripts[scripts[pick - len(channels)]].popleft()()
        else:
            self.deferred.popleft()()
        return True

    def _deliver(self, key: tuple[int, int, str]) -> None:
        source, target, _ = key
        message, payload = self._channels[key].popleft()
        for left, _ in self._awaited:
            if left.get(key):
                left[key] -= 1
        decoded = wire.decode_peer_message(message)
        # As ZeroMQ hands it over: read-only, and at any address.
        view = [] if payload is None else [memoryview(b"\0" + bytes(payload))[1:]]
        self.nodes[target].engine.peer_message(source, decoded, *view)
        self._call_who_waits()

    def settle(self) -> None:
        """Runs until nothing is under way; fails when a node's daemon reported a failure of the job."""
        while self.step():
            pass
        assert [node.failure for node in self.nodes] == [""] * len(self.nodes)

    def pass_time(self, seconds: float) -> None:
        """Lets time pass, a second at a time, as the daemons see it."""
        for _ in range(round(seconds)):
            self.now += 1
            due = [callback for at, callback in self.timers if at <= self.now]
            self.timers = [timer for timer in self.timers if timer[0] > self.now]
            for callback in due:
                callback()
            for node in self.nodes:
                if not node.engine.idle:
                    node.engine.tick()
            self.settle()

    def leave(self, rank: int) -> None:
        """Lets a rank leave in good order; all nodes hear of it."""
        for node in self.nodes:
            node.engine.depart([rank])

    # --- the workers --------------------------------------------------------------------------------------------------

    def later(self, rank: int, action: Callable[[], object]) -> None:
        """Adds an action to those that a worker does in order, at some time."""
        self._scripts.setdefault(rank, deque()).append(action)

    def submit(
        self,
        rank: int,
        name: str,
        signature: wire.Signature,
        values: Array | None = None,
        clock: int = 0,
        splits: tuple[int, ...] = (),
        inline: bool = False,
        receives: tuple[int, ...] = (),
        into: int | None = None,
        seconds: float = 0.0,
    ) -> int:
        """Submits `values` (as they are stored) of a rank, in its arena or in the message; returns the handle.

        Args:
            into: bytes of a place in the arena of its own, to which the result goes.
        """
        self._handles += 1
        handle, memory, data = self._handles, None, None
        if values is not None and inline:
            data = values.tobytes()
        elif values is not None:
            memory = self._memory[rank, handle] = values.reshape(-1).view(np.uint8).copy()
        place: wire.Place | wire.Address | None = None if memory is None else wire.Place(1, 0)
        there: wire.Place | wire.Address | None = None if into is None else wire.Place(2, 0)
        operand: Operand | None = memory
        if rank in self.by_address:
            if memory is not None:
                place, operand = wire.Address(memory.ctypes.data), self._remote(memory.ctypes.data, len(memory))
            there = None if into is None else wire.Address(1)
        submit = wire.Submit(handle, name, clock, signature, place, data, splits, receives, there, seconds)
        decoded = wire.decode_worker_message(wire.encode(submit))
        assert isinstance(decoded, wire.Submit)
        if into is None:
            self.engine(rank).submit(rank, decoded, operand)
            return handle
        if memory is not None:
            self._given[rank, handle] = memory
        target = self._memory[rank, handle] = np.full(into, GARBAGE, np.uint8)

        def find(nbytes: int) -> Operand:
            if nbytes > len(target):
                raise WireError(f"{nbytes} bytes are not in the arena")
            return self._remote(target.ctypes.data, nbytes) if rank in self.by_address else target[:nbytes]

        self.engine(rank).submit(rank, decoded, operand, find)
        return handle

    def open_group(self, key: str, ranks: Sequence[int]) -> int:
        """Opens a group on all of its members; returns its id."""
        for rank in ranks:
            self._handles += 1
            self.engine(rank).groups.open(rank, wire.OpenGroup(self._handles, key, tuple(ranks)))
            assert isinstance(self.answer(rank, self._handles)[0], wire.Done)
        return wire.group_id(key)

    def close_group(self, key: str, rank: int) -> None:
        """A member closes a group."""
        self._handles += 1
        self.engine(rank).groups.close(rank, wire.CloseGroup(self._handles, wire.group_id(key)))
        assert isinstance(self.answer(rank, self._handles)[0], wire.Done)

    def submit_at(self, rank: int, name: str, signature: wire.Signature, address: int) -> int:
        """Submits a tensor of which nobody knows whether it is at this address of a rank's; returns the handle."""
        self._handles += 1
        nbytes = math.prod(signature.shape) * DTYPES[signature.dtype].itemsize
        submit = wire.Submit(self._handles, name, 0, signature, wire.Address(address))
        self.engine(rank).submit(rank, submit, self._remote(address, nbytes))
        return self._handles

    def _remote(self, address: int, nbytes: int) -> Remote:
        assert self._process is not None, "no rank has tensors in its own memory"
        return Remote(self._process, address, np.dtype(np.uint8), nbytes)

    def on_all_ranks(self, action: Callable[[int], int]) -> list[int]:
        """Runs `action`, which returns a handle, on every rank at some time; returns the handles once all is done."""
        handles = [0] * self.size
        for rank in self.ranks:
            self.later(rank, lambda rank=rank: handles.__setitem__(rank, action(rank)))  # type: ignore[misc]
        self.settle()
        return handles

    def submit_all(
        self, name: str, signature: wire.Signature, values: Sequence[Array], clock: int = 0, inline: bool = False
    ) -> list[int]:
        """Submits every rank's values, at some time; returns the handles by rank once all is done."""
        return self.on_all_ranks(lambda rank: self.submit(rank, name, signature, values[rank], clock, inline=inline))

    def propose(self, rank: int, proposal: wire.Proposal) -> int:
        """Asks for a plan on a rank; returns the handle."""
        self._handles += 1
        self.engine(rank).propose(rank, self._handles, proposal)
        return self._handles

    def plan(self, proposal: Callable[[int], wire.Proposal] | wire.Proposal) -> wire.Plan:
        """Asks for a plan on all ranks, and adds their memory for it."""
        make = (lambda _: proposal) if isinstance(proposal, wire.Proposal) else proposal
        handles = self.on_all_ranks(lambda rank: self.propose(rank, make(rank)))
        plans = []
        for rank in self.ranks:
            message, _ = self.answer(rank, handles[rank])
            assert isinstance(message, wire.Planned), message
            plans.append(message.plan)
        assert plans == plans[:1] * self.size
        return plans[0]

    def saved_homes(self, plan: wire.Plan) -> list[dict[str, Array]]:
        """Returns what each node saves of a plan's homes."""
        found: list[dict[str, Array]] = [{} for _ in self.nodes]
        errors: list[BaseException | None] = []
        for node, into in zip(self.nodes, found, strict=True):
            node.engine.homes.save(plan.id, into, errors.append)
        self.settle()
        assert errors == [None] * len(self.nodes)
        return found

    def load_homes(self, node: int, state: Mapping[str, Array], group: str = "opt") -> None:
        """Loads a state of homes on a node. Raises the error that its daemon answers with."""
        errors: list[BaseException | None] = []
        self.nodes[node].engine.keeper.load((0, group), state, False, errors.append)
        self.settle()
        if (error := errors.pop()) is not None:
            raise error

    def add_plan_memory(self, plan: wire.Plan) -> list[Array]:
        """Adds every rank's segment for a plan; returns their bytes."""
        memory = [np.full(plan.nbytes, GARBAGE, np.uint8) for _ in self.ranks]
        for rank in self.ranks:
            self.engine(rank).add_plan_memory(rank, plan.id, memory[rank])
        return memory

    def ready(self, rank: int, plan: wire.Plan, bucket: int, clock: int) -> int:
        """Submits a rank's part of a bucket, which is in its segment; returns the handle."""
        self._handles += 1
        self.engine(rank).ready(rank, wire.Ready(self._handles, plan.id, bucket, clock))
        return self._handles

    def answered(self, rank: int, message: wire.DaemonMessage, data: Array | None) -> None:
        """Gives a worker an answer; the operation's memory in its arena is overwritten at once."""
        given = self._given.pop((rank, getattr(message, "handle", -1)), None)
        if given is not None:
            given[:] = GARBAGE
        memory = self._memory.pop((rank, getattr(message, "handle", -1)), None)
        if memory is not None and data is None and isinstance(message, wire.Done):
            data = memory.copy()
        if memory is not None:
            memory[:] = GARBAGE
        self.answers.setdefault(rank, []).append((message, data))

    def answer(self, rank: int, handle: int) -> tuple[wire.DaemonMessage, Array | None]:
        """Returns the rank's answer to an operation."""
        found = [pair for pair in self.answers.get(rank, []) if getattr(pair[0], "handle", None) == handle]
        assert len(found) == 1, f"rank {rank} has {len(found)} answers for handle {handle}: {self.answers.get(rank)}"
        return found[0]

    def is_answered(self, rank: int, handle: int) -> bool:
        return any(getattr(message, "handle", None) == handle for message, _ in self.answers.get(rank, []))

    def result(self, rank: int, handle: int, dtype: str = "float32") -> Array:
        """Returns the elements that a rank got, as they are stored; fails when it got an error."""
        message, data = self.answer(rank, handle)
        assert isinstance(message, wire.Done), message
        if message.inline is not None:
            return np.frombuffer(message.inline, DTYPES[dtype].storage)
        assert data is not None
        return data.view(DTYPES[dtype].storage)

    def error(self, rank: int, handle: int) -> str:
        """Returns the error text that a rank got; fails when it got a result."""
        message, _ = self.answer(rank, handle)
        assert isinstance(message, wire.Failed), message
        return message.message

    def messages(self, kind: type) -> int:
        """Counts the control messages of a kind between nodes."""
        return sum(isinstance(message, kind) for _, _, message in self.sent)

    def nothing_is_left(self) -> None:
        """Fails when an engine still remembers an operation that is over."""
        for node in self.nodes:
            assert node.engine.statistics()["under_way"] == 0
            assert node.engine.idle
            if node.engine.coordinator is not None:
                assert node.engine.coordinator.statistics()["pending"] == 0
