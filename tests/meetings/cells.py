"""The cells of the matrix: which script meets which algorithm, codec, overlap and number of nodes.

Two things that the product refuses to join (`refused_pair`) make a cell of their own, in which the refusal is checked.
Of all others, `cover` chooses enough cells that every two things meet in one, and `product` has all of them.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fusion_rt import algorithms, codecs
from fusion_rt.torch.sync.overlap.ways import chosen_overlap
from tests.meetings.scripts import SCRIPTS

ALGORITHMS = {
    each.partition("(")[0]
    + (", synchronous home" if "synchronous" in each else ", streaming" if "fragments" in each else ""): each
    for each in (
        "allreduce", "bsp", "asp", "ssp(staleness=2)", "softsync(contributions=2)", "dc_asgd", "hogwild",
        "partial(backup=1)", "collaborative(samples=16)", "easgd(steps=2)", "easgd(steps=2, synchronous_home=True)",
        "ea_wild(steps=2)", "dpsgd", "adpsgd(topology='bipartite')", "sgp", "choco", "local_sgd(steps=2)",
        "diloco(steps=2, outer_momentum=0.5)",
        "diloco(steps=2, outer_momentum=0.5, fragments=2, delay=1, mix=0.25)",
        "decoupled(steps=2, outer_rate=1.0, outer_momentum=0.5)", "noloco(steps=2)",
    )
}  # fmt: skip
CODECS = {
    "dense": "dense",
    "topk": "topk(density=0.5, minimum=4)",
    "topk with momentum": "topk(density=0.5, minimum=4, momentum=0.5)",
    "powersgd": "powersgd(rank=2, minimum=4)",
    "int8": "int8",
    "int2": "int2(minimum=4, decay=0.9)",
    "demo": "demo(density=0.5, minimum=4, decay=0.9)",
}
_ALIKE = {"fp16", "bf16", "int4", "onebit", "gaussiank", "thresholdk", "randomk"}  # each one of a family that is there
CODECS |= {
    name: name for name in sorted(codecs.CODECS.keys() - _ALIKE - {text.partition("(")[0] for text in CODECS.values()})
}
OVERLAPS = ("none", "forward", "stale")
NODES = {"one node": (2,), "two nodes": (2, 1)}


@dataclass(frozen=True)
class Cell:
    """A meeting: the names of the things that meet."""

    script: str
    algorithm: str
    codec: str
    overlap: str
    nodes: str

    def __str__(self) -> str:
        return f"{self.script} - {self.algorithm} - {self.codec} - {self.overlap} - {self.nodes}"

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(NODES[self.nodes])

    @property
    def things(self) -> tuple[tuple[int, str], ...]:
        """The things that meet, each with the number of its kind."""
        return tuple(enumerate((self.script, self.algorithm, self.codec, self.overlap, self.nodes)))

    @functools.cached_property
    def pairs(self) -> frozenset[tuple[tuple[int, str], tuple[int, str]]]:
        return frozenset(itertools.combinations(self.things, 2))


def refusal(cell: Cell) -> str:
    """Returns the product's error for this algorithm with this codec and overlap; empty if they go together."""
    return _refusal(cell.algorithm, cell.codec, cell.overlap, cell.size)


@functools.cache
def _refusal(algorithm: str, codec: str, overlap: str, size: int) -> str:
    spec = algorithms.parse(ALGORITHMS[algorithm])
    try:
        algorithms.check_use(spec, codecs.parse(CODECS[codec]), "average", size)
        chosen_overlap(overlap, torch.optim.SGD([torch.zeros(1)], lr=0.1), spec, adasum=False)
    except ValueError as error:
        return str(error)
    return ""


def product() -> Iterator[Cell]:
    """Yields all cells of things that go together."""
    for names in itertools.product(SCRIPTS, ALGORITHMS, CODECS, OVERLAPS, NODES):
        cell = Cell(*names)
        if not refusal(cell):
            yield cell


def refused() -> Iterator[Cell]:
    """Yields a cell for each codec, and each overlap, that an algorithm refuses."""
    for algorithm, codec, nodes in itertools.product(ALGORITHMS, CODECS, NODES):
        cell = Cell("plain", algorithm, codec, "none", nodes)
        if refusal(cell) and nodes == "two nodes":
            yield cell
    for algorithm, overlap in itertools.product(ALGORITHMS, OVERLAPS[1:]):
        cell = Cell("plain", algorithm, "topk" if algorithm == "choco" else "dense", overlap, "one node")
        if refusal(cell):
            yield cell


def cover() -> list[Cell]:
    """Returns cells in which all pairs of things that can meet do so, the same in each run.

    They are each script with each algorithm, where nothing else is special, and as few more, chosen greedily, as all
    other pairs need.
    """
    chosen = [
        Cell(script, algorithm, "topk" if algorithm == "choco" else "dense", "none", nodes)
        for (row, script), (column, algorithm) in itertools.product(enumerate(SCRIPTS), enumerate(ALGORITHMS))
        for nodes in [list(NODES)[(row + column) % len(NODES)]]
    ]
    cells = list(product())
    random.Random(0).shuffle(cells)
    missing = set().union(*(cell.pairs for cell in cells)).difference(*(cell.pairs for cell in chosen))
    # Cells by the number of new pairs that each would bring, the most first. This number only becomes less, so each
    # cell is counted again only when its turn comes.
    found = len(next(iter(cells)).pairs)
    waiting: dict[int, list[Cell]] = {count: [] for count in range(found + 1)} | {found: cells}
    for count in range(found, 0, -1):
        for cell in waiting[count]:
            new = len(cell.pairs & missing)
            if new < count:
                waiting[new].append(cell)
                continue
            chosen.append(cell)
            missing -= cell.pairs
    order = {name: number for number, name in enumerate(SCRIPTS)}
    return sorted(chosen, key=lambda cell: (cell.nodes, order[cell.script], str(cell)))
