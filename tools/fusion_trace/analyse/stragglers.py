"""`fusion-trace stragglers` says which rank, node or link is slow, and why.

In every step, each rank, node and link is compared with the others of its kind, and with itself in other steps: what it
took more than the lower of the two is its *excess*. Four causes are told apart, and none is blamed for another's time:

| cause | of a | what is measured in a step |
| --- | --- | --- |
| compute | rank | the step without what the script waited |
|         | node | the union of its kernels (reducing, encoding, decoding) |
| negotiation | node | asking the coordinator, from when the last rank had handed its part over |
| queue | node | from the hand-over of its last rank to the daemon's start, without negotiation |
|       | link | chunks wait to be sent, or to be taken, while the link carries nothing; from when all nodes run |
| wire | link | something is between its two ends; for the bytes it carried |

An excess counts as far as somebody waited in that step, and if it is more than `LEAST` of the step, more than `CLEARLY`
of what is usual (but for ranks, which are more even), and more than what the clocks' errors can make of nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from fusion_trace.analyse.overlap import Partition, by_step, median, operations_of_steps, partitions
from fusion_trace.read.choice import EVERY_STEP, StepRange
from fusion_trace.read.job import JobTrace
from fusion_trace.read.operations import Operation, operations, script
from fusion_trace.read.spans import Span, difference, total, union

LEAST = 0.03  # of a step, below which an excess is the noise that every machine has
CLEARLY = 0.3
WORTH_TELLING = 0.02  # of all steps, that a finding costs together
CAUSES = ("compute", "negotiation", "queue", "wire")


@dataclass(frozen=True)
class Finding:
    """Something that was slower than the others.

    Attributes:
        cause: one of `CAUSES`.
        rank, node, link: where; one of them is set. A link is (source, target).
        lost: how much longer the steps took because of it, ns, all together.
        share: of the time of all steps.
        steps: numbers of the steps in which it was slow.
        of: how many steps were looked at.
        typical: what it took in these steps, ns, the median; `usual`: what others, or it in other steps, took.
        detail: where in the step, in words; "" if there is nothing to add.
    """

    cause: str
    rank: int | None
    node: int | None
    link: tuple[int, int] | None
    lost: int
    share: float
    steps: tuple[int, ...]
    of: int
    typical: int
    usual: int
    detail: str = ""


_Kind = tuple[str, str]  # of places that are compared with each other


@dataclass(frozen=True)
class _Place:
    cause: str
    rank: int | None = None
    node: int | None = None
    link: tuple[int, int] | None = None

    @property
    def kind(self) -> _Kind:
        return self.cause, "rank" if self.rank is not None else "node" if self.node is not None else "link"


_Times = dict[_Place, dict[int, int]]  # by place and step, ns


def find(trace: JobTrace, chosen: StepRange = EVERY_STEP) -> tuple[Finding, ...]:
    """Returns all that were slower than the others, the most expensive first."""
    parts = partitions(trace, chosen)
    if not parts:
        return ()
    steps = by_step(parts)
    of_step = operations_of_steps(operations(trace).values(), parts)
    bytes_carried: dict[_Place, dict[int, int]] = defaultdict(dict)
    spans_seen: dict[_Place, dict[int, int]] = defaultdict(dict)
    times: _Times = defaultdict(dict)
    for part in parts:
        times[_Place("compute", rank=part.rank)][part.number] = part.ns - part.blocked
    for number, its in of_step.items():
        _of_daemons(number, its, times)
        _of_links(number, its, times, bytes_carried, spans_seen)
    groups: dict[_Kind, list[_Place]] = defaultdict(list)
    for place in times:
        groups[place.kind].append(place)
    findings = []
    for places in groups.values():
        expected = _expected(places, times, bytes_carried)
        for place in places:
            finding = _finding(trace, place, times[place], expected[place], spans_seen[place], steps, parts)
            if finding is not None:
                findings.append(finding)
    return tuple(sorted(findings, key=lambda finding: -finding.lost))


def _of_daemons(number: int, its: Sequence[Operation], times: _Times) -> None:
    """Notes the negotiation, the queues before the start, and the kernels of a step."""
    negotiation: dict[int, int] = defaultdict(int)
    queue: dict[int, int] = defaultdict(int)
    kernels: dict[int, list[Span]] = defaultdict(list)
    for operation in its:
        submitted = [part.submitted for part in operation.workers.values() if part.submitted is not None]
        for node, part in operation.daemons.items():
            kernels[node] += part.worked
            asked = [Span(max(begin, *submitted), end) for begin, end in part.negotiations] if submitted else []
            negotiation[node] += total(union(asked))
            if part.run_begin is None or not part.ready:
                continue
            # Of its workers: when it is ready, the daemon can start; negotiations are counted above.
            locals_ = [operation.workers[rank].submitted for rank in part.ready if rank in operation.workers]
            handed = [time for time in locals_ if time is not None]
            if handed:
                before = difference(union([(max(handed), part.run_begin)]), union(part.negotiations))
                queue[node] += total(before)
    for node in {node for operation in its for node in operation.daemons}:
        times[_Place("negotiation", node=node)][number] = negotiation[node]
        times[_Place("queue", node=node)][number] = queue[node]
        times[_Place("compute", node=node)][number] = total(union(kernels[node]))


def _of_links(
    number: int,
    its: Sequence[Operation],
    times: _Times,
    bytes_carried: dict[_Place, dict[int, int]],
    spans_seen: dict[_Place, dict[int, int]],
) -> None:
    """Notes the queues and wires of a step."""
    flights: dict[tuple[int, int], list[Span]] = defaultdict(list)
    waits: dict[tuple[int, int], list[Span]] = defaultdict(list)
    carried: dict[tuple[int, int], int] = defaultdict(int)
    for operation in its:
        began = [part.run_begin for part in operation.daemons.values() if part.run_begin is not None]
        start = max(began, default=0) if not operation.asynchronous else 0
        for chunk in operation.chunks:
            link = chunk.source, chunk.target
            carried[link] += chunk.nbytes
            if chunk.sent is not None and chunk.received is not None:
                flights[link].append(Span(chunk.sent, chunk.received))
            for begin, end in ((chunk.queued, chunk.sent), (chunk.received, chunk.taken)):
                if begin is not None and end is not None:
                    waits[link].append(Span(max(begin, start), end))
    for link in carried:
        busy, idle = union(flights[link]), difference(union(waits[link]), union(flights[link]))
        wire, queue = _Place("wire", link=link), _Place("queue", link=link)
        times[wire][number], spans_seen[wire][number] = total(busy), len(busy)
        times[queue][number], spans_seen[queue][number] = total(idle), len(idle)
        bytes_carried[wire][number] = carried[link]


def _expected(
    places: Sequence[_Place], times: _Times, bytes_carried: Mapping[_Place, Mapping[int, int]]
) -> dict[_Place, dict[int, float]]:
    """Returns what each place would have taken in each step: as the others did then, or as it does itself, the lower of
    both.

    Links are compared by bytes.
    """

    def nbytes(place: _Place, number: int) -> int:
        return max(1, bytes_carried[place][number]) if place in bytes_carried else 1

    def rate(place: _Place, number: int) -> float:
        return times[place][number] / nbytes(place, number)

    expected: dict[_Place, dict[int, float]] = {}
    for place in places:
        usual = _middle([rate(place, number) for number in times[place]])
        mine: dict[int, float] = {}
        for number in times[place]:
            others = [rate(other, number) for other in places if other != place and number in times[other]]
            at_most = min(usual, _middle(others)) if others else usual
            mine[number] = at_most * nbytes(place, number)
        expected[place] = mine
    return expected


def _middle(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _finding(
    trace: JobTrace,
    place: _Place,
    took: Mapping[int, int],
    expected: Mapping[int, float],
    spans_seen: Mapping[int, int],
    steps: Mapping[int, Sequence[Partition]],
    parts: Sequence[Partition],
) -> Finding | None:
    error = _clock_error(trace, place)
    lost, slow = 0, []
    for number, ns in took.items():
        step = steps[number]
        blocked = max(part.blocked for part in step if part.rank != place.rank or len(step) == 1)
        excess = min(round(ns - expected[number]), blocked)
        noise = error * spans_seen.get(number, 0)
        clearly = 0 if place.rank is not None else CLEARLY * expected[number]
        if excess >= max(1, LEAST * median(part.ns for part in step), noise, clearly):
            lost += excess
            slow.append(number)
    whole = fmean(sum(part.ns for part in parts if part.rank == rank) for rank in {part.rank for part in parts})
    if not slow or lost < WORTH_TELLING * whole:
        return None
    return Finding(
        cause=place.cause,
        rank=place.rank,
        node=place.node,
        link=place.link,
        lost=lost,
        share=lost / whole,
        steps=tuple(slow),
        of=len(steps),
        typical=median(took[number] for number in slow),
        usual=round(_middle([expected[number] for number in slow])),
        detail=_detail(trace, place, slow, steps),
    )


def _clock_error(trace: JobTrace, place: _Place) -> int:
    """Returns by how much times between the two ends of a link may be wrong, ns; each span by so much."""
    if place.link is None:
        return 0
    return sum(max(0, trace.offsets[node].error) for node in place.link if node in trace.offsets)


def _detail(trace: JobTrace, place: _Place, slow: Sequence[int], steps: Mapping[int, Sequence[Partition]]) -> str:
    """Says in which phase a rank is slower than the others, or what of a node is."""
    if place.cause == "queue":
        return "between its workers and its daemon" if place.node is not None else "with nothing on the link"
    if place.cause != "compute":
        return ""
    if place.node is not None:
        return "kernels of the daemon"
    apart: dict[str, list[int]] = {"forward": [], "backward": [], "outside of forward and backward": []}
    scripts = {rank: script(worker) for rank, worker in trace.workers.items()}

    def longer(number: int, length: Callable[[Partition], int]) -> int | None:
        """Returns by how much a part of a step takes longer here than on the other ranks, ns; None: nothing to
        compare."""
        own = [length(part) for part in steps[number] if part.rank == place.rank]
        others = [length(part) for part in steps[number] if part.rank != place.rank]
        return own[0] - median(others) if own and others else None

    for number in slow:
        both = 0
        for name in ("forward", "backward"):
            more = longer(number, lambda part, name=name: _begun_in(part, scripts[part.rank][name])) or 0  # type: ignore[misc]
            apart[name].append(more)
            both += more
        work = longer(number, lambda part: part.ns - part.blocked)
        if work is not None:
            apart["outside of forward and backward"].append(work - both)
    known = {name: fmean(values) for name, values in apart.items() if values}
    total_apart = sum(value for value in known.values() if value > 0)
    named = [name for name, value in known.items() if total_apart > 0 and value >= 0.25 * total_apart]
    return " and ".join(named)


def _begun_in(part: Partition, spans: Sequence[Span]) -> int:
    """Returns how long spans that begin in a step are, ns."""
    return sum(span.ns for span in spans if part.begin <= span.begin < part.end)


def document(trace: JobTrace, found: Sequence[Finding]) -> dict[str, object]:
    """Returns what `--json` shows; all times in ns."""
    return {"job": trace.job, "stragglers": [asdict(finding) for finding in found], "problems": list(trace.problems)}
