"""The cost of control by the number of hosts: whole daemons in virtual time, and parts of a job of 1,024 hosts.

    python -m benchmarks.scale --control
    python -m benchmarks.scale --control --nodes 8,16,32

*Whole daemons* are those of the product, in one thread and in virtual time (`tests/fusiond/network_simulation`): their
links, epochs, plans and ends are real; sockets, threads and processes are not there. One worker on each host goes
through the *phases* of a job, one after the other. CPU and the longest callback are measured; messages and bytes are
counted. *Parts* are single classes with as many ranks as a large job has, eight on each host.

How a figure grows is the exponent of N that fits it best (least squares of logarithms). A job whose cost for each
daemon grows with the number of its peers has an exponent of 1.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
from msgspec.structs import replace
from rich.console import Console

from benchmarks.common import results, tables
from benchmarks.common.results import Measure, Record
from benchmarks.common.tables import Table
from fusion_rt import wire
from fusion_rt.core.cost import CostModel
from fusion_rt.core.topology import Topology
from fusion_rt.settings import Settings
from fusion_rt.tracing import resident_memory
from fusiond.control.negotiation import Coordinator
from fusiond.core.participants import Participants
from fusiond.live import figures
from fusiond.live.rates import compare
from fusiond.transport import distance, mesh
from fusiond.transport.distance import ring_order
from tests.fusiond.network_simulation import Network, VirtualWorker, job

NAME = "control"
DAEMONS, OF_PARTS, LOSSES = "whole daemons", "parts", "losses"  # kinds of records
NODES = (8, 64, 256)
HOSTS, RANKS = 1024, 8  # of the parts: hosts, and ranks on each
PARTS_AT = (64, 256, HOSTS)
TENSORS = 300
PENDING = 4000  # operations that are seen for the first time
IDLE = 10.0  # seconds
LOSS, PAUSE, SEEDS = 0.01, 3.0, 3  # of packets; seconds; jobs
PHASES = ("start", "first operation", "gather", "plan", "steps", "idle", "epoch", "end")
_TENSOR = 64  # elements
_LIMIT = 600.0  # seconds of virtual time for a phase


def lines_of(function: Callable[[], object]) -> int:
    """Calls a function, and counts the lines of the product's Python that run: the same each time, on any machine."""
    count = 0

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if not _is_ours(frame.f_code.co_filename):
            return None
        count += 1
        return line

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return line

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


@cache
def _is_ours(file: str) -> bool:
    return ("/fusiond/" in file or "/fusion_rt/" in file) and "/tests/" not in file


class MeteredNetwork(Network):
    """A network that measures what daemons do in each phase.

    Args:
        count: count lines of the product's Python that run, which are the same each time, and measure no time.

    Attributes:
        phase: the present one.
        cpu: seconds by phase and node; where lines are counted, lines.
        longest: seconds (lines) of the longest callback by phase, and its name.
        sent, bytes: of all daemons, by phase.
    """

    def __init__(self, count: bool = False) -> None:
        super().__init__(0, 1e9, 1e-4)
        self.phase = PHASES[0]
        self.cpu: dict[str, Counter[int]] = defaultdict(Counter)
        self.longest: dict[str, tuple[float, str]] = {}
        self.sent: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._count = count
        self._before = (0, 0)

    def step(self, node: int, callback: Callable[[], None]) -> None:
        if self._count:
            took = float(lines_of(callback))
        else:
            began = time.thread_time()
            callback()
            took = time.thread_time() - began
        self.cpu[self.phase][node] += took  # type: ignore[assignment]
        if took > self.longest.get(self.phase, (0.0, ""))[0]:
            self.longest[self.phase] = took, getattr(callback, "__qualname__", repr(callback)[:80])

    def begin(self, phase: str) -> None:
        """Ends a phase, and begins the next one."""
        total = self.messages.total(), self.nbytes.total()
        self.sent[self.phase] += total[0] - self._before[0]
        self.bytes[self.phase] += total[1] - self._before[1]
        self._before, self.phase = total, phase


class VirtualJob:
    """A job of daemons in virtual time, one worker on each.

    Args:
        nodes: how many.
        tensors: of the model.
        count: see `MeteredNetwork`.
    """

    def __init__(self, nodes: int, tensors: int, count: bool = False) -> None:
        self.network = MeteredNetwork(count)
        self._tensors = tuple(
            wire.TensorSpec(f"layer.{index}.weight", "float32", (_TENSOR,)) for index in range(tensors)
        )
        self._gates: dict[int, Callable[[], None]] = {}
        self._waiting = 0
        self.workers = job(self.network, [1] * nodes, tensors * _TENSOR * 4 + 65536, start_timeout=_LIMIT)

    def run(self) -> None:
        """Runs all phases."""
        workers, network = self.workers, self.network
        for worker in workers:
            worker.begin(self._script(worker))
        self._wait()
        for phase in PHASES[1:5]:
            network.begin(phase)
            self._open()
            self._wait()
        network.begin("idle")
        let_pass(network, IDLE)
        network.begin("epoch")
        for daemon in network.daemons:
            daemon.may_return = True
        for worker in workers:
            worker.daemon.tell(worker, wire.Bye())
        let_pass(network, 1.0)
        self._waiting = 0
        for worker in workers:
            worker.begin(self._again(worker))
        self._wait()
        let_pass(network, 5.0)
        network.begin("end")
        for daemon in network.daemons:
            daemon.may_return = False
        self._open()
        network.run(lambda: all(daemon.loop.stopped for daemon in network.daemons), _LIMIT)
        network.begin("over")
        failures = [failure for worker in workers for failure in worker.failures]
        assert not failures, failures[:1]
        assert not any(daemon.failure for daemon in network.daemons)

    def _wait(self) -> None:
        self.network.run(lambda: self._waiting == len(self.workers), _LIMIT)

    def _open(self) -> None:
        """Lets all workers go on."""
        self._waiting = 0
        for worker in self.workers:
            worker.hear(cast(Any, SimpleNamespace(handle=-1)))

    def _gate(self, worker: VirtualWorker) -> list[int]:
        worker.answers.pop(-1, None)
        self._waiting += 1
        return [-1]

    def _script(self, worker: VirtualWorker) -> Iterator[Any]:
        yield self._gate(worker)
        yield [_submit(worker, "allreduce", 0)]
        yield self._gate(worker)
        yield [_submit(worker, "allgather", 0)]
        yield self._gate(worker)
        proposal = wire.Proposal("opt", 0, 0, wire.Reduction("sum"), self._tensors)
        handle = worker.submit(wire.Propose(next(worker.handles), proposal))
        yield [handle]
        plan = cast(wire.Planned, worker.answers[handle]).plan
        worker.daemon.tell(worker, wire.AddSegment(1, plan.nbytes, plan.id))
        yield self._gate(worker)
        for clock in range(2):
            ready = [wire.Ready(next(worker.handles), plan.id, bucket.index, clock) for bucket in plan.buckets]
            yield [worker.submit(each) for each in ready]
        yield self._gate(worker)
        yield [-2]

    def _again(self, worker: VirtualWorker) -> Iterator[Any]:
        yield self._gate(worker)


def let_pass(network: Network, seconds: float) -> None:
    """Lets time pass."""
    over: list[bool] = []
    network.at(network.now + seconds, lambda: over.append(True))
    network.run(lambda: bool(over), seconds + 1)


def _submit(worker: VirtualWorker, kind: wire.Kind, clock: int) -> int:
    signature = wire.Signature(kind, "float32", (1,))
    return worker.submit(wire.Submit(next(worker.handles), kind, clock, signature, inline=bytes(4)))


def whole_daemons(nodes: int) -> Record:
    """Measures a job of so many hosts."""
    here, date = results.begin()
    gc.collect()
    before = resident_memory.nbytes()
    gc.disable()  # it would look at the objects of all daemons
    try:
        virtual = VirtualJob(nodes, TENSORS)
        virtual.run()
    finally:
        gc.enable()
    network = virtual.network
    measures = [_figure("memory of a daemon", "B", (resident_memory.nbytes() - before) / nodes)]
    for phase in PHASES:
        cpu = network.cpu[phase]
        measures += [
            _figure(f"{phase}: CPU of a daemon", "s", sum(cpu.values()) / nodes),
            _figure(f"{phase}: CPU of the coordinator", "s", float(cpu[0])),
            _figure(f"{phase}: longest callback", "s", network.longest.get(phase, (0.0, ""))[0]),
            _figure(f"{phase}: messages of a daemon", "1", network.sent[phase] / nodes, portable=True),
            _figure(f"{phase}: bytes of a daemon", "B", network.bytes[phase] / nodes, portable=True),
        ]
    details = {"longest": {phase: name for phase, (_, name) in network.longest.items()}}
    setting: results.Setting = {"what": DAEMONS, "hosts": nodes}
    return Record(setting, measures, here, date, results.command_line(), details)


def lines(nodes: int, tensors: int = 20) -> dict[str, float]:
    """Counts the lines of the product's Python that a daemon, and the coordinator, run in each phase, and messages."""
    virtual = VirtualJob(nodes, tensors, count=True)
    virtual.run()
    network = virtual.network
    found = {}
    for phase in PHASES:
        cpu = network.cpu[phase]
        found[f"{phase}: lines of a daemon"] = sum(cpu.values()) / nodes
        found[f"{phase}: lines of the coordinator"] = float(cpu[0])
        found[f"{phase}: messages of a daemon"] = network.sent[phase] / nodes
        found[f"{phase}: bytes of a daemon"] = network.bytes[phase] / nodes
        found[f"{phase}: lines of the longest callback"] = network.longest.get(phase, (0.0, ""))[0]
    return found


def exponent(figures: Mapping[int, float]) -> float:
    """Returns the exponent of N that fits figures by N best; 0 where they are nothing."""
    if min(figures.values()) <= 0:
        return 0.0
    sizes, values = np.log(list(figures)), np.log(list(figures.values()))
    return float(np.polyfit(sizes, values, 1)[0])


# --- losses -----------------------------------------------------------------------------------------------------------


class UnreliableNetwork(Network):
    """A network in which one packet in a hundred is lost, and comes after a retransmission's time-out."""

    def late(self) -> float:
        seconds, wait = super().late(), 0.2
        while self.random.random() < LOSS:
            seconds, wait = seconds + wait, 2 * wait
        return seconds


def found_out(nodes: int, seed: int) -> tuple[float, int]:
    """Runs an idle job in which one packet in a hundred is lost and daemons stand still for 3 s, now and then, and cuts
    a host off in the end.

    Returns: seconds until all others know; how many daemons had failed before.
    """
    network = UnreliableNetwork(seed, 1e9, 1e-4)
    workers = job(network, [1] * nodes, 8, start_timeout=_LIMIT)
    for worker in workers:
        worker.begin(iter([[-1]]))
    network.run(lambda: all(worker.started for worker in workers), _LIMIT)
    for pause in range(6):
        node = network.random.randrange(nodes)
        network.at(
            network.now + 5.0 * pause, partial(network.paused.__setitem__, node, network.now + 5.0 * pause + PAUSE)
        )
    let_pass(network, 30.0)
    alarms = sum(bool(daemon.failure) for daemon in network.daemons)
    lost = network.random.randrange(nodes)
    network.cut.add(lost)
    began = network.now
    left = [daemon for daemon in network.daemons if daemon.node != lost]
    network.run(lambda: all(daemon.failure for daemon in left), 60.0)
    assert alarms or all(f"host{lost}" in daemon.failure for daemon in left)
    return network.now - began, alarms


def losses(nodes: int) -> Record:
    """Measures how soon all know that a host is cut off, and how many daemons fail for nothing, where each watches its
    neighbours, and where each watches all others."""
    here, date = results.begin()
    found: dict[str, list[tuple[float, int]]] = {}
    for name, distances in (("neighbours", None), ("all others", nodes)):
        with nullcontext() if distances is None else patch.object(mesh, "_DISTANCES", distances):
            found[name] = [found_out(nodes, seed) for seed in range(SEEDS)]
    seconds = {name: results.rounded(each[0] for each in runs) for name, runs in found.items()}
    alarms = {name: [float(each[1]) for each in runs] for name, runs in found.items()}
    measures = [
        Measure("until all know of a host that is cut off", "s", seconds, "all others", portable=True),
        Measure("daemons that fail for nothing", "1", alarms, "all others", portable=True),
    ]
    return Record({"what": LOSSES, "hosts": nodes}, measures, here, date, results.command_line())


# --- parts ------------------------------------------------------------------------------------------------------------


class _Nodes:
    """Where a coordinator's messages go: nowhere."""

    def send(self, messages: Sequence[tuple[int, wire.PeerMessage]]) -> None:
        pass

    def warn(self, text: str) -> None:
        pass


class Longest:
    """Times calls: `total` seconds, and `longest`."""

    def __init__(self) -> None:
        self.total = self.longest = 0.0

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        began = time.thread_time()
        found = function(*arguments)
        took = time.thread_time() - began
        self.total, self.longest = self.total + took, max(self.longest, took)
        return found


def topology(hosts: int, ranks: int = RANKS) -> Topology:
    """Returns one of so many hosts with so many ranks each."""
    local = tuple(tuple(range(ranks * host, ranks * host + ranks)) for host in range(hosts))
    return Topology(tuple(f"host{host}" for host in range(hosts)), local)


def coordinator(hosts: int) -> Coordinator:
    """Returns the coordinator of a job of so many hosts."""
    return Coordinator(Participants(topology(hosts), 0), Settings(), cast(Any, None), _Nodes())


def plan_of_many_tensors(hosts: int) -> Longest:
    """The coordinator makes a plan of `TENSORS` tensors, of messages as they come from nodes."""
    tensors = tuple(wire.TensorSpec(f"layers.{index}.weight", "float32", (256, 256)) for index in range(TENSORS))
    asked = wire.encode(wire.PlanRequest(0, wire.Proposal("opt", 0, 0, wire.Reduction("average"), tensors)))
    ours, took = coordinator(hosts), Longest()
    for rank in range(hosts * RANKS):
        message: Any = wire.PlanRequestAlike(rank, 0, "opt", 0, rank - 1)
        if rank % RANKS == 0:
            message = replace(wire.decode_peer_message(asked), rank=rank)
        told = wire.encode(message)
        took(lambda told=told, rank=rank: ours.handle(rank // RANKS, wire.decode_peer_message(told)))
    assert ours.statistics()["plans"] == 1
    return took


def requests(hosts: int, name: str) -> Iterator[tuple[bytes, int]]:
    """Yields the encoded messages by which nodes ask about an operation."""
    signature = wire.Signature("allgather", "float32", (4,))
    key = wire.OpKey(0, 0, name, 0)
    for host in range(hosts):
        signatures = {rank: signature for rank in range(host * RANKS, host * RANKS + RANKS)}
        yield wire.encode(wire.Request(key, signatures, {})), host


def first_operation(hosts: int) -> Longest:
    """The coordinator decides on an operation that is new to it."""
    ours, took = coordinator(hosts), Longest()
    answer: Any = []
    for message, node in requests(hosts, "x"):
        answer = took(lambda message=message, node=node: ours.handle(node, wire.decode_peer_message(message)))
    assert len(answer) == hosts
    return took


def many_operations(hosts: int = 2) -> Longest:
    """The coordinator decides on `PENDING` operations on two nodes, which all wait before the second node asks."""
    ours, took = coordinator(hosts), Longest()
    asked = []
    for index in range(PENDING):
        signature = wire.Signature("allreduce", "float32", (index + 1,))
        for node in range(hosts):
            signatures = {rank: signature for rank in range(node * RANKS, node * RANKS + RANKS)}
            asked.append((node, wire.Request(wire.OpKey(0, 0, f"tensor.{index}", 0), signatures, {})))
    for node, request in sorted(asked, key=lambda each: each[0]):
        took(ours.handle, node, request)
    assert ours.statistics()["pending"] == 0
    return took


def measured_ring(hosts: int) -> Longest:
    """Every node finds the order of a ring over measured links of four sites; of 128 nodes at most."""
    hosts = min(hosts, distance._MOST)
    choose = np.random.default_rng(0)
    sites = choose.integers(0, 4, hosts)
    costs = {}
    for one in range(hosts):
        for other in range(one + 1, hosts):
            far = 0.02 * abs(int(sites[one]) - int(sites[other])) + 1e-4
            costs[one, other] = CostModel(far * (1 + 0.1 * choose.random()), 1e-9 * (1 + choose.random()))
    took = Longest()
    order = took(ring_order, range(hosts), costs)
    assert sorted(order) == list(range(hosts))
    return took


def looked_at(hosts: int) -> Longest:
    """One daemon puts the figures of all together for `fusiond top`, which compares two looks."""
    links, ranks = figures.shares(hosts)
    of_links = tuple(wire.LinkFigures(node, 1000 * node, 1000 * node, 10, 0, False) for node in range(hosts))
    took = Longest()
    told = {}
    for node in range(hosts):
        of_ranks = tuple(wire.RankFigures(rank, 1, 1, 0.0) for rank in range(RANKS * node, RANKS * node + RANKS))
        counters = (1, 1, 1, 0, 0, 0, 0, 0.0)
        told[node] = wire.Figures(0, 1, "running", "", 1.0, 1.0, *counters, of_ranks[:ranks], of_links[:links])
    text = took(lambda: figures.fitting(figures.document("job", topology(hosts), told, 1.0)))
    compare(None, json.loads(text))
    return took


PARTS: dict[str, Callable[[int], Longest]] = {
    "a plan of 300 tensors": plan_of_many_tensors,
    "an operation seen for the first time": first_operation,
    "the order of a ring": measured_ring,
    "figures for fusiond top": looked_at,
}


def parts(hosts: int) -> Record:
    """Measures the parts of a job of so many hosts."""
    here, date = results.begin()
    measures = []
    for name, part in PARTS.items():
        took = part(hosts)
        measures += [_figure(f"{name}: CPU", "s", took.total), _figure(f"{name}: longest callback", "s", took.longest)]
    if hosts == HOSTS:
        measures.append(_figure(f"{PENDING} operations pending on two nodes: CPU", "s", many_operations().total))
    return Record({"what": OF_PARTS, "hosts": hosts}, measures, here, date, results.command_line())


def _figure(name: str, unit: str, value: float, portable: bool = False) -> Measure:
    return Measure(name, unit, {"fusion_rt": results.rounded([value])}, portable=portable)


def main(nodes: Sequence[int], out: Path | None, only_table: bool) -> None:
    """Measures whole daemons of so many hosts, and parts; keeps the results in a file, and shows all that are there."""
    path = out or results.RESULTS / f"{NAME}.json"
    for count in () if only_table else nodes:
        results.keep(path, NAME, whole_daemons(count))
        results.keep(path, NAME, losses(count))
    for count in () if only_table or nodes is not NODES else PARTS_AT:
        results.keep(path, NAME, parts(count))
    show(results.load(path, NAME).records, Console(width=None))


# --- tables -----------------------------------------------------------------------------------------------------------


def of(records: Sequence[Record], what: str) -> list[Record]:
    """Returns the records of one kind, the fewest hosts first."""
    chosen = [record for record in records if record.setting["what"] == what]
    return sorted(chosen, key=lambda record: int(record.setting["hosts"]))


def by_hosts(records: Sequence[Record], what: str, name: str) -> dict[int, float]:
    """Returns a figure by the number of hosts."""
    return {
        int(record.setting["hosts"]): measure.samples["fusion_rt"][0]
        for record in of(records, what)
        for measure in record.measures
        if measure.name == name
    }


def phases(records: Sequence[Record]) -> Table:
    """Makes a table of the cost of each phase, by the number of hosts, with the exponent of N."""
    hosts = ", ".join(str(record.setting["hosts"]) for record in of(records, DAEMONS))
    figures = ("CPU of a daemon", "CPU of the coordinator", "longest callback", "messages of a daemon")
    table = Table(["phase", *figures], title=f"whole daemons: {hosts} hosts, and the exponent of N")
    for phase in PHASES:
        table.add(phase, *(_cell(by_hosts(records, DAEMONS, f"{phase}: {name}"), name) for name in figures))
    return table


def large_parts(records: Sequence[Record]) -> Table:
    """Makes a table of the cost of parts, by the number of hosts, with the exponent of N."""
    hosts = ", ".join(str(record.setting["hosts"]) for record in of(records, OF_PARTS))
    table = Table(["part", "CPU", "longest callback"], title=f"parts: {hosts} hosts of {RANKS} ranks")
    for part in PARTS:
        table.add(part, *(_cell(by_hosts(records, OF_PARTS, f"{part}: {name}"), name) for name in table.columns[1:]))
    return table


def found_losses(records: Sequence[Record]) -> Table:
    """Makes a table of how soon a host that is cut off is known to all."""
    table = Table(["hosts", "a daemon watches", "until all know, s", "daemons that fail for nothing"])
    for record in of(records, LOSSES):
        seconds, alarms = record.measures
        for name, samples in seconds.samples.items():
            known = "; ".join(f"{each:.2f}" for each in samples)
            table.add(str(record.setting["hosts"]), name, known, f"{sum(alarms.samples[name]):.0f}")
    return table


def _cell(figures: Mapping[int, float], name: str) -> str:
    """Formats a figure by the number of hosts; times in ms."""
    unit, scale = ("", 1.0) if name.startswith("messages") else (" ms", 1e3)
    values = ", ".join(tables.number(value * scale, 2) for value in figures.values())
    grows = round(exponent(figures), 1) + 0.0  # not -0.0
    return f"{values}{unit} ({grows:.1f})" if len(figures) > 1 else f"{values}{unit}"


def show(records: Sequence[Record], console: Console) -> None:
    """Prints all tables, and the memory of a daemon by the number of hosts."""
    for table in (phases(records), large_parts(records), found_losses(records)):
        table.show(console)
    memory = by_hosts(records, DAEMONS, "memory of a daemon")
    console.print("memory of a daemon:", ", ".join(f"{hosts} hosts {n / 2**20:.1f} MiB" for hosts, n in memory.items()))
