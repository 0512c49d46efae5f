"""Mixing graphs of decentralised training: at each clock, which ranks a rank takes values from, and with what weight.

A graph is written as text, in a setting or on a command line:

| text | from which ranks a rank takes | weights |
| --- | --- | --- |
| `ring` | both neighbours | 1/3 each (two ranks: 1/2) |
| `torus` | the neighbours in a grid closed on both sides, as square as possible; its rows run to and fro, so that ranks in sequence are neighbours and, with even sides, all neighbours have different parity | 1 / (1 + neighbours) |
| `exponential` | rank i from i - 1, i - 2, i - 4, ... (modulo ranks) | 1 / (1 + senders) |
| `one-peer-exponential` | at clock k, rank i from i - 2^(k mod ceil(log2 ranks)) only | 1/2 |
| `complete` | everybody from everybody | 1 / ranks |
| `bipartite` | as in a ring, but only even ranks from odd ones and the other way round: with an odd number of ranks the ring is left open | 1 / (1 + the larger number of neighbours) (Metropolis) |
| `random-pairs` | at each clock, a rank that is drawn for it, which takes from it, too; with an odd number of ranks one has none (the draws repeat after 32 clocks, and are the same in every job) | 1/2 |
| `hypercube` | ranks whose numbers differ in one bit; for 2^k ranks | 1 / (1 + k) |
| `file:PATH` | a matrix of weights: one row a rank, separated by white space or commas, `#` starts a comment | as they are |

A one-peer exponential graph averages exactly, in log2(ranks) steps, only when the number of ranks is a power of two
(arXiv 2110.13363); with 6 ranks a distance of up to 0.22 of the first one is left after a period. For other
numbers use `exponential`.
"""  # noqa: E501 - a table has long lines

from __future__ import annotations

import difflib
import math
import os
import random
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fusion_rt.core.errors import MixingError

MAX_RANKS = 1024  # a complete graph has this number of weights, squared
TOLERANCE = 1e-9  # of a sum that should be 1, and of two weights that should be equal
_DRAWS = 32  # of pairs, before they repeat
MAX_SHOWN = 200  # characters of somebody's text in an error
_WRITTEN_TOLERANCE = 1e-6  # of a sum that should be 1: people write six decimals
_BYTES_PER_WEIGHT = 40  # a float64 takes 24 characters at most; the rest is for separators and comments
_BYTES_EXTRA = 4096

Row = tuple[tuple[int, float], ...]  # weights of one rank: (sender, weight), ascending, its own included


@dataclass(frozen=True)
class Mixing:
    """Weights W of x_i <- sum_j W[i, j] x_j. They may change from clock to clock, and repeat after `period` clocks.

    Attributes:
        text: the text from which `parse` made it.
        ranks: number of ranks n.
        rows: for each clock of the period, the row of each rank.
        note: a sentence for people that the text does not say by itself, such as the sides of a torus; may be empty.
    """

    text: str
    ranks: int
    rows: tuple[tuple[Row, ...], ...] = field(repr=False)
    note: str = ""

    @property
    def period(self) -> int:
        """Number of clocks after which the weights repeat; 1 when they never change."""
        return len(self.rows)

    def matrix(self, clock: int) -> NDArray[np.float64]:
        """Returns W at this clock, float64 of shape (ranks, ranks), read-only; row i: the weights that rank i takes."""
        weights = np.zeros((self.ranks, self.ranks))
        for rank, row in enumerate(self.rows[clock % self.period]):
            for sender, weight in row:
                weights[rank, sender] = weight
        weights.flags.writeable = False
        return weights

    def incoming(self, rank: int, clock: int) -> Row:
        """Returns (sender j, W[rank, j]) of every other rank that `rank` takes from, ascending."""
        return tuple(entry for entry in self.rows[clock % self.period][self._checked(rank)] if entry[0] != rank)

    def outgoing(self, rank: int, clock: int) -> Row:
        """Returns (receiver i, W[i, rank]) of every other rank that takes from `rank`, ascending."""
        return tuple(entry for entry in self._columns[clock % self.period][self._checked(rank)] if entry[0] != rank)

    def own(self, rank: int, clock: int) -> float:
        """Returns W[rank, rank], the weight of the rank's own value."""
        return dict(self.rows[clock % self.period][self._checked(rank)]).get(rank, 0.0)

    @property
    def row_stochastic(self) -> bool:
        """True if every row of W sums to 1, so that ranks that agree stay as they are."""
        return all(_sums_to_one(self.matrix(clock), axis=1) for clock in range(self.period))

    @property
    def column_stochastic(self) -> bool:
        """True if every column of W sums to 1, so that the sum over all ranks stays as it is."""
        return all(_sums_to_one(self.matrix(clock), axis=0) for clock in range(self.period))

    @property
    def doubly_stochastic(self) -> bool:
        """True if rows and columns sum to 1, so that ranks come to agree on the mean."""
        return self.row_stochastic and self.column_stochastic

    @property
    def symmetric(self) -> bool:
        """True if W is symmetric at every clock."""
        matrices = (self.matrix(clock) for clock in range(self.period))
        return all(bool(np.allclose(w, w.T, rtol=0, atol=TOLERANCE)) for w in matrices)

    @property
    def bipartite(self) -> bool:
        """True if every edge, at any clock, joins an even and an odd rank."""
        return all((rank - other) % 2 for rank, others in enumerate(self._neighbours) for other in others)

    def partners(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks of the other parity that `rank` takes from, or gives to, at any clock, ascending.

        Between these AD-PSGD may average: an odd rank asks, an even one answers, so that no ranks wait in a circle
        (arXiv 1710.06952).
        """
        return tuple(sorted(other for other in self._neighbours[self._checked(rank)] if (rank - other) % 2))

    def spectral_gap(self) -> float:
        """Returns 1 - rho, where rho is the factor by which a step brings ranks closer to each other; from 0 to 1.

        For one matrix, rho is its second largest absolute eigenvalue. For a period of p matrices, all doubly
        stochastic, it is s^(1/p), with s the largest singular value of (their product - 11^T/n), which is the largest
        part of a distance from the mean that a period leaves.
        """
        return self._gap

    @cached_property
    def beta(self) -> float:
        """|I - W|_2, the most by which a step moves ranks for each unit that they are apart; the largest of all clocks,
        from 0 (one rank) to 2."""
        return max(float(np.linalg.norm(np.eye(self.ranks) - self.matrix(clock), 2)) for clock in range(self.period))

    @cached_property
    def _gap(self) -> float:
        if self.ranks == 1:
            return 1.0
        if self.period == 1:
            weights = self.matrix(0)
            eigenvalues = np.linalg.eigvalsh(weights) if self.symmetric else np.linalg.eigvals(weights)
            left = float(np.sort(np.abs(eigenvalues))[-2])
        else:
            product = np.eye(self.ranks)
            for clock in range(self.period):
                product = self.matrix(clock) @ product
            left = float(np.linalg.norm(product - 1 / self.ranks, 2))
            if left < 1e-12:  # a rounding error, which a root would make large
                left = 0.0
            left **= 1 / self.period
        return min(max(1 - left, 0.0), 1.0)

    @cached_property
    def _columns(self) -> tuple[tuple[Row, ...], ...]:
        """The columns of W: for each clock and rank, (receiver, weight), ascending."""
        found = []
        for rows in self.rows:
            columns: list[list[tuple[int, float]]] = [[] for _ in range(self.ranks)]
            for receiver, row in enumerate(rows):
                for sender, weight in row:
                    columns[sender].append((receiver, weight))
            found.append(tuple(tuple(column) for column in columns))
        return tuple(found)

    @cached_property
    def _neighbours(self) -> tuple[frozenset[int], ...]:
        """For each rank, all others that it takes from or gives to at any clock."""
        found: list[set[int]] = [set() for _ in range(self.ranks)]
        for rows in self.rows:
            for receiver, row in enumerate(rows):
                for sender, _ in row:
                    found[receiver].add(sender)
                    found[sender].add(receiver)
        return tuple(frozenset(others - {rank}) for rank, others in enumerate(found))

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.ranks:
            raise MixingError(f"there is no rank {rank} in a mixing graph of {self.ranks} ranks")
        return rank


def parse(text: str, ranks: int) -> Mixing:
    """Parses the text of a graph (see above), for this number of ranks.

    Raises:
        MixingError: there is no such graph (then the error has the nearest name), or it is not possible with this
            number of ranks, or the file has no matrix of weights that brings all ranks to agree.
    """
    text = text.strip()
    if not 1 <= ranks <= MAX_RANKS:
        raise MixingError(f"a mixing graph has from 1 to {MAX_RANKS} ranks, not {ranks}")
    if text.startswith("file:"):
        return Mixing(text, ranks, (_read(text.removeprefix("file:"), ranks),))
    if text not in GRAPHS:
        near = difflib.get_close_matches(text[:MAX_SHOWN], [*GRAPHS, "file:PATH"], n=1, cutoff=0.0)[0]
        raise MixingError(f"there is no mixing graph {text[:MAX_SHOWN]!r}; did you mean {near!r}?")
    if ranks == 1:
        return Mixing(text, 1, ((((0, 1.0),),),))
    rows, note = GRAPHS[text](ranks)
    return Mixing(text, ranks, rows, note)


def check_dpsgd(mixing: Mixing) -> None:
    """Checks that W is doubly stochastic, without which ranks of D-PSGD do not agree on the mean (arXiv 1705.09056).

    Raises:
        MixingError: a row or a column does not sum to 1.
    """
    for axis in (1, 0):
        _check_sums(mixing, axis, "D-PSGD", "use a doubly stochastic graph, such as 'ring' or 'exponential'")


def check_symmetric(mixing: Mixing, algorithm: str) -> None:
    """Checks that two ranks take from each other with the same weight at every clock.

    Raises:
        MixingError: it has not.
    """
    for clock in range(mixing.period):
        weights = mixing.matrix(clock)
        receiver, sender = np.unravel_index(int(np.argmax(np.abs(weights - weights.T))), weights.shape)
        there, back = weights[receiver, sender], weights[sender, receiver]
        if abs(there - back) > TOLERANCE:
            raise MixingError(
                f"{algorithm} cannot use the mixing graph {mixing.text!r}, which is not symmetric: rank {receiver} "
                f"takes {there:.6g} of rank {sender}, and that takes {back:.6g} of it; use a symmetric graph, such as "
                "'ring', 'torus' or 'random-pairs', or the algorithm sgp, which is for directed ones"
            )


def check_push_sum(mixing: Mixing) -> None:
    """Checks that W is column-stochastic, so that push-sum keeps the sum of x and of its weights (arXiv 1811.10792).

    Raises:
        MixingError: a column does not sum to 1.
    """
    _check_sums(mixing, 0, "push-sum", "make the weights that each rank gives, its own included, sum to 1")


def check_pairwise(mixing: Mixing) -> None:
    """Checks that pairs of an odd and an even rank, which AD-PSGD averages, connect all ranks; a single rank passes.

    Raises:
        MixingError: a rank has no neighbour of the other parity, or not all ranks are connected by such neighbours.
    """
    todo = "use 'bipartite', or 'ring'"
    for rank in range(mixing.ranks):
        if mixing.ranks > 1 and not mixing.partners(rank):
            raise MixingError(
                f"AD-PSGD averages an odd with an even rank, and in the mixing graph {mixing.text!r} rank {rank} has "
                f"no neighbour that is {'even' if rank % 2 else 'odd'}; {todo}"
            )
    partners = [mixing.partners(rank) for rank in range(mixing.ranks)]
    lost = set(range(mixing.ranks)).difference(distances(partners))
    if lost:
        raise MixingError(
            f"AD-PSGD averages an odd with an even rank, and by such pairs of the mixing graph {mixing.text!r} nothing "
            f"comes from rank 0 to rank {min(lost)}; {todo}"
        )


def _check_sums(mixing: Mixing, axis: int, algorithm: str, todo: str) -> None:
    for clock in range(mixing.period):
        sums = mixing.matrix(clock).sum(axis=axis)
        rank = int(np.argmax(np.abs(sums - 1)))
        if abs(sums[rank] - 1) > TOLERANCE:
            raise MixingError(
                f"{algorithm} cannot use the mixing graph {mixing.text!r}: what rank {rank} "
                f"{'takes' if axis else 'gives'} sums to {sums[rank]:.9g} instead of 1 (W is not "
                f"{'row' if axis else 'column'}-stochastic); {todo}"
            )


def _sums_to_one(weights: NDArray[np.float64], axis: int) -> bool:
    return bool(np.all(np.abs(weights.sum(axis=axis) - 1) <= TOLERANCE))


def _equal(senders: Iterable[Iterable[int]]) -> tuple[Row, ...]:
    """Returns rows in which a rank takes the same weight from itself and each of its senders.

    Args:
        senders: of each rank; numbers are modulo ranks.
    """
    rows, of_ranks = [], [tuple(each) for each in senders]
    for rank, others in enumerate(of_ranks):
        taken = sorted({rank, *(sender % len(of_ranks) for sender in others)})
        rows.append(tuple((sender, 1 / len(taken)) for sender in taken))
    return tuple(rows)


def _metropolis(neighbours: Sequence[Sequence[int]]) -> tuple[Row, ...]:
    """Returns symmetric, doubly stochastic rows for any undirected graph: 1 / (1 + the larger degree of the two)."""
    rows = []
    for rank, others in enumerate(neighbours):
        row = {other: 1 / (1 + max(len(others), len(neighbours[other]))) for other in others}
        row[rank] = 1 - sum(row.values())
        rows.append(tuple(sorted(row.items())))
    return tuple(rows)


_Built = tuple[tuple[tuple[Row, ...], ...], str]  # rows for each clock, and the note


def _ring(ranks: int) -> _Built:
    return (_equal((rank - 1, rank + 1) for rank in range(ranks)),), ""


def _torus(ranks: int) -> _Built:
    height = max(side for side in range(1, math.isqrt(ranks) + 1) if ranks % side == 0)
    width = ranks // height
    if height == 1:
        raise MixingError(
            f"a torus of {ranks} ranks would be a ring, since {ranks} is a prime number; use 'ring' or 'exponential'"
        )

    def at(y: int, x: int) -> int:
        """Returns the rank at a place of the grid; every second row runs backwards."""
        y, x = y % height, x % width
        return y * width + (width - 1 - x if y % 2 else x)

    around = {
        at(y, x): (at(y - 1, x), at(y + 1, x), at(y, x - 1), at(y, x + 1)) for y in range(height) for x in range(width)
    }
    return (_equal(around[rank] for rank in range(ranks)),), f"The torus has {height} rows of {width} ranks."


def _hops(ranks: int) -> list[int]:
    """Returns the powers of two (1, 2, 4, ...) below the number of ranks."""
    return [1 << k for k in range((ranks - 1).bit_length())]


def _exponential(ranks: int) -> _Built:
    hops = _hops(ranks)
    return (_equal([rank - hop for hop in hops] for rank in range(ranks)),), ""


def _one_peer_exponential(ranks: int) -> _Built:
    rows = tuple(_equal([rank - hop] for rank in range(ranks)) for hop in _hops(ranks))
    if ranks & (ranks - 1) == 0:
        return rows, f"It averages exactly every {len(rows)} steps."
    return rows, f"It never averages exactly, since {ranks} is no power of two: 'exponential' may suit better."


def _complete(ranks: int) -> _Built:
    return (_equal([range(ranks)] * ranks),), ""


def _bipartite(ranks: int) -> _Built:
    edges = [(rank, rank + 1) for rank in range(ranks - 1)]
    if ranks % 2 == 0 and ranks > 2:
        edges.append((ranks - 1, 0))
    neighbours: list[list[int]] = [[] for _ in range(ranks)]
    for a, b in edges:
        neighbours[a].append(b)
        neighbours[b].append(a)
    note = f"With {ranks} ranks it is a chain: ranks {ranks - 1} and 0 are both even and not joined."
    return (_metropolis(neighbours),), note if ranks % 2 else ""


def _hypercube(ranks: int) -> _Built:
    if ranks & (ranks - 1):
        raise MixingError(
            f"a hypercube has 2, 4, 8, ... ranks, not {ranks}; use 'exponential', which comes to agree as fast"
        )
    hops = _hops(ranks)
    rows = _equal([rank ^ hop for hop in hops] for rank in range(ranks))
    return (rows,), f"The hypercube has {len(hops)} dimensions."


def _random_pairs(ranks: int) -> _Built:
    drawn = random.Random(ranks)  # of the standard library, whose draws are the same in all versions
    rows = []
    for _ in range(_DRAWS):
        order = list(range(ranks))
        drawn.shuffle(order)
        partner = {rank: rank for rank in order}
        for one, other in zip(order[::2], order[1::2], strict=False):
            partner[one], partner[other] = other, one
        rows.append(_equal([partner[rank]] for rank in range(ranks)))
    return tuple(rows), "One rank has no partner at each clock." if ranks % 2 else ""


GRAPHS: dict[str, Callable[[int], _Built]] = {
    "ring": _ring,
    "torus": _torus,
    "exponential": _exponential,
    "one-peer-exponential": _one_peer_exponential,
    "complete": _complete,
    "bipartite": _bipartite,
    "hypercube": _hypercube,
    "random-pairs": _random_pairs,
}


def _read(path: str, ranks: int) -> tuple[Row, ...]:
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
    takes, gives = (np.abs(weights.sum(axis=axis) - 1) > _WRITTEN_TOLERANCE for axis in (1, 0))
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
    axes = [axis for axis in (1, 0) if np.all(np.abs(weights.sum(axis=axis) - 1) <= _WRITTEN_TOLERANCE)]
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
