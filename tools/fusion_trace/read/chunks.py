"""Joins what the daemons at both ends of a link have recorded into the chunks of an operation."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fusion_rt.tracing.format import Kind

OF_LINKS = (Kind.QUEUED, Kind.SENT, Kind.RECEIVED, Kind.TAKEN)

Row = tuple[int, int, int, int, int]
"""Fields of a record: kind, time, value, extra, peer."""


class Chunk(NamedTuple):
    """A chunk on its way from a node to another. Times in ns on the job's axis, None: not recorded.

    Attributes:
        source, target: nodes.
        number: among those of the link; 0: not counted.
        nbytes: of its payload.
        queued: it waits for credit or its turn.
        sent: it was handed to the link.
        received, taken: it came; it was consumed.
    """

    source: int
    target: int
    number: int
    nbytes: int
    queued: int | None
    sent: int | None
    received: int | None
    taken: int | None


def of_link(source: int, target: int, out: Sequence[Row], into: Sequence[Row]) -> list[Chunk]:
    """Returns the chunks of one operation on one link, from what both ends have recorded of it, by time.

    A link keeps its order, so that what has no number belongs to the next one that has nothing yet.
    """
    sent = _departures(out)
    received = _arrivals(into)
    by_number = {row[3]: (row, taken) for row, taken in received if row is not None and row[3]}
    others = deque((row, taken) for row, taken in received if row is None or not row[3])
    chunks = []
    for queued, row in sent:
        number = row[3] if row is not None else 0
        came: Row | None
        if number:
            came, taken = by_number.pop(number, (None, None))
        elif row is not None and others:
            came, taken = others.popleft()
        else:
            came, taken = None, None
        nbytes = next((each[2] for each in (row, queued, came) if each is not None), 0)
        chunks.append(
            Chunk(
                source,
                target,
                number,
                nbytes,
                queued and queued[1],
                row and row[1],
                came and came[1],
                taken and taken[1],
            )
        )
    for came, taken in [*by_number.values(), *others]:
        row = came or taken
        assert row is not None
        chunks.append(Chunk(source, target, row[3], row[2], None, None, came and came[1], taken and taken[1]))
    return chunks


def _departures(rows: Iterable[Row]) -> list[tuple[Row | None, Row | None]]:
    """Returns what was sent on a link, each with the first QUEUED of the chunk, if it had to wait; then what still
    waits.

    A chunk waits for credit, then for its turn, or for one of them, or for neither; nothing overtakes.
    """
    for_credit: deque[Row] = deque()
    for_turn: deque[Row] = deque()
    found: list[tuple[Row | None, Row | None]] = []
    for row in rows:
        if row[0] == Kind.QUEUED and not row[3]:
            for_credit.append(row)
        elif row[0] == Kind.QUEUED:
            for_turn.append(for_credit.popleft() if for_credit else row)
        else:
            waited = for_turn.popleft() if for_turn else for_credit.popleft() if for_credit else None
            found.append((waited, row))
    return found + [(row, None) for row in (*for_turn, *for_credit)]


def _arrivals(rows: Iterable[Row]) -> list[tuple[Row | None, Row | None]]:
    """Returns what came on a link, each with its TAKEN: of the same number, or the first one that is not of another
    chunk."""
    waiting: deque[Row] = deque()
    found: list[tuple[Row | None, Row | None]] = []
    for row in rows:
        if row[0] == Kind.RECEIVED:
            waiting.append(row)
            continue
        came = next((each for each in waiting if row[3] and each[3] == row[3]), None)
        if came is None and waiting and not (waiting[0][3] and row[3]):
            came = waiting[0]
        if came is not None:
            waiting.remove(came)
        found.append((came, row))
    return found + [(row, None) for row in waiting]
