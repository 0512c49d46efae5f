"""`fusion-trace tensor` follows a tensor from the hook to the update, over all ranks.

A parameter is followed into its bucket; a bucket, and a tensor outside a plan, are followed themselves.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import overload

import numpy as np

from fusion_rt.tracing.format import Kind
from fusion_trace.analyse.bucket_times import Plan, gradients, plans
from fusion_trace.analyse.overlap import Partition, median, partitions, steps_of_operations
from fusion_trace.read.choice import EVERY_STEP, ChoiceError, StepRange
from fusion_trace.read.chunks import Chunk
from fusion_trace.read.job import JobTrace
from fusion_trace.read.operations import DaemonPart, Operation, WorkerPart, operations
from fusion_trace.read.rows import Ints


@dataclass(frozen=True)
class Event:
    """One thing that happened to a tensor.

    Attributes:
        at: ns on the job's axis.
        since: ns since its first event of this life.
        who: `rank 2`, `the daemon of a` or, of the link between two hosts, `a to b`.
        what: in words.
        lasted: ns, of an activity that began then; None: it is a moment.
    """

    at: int
    since: int
    who: str
    what: str
    lasted: int | None


@dataclass(frozen=True)
class Life:
    """The events of a tensor in one step. `clock`: of the operation; `ns`: from its first event to its last."""

    step: int | None
    clock: int
    plan: int
    operation: str
    nbytes: int
    ns: int
    events: tuple[Event, ...]


class Lives(Sequence[Life]):
    """The lives of a tensor, by time. Each is put together when it is asked for: a job may have more than fit into
    memory.

    Args:
        make: makes the life of an operation; numbers: of the operations.
        lengths: of the lives, ns.
    """

    def __init__(self, make: Callable[[int], Life], numbers: Sequence[int], lengths: Sequence[int]) -> None:
        self._make, self._numbers = make, numbers
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, place: int) -> Life: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Life]: ...
    def __getitem__(self, place: int | slice) -> Life | Sequence[Life]:
        if isinstance(place, slice):
            return Lives(self._make, self._numbers[place], self.lengths[place])
        return self._make(self._numbers[place])


@dataclass(frozen=True)
class TensorLives:
    """A tensor. `nbytes`: of the tensor itself; 0: not known. `lives`: one for each operation, by time."""

    name: str
    nbytes: int
    lives: Lives

    @property
    def typical(self) -> Life | None:
        """The life of median length; None: there are none."""
        lengths = self.lives.lengths
        if not lengths:
            return None
        middle = median(lengths)
        return self.lives[min(range(len(lengths)), key=lambda place: abs(lengths[place] - middle))]


def find(trace: JobTrace, name: str, chosen: StepRange = EVERY_STEP) -> TensorLives:
    """Returns the lives of a tensor or bucket.

    Args:
        name: all of it, or a part of it that no other name has.

    Raises:
        ChoiceError: there is no such name, or several are meant.
    """
    every = operations(trace)
    made = plans(trace)
    name = _meant(name, sorted({trace.names[number] for number in set(every.name.tolist())} | _tensors(trace, made)))
    numbers = {each: number for number, each in enumerate(trace.names)}
    named = every.name == numbers.get(name, 0)
    wanted = named.copy()
    nbytes = 0
    for plan in made:
        bucket = plan.bucket_of(name)
        if bucket is not None:
            nbytes = dict(plan.tensors[bucket])[name]
            wanted |= (every.name == numbers.get(bucket, 0)) & (every.plan == plan.number)
    parts = partitions(trace, chosen)
    step_of = steps_of_operations(every, parts)
    if chosen != EVERY_STEP:
        wanted &= step_of >= 0
    stories = _Stories(trace, name, parts, step_of)
    found: list[tuple[int, int, int]] = []
    for number, operation in every.some(wanted):
        seen = stories.seen(number, operation)
        if seen:
            found.append((operation.submitted or 0, number, _length(seen)))
    found.sort(key=lambda each: each[0])
    if not nbytes:
        nbytes = int(every.nbytes[named].max(initial=0))
    return TensorLives(name, nbytes, Lives(stories.life, [each[1] for each in found], [each[2] for each in found]))


def _tensors(trace: JobTrace, made: Sequence[Plan]) -> set[str]:
    names = {tensor for plan in made for its in plan.tensors.values() for tensor, _ in its}
    for worker in trace.workers.values():
        names |= {trace.names[number] for number in set(worker.of(Kind.GRADIENT)["name"].tolist())}
    return names - {""}


def _meant(name: str, known: Sequence[str]) -> str:
    if name in known:
        return name
    parts = [each for each in known if name and name in each]
    if len(parts) == 1:
        return parts[0]
    if parts:
        raise ChoiceError(f"{name!r} is part of several names: {_some(parts)}")
    near = difflib.get_close_matches(name, known, 5, 0.4) or known
    raise ChoiceError(
        f"nothing in this trace is called {name!r}; there are {_some(near)}" if known else "this trace has no tensors"
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if names[8:] else "")


class _Stories:
    """Everything that happened to a tensor, by operation."""

    def __init__(self, trace: JobTrace, name: str, parts: Sequence[Partition], step_of: Ints) -> None:
        self._trace, self._every, self._step_of = trace, operations(trace), step_of
        self._completed = {rank: times for (rank, of), times in gradients(trace).items() if of == name}
        self._begins = {(part.rank, part.number): part.begin for part in parts}

    def life(self, number: int) -> Life:
        """Returns the life of an operation."""
        operation = self._every.at(int(self._every.places[number]))
        step, seen = int(self._step_of[number]), self.seen(number, operation)
        events = tuple(Event(at, at - seen[0][0], who, what, lasted) for at, who, what, lasted in seen)
        key = operation.key
        return Life(step if step >= 0 else None, key.clock, key.plan, key.name, operation.nbytes, _length(seen), events)

    def seen(self, number: int, operation: Operation) -> list[_Moment]:
        """Returns the records, by time."""
        seen: list[_Moment] = []
        for rank, mine in sorted(operation.workers.items()):
            begin = self._begins.get((rank, int(self._step_of[number])))
            if begin is not None and mine.submitted is not None:
                times = self._completed.get(rank, _NOTHING)
                place = int(np.searchsorted(times, mine.submitted, "right")) - 1
                if place >= 0 and times[place] >= begin:
                    seen.append((int(times[place]), f"rank {rank}", "its gradient is complete", None))
            seen += _of_worker(rank, mine)
        for node, there in sorted(operation.daemons.items()):
            seen += _of_daemon(f"the daemon of {self._trace.host_of(node)}", there)
        for chunk in operation.chunks:
            seen += _of_chunk(self._trace.link_of(chunk.source, chunk.target), chunk)
        seen.sort(key=lambda each: each[0])
        return seen


def _length(seen: Sequence[_Moment]) -> int:
    """Returns how long a life is, ns."""
    return max(at + (lasted or 0) for at, _, _, lasted in seen) - seen[0][0] if seen else 0


_NOTHING = np.zeros(0, np.int64)
_Moment = tuple[int, str, str, int | None]
_Seen = Iterator[_Moment]


def _of_worker(rank: int, mine: WorkerPart) -> _Seen:
    who = f"rank {rank}"
    for at, end in mine.copies:
        yield at, who, "it is copied into the arena", end - at
    if mine.full is not None:
        yield mine.full, who, "the bucket is full", None
    if mine.submitted is not None:
        why = {None: "", 1: ", because it is full", 2: ", because the step wants it", 3: ", by the script"}[mine.flush]
        yield mine.submitted, who, f"it is handed to the daemon{why}", None
    for at, end in mine.waits:
        yield at, who, "the script waits for it", end - at
    if mine.done is not None:
        yield mine.done, who, "the answer is read", None
    for at, end in mine.applies:
        yield at, who, "it is applied", end - at


def _of_daemon(who: str, there: DaemonPart) -> _Seen:
    for rank, at in there.ready.items():
        yield at, who, f"the part of rank {rank} came", None
    for at, end in there.negotiations:
        yield at, who, "the coordinator is asked", end - at
    if there.run_begin is not None:
        lasted = None if there.run_end is None else there.run_end - there.run_begin
        yield there.run_begin, who, "it runs: all local parts are there", lasted
    for what, spans in there.kernels.items():
        for at, end in spans:
            yield at, who, f"it is {what.removesuffix('e')}ed", end - at
    for rank, (at, staleness) in there.applied.items():
        yield at, who, f"its home takes what rank {rank} gave ({staleness} versions old)", None
    for rank, at in there.answered.items():
        yield at, who, f"rank {rank} is answered", None
    if there.failed is not None:
        yield there.failed, who, "it fails", None


def _of_chunk(who: str, chunk: Chunk) -> _Seen:
    if chunk.queued is not None and chunk.sent is not None:
        yield chunk.queued, who, f"a chunk of {chunk.nbytes} bytes waits to be sent", chunk.sent - chunk.queued
    if chunk.sent is not None:
        lasted = None if chunk.received is None else max(chunk.received - chunk.sent, 0)  # clocks may disagree
        yield chunk.sent, who, f"a chunk of {chunk.nbytes} bytes is on the wire", lasted
    elif chunk.received is not None:
        yield chunk.received, who, f"a chunk of {chunk.nbytes} bytes comes", None
    if chunk.received is not None and chunk.taken is not None:
        yield chunk.received, who, "it waits to be used", chunk.taken - chunk.received


def document(trace: JobTrace, found: TensorLives) -> dict[str, object]:
    """Returns what `--json` shows; all times in ns."""
    lives = [asdict(life) for life in found.lives]
    return {
        "job": trace.job,
        "name": found.name,
        "nbytes": found.nbytes,
        "lives": lives,
        "problems": list(trace.problems),
    }
