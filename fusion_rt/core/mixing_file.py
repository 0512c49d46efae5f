"""Mixing graphs in files: a matrix of weights, as people write it."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fusion_rt.core.errors import MixingError

MAX_SHOWN = 200  # characters of somebody's text in an error
_TOLERANCE = 1e-6  # of a sum that should be 1: people write six decimals
_BYTES_PER_WEIGHT = 40  # a float64 takes 24 characters at most; the rest is for separators and comments
_BYTES_EXTRA = 4096

Row = tuple[tuple[int, float], ...]  # weights of one rank: (sender, weight), ascending, its own included


def read(path: str, ranks: int) -> tuple[Row, ...]:
    """Reads the matrix in a file, made exact where its sums are 1 to six decimals.

    D-PSGD needs rows that sum to 1, push-sum needs such columns; a matrix has to have one of the two.
    """
    weights = np.array(_numbers(path, _content(path, ranks), ranks))
    for rank in range(ranks):
        for sender in range(ranks):
            weight = weights[rank, sender]
            if not math.isfinite(weight) or weight < 0:
                raise MixingError(
                    f"{path}: in the row of rank {rank} the weight for rank {sender} is {weight:g}; write a number "
                    "that is finite and not negative"
                )
    _check_written_sums(path, weights)
    rows = tuple(tuple((int(j), float(row[j])) for j in np.flatnonzero(row)) for row in _exact(weights))
    _check_connected(path, rows)
    return rows


def _content(path: str, ranks: int) -> str:
    limit = ranks * ranks * _BYTES_PER_WEIGHT + _BYTES_EXTRA
    if not path:
        raise MixingError("'file:' names no file; write file:PATH with the path of a matrix of weights")
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for whoever writes to it
            raise MixingError(f"{path} is not a file; write file:PATH with the path of a matrix of weights")
        with open(path, "rb") as file:
            data = file.read(limit + 1) if found.st_size <= limit else b""
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path, and MixingError
        if isinstance(error, MixingError):
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise MixingError(f"{path} cannot be read ({reason}); write file:PATH with the path of a matrix") from None
    if found.st_size > limit or len(data) > limit:
        raise MixingError(
            f"{path} has {max(found.st_size, len(data))} bytes, more than {ranks} x {ranks} weights can need "
            f"({limit}); is it another file, or for more ranks?"
        )
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise MixingError(f"{path} is not a text; write one row of weights a rank, separated by spaces") from None


def _numbers(path: str, content: str, ranks: int) -> list[list[float]]:
    rows: list[list[float]] = []
    for number, line in enumerate(content.splitlines(), 1):
        words = line.partition("#")[0].replace(",", " ").split()
        if not words:
            continue
        where = f"{path}: the row of rank {len(rows)} (line {number})"
        if len(words) != ranks:
            raise MixingError(f"{where} has {len(words)} weights; write {ranks}, one for each rank")
        row = []
        for word in words:
            try:
                row.append(float(word))
            except ValueError:
                raise MixingError(
                    f"{where} has {word[:MAX_SHOWN]!r}, which is no number; write weights such as 0.25"
                ) from None
        rows.append(row)
    if len(rows) != ranks:
        raise MixingError(f"{path} has {len(rows)} rows; write {ranks}, one for each rank")
    return rows


def _check_written_sums(path: str, weights: NDArray[np.float64]) -> None:
    takes, gives = (np.abs(weights.sum(axis=axis) - 1) > _TOLERANCE for axis in (1, 0))
    if takes.any() and gives.any():
        rank = int(np.flatnonzero(takes)[0])
        raise MixingError(
            f"{path}: the row of rank {rank} sums to {weights[rank].sum():.9g}; make every row sum to 1 (or, for "
            "push-sum only, every column)"
        )


def _exact(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scales rows, columns, or both in turn (Sinkhorn and Knopp), whichever sum to 1 to six decimals.

    A symmetric matrix stays symmetric.
    """
    axes = [axis for axis in (1, 0) if np.all(np.abs(weights.sum(axis=axis) - 1) <= _TOLERANCE)]
    for _ in range(100):
        for axis in axes:
            weights = weights / weights.sum(axis=axis, keepdims=True)
        if all(np.all(np.abs(weights.sum(axis=axis) - 1) <= 1e-14) for axis in axes):
            break
    return weights


def _check_connected(path: str, rows: tuple[Row, ...]) -> None:
    """Checks that W is primitive: values get from every rank to every other, and not only at multiples of a period."""
    senders = [[sender for sender, _ in row] for row in rows]
    receivers: list[list[int]] = [[] for _ in rows]
    for receiver, others in enumerate(senders):
        for sender in others:
            receivers[sender].append(receiver)
    everyone = set(range(len(rows)))
    lost = everyone.difference(distances(receivers))
    if lost:
        raise MixingError(
            f"{path}: values of rank 0 never come to rank {min(lost)}; in the row of rank {min(lost)}, or of ranks "
            "on the way to it, put a weight for one that rank 0 reaches"
        )
    lost = everyone.difference(distances(senders))
    if lost:
        raise MixingError(
            f"{path}: values of rank {min(lost)} never come to rank 0; put a weight for rank {min(lost)} into the "
            "row of a rank from which rank 0 takes"
        )
    distance = distances(receivers)
    beat = math.gcd(*(distance[s] + 1 - distance[r] for r, others in enumerate(senders) for s in others))
    if beat != 1:
        raise MixingError(
            f"{path}: values come back to a rank only every {beat} steps, so ranks would pass them on forever and "
            "never agree; give a rank a weight for itself, in the row of rank 0 for example"
        )


def distances(edges: Sequence[Sequence[int]]) -> dict[int, int]:
    """Returns the ranks that rank 0 reaches along the edges, with their distances in steps."""
    distance = {0: 0}
    queue = [0]
    for rank in queue:
        for other in edges[rank]:
            if other not in distance:
                distance[other] = distance[rank] + 1
                queue.append(other)
    return distance
