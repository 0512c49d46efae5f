"""Puts the rings of a job together: one axis of time (node 0's clock, ns), one table of names.

Times of a `JobTrace` are int64 nanoseconds of node 0's CLOCK_MONOTONIC, whichever host they were recorded on.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fusion_rt.tracing.format import Kind, Role
from fusion_rt.tracing.reader import (
    Header,
    Records,
    Ring,
    TraceError,
    Window,
    ends_of_steps,
    is_ring,
    read,
    read_header,
)
from fusion_trace.read import alignment
from fusion_trace.read.alignment import Offset
from fusion_trace.read.choice import EVERY_STEP, ChoiceError, StepRange

AT_ONCE = 4 << 20  # of a job that are read if no steps are chosen: with the tables made of them, a few 100 MB
_FOREVER: Window = (-(1 << 62), 1 << 62)
_PATIENCE = 1.0  # seconds without a word
_MOST_FILES = 16384  # below a directory
_DEPTH = 3  # folders of folders that are looked through
COLLECTED = ".rings"  # behind a job's id: the directory that its rings are collected in
_ONE_HOST = 10**7  # ns between the starts of two machines, below which they are one that has two names
_NOWHERE = (
    ", nor has `fusion-trace collect` put any into this directory; a job with --trace-dir has left them there: name "
    "that directory, or set FUSION_TRACE_DIR"
)


@dataclass(frozen=True, eq=False)
class Process:
    """A worker or daemon of a job, with its records.

    Attributes:
        role, rank, node, host, pid: who; the rank of a daemon is its node. `pid` is that of the last one, if several
            processes had this part one after the other.
        records: of `reader.RECORD_DTYPE`, by time; `time` on the job's axis, `name` in the job's table.
        written, overwritten: records, of which the latter are lost.
        paths: the files.
        machine: the same for all hosts of one machine; "": not recorded.
        processors: that it may use; 0: not recorded.
    """

    role: Role
    rank: int
    node: int
    host: str
    pid: int
    records: Records
    written: int
    overwritten: int
    paths: tuple[str, ...]
    machine: str = ""
    processors: float = 0.0

    def __str__(self) -> str:
        return f"rank {self.rank}" if self.role == Role.WORKER else f"daemon of {self.host}"

    def of(self, *kinds: Kind) -> Records:
        """Returns the records of some kinds, by time."""
        order, starts = self._by_kind
        places = [order[starts[kind] : starts[kind + 1]] for kind in sorted({*kinds}) if kind + 1 < len(starts)]
        if len(places) == 1:
            return self.records[places[0]]
        return self.records[np.sort(np.concatenate(places or [order[:0]]))]

    @cached_property
    def _by_kind(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The places of records, by kind and then by time; and where those of each kind begin, and the last ones end.

        Every question begins with the records of some kinds, and searching all of them each time took a tenth of a
        report.
        """
        kinds = np.ascontiguousarray(self.records["kind"])
        order = np.argsort(kinds, kind="stable").astype(np.int32)
        return order, np.concatenate([[0], np.cumsum(np.bincount(kinds, minlength=1))])


@dataclass(frozen=True, eq=False)
class JobTrace:
    """All records of a job.

    Attributes:
        job: its id.
        processes: workers by rank, then daemons by node.
        names: of buckets and tensors; number 0 is "".
        offsets: by node, the number added to its times.
        problems: sentences about missing or unreadable rings.
        nodes: how many the job had.
        began: wall-clock time when the first ring was made, ns since 1970.
        command: the command line of the first rank; "": not recorded.
    """

    job: str
    processes: tuple[Process, ...]
    names: tuple[str, ...]
    offsets: dict[int, Offset]
    problems: tuple[str, ...] = field(default=())
    nodes: int = 0
    began: int = 0
    command: str = ""

    @cached_property
    def workers(self) -> dict[int, Process]:
        """Workers, by rank."""
        return {process.rank: process for process in self.processes if process.role == Role.WORKER}

    @cached_property
    def daemons(self) -> dict[int, Process]:
        """Daemons, by node."""
        return {process.node: process for process in self.processes if process.role == Role.DAEMON}

    @cached_property
    def hosts(self) -> dict[int, str]:
        """Names of hosts, by node."""
        return {process.node: process.host for process in self.processes}

    @cached_property
    def node_of(self) -> dict[int, int]:
        """Nodes, by rank."""
        return {rank: worker.node for rank, worker in self.workers.items()}

    @cached_property
    def _names_of_nodes(self) -> dict[int, str]:
        shared = Counter(self.hosts.values())
        return {node: f"{host} (node {node})" if shared[host] > 1 else host for node, host in self.hosts.items()}

    def host_of(self, node: int) -> str:
        """Returns the name of a node: its host's, with its number where that name is another node's too; `node 3`
        where no ring has the name of its host."""
        return self._names_of_nodes.get(node) or f"node {node}"

    def name_of(self, process: Process) -> str:
        """Returns the name of a worker or daemon; no two have the same."""
        return f"rank {process.rank}" if process.role == Role.WORKER else f"daemon of {self.host_of(process.node)}"

    def link_of(self, source: int, target: int) -> str:
        """Returns the name of the link from one node to another."""
        return f"{self.host_of(source)} to {self.host_of(target)}"

    @property
    def span(self) -> tuple[int, int]:
        """The first and last time of all records, ns; (0, 0) if there are none."""
        ends = [
            (process.records["time"][0], process.records["time"][-1])
            for process in self.processes
            if len(process.records)
        ]
        return (int(min(end[0] for end in ends)), int(max(end[1] for end in ends))) if ends else (0, 0)

    def between(self, begin: int, end: int) -> JobTrace:
        """Returns this trace with the records of a time only, from `begin` to before `end`, which are not copied."""
        parts = []
        for process in self.processes:
            low, high = np.searchsorted(process.records["time"], (begin, end)).tolist()
            parts.append(replace(process, records=process.records[low:high]))
        return replace(self, processes=tuple(parts))


def load(what: Sequence[str], root: str, chosen: StepRange = EVERY_STEP) -> JobTrace:
    """Reads the trace that a person means.

    Args:
        what: nothing (the newest job, also of those that were collected into this directory), one job's id, or
            directories and files, which must be of one job.
        root: directory in which traces are written (`trace_dir`).
        chosen: steps that are asked about: of others as much is read as these need. If it is every step, and there are
            more than `AT_ONCE` records, the last steps are read, and a problem says so.

    Raises:
        TraceError: there is none, or several jobs are meant, or nothing of it can be read.
        ChoiceError: none of the chosen steps is in it.
    """
    paths = find(what, root)
    rings, problems = [], []
    headers: dict[str, Header] = {}
    for path in paths:
        try:
            headers[path] = read_header(path)
        except TraceError as error:
            problems.append(str(error))
    parts = _windows(headers, chosen)
    if parts.chosen is not None:
        problems.append(
            f"of {parts.records:,} records only those of step {parts.chosen.first} and later are read; --steps "
            "chooses others, for commands that have it"
        )
    for path in _told("reading rings", [*headers]):
        try:
            rings.append(read(path, parts.of.get(path)))
        except TraceError as error:
            problems.append(str(error))
    if not rings:
        raise TraceError("; ".join(problems))
    jobs = sorted({ring.job for ring in rings})
    if len(jobs) > 1:
        raise TraceError(f"these are rings of several jobs ({', '.join(jobs)}): name one of them")
    return join(rings, problems)


def _told(what: str, every: Sequence[str]) -> Iterator[str]:
    """Yields all elements; once that takes long, a line on standard error, if it is a terminal, says how many are
    done. It is gone in the end."""
    began, shown = time.monotonic(), False
    try:
        for number, each in enumerate(every):
            if sys.stderr.isatty() and time.monotonic() - began > _PATIENCE:
                print(f"\r{what}: {number} of {len(every)}", end="\033[K", file=sys.stderr, flush=True)
                shown = True
            yield each
    finally:
        if shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class _Windows:
    """The parts of a job's rings that are read.

    Attributes:
        of: by path; those that are missing are read wholly.
        chosen: the steps, if only the last ones of a job are read because it is large; else None.
        records: how many it has.
    """

    of: Mapping[str, Window]
    chosen: StepRange | None = None
    records: int = 0


def _windows(headers: Mapping[str, Header], chosen: StepRange) -> _Windows:
    """Returns which part of each ring some steps are in, with a step on either side, in which operations of theirs may
    begin and end. Without a choice, and if a job is large, the last steps of it.

    Args:
        headers: of the rings, by path.

    Raises:
        ChoiceError: there are whole steps in them, and none that was chosen.
    """
    records = sum(min(header.written, header.capacity) for header in headers.values())
    if chosen == EVERY_STEP and records <= AT_ONCE:
        return _Windows({})
    workers = [path for path, header in headers.items() if header.role == Role.WORKER]
    ends = {path: ends_of_steps(path) for path in _told("looking for steps: rings", workers)}
    clocks = np.sort(np.concatenate([its["clock"] for its in ends.values()])) if ends else np.zeros(0)
    if not len(clocks):
        return _Windows({})
    if not any(clock in chosen for clock in [*np.unique(clocks).tolist(), int(clocks[-1]) + 1]):
        # The one after the last that has ended is there as well, because a rank may have died in it.
        whole = [its["clock"][1:][its["clock"][1:] == its["clock"][:-1] + 1] for its in ends.values()]
        first, last = (pick((int(pick(its)) for its in whole if len(its)), default=0) for pick in (min, max))
        job = next(iter(headers.values())).job
        raise ChoiceError(f"none of the chosen steps is in job {job}, which has steps {first} to {last}")
    limited = None
    if chosen == EVERY_STEP:
        # A record belongs to a step of one rank, on average: the last of these, so that a rank that died long ago does
        # not count.
        kept = max(1, len(clocks) * AT_ONCE // records)
        limited = chosen = StepRange(int(clocks[-kept]), None)
    of = {path: _window(its, chosen) for path, its in ends.items()}
    of_host: dict[tuple[str, int], list[Window]] = {}
    for path, window in of.items():
        of_host.setdefault(_host(headers[path]), []).append(window)
    for path, header in headers.items():
        if header.role == Role.DAEMON and _host(header) in of_host:
            of[path] = _around(of_host[_host(header)])
    return _Windows(of, limited, records)


def _window(ends: Records, chosen: StepRange) -> Window:
    """Returns from when to when a worker's records are to be read, whose steps ended so: where it has none of the
    chosen steps, around where they would be."""
    first, stop = chosen.first or 0, 1 << 62 if chosen.stop is None else chosen.stop
    inside = np.flatnonzero((ends["clock"] >= first) & (ends["clock"] < stop))
    before = np.count_nonzero(ends["clock"] < first)
    low, high = (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (int(before), int(before))
    return (
        int(ends["time"][low - 2]) if low >= 2 else _FOREVER[0],
        int(ends["time"][high]) if high < len(ends) else _FOREVER[1],
    )


def _host(header: Header) -> tuple[str, int]:
    """Returns a key that tells clocks apart."""
    return header.host, header.node


def _around(every: Sequence[Window]) -> Window:
    return min(low for low, _ in every), max(high for _, high in every)


def find(what: Sequence[str], root: str) -> list[str]:
    """Returns the files that a person means, as `load` has it. The newest job, if directories have several and none is
    named.

    Raises:
        TraceError: there are none.
    """
    if len(what) == 1 and not os.path.exists(what[0]):
        paths = _of_job(_left(root), what[0])
        if not paths:
            raise TraceError(f"{what[0]} is neither a file or directory, nor a job with traces in {root}")
        return paths
    if not what:
        paths = _left(root)
        if not paths:
            raise TraceError(f"there are no traces in {root}{_NOWHERE}")
        return _newest(paths)
    paths = []
    for path in what:
        if os.path.isdir(path):
            found = list(_below(path))
            if not found:
                raise TraceError(f"there are no traces in {path}")
            paths += found
        elif os.path.exists(path):
            paths.append(path)
        else:
            raise TraceError(f"{path} does not exist")
    paths = list(dict.fromkeys(os.path.realpath(path) for path in paths))
    return _newest(paths) if all(os.path.isdir(path) for path in what) else paths


@dataclass(frozen=True)
class LeftJob:
    """A job that has left traces.

    Attributes:
        job: its id.
        began: wall-clock time when the first ring was made, ns since 1970.
        hosts: of which there are rings, by node; `nodes`: how many the job had.
        ranks: of which there are rings.
        command: the command line of the first rank; "": not recorded.
        directories: of the rings.
    """

    job: str
    began: int
    hosts: tuple[str, ...]
    nodes: int
    ranks: int
    command: str
    directories: tuple[str, ...]


def by_age(root: str) -> list[str]:
    """Returns the ids of the jobs whose traces jobs and `fusion-trace collect` have left, the newest first."""
    return [each.job for each in left_jobs([], root)]


def left_jobs(directories: Sequence[str], root: str) -> list[LeftJob]:
    """Returns the jobs with traces in directories, or else those of `by_age`; the newest first."""
    jobs, _ = _jobs([path for each in directories for path in _below(each)] if directories else _left(root))
    found = []
    for job in sorted(jobs, key=lambda job: max(made for made, _, _ in jobs[job]), reverse=True):
        headers = [header for _, _, header in jobs[job]]
        hosts = {header.node: header.host for header in sorted(headers, key=lambda header: header.node)}
        found.append(
            LeftJob(
                job=job,
                began=min(header.created_wall for header in headers),
                hosts=tuple(hosts.values()),
                nodes=max(header.nodes for header in headers),
                ranks=len({header.rank for header in headers if header.role == Role.WORKER}),
                command=_command_of(headers),
                directories=tuple(sorted({os.path.dirname(path) for _, path, _ in jobs[job]})),
            )
        )
    return found


def _command_of(headers: Sequence[Header]) -> str:
    """Returns the command line of the first rank of which there is a ring, or ""."""
    workers = [header for header in headers if header.role == Role.WORKER]
    return min(workers, key=lambda header: header.rank).command if workers else ""


def _left(root: str) -> list[str]:
    """Returns the rings that jobs have left, and those that `fusion-trace collect` has put here."""
    collected = (entry.path for entry in os.scandir() if entry.name.endswith(COLLECTED) and entry.is_dir())
    return [*_below(root), *(path for each in sorted(collected) for path in _below(each))]


def _below(directory: str, depth: int = _DEPTH) -> Iterator[str]:
    """Yields the rings in a directory and those below it."""
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries[:_MOST_FILES]:
        if entry.is_dir(follow_symlinks=False):
            if depth > 1:
                yield from _below(entry.path, depth - 1)
        elif entry.is_file() and is_ring(entry.path):
            yield entry.path


def _jobs(paths: Iterable[str]) -> tuple[dict[str, list[tuple[int, str, Header]]], list[str]]:
    """Returns, by job, when its rings were made, where they are, and their headers; and files of which nobody can tell
    whose they are."""
    jobs: dict[str, list[tuple[int, str, Header]]] = {}
    damaged = []
    for path in paths:
        try:
            header = read_header(path)
        except TraceError:
            damaged.append(path)
            continue
        jobs.setdefault(header.job, []).append((header.created_wall, path, header))
    return jobs, damaged


def _of_job(paths: Sequence[str], job: str) -> list[str]:
    """Returns a job's rings, and damaged ones beside them, which `load` describes."""
    jobs, damaged = _jobs(paths)
    its = [path for _, path, _ in jobs.get(job, [])]
    beside = {os.path.dirname(path) for path in its}
    return its + [path for path in damaged if os.path.dirname(path) in beside]


def _newest(paths: Sequence[str]) -> list[str]:
    """Returns the rings of the job of which one was made last; all, if not one of them can be read."""
    jobs, _ = _jobs(paths)
    return _of_job(paths, max(jobs, key=lambda job: max(made for made, _, _ in jobs[job]))) if jobs else list(paths)


def join(rings: Sequence[Ring], problems: Sequence[str] = ()) -> JobTrace:
    """Puts rings of one job, at least one, on one axis of time and gives them one table of names.

    Their records become those of the trace, without a copy, and are changed.
    """
    rings = _without_copies(rings)
    problems = [*problems, *(problem for ring in rings for problem in ring.problems)]
    names: dict[str, int] = {"": 0}
    offsets = _offsets(rings, problems)
    parts: dict[tuple[Role, int], list[tuple[Ring, Records]]] = {}
    for ring in sorted(rings, key=lambda ring: (ring.role, ring.rank, ring.created_wall)):
        numbers = np.array([names.setdefault(name, len(names)) for name in ring.names], "<u4")
        records = ring.records
        records["name"] = numbers[records["name"]]
        records["time"] = offsets[ring.node].apply(records["time"])
        parts.setdefault((ring.role, ring.rank), []).append((ring, records))
    processes = tuple(_process(role, rank, part) for (role, rank), part in parts.items())
    problems += _missing(rings, processes)
    nodes = max(ring.nodes for ring in rings)
    began = min(ring.created_wall for ring in rings)
    return JobTrace(rings[0].job, processes, tuple(names), offsets, tuple(problems), nodes, began, _command_of(rings))


def _without_copies(rings: Sequence[Ring]) -> list[Ring]:
    """Returns, of each ring that is there more than once (collected twice, for instance), the one that was copied
    last."""
    latest: dict[tuple[object, ...], Ring] = {}
    for ring in rings:
        key = (ring.role, ring.rank, ring.host, ring.pid, ring.created)
        if key not in latest or latest[key].written < ring.written:
            latest[key] = ring
    return list(latest.values())


def _process(role: Role, rank: int, part: Sequence[tuple[Ring, Records]]) -> Process:
    last = part[-1][0]
    records = part[0][1] if len(part) == 1 else np.concatenate([records for _, records in part])
    if (records["time"][1:] < records["time"][:-1]).any():
        records = records[np.argsort(records["time"], kind="stable")]
    return Process(
        role=role,
        rank=rank,
        node=last.node,
        host=last.host,
        pid=last.pid,
        records=records,
        written=sum(ring.written for ring, _ in part),
        overwritten=sum(ring.overwritten for ring, _ in part),
        paths=tuple(ring.path for ring, _ in part),
        machine=last.machine,
        processors=last.processors,
    )


def _offsets(rings: Sequence[Ring], problems: list[str]) -> dict[int, Offset]:
    """Returns the offset of every node with a ring. Where nothing was measured, the host's clocks are believed, and
    that is said."""
    daemons: dict[int, Records] = {}
    for ring in rings:
        if ring.role == Role.DAEMON:
            earlier = daemons.get(ring.node)
            daemons[ring.node] = ring.records if earlier is None else np.concatenate([earlier, ring.records])
    by_node = {ring.node: ring for ring in rings}
    offsets = alignment.by_machine(alignment.to_node_0(daemons), {node: ring.machine for node, ring in by_node.items()})
    reference = by_node[min(by_node)]
    for node, ring in sorted(by_node.items()):
        if node in offsets:
            continue
        apart = _boot(ring) - _boot(reference)
        if abs(apart) < (10**9 if ring.host == reference.host else _ONE_HOST):
            offsets[node] = alignment.same("the same host as node 0")
            continue
        offsets[node] = alignment.fixed(apart, -1, "the hosts' wall clocks")
        problems.append(
            f"the clock of host {ring.host} was not measured against the others: the hosts' wall clocks "
            "are believed, and times between hosts may be wrong by more than they last"
        )
    return {node: offsets[node] for node in by_node}


def _boot(ring: Ring) -> int:
    """Returns the wall-clock time at which the host's CLOCK_MONOTONIC was 0, ns."""
    return ring.created_wall - ring.created


def _missing(rings: Sequence[Ring], processes: Sequence[Process]) -> Iterator[str]:
    nodes = max(ring.nodes for ring in rings)
    there = {process.node for process in processes if process.role == Role.DAEMON}
    hosts = {process.node: process.host for process in processes}
    if absent := [hosts.get(node, f"node {node}") for node in range(nodes) if node not in there]:
        shown = ", ".join(absent[:8]) + (", ..." if absent[8:] else "")
        yield f"there is no ring of the daemons of {shown}: `fusion-trace collect` fetches them from other hosts"
    for process in processes:
        if not len(process.records):
            yield (
                f"the {process} has recorded nothing"
                if process.role == Role.DAEMON
                else f"{process} has recorded nothing"
            )
