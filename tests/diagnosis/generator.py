"""Jobs that never ran, with a fault of which everything is known: who, why, when, and what it has cost.

A job is run twice on the true clock, with the same noise: with its fault, recorded, and without it. By how much it was
shorter then is the true cost. Times depend on each other as in the engine: a rank gives a bucket after its own work;
the daemon of a node begins when its ranks have given theirs; chunks go around a ring of nodes, or to the owners of
pieces and back, over links that carry one at a time; whoever waits for a bucket goes on when its daemon has answered;
and a step ends with the last bucket. Times are ns, sizes bytes, bandwidths bytes a second.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fusion_rt.tracing.format import (
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
from fusion_rt.tracing.reader import RECORD_DTYPE, Ring
from fusion_trace.read.job import JobTrace, join

US, MS, S = 10**3, 10**6, 10**9
START = 5_000 * S
WALL = 1_790_000_000 * S


@dataclass(frozen=True)
class Fault:
    """What is slow.

    Attributes:
        what: forward, backward, loader (of ranks); link, daemon, negotiation; stop (of ranks), killed (a rank, or with
            `nodes` a daemon).
        ranks, nodes, links: where.
        when: by step, how much of the fault there is, 0 to 1; shape (steps,).
        more: ns that are added to a rank's phase, a daemon's work on a chunk, or a stop; `factor`: by which a link is
            slower.
    """

    what: str
    when: tuple[float, ...]
    ranks: frozenset[int] = frozenset()
    nodes: frozenset[int] = frozenset()
    links: frozenset[tuple[int, int]] = frozenset()
    more: float = 0.0
    factor: float = 1.0


@dataclass(frozen=True)
class Shape:
    """A job and its noise.

    Attributes:
        per_node: how many ranks each node has, in place of `ranks_per_node`.
        exchange: ring or owners.
        waits: where scripts wait for buckets: backward, or step.
        loss: whether a number is reduced after each step, negotiated each time, and waited for; `direct`: it goes
            from every node to every other one, whatever `exchange` is.
        noise: of all computing, standard deviation of its logarithm; `host_noise`: common to the ranks of a host;
            `common`: to all ranks; `uneven`: of ranks' speeds, always.
        hiccups: by how likely a rank stands still in a step, for `hiccup` ns on average. late: by how likely a daemon
            is that late for what a rank hands over, since others have its processor.
        processors: of the one machine that all nodes are on; 0: each node is on its own.
        skews, drifts, round_trip: of clocks, by node; ns, parts per million, ns.
    """

    nodes: int = 2
    ranks_per_node: int = 1
    steps: int = 60
    buckets: int = 2
    bucket_nbytes: int = 1 << 20
    forward: float = 8 * MS
    backward: float = 16 * MS
    update: float = 2 * MS
    loader: float = 1 * MS
    bandwidth: float = 250e6
    latency: float = 100 * US
    pieces: int = 1
    exchange: str = "ring"
    waits: str = "backward"
    loss: bool = False
    direct: bool = False
    noise: float = 0.02
    host_noise: float = 0.0
    common: float = 0.0
    uneven: float = 0.0
    hiccups: float = 0.0
    hiccup: float = 0.0
    late: float = 0.0
    per_node: tuple[int, ...] = ()
    processors: int = 0
    skews: Mapping[int, int] = field(default_factory=dict)
    drifts: Mapping[int, float] = field(default_factory=dict)
    round_trip: float = 200 * US
    seed: int = 0

    @property
    def ranks(self) -> int:
        return sum(self.counts)

    @property
    def counts(self) -> tuple[int, ...]:
        """Ranks of each node."""
        return self.per_node or (self.ranks_per_node,) * self.nodes

    def ranks_of(self, node: int) -> range:
        first = sum(self.counts[:node])
        return range(first, first + self.counts[node])


@dataclass(frozen=True)
class Made:
    """A job's trace, the time that it took, and what it would have taken without its fault; ns."""

    trace: JobTrace
    took: float
    without: float

    @property
    def cost(self) -> float:
        return self.took - self.without


def make(shape: Shape, fault: Fault | None = None, hidden: frozenset[int] = frozenset()) -> Made:
    """Runs a job. `hidden`: nodes whose rings are not in the trace."""
    run = _Run(shape, fault, recorded=True)
    took = run.run()
    without = _Run(shape, None, recorded=False).run() if fault is not None else took
    return Made(join(run.rings(hidden)), took, without)


def write(shape: Shape, directory: Path, fault: Fault | None = None, times: int = 1) -> int:
    """Runs a job and writes its rings into a directory, as its processes would have. Returns the number of records.

    Args:
        times: how often the job is in them, one after the other: so large jobs are made in little time and memory.
    """
    run = _Run(shape, fault, recorded=True)
    run.run()
    rings = run.rings(frozenset())
    begin, end = (pick(pick(ring.records["time"]) for ring in rings) for pick in (min, max))
    most = max(int(ring.records["extra"][np.isin(ring.records["kind"], _NUMBERED)].max(initial=0)) for ring in rings)
    for ring in rings:
        name = f"{'rank' if ring.role == Role.WORKER else 'node'}-{ring.rank}.ring"
        numbered = np.isin(ring.records["kind"], _NUMBERED)
        with (directory / name).open("wb") as file:
            file.write(_head_of(ring, times))
            for turn in range(times):
                records = ring.records.copy()
                records["time"] += turn * (end - begin + MS)
                records["clock"] += np.uint64(turn * shape.steps)
                records["extra"][numbered] += np.uint32(turn * most)
                file.write(records.tobytes())
    return times * sum(len(ring.records) for ring in rings)


_NUMBERED = (Kind.SENT, Kind.RECEIVED, Kind.TAKEN)


def _head_of(ring: Ring, times: int) -> bytes:
    """Returns what is before the records in a ring's file, by the words of `fusion_rt.tracing.format`."""
    host, job = ring.host.encode(), ring.job.encode()
    names = b"".join(len(name.encode()).to_bytes(2, "little") + name.encode() for name in ring.names[1:])
    written = ring.written * times
    header = HEADER.pack(
        MAGIC, VERSION, RECORD.size, written + 64, ring.created, ring.created_wall, ring.pid, ring.rank, ring.node,
        ring.nodes, len(host), len(job), ring.role, written, len(names), 0,
    )  # fmt: skip
    return (header + host + job).ljust(HEADER_NBYTES, b"\0") + names.ljust(NAMES_NBYTES, b"\0")


class _Tape:
    def __init__(self, role: Role, number: int, node: int) -> None:
        self.role, self.number, self.node = role, number, node
        self.rows: list[tuple[int, int, int, int, int, int, int, int]] = []


class _Run:
    def __init__(self, shape: Shape, fault: Fault | None, recorded: bool) -> None:
        self.shape, self.fault, self.recorded = shape, fault, recorded
        generator = np.random.default_rng(shape.seed)
        size = shape.steps, shape.ranks
        speed = np.exp(generator.normal(0, 1, shape.ranks) * shape.uneven)
        per_rank = generator.normal(0, 1, (4, *size)) * shape.noise
        per_host = generator.normal(0, 1, (shape.steps, shape.nodes)).repeat(shape.counts, 1) * shape.host_noise
        everybody = generator.normal(0, 1, (shape.steps, 1)) * shape.common
        self.compute = np.exp(per_rank + per_host + everybody) * speed
        self.stalls = (generator.random(size) < shape.hiccups) * generator.exponential(1.0, size) * shape.hiccup
        self.small = np.exp(generator.normal(0, 1, (shape.steps, 4096)) * max(shape.noise, 0.02)).tolist()
        self.random = generator
        other = np.random.default_rng((shape.seed, 1))
        messages = *size, shape.buckets + 2
        self.late = (other.random(messages) < shape.late) * other.exponential(1.0, messages) * shape.hiccup
        self.names = [""] + [f"bucket {number}" for number in range(shape.buckets)] + ["loss"]
        nodes = range(shape.nodes)
        self.workers = [_Tape(Role.WORKER, rank, node) for node in nodes for rank in shape.ranks_of(node)]
        self.daemons = [_Tape(Role.DAEMON, node, node) for node in range(shape.nodes)]
        self.now = [float(START + MS * (1 + rank % 3)) for rank in range(shape.ranks)]
        self.stopped: set[int] = set()
        self.free: dict[tuple[int, int], float] = {}
        self.numbers: dict[tuple[int, int], int] = {}
        self.died_at: float | None = None

    def run(self) -> float:
        begin = max(self.now)
        for step in range(self.shape.steps):
            self._step(step)
            if self.died_at is not None:
                break
        if self.recorded:
            self._clocks()
        return max(self.now) - begin

    # --- recording ----------------------------------------------------------------------------------------------------

    def _add(self, tape: _Tape, kind: Kind, time: float, name: int = 0, clock: int = 0, value: int = 0, extra: int = 0,
             peer: int = NOBODY) -> None:  # fmt: skip
        if self.recorded:
            plan = int(0 < name <= self.shape.buckets)
            tape.rows.append((self._local(tape.node, time), value, clock, name, plan, extra, kind, peer))

    def _local(self, node: int, time: float) -> int:
        shape = self.shape
        return round(time) + shape.skews.get(node, 0) + round((time - START) * shape.drifts.get(node, 0.0) / 1e6)

    def _clocks(self) -> None:
        shape = self.shape
        if shape.nodes < 2:
            return
        end, at = max(self.now), float(START)
        while at < end:
            for node in range(shape.nodes):
                for peer in range(shape.nodes):
                    if peer != node:
                        trip = shape.round_trip * (1 + self.random.exponential())
                        offset = self._local(peer, at + trip / 2) - self._local(node, at + trip / 2)
                        offset += round(self.random.uniform(-0.5, 0.5) * trip)
                        tape = self.daemons[node]
                        self._add(tape, Kind.CLOCK, at + trip, 0, 0, offset, round(trip / US), peer)
            at += S / 4

    def rings(self, hidden: frozenset[int]) -> list[Ring]:
        rings = []
        for tape in (*self.workers, *self.daemons):
            if tape.node in hidden:
                continue
            records = np.array(tape.rows, RECORD_DTYPE)
            if self.died_at is not None:
                records = records[records["time"] <= self._local(tape.node, self._end_of(tape))]
            records = records[np.argsort(records["time"], kind="stable")]
            rings.append(
                Ring(
                    capacity=len(records) + 64, created=self._local(tape.node, START), created_wall=WALL,
                    pid=100 + tape.number, rank=tape.number, node=tape.node, nodes=self.shape.nodes, role=tape.role,
                    host=f"host{tape.node}", job="diagnosis", written=len(records), names_nbytes=0, lost_names=0,
                    path=f"/{tape.role.name}-{tape.number}", names=tuple(self.names), records=records, overwritten=0,
                    problems=(), machine="one" if self.shape.processors else "",
                    processors=float(self.shape.processors), command="",
                )
            )  # fmt: skip
        return rings

    # --- what dies ----------------------------------------------------------------------------------------------------

    def _end_of(self, tape: _Tape) -> float:
        """Returns when a process ends: the one that is killed, and the others when they have heard of it."""
        assert self.fault is not None
        assert self.died_at is not None
        died = self.died_at
        if tape.role == Role.WORKER and tape.number in self.fault.ranks:
            return died
        if tape.node in self.fault.nodes:
            return died if tape.role == Role.DAEMON else died + 5 * MS
        return died + 300 * MS

    def _die(self, step: int, clock_end: float) -> None:
        fault = self.fault
        assert fault is not None
        self.died_at = died = clock_end
        for node in range(self.shape.nodes):
            tape = self.daemons[node]
            if node in fault.nodes:
                continue
            for rank in fault.ranks:
                if self.workers[rank].node == node:
                    self._gone(
                        tape, died + 2 * MS, rank, 0, f"rank {rank} (host host{node}, pid {100 + rank}) has died"
                    )
            for dead in fault.nodes:
                self._add(tape, Kind.LOST, died + 2 * MS, 0, peer=dead)
                self._gone(tape, died + 200 * MS, dead, 1, f"the daemon of host{dead} is silent")
            self._add(tape, Kind.FAILED, died + 250 * MS, 1, step)

    def _gone(self, tape: _Tape, time: float, who: int, what: int, why: str) -> None:
        if why not in self.names:
            self.names.append(why)
        self._add(tape, Kind.GONE, time, self.names.index(why), extra=what, peer=who)

    # --- a step of a rank ---------------------------------------------------------------------------------------------

    def _slow(self, what: str, step: int, where: Callable[[Fault], bool]) -> float:
        fault = self.fault
        return fault.when[step] if fault is not None and fault.what == what and where(fault) else 0.0

    def _more(self, what: str, rank: int, step: int) -> float:
        share = self._slow(what, step, lambda fault: rank in fault.ranks)
        return share * self.fault.more if share and self.fault is not None else 0.0

    def _step(self, step: int) -> None:
        shape = self.shape
        if self._slow("killed", step, lambda fault: True):
            self._die(step, min(self.now) + shape.loader + shape.forward / 2)
        given: dict[int, dict[int, float]] = {name: {} for name in range(1, shape.buckets + 1)}
        for rank in range(shape.ranks):
            self._passes(rank, step, given)
        if self.died_at is not None and self.fault is not None:
            dead = {*self.fault.ranks, *(tape.number for tape in self.workers if tape.node in self.fault.nodes)}
            for rank in range(shape.ranks):
                if rank not in dead:
                    self._add(self.workers[rank], Kind.WAIT_BEGIN, self.now[rank], 1, step)
            return
        answered = self._exchange(step, given)
        for rank in range(shape.ranks):
            self._rest(rank, step, answered)
        if shape.loss:
            name = shape.buckets + 1
            told: dict[int, float] = {}
            for rank in range(shape.ranks):
                self.now[rank] += 5 * US
                self._add(self.workers[rank], Kind.SUBMITTED, self.now[rank], name, step, 4, Flush.ALONE)
                told[rank] = self.now[rank]
            answered = self._exchange(step, {name: told})
            for rank in range(shape.ranks):
                self._wait(rank, name, step, answered)

    def _passes(self, rank: int, step: int, given: dict[int, dict[int, float]]) -> None:
        shape, tape = self.shape, self.workers[rank]
        forward, backward, _, loader = (float(self.compute[which, step, rank]) for which in range(4))
        now = self.now[rank] + shape.loader * loader + self._more("loader", rank, step) + float(self.stalls[step, rank])
        self._add(tape, Kind.FORWARD_BEGIN, now, 0, step)
        now += shape.forward * forward + self._more("forward", rank, step)
        self._add(tape, Kind.FORWARD_END, now, 0, step)
        self._add(tape, Kind.BACKWARD_BEGIN, now, 0, step)
        for name in range(1, shape.buckets + 1):
            now += (shape.backward * backward + self._more("backward", rank, step)) / shape.buckets
            self._add(tape, Kind.FULL, now, name, step)
            now += 2 * US
            self._add(tape, Kind.SUBMITTED, now, name, step, shape.bucket_nbytes, Flush.FULL)
            given[name][rank] = now
        if shape.waits == "step":
            self._add(tape, Kind.BACKWARD_END, now, 0, step)
            self._add(tape, Kind.STEP_BEGIN, now, 0, step)
        self.now[rank] = now

    def _wait(self, rank: int, name: int, step: int, answered: dict[tuple[int, int], float]) -> None:
        tape, now, there = self.workers[rank], self.now[rank], answered[name, rank] + 15 * US
        if there > now:
            self._add(tape, Kind.WAIT_BEGIN, now, name, step)
            stop = self._more("stop", rank, step)
            if stop and rank not in self.stopped:  # it is stopped while it waits
                self.stopped.add(rank)
                there = max(there, now + stop)
            self._add(tape, Kind.DONE, there, name, step)
            now = there + US
            self._add(tape, Kind.WAIT_END, now, name, step)
        self.now[rank] = now

    def _rest(self, rank: int, step: int, answered: dict[tuple[int, int], float]) -> None:
        shape, tape = self.shape, self.workers[rank]
        for name in range(1, shape.buckets + 1):
            self._wait(rank, name, step, answered)
        if shape.waits == "backward":
            self._add(tape, Kind.BACKWARD_END, self.now[rank], 0, step)
            self._add(tape, Kind.STEP_BEGIN, self.now[rank], 0, step)
        self._add(tape, Kind.APPLY_BEGIN, self.now[rank], 0, step)
        self.now[rank] += shape.update * float(self.compute[2, step, rank])
        self._add(tape, Kind.APPLY_END, self.now[rank], 0, step)
        self._add(tape, Kind.STEP_END, self.now[rank] + US, 0, step)
        self.now[rank] += 2 * US

    # --- and of the daemons -------------------------------------------------------------------------------------------

    def _work(self, node: int, step: int, ns: float, place: int) -> float:
        """Returns how long a daemon takes for something that usually takes so long."""
        slow = self._slow("daemon", step, lambda fault: node in fault.nodes)
        more = slow * self.fault.more if slow and self.fault is not None else 0.0
        return ns * float(self.small[step][place % 4096]) + more

    def _exchange(self, step: int, given: dict[int, dict[int, float]]) -> dict[tuple[int, int], float]:
        """Runs operations. Returns when each rank is answered."""
        shape, nodes = self.shape, self.shape.nodes
        begun: dict[tuple[int, int], float] = {}
        for name, parts in given.items():
            for node in range(nodes):
                begun[name, node] = self._begin(name, node, step, parts)
        ended = dict(begun)
        if nodes > 1:
            around = shape.exchange == "ring" and not (shape.direct and shape.buckets + 1 in given)
            (self._around if around else self._to_owners)(step, list(given), begun, ended)
        answered = {}
        for (name, node), end in ended.items():
            end += self._work(node, step, 2 * US, 17 * node + name)
            self._add(self.daemons[node], Kind.RUN_END, end, name, step)
            for rank in shape.ranks_of(node):
                end += 3 * US
                self._add(self.daemons[node], Kind.ANSWERED, end, name, step, peer=rank)
                answered[name, rank] = end
        return answered

    def _begin(self, name: int, node: int, step: int, parts: Mapping[int, float]) -> float:
        shape, tape, ready = self.shape, self.daemons[node], 0.0
        for rank in shape.ranks_of(node):
            came = parts[rank] + self._work(node, step, 30 * US, 31 * rank + name) + self.late[step, rank, name]
            self._add(tape, Kind.READY, came, name, step, peer=rank)
            ready = max(ready, came)
        begin = ready + 5 * US
        if name > shape.buckets:
            self._add(tape, Kind.NEGOTIATE_BEGIN, begin, name, step)
            begin = max(begin, max(parts.values()) + 40 * US) + 2 * shape.latency * self.small[step][node + 7]
            slow = self._slow("negotiation", step, lambda fault: node in fault.nodes)
            begin += slow * self.fault.more if slow and self.fault is not None else 0.0
            self._add(tape, Kind.NEGOTIATE_END, begin, name, step)
        nbytes = shape.bucket_nbytes if name <= shape.buckets else 4
        self._add(tape, Kind.RUN_BEGIN, begin, name, step, nbytes)
        if shape.counts[node] > 1:
            begin = self._kernel(name, node, step, begin, nbytes, 3)
        return begin

    def _kernel(self, name: int, node: int, step: int, begin: float, nbytes: int, place: int) -> float:
        end = begin + self._work(node, step, 2 * US + nbytes / 8, 101 * place + 7 * node + name)
        self._add(self.daemons[node], Kind.REDUCE_BEGIN, begin, name, step, nbytes)
        self._add(self.daemons[node], Kind.REDUCE_END, end, name, step, nbytes)
        return end

    def _send(self, name: int, step: int, link: tuple[int, int], queued: float, nbytes: int, begun: float,
              place: int) -> float:  # fmt: skip
        """Sends a chunk. Returns when it is consumed."""
        shape, (source, target) = self.shape, link
        slow = self._slow("link", step, lambda fault: link in fault.links)
        factor = 1 + slow * (self.fault.factor - 1) if slow and self.fault is not None else 1.0
        sent = max(queued + self._work(source, step, 5 * US, place), self.free.get(link, 0.0))
        self.free[link] = sent + nbytes / shape.bandwidth * S * factor
        came = self.free[link] + shape.latency * factor * self.small[step][(place * 13 + target) % 4096]
        taken = max(came, begun) + self._work(target, step, 10 * US, place + 1)
        number = self.numbers[link] = self.numbers.get(link, 0) + 1
        if self.recorded:
            out, into = self.daemons[source], self.daemons[target]
            self._add(out, Kind.QUEUED, queued, name, step, nbytes, 1, target)
            self._add(out, Kind.SENT, sent, name, step, nbytes, number, target)
            self._add(into, Kind.RECEIVED, came, name, step, nbytes, number, source)
            self._add(into, Kind.TAKEN, taken, name, step, nbytes, number, source)
        return float(taken)

    def _sizes(self, name: int) -> int:
        return (
            max(4, self.shape.bucket_nbytes // self.shape.nodes // self.shape.pieces)
            if name <= self.shape.buckets
            else 4
        )

    def _around(self, step: int, names: list[int], begun: Mapping[tuple[int, int], float],
                ended: dict[tuple[int, int], float]) -> None:  # fmt: skip
        nodes, rounds = self.shape.nodes, 2 * (self.shape.nodes - 1)
        events: list[tuple[float, int, int, int, int]] = []
        for name, node in begun:
            for piece in range(self.shape.pieces if name <= self.shape.buckets else 1):
                heapq.heappush(events, (begun[name, node], node, name, 0, piece))
        while events:
            queued, source, name, number, piece = heapq.heappop(events)
            target, nbytes = (source + 1) % nodes, self._sizes(name)
            place = ((name * 16 + number) * 8 + source) * 4 + piece
            taken = self._send(name, step, (source, target), queued, nbytes, begun[name, target], place)
            after = self._kernel(name, target, step, taken, nbytes, place)
            ended[name, target] = max(ended[name, target], after)
            if number + 1 < rounds:
                heapq.heappush(events, (after, target, name, number + 1, piece))

    def _to_owners(self, step: int, names: list[int], begun: Mapping[tuple[int, int], float],
                   ended: dict[tuple[int, int], float]) -> None:  # fmt: skip
        nodes = self.shape.nodes
        events = [
            (begun[name, node], node, (node + turn) % nodes, name, 0)
            for name, node in begun
            for turn in range(1, nodes)
        ]
        heapq.heapify(events)
        reduced: dict[tuple[int, int], list[float]] = {}
        while events:
            queued, source, target, name, back = heapq.heappop(events)
            nbytes = self._sizes(name)
            place = ((name * 2 + back) * 8 + source) * 8 + target
            taken = self._send(name, step, (source, target), queued, nbytes, begun[name, target], place)
            after = self._kernel(name, target, step, taken, nbytes, place)
            ended[name, target] = max(ended[name, target], after)
            if not back:
                there = reduced.setdefault((name, target), [])
                there.append(after)
                if len(there) == nodes - 1:
                    for turn in range(1, nodes):
                        heapq.heappush(events, (max(there), target, (target + turn) % nodes, name, 1))
