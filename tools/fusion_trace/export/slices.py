"""Slices and marks of a picture, in columns: a large job has millions of them. They become objects one by one."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fusion_rt.tracing.format import NOBODY, Flush, Kind
from fusion_rt.tracing.reader import Records
from fusion_trace.read.rows import NEVER, Ints

Column = NDArray[Any]  # of integers, as narrow as they may be


class Slice(NamedTuple):
    """An activity that lasts. Times in ns on the job's axis; `arrows`: numbers of those that go through it."""

    begin: int
    end: int
    name: str
    about: Mapping[str, object]
    arrows: tuple[int, ...]


class Mark(NamedTuple):
    """An event at a moment."""

    time: int
    name: str
    about: Mapping[str, object]


@dataclass(frozen=True, eq=False)
class Texts:
    """Names of slices, each of which is kept once. `plan`, `clock`: of operations, by number."""

    plan: Ints
    clock: NDArray[np.uint64]
    names: Sequence[str] = ("",)
    known: list[str] = field(default_factory=list)

    def number(self, text: str) -> int:
        self.known.append(text)
        return len(self.known) - 1

    def numbers(self, before: str, names: Ints, after: str = "") -> Ints:
        """Returns the numbers of texts with a name in the middle, which is one of `names`, by its number there."""
        those, which = np.unique(names, return_inverse=True)
        found: Ints = np.array([self.number(f"{before}{self.names[name]}{after}") for name in those.tolist()], np.int64)
        return found[which] if len(found) else found

    def about(self, operation: int) -> dict[str, object]:
        plan, clock = int(self.plan[operation]), int(self.clock[operation])
        return {"plan": plan, "clock": clock} if plan else {"clock": clock}


@dataclass(frozen=True, eq=False)
class Slices:
    """Slices, in columns of shape (n,).

    Attributes:
        texts: in which `text` is the number of the name.
        begin, end: ns.
        operation: its number in the index; -1: none. nbytes, chunk: what is said of it, `chunk` being the number of a
            chunk on its link; `NEVER`: nothing. why: a `Flush`; 0: none.
        arrow: the number of the one that goes through it; 0: none.
    """

    texts: Texts
    begin: Column
    end: Column
    text: Column
    operation: Column
    nbytes: Column
    chunk: Column
    why: Column
    arrow: Column

    def __len__(self) -> int:
        return len(self.begin)

    def __iter__(self) -> Iterator[Slice]:
        columns = (self.begin, self.end, self.text, self.operation, self.nbytes, self.chunk, self.why, self.arrow)
        for begin, end, text, operation, nbytes, chunk, why, arrow in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            about = self.texts.about(operation) if operation >= 0 else {}
            if nbytes != NEVER:
                about["bytes"] = nbytes
            if chunk != NEVER:
                about["number"] = chunk
            if why:
                about["why"] = Flush(why).name.lower()
            yield Slice(begin, end, self.texts.known[text], about, (arrow,) if arrow else ())

    def at(self, places: Ints) -> Slices:
        """Returns those in these places."""
        columns = (self.begin, self.end, self.text, self.operation, self.nbytes, self.chunk, self.why, self.arrow)
        return Slices(self.texts, *(column[places] for column in columns))


def slices(
    texts: Texts,
    begin: Ints,
    end: Ints,
    text: Column | int,
    operation: Column | int = -1,
    nbytes: Column | int = NEVER,
    chunk: Column | int = NEVER,
    why: Column | int = 0,
    arrow: Column | int = 0,
) -> Slices:
    """Returns slices; a number stands for a column that has nothing else."""
    narrow = [
        np.broadcast_to(np.asarray(column), begin.shape) for column in (text, operation, nbytes, chunk, why, arrow)
    ]
    return Slices(texts, begin, end, *(column.astype(kind) for column, kind in zip(narrow, _NARROW, strict=True)))


_NARROW = (np.int32, np.int32, np.int64, np.int64, np.int8, np.int32)


def together(parts: Sequence[Slices], *order: Ints) -> Slices:
    """Returns all slices of at least one part, sorted by these columns, of all parts, the first one first."""
    columns = ("begin", "end", "text", "operation", "nbytes", "chunk", "why", "arrow")
    joined = Slices(parts[0].texts, *(np.concatenate([getattr(part, name) for part in parts]) for name in columns))
    return joined.at(np.lexsort(order[::-1])) if order else joined


@dataclass(frozen=True, eq=False)
class Marks:
    """Marks, as records. `names`: of the job's table."""

    records: Records
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Mark]:
        columns = (self.records[of].tolist() for of in ("time", "kind", "name", "value", "peer"))
        for time, kind, name, value, peer in zip(*columns, strict=True):
            about: dict[str, object] = {"value": value}
            if peer != NOBODY:
                about["peer"] = peer
            yield Mark(time, self.text(kind, name), about)

    def text(self, kind: int, name: int) -> str:
        """Returns the name of a mark."""
        named = self.names[name]
        return named if kind == Kind.GRADIENT else f"{Kind(kind).name.lower()} {named}".strip()


def lanes(name: str, which: Slices) -> Iterator[tuple[str, Slices]]:
    """Yields tracks, by name, on which no slice begins before the one before it has ended. Those that last no time at
    all get 1 ns, which viewers need to attach arrows to them."""
    order = np.lexsort((which.end, which.begin))
    begin = which.begin[order]
    end = np.maximum(which.end[order], begin + 1)
    place = _places(begin, end)
    laid = which.at(order)
    laid = Slices(laid.texts, begin, end, laid.text, laid.operation, laid.nbytes, laid.chunk, laid.why, laid.arrow)
    for number in range(int(place.max(initial=-1)) + 1):
        yield name if not number else f"{name} ({number + 1})", laid.at(np.flatnonzero(place == number))


def _places(begin: Ints, end: Ints) -> Ints:
    """Returns the track of each slice: the first one that is free."""
    place = np.zeros(len(begin), np.int64)
    if not len(begin):
        return place
    reached = np.maximum.accumulate(end)
    first = np.flatnonzero(np.r_[True, begin[1:] >= reached[:-1]])  # all tracks are free there
    last = np.r_[first[1:], len(begin)]
    several = last - first > 1
    for low, high in zip(first[several].tolist(), last[several].tolist(), strict=True):
        place[low:high] = list(_first_free(begin[low:high].tolist(), end[low:high].tolist()))
    return place


def _first_free(begin: Iterable[int], end: Iterable[int]) -> Iterator[int]:
    busy: list[tuple[int, int]] = []  # when each track is free again
    free: list[int] = []
    tracks = 0
    for opened, closed in zip(begin, end, strict=True):
        while busy and busy[0][0] <= opened:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            place = heapq.heappop(free)
        else:
            place, tracks = tracks, tracks + 1
        heapq.heappush(busy, (closed, place))
        yield place
