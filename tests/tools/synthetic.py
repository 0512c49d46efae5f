"""Rings of jobs that never ran, of which everything is known: for the tests of what reads rings.

`Tape` is the ring of one process, written record by record. `simulate` makes the tapes of a whole job: ranks that
compute, daemons that exchange buckets around a ring of nodes over links of a bandwidth and latency, with a straggler of
a known cause, and clocks that are off by known amounts. All times below are ns of a true clock, which is node 0's.
"""

from __future__ import annotations

import heapq
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fusion_rt.choice.codec_costs import Encoded
from fusion_rt.codecs.base import Codec, Layout
from fusion_rt.tracing.format import (
    COMMAND_AT,
    HEADER,
    HEADER_NBYTES,
    MAGIC,
    NAMES_NBYTES,
    NOBODY,
    RECORD,
    VERSION,
    Flush,
    Kind,
    Role,
)
from fusion_rt.tracing.processors import MACHINE, MACHINE_AT

US, MS, S = 10**3, 10**6, 10**9
START = 5_000 * S  # how long node 0's host has been up when the job begins
WALL = 1_790_000_000 * S


@dataclass
class Tape:
    """The ring of one process. `rank` of a daemon is its node.

    Attributes:
        skew: its host's clock minus the true one, ns; `drift`: parts per million by which it is fast.
        capacity: of the ring, records; None: room for all.
        machine: the number of its machine; 0: not recorded.
        command: its command line; "": not recorded.
        wall: the wall clock when it was made, ns since 1970.
    """

    role: Role
    rank: int
    node: int = 0
    nodes: int = 1
    host: str = "a"
    job: str = "synthetic"
    pid: int = 0
    skew: int = 0
    drift: float = 0.0
    capacity: int | None = None
    machine: int = 0
    command: str = ""
    wall: int = WALL
    rows: list[tuple[int, int, int, str, int, int, int, int]] = field(default_factory=list)

    def add(
        self,
        kind: Kind,
        time: int,
        name: str = "",
        *,
        clock: int = 0,
        plan: int = 0,
        value: int = 0,
        extra: int = 0,
        peer: int = NOBODY,
    ) -> None:
        """An event at a true time."""
        self.rows.append((self.local(time), value, clock, name, plan, extra, kind, peer))

    def local(self, time: int) -> int:
        """What this host's clock shows at a true time."""
        return time + self.skew + round((time - START) * self.drift / 1e6)

    def encoded(self) -> bytes:
        """The file, by the words of `trace_format`."""
        rows = sorted(self.rows, key=lambda row: row[0])
        capacity = self.capacity or len(rows) + 64  # full ones lose their oldest records
        numbers, names = {"": 0}, bytearray()
        for row in rows:
            if row[3] not in numbers:
                numbers[row[3]] = len(numbers)
                text = row[3].encode()
                names += len(text).to_bytes(2, "little") + text
        data = bytearray(HEADER_NBYTES + NAMES_NBYTES + capacity * RECORD.size)
        host, job = self.host.encode(), self.job.encode()
        HEADER.pack_into(
            data, 0, MAGIC, VERSION, RECORD.size, capacity, self.local(START), self.wall, self.pid, self.rank,
            self.node, self.nodes, len(host), len(job), self.role, len(rows), len(names), 0,
        )  # fmt: skip
        data[HEADER.size : HEADER.size + len(host + job)] = host + job
        MACHINE.pack_into(data, MACHINE_AT, self.machine.to_bytes(16, "big"), 0)
        command = self.command.encode()
        data[COMMAND_AT : COMMAND_AT + 2 + len(command)] = len(command).to_bytes(2, "little") + command
        data[HEADER_NBYTES : HEADER_NBYTES + len(names)] = names
        for number, (time, value, clock, name, plan, extra, kind, peer) in enumerate(rows):
            at = HEADER_NBYTES + NAMES_NBYTES + number % capacity * RECORD.size
            RECORD.pack_into(data, at, time, value, clock, numbers[name], plan, extra, kind, peer)
        return bytes(data)

    def write(self, directory: object) -> str:
        """Writes it into a directory, under the name the recorder would give it. Returns the path."""
        kind = "rank" if self.role == Role.WORKER else "node"
        path = os.path.join(str(directory), f"{kind}-{self.rank}.ring")
        with open(path, "wb") as file:
            file.write(self.encoded())
        return path


@dataclass(frozen=True)
class Straggler:
    """What is slow.

    Attributes:
        cause: compute, negotiation, queue or wire.
        where: the rank (compute), node (negotiation), or link as (source, target) (queue, wire).
        factor: how many times as long it takes (compute, wire).
        delay: what is added each time, ns (negotiation: to each question; queue: to each chunk).
        steps: in which it is; None: in all.
    """

    cause: str
    where: int | tuple[int, int]
    factor: float = 2.0
    delay: int = 3 * MS
    steps: range | None = None

    def hits(self, cause: str, where: int | tuple[int, int], step: int) -> bool:
        return (self.cause, self.where) == (cause, where) and (self.steps is None or step in self.steps)


@dataclass(frozen=True)
class Job:
    """A job to simulate. Times in ns, sizes in bytes, bandwidth in bytes a second."""

    nodes: int = 2
    ranks_per_node: int = 1
    steps: int = 8
    buckets: int = 3
    bucket_nbytes: int = 1 << 20
    tensors: int = 2  # a bucket has
    forward: int = 8 * MS
    backward: int = 16 * MS
    update: int = 2 * MS
    between: int = 300 * US  # a step and the next one: data
    bandwidth: float = 250e6
    latency: int = 100 * US
    chunk_nbytes: int = 256 << 10
    jitter: float = 0.02  # of everything that takes time
    loss: bool = True  # a small tensor outside the plan each step, which is negotiated each time
    straggler: Straggler | None = None
    skews: Mapping[int, int] = field(default_factory=dict)  # by node
    drifts: Mapping[int, float] = field(default_factory=dict)
    round_trip: int = 200 * US  # of clock measurements, the shortest
    seed: int = 0
    name: str = "synthetic"

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass
class Truth:
    """What is so, by the simulation's own account.

    Attributes:
        tapes: by (role, rank).
        steps: by rank, when each step ended.
        submitted, answered: by (bucket or "loss", step) and rank.
        flights: (source, target, name, step, sent, received) of each chunk.
    """

    job: Job
    tapes: dict[tuple[Role, int], Tape]
    steps: dict[int, list[int]]
    submitted: dict[tuple[str, int], dict[int, int]]
    answered: dict[tuple[str, int], dict[int, int]]
    flights: list[tuple[int, int, str, int, int, int]]

    def write(self, directory: object) -> list[str]:
        """All rings; their paths."""
        return [tape.write(directory) for tape in self.tapes.values()]


def cheap(codec: Codec, layout: Layout) -> Encoded:
    """Takes the place of a measured codec, whose times differ from run to run."""
    return Encoded(4 * layout.elements * (0.0075 if codec.name == "topk" else 0.5), 0.0, "chunks")


def simulate(job: Job) -> Truth:
    """Runs a job on the true clock. The same job and seed give the same rings."""
    return _Simulation(job).run()


class _Simulation:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.random = random.Random(job.seed)
        tapes = {}
        for node in range(job.nodes):
            host = {
                "node": node,
                "nodes": job.nodes,
                "host": f"host{node}",
                "job": job.name,
                "skew": job.skews.get(node, 0),
                "drift": job.drifts.get(node, 0.0),
            }
            tapes[Role.DAEMON, node] = Tape(Role.DAEMON, node, pid=100 + node, **host)  # type: ignore[arg-type]
            for local in range(job.ranks_per_node):
                rank = node * job.ranks_per_node + local
                tapes[Role.WORKER, rank] = Tape(Role.WORKER, rank, pid=1000 + rank, **host)  # type: ignore[arg-type]
        self.truth = Truth(job, tapes, {rank: [] for rank in range(job.ranks)}, {}, {}, [])
        self.now = {rank: START + self._noisy(MS) for rank in range(job.ranks)}
        self.link_free: dict[tuple[int, int], int] = {}
        self.numbers: dict[tuple[int, int], int] = {}
        self.measured = START

    def _noisy(self, ns: float) -> int:
        return max(1, round(ns * self.random.uniform(1 - self.job.jitter, 1 + self.job.jitter)))

    def worker(self, rank: int) -> Tape:
        return self.truth.tapes[Role.WORKER, rank]

    def daemon(self, node: int) -> Tape:
        return self.truth.tapes[Role.DAEMON, node]

    def node(self, rank: int) -> int:
        return rank // self.job.ranks_per_node

    def ranks(self, node: int) -> range:
        return range(node * self.job.ranks_per_node, (node + 1) * self.job.ranks_per_node)

    def run(self) -> Truth:
        job = self.job
        for node in range(job.nodes):
            daemon = self.daemon(node)
            daemon.add(Kind.PLAN, START, plan=1, value=job.buckets * job.bucket_nbytes, extra=job.buckets)
            for bucket in range(job.buckets):
                daemon.add(Kind.BUCKET, START, f"bucket {bucket}", plan=1, value=job.bucket_nbytes, extra=bucket)
                for name in self._tensors(bucket):
                    nbytes = job.bucket_nbytes // job.tensors
                    daemon.add(Kind.MEMBER, START, name, plan=1, value=nbytes, extra=bucket)
        for step in range(job.steps):
            self._measure_clocks()
            for rank in range(job.ranks):
                self._compute(rank, step)
            self._exchange(step)
            for rank in range(job.ranks):
                self._finish(rank, step)
        self._measure_clocks()
        return self.truth

    def _tensors(self, bucket: int) -> Sequence[str]:
        return [f"layer{bucket}.{number}" for number in range(self.job.tensors)]

    def _measure_clocks(self) -> None:
        """Each daemon asks each other, about once a second: an echo is off by at most half its round trip."""
        latest = max(self.now.values())
        while self.measured <= latest:
            for node in range(self.job.nodes):
                for peer in range(self.job.nodes):
                    if peer == node:
                        continue
                    round_trip = round(self.job.round_trip * (1 + self.random.expovariate(1.0)))
                    there = self.measured + round_trip // 2
                    offset = self.daemon(peer).local(there) - self.daemon(node).local(there)
                    offset += round(self.random.uniform(-0.5, 0.5) * round_trip)
                    self.daemon(node).add(
                        Kind.CLOCK, self.measured + round_trip, value=offset, extra=round_trip // US, peer=peer
                    )
            self.measured += S // 4

    # --- a step of a rank ---------------------------------------------------------------------------------------------

    def _compute(self, rank: int, step: int) -> None:
        job, tape, now = self.job, self.worker(rank), self.now[rank] + self._noisy(self.job.between)
        slow = job.straggler
        factor = slow.factor if slow is not None and slow.hits("compute", rank, step) else 1.0
        tape.add(Kind.FORWARD_BEGIN, now, clock=step)
        now += self._noisy(job.forward * factor)
        tape.add(Kind.FORWARD_END, now, clock=step)
        tape.add(Kind.BACKWARD_BEGIN, now, clock=step)
        for bucket in range(job.buckets):
            for name in self._tensors(bucket):
                now += self._noisy(job.backward * factor / (job.buckets * job.tensors))
                tape.add(Kind.GRADIENT, now, name, clock=step, value=job.bucket_nbytes // job.tensors)
            tape.add(Kind.COPY_BEGIN, now, f"bucket {bucket}", clock=step, plan=1)
            now += self._noisy(50 * US)
            tape.add(Kind.COPY_END, now, f"bucket {bucket}", clock=step, plan=1)
            tape.add(Kind.FULL, now, f"bucket {bucket}", clock=step, plan=1)
            now += 2 * US
            self._submit(rank, f"bucket {bucket}", step, now, job.bucket_nbytes, Flush.FULL)
        tape.add(Kind.BACKWARD_END, now, clock=step)
        if job.loss:
            now += 2 * US
            self._submit(rank, "loss", step, now, 4, Flush.ALONE)
        self.now[rank] = now

    def _submit(self, rank: int, name: str, step: int, now: int, nbytes: int, why: Flush) -> None:
        self.worker(rank).add(Kind.SUBMITTED, now, name, clock=step, plan=int(name != "loss"), value=nbytes, extra=why)
        self.truth.submitted.setdefault((name, step), {})[rank] = now

    def _finish(self, rank: int, step: int) -> None:
        job, tape, now = self.job, self.worker(rank), self.now[rank]
        tape.add(Kind.STEP_BEGIN, now, clock=step)
        names = [f"bucket {bucket}" for bucket in range(job.buckets)]
        for name in [*names, "loss"] if job.loss else names:
            plan = int(name != "loss")
            tape.add(Kind.WAIT_BEGIN, now, name, clock=step, plan=plan)
            now = max(now + US, self.truth.answered[name, step][rank] + 15 * US)
            tape.add(Kind.DONE, now, name, clock=step, plan=plan)
            now += US
            tape.add(Kind.WAIT_END, now, name, clock=step, plan=plan)
            if plan:
                tape.add(Kind.APPLY_BEGIN, now, name, clock=step, plan=1)
                now += self._noisy(job.update / job.buckets)
                tape.add(Kind.APPLY_END, now, name, clock=step, plan=1)
        tape.add(Kind.STEP_END, now, clock=step)
        self.truth.steps[rank].append(now)
        self.now[rank] = now

    # --- and of the daemons -------------------------------------------------------------------------------------------

    def _exchange(self, step: int) -> None:
        """All operations of a step around the ring of nodes, chunk by chunk, on links that carry one at a time."""
        job, slow = self.job, self.job.straggler
        begun: dict[tuple[str, int], int] = {}
        events: list[tuple[int, int, str, int, int]] = []  # time, source, operation, round, chunk
        for name in [name for name, of in self.truth.submitted if of == step]:
            for node in range(job.nodes):
                begun[name, node] = self._begin(name, node, step)
        rounds = 2 * (job.nodes - 1)
        pieces: dict[str, list[int]] = {}
        ended: dict[tuple[str, int], int] = {}
        left: dict[tuple[str, int], int] = {}
        for name, node in begun:
            nbytes = 4 if name == "loss" else job.bucket_nbytes // job.nodes
            whole, rest = divmod(nbytes, job.chunk_nbytes)
            pieces[name] = [job.chunk_nbytes] * whole + [rest] * bool(rest)
            left[name, node] = rounds * len(pieces[name])
            ended[name, node] = begun[name, node]
            if rounds:
                for chunk in range(len(pieces[name])):
                    heapq.heappush(events, (begun[name, node], node, name, 0, chunk))
        while events:
            queued, source, name, number, chunk = heapq.heappop(events)
            target = (source + 1) % job.nodes
            link, nbytes, plan = (source, target), pieces[name][chunk], int(name != "loss")
            factor = slow.factor if slow is not None and slow.hits("wire", link, step) else 1.0
            delay = slow.delay if slow is not None and slow.hits("queue", link, step) else 0
            sent = max(queued + self._noisy(3 * US), self.link_free.get(link, 0)) + delay
            self.link_free[link] = sent + round(nbytes / job.bandwidth * S * factor)
            received = self.link_free[link] + self._noisy(job.latency * factor)
            taken = max(received, begun[name, target]) + self._noisy(5 * US)
            self.numbers[link] = self.numbers.get(link, 0) + 1
            at = {"clock": step, "plan": plan, "value": nbytes, "extra": self.numbers[link]}
            self.daemon(source).add(Kind.QUEUED, queued, name, peer=target, **{**at, "extra": 1})
            self.daemon(source).add(Kind.SENT, sent, name, peer=target, **at)
            self.daemon(target).add(Kind.RECEIVED, received, name, peer=source, **at)
            self.daemon(target).add(Kind.TAKEN, taken, name, peer=source, **at)
            self.truth.flights.append((source, target, name, step, sent, received))
            after = taken + self._kernel(target, name, step, taken, nbytes)
            left[name, target] -= 1
            ended[name, target] = max(ended[name, target], after)
            if number + 1 < rounds:
                heapq.heappush(events, (after, target, name, number + 1, chunk))
        for (name, node), end in ended.items():
            assert not left[name, node]
            plan, end = int(name != "loss"), end + 2 * US
            self.daemon(node).add(Kind.RUN_END, end, name, clock=step, plan=plan)
            for rank in self.ranks(node):
                end += 3 * US
                self.daemon(node).add(Kind.ANSWERED, end, name, clock=step, plan=plan, peer=rank)
                self.truth.answered.setdefault((name, step), {})[rank] = end

    def _kernel(self, node: int, name: str, step: int, begin: int, nbytes: int) -> int:
        took = self._noisy(2 * US + nbytes / 8e9 * S)
        at = {"clock": step, "plan": int(name != "loss"), "value": nbytes}
        self.daemon(node).add(Kind.REDUCE_BEGIN, begin, name, **at)
        self.daemon(node).add(Kind.REDUCE_END, begin + took, name, **at)
        return took

    def _begin(self, name: str, node: int, step: int) -> int:
        """When the operation begins on a node."""
        job, slow, daemon, plan = self.job, self.job.straggler, self.daemon(node), int(name != "loss")
        ready = 0
        for rank in self.ranks(node):
            came = self.truth.submitted[name, step][rank] + self._noisy(20 * US)
            daemon.add(Kind.READY, came, name, clock=step, plan=plan, peer=rank)
            ready = max(ready, came)
        begin = ready + 5 * US
        if not plan:
            # The coordinator answers when it has heard of all.
            delay = slow.delay if slow is not None and slow.hits("negotiation", node, step) else 0
            daemon.add(Kind.NEGOTIATE_BEGIN, begin, name, clock=step)
            last = max(self.truth.submitted[name, step].values())
            begin = max(begin, last) + 2 * job.latency + self._noisy(30 * US) + delay
            daemon.add(Kind.NEGOTIATE_END, begin, name, clock=step)
            begin += 2 * US
        nbytes = 4 if not plan else job.bucket_nbytes
        daemon.add(Kind.RUN_BEGIN, begin, name, clock=step, plan=plan, value=nbytes)
        if job.ranks_per_node > 1:
            begin += self._kernel(node, name, step, begin, nbytes)
        return begin
