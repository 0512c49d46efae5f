"""The cells of the matrix: which script meets which algorithm, codec, overlap and number of nodes.

Two things that the product refuses to join (`refusal`) make a cell of their own, in which the refusal is checked. Of
all others, `cover` chooses enough cells that every two things meet in one, in the small worlds. `properties` has those
in which an algorithm's promises are judged, and those of the large worlds.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fusion_rt import algorithms, codecs
from fusion_rt.torch.optimizer import chosen_overlap
from tests.meetings.reference import RULES
from tests.meetings.scripts import OPTIMIZERS, RATES, SCRIPTS

ALGORITHMS = {
    each.partition("(")[0]
    + (", synchronous home" if "synchronous" in each else ", streaming" if "fragments" in each else ""): each
    for each in (
        "allreduce", "bsp", "asp", "ssp(staleness=2)", "softsync(contributions=2)", "dc_asgd", "hogwild",
        "partial(backup=1)", "collaborative(samples=16)", "easgd(steps=2)", "easgd(steps=2, synchronous_home=True)",
        "ea_wild(steps=2)", "dpsgd", "adpsgd(topology='bipartite')", "sgp", "choco", "local_sgd(steps=2)",
        "diloco(steps=2, outer_momentum=0.5)",
        "diloco(steps=2, outer_momentum=0.5, fragments=2, delay=1, mix=0.25)",
        "decoupled(steps=2)", "noloco(steps=2)",
    )
}  # fmt: skip
CODECS = {
    "dense": "dense",
    "fp16": "fp16",
    "bf16": "bf16",
    "topk": "topk(density=0.5, minimum=16)",
    "topk with momentum": "topk(density=0.5, minimum=16, momentum=0.5)",
    "gaussiank": "gaussiank(density=0.5, minimum=16)",
    "thresholdk": "thresholdk(density=0.5, minimum=16)",
    "randomk": "randomk(density=0.5, minimum=16)",
    "demo": "demo(density=0.5, minimum=16, decay=1.0, chunk=8)",
    "int8": "int8(minimum=16)",
    "int4": "int4(minimum=16)",
    "int2": "int2(minimum=16, decay=0.9)",
    "onebit": "onebit(minimum=16)",
    "powersgd": "powersgd(rank=2, minimum=16)",
}
CODECS |= {name: name for name in sorted(codecs.CODECS.keys() - {text.partition("(")[0] for text in CODECS.values()})}
OVERLAPS = ("none", "forward", "stale")


@dataclass(frozen=True)
class World:
    """The ranks of a job.

    Attributes:
        nodes: the number of ranks on each node.
        graphs: of gossip, by algorithm; others have their default, on which two or three ranks all meet.
    """

    nodes: tuple[int, ...]
    graphs: Mapping[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(self.nodes)


WORLDS = {
    "one node": World((2,)),
    "two nodes": World((2, 1)),
    "four ranks": World((2, 2), {"sgp": "ring"}),
    "six ranks": World((2, 2, 2), dict.fromkeys(("dpsgd", "sgp", "choco"), "exponential")),  # directed
    "eight ranks": World(  # which change with each step
        (2, 2, 2, 2),
        {"dpsgd": "one-peer-exponential", "sgp": "one-peer-exponential", "choco": "torus", "adpsgd": "hypercube"},
    ),
}
SMALL = ("one node", "two nodes")  # in which everything meets everything
FEATURES = tuple(name for name, script in SCRIPTS.items() if not script.property)
KINDS = (FEATURES, tuple(ALGORITHMS), tuple(CODECS), OVERLAPS, tuple(OPTIMIZERS), tuple(RATES), SMALL)
SAVING = tuple(
    name
    for name, text in CODECS.items()
    if (codec := codecs.parse(text)).stateful and not codec.has_momentum() and getattr(codec, "decay", 1.0) == 1.0
)  # what these do not send waits, all of it
LEDGER, SET = "a ledger of gradients", "uneven data, then weights set and reseed()"
DRAWS = 24  # of cells, of which the best is taken
Pair = tuple[tuple[int, str], tuple[int, str]]


@dataclass(frozen=True)
class Cell:
    """A meeting: the names of the things that meet."""

    script: str
    algorithm: str
    codec: str = "dense"
    overlap: str = "none"
    optimizer: str = "SGD"
    rates: str = "constant"
    world: str = "two nodes"

    def __str__(self) -> str:
        return " - ".join(name for _, name in self.things)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return WORLDS[self.world].size

    @property
    def graph(self) -> str:
        """The graph on which ranks mix; empty where they do not."""
        return getattr(algorithms.parse(self.chosen), "topology", "")

    @property
    def chosen(self) -> str:
        """The algorithm's text."""
        return chosen(self.algorithm, self.world)

    @property
    def encodes(self) -> bool:
        """Says whether something is sent that a codec has encoded: nothing is, within a node."""
        return self.codec != "dense" and len(WORLDS[self.world].nodes) > 1

    @property
    def things(self) -> tuple[tuple[int, str], ...]:
        """The things that meet, each with the number of its kind."""
        return tuple(enumerate(dataclasses.astuple(self)))

    @functools.cached_property
    def pairs(self) -> frozenset[Pair]:
        return frozenset(itertools.combinations(self.things, 2))


def refusal(cell: Cell) -> str:
    """Returns the product's error for this algorithm with this codec and overlap; empty if they go together."""
    return _refusal(cell.algorithm, cell.codec, cell.overlap, cell.world)


def chosen(algorithm: str, world: str) -> str:
    """Returns the text of an algorithm in a world."""
    text, graph = ALGORITHMS[algorithm], WORLDS[world].graphs.get(algorithm, "")
    return f"{text.partition('(')[0]}(topology='{graph}')" if graph else text


@functools.cache
def _refusal(algorithm: str, codec: str, overlap: str, world: str) -> str:
    spec = algorithms.parse(chosen(algorithm, world))
    try:
        algorithms.check_use(spec, codecs.parse(CODECS[codec]), "average", WORLDS[world].size)
        chosen_overlap(overlap, torch.optim.SGD([torch.zeros(1)], lr=0.1), spec, adasum=False)
    except ValueError as error:
        return str(error)
    return ""


def goes_together(cell: Cell) -> bool:
    """Says whether the things of a cell may meet: none refuses another, and a momentum is either the codec's or the
    optimizer's (else there is a warning, and training may diverge)."""
    return not refusal(cell) and (cell.codec != "topk with momentum" or cell.optimizer == "SGD")


def sample(script: str, count: int) -> list[Cell]:
    """Returns so many cells of a script, drawn from all of the small worlds."""
    draw = random.Random(script)
    return [_drawn(draw, {0: (script,)}) for _ in range(count)]


def refused() -> Iterator[Cell]:
    """Yields a cell for each codec, and each overlap, that an algorithm refuses."""
    for algorithm, codec in itertools.product(ALGORITHMS, CODECS):
        cell = Cell("plain", algorithm, codec)
        if refusal(cell):
            yield cell
    for algorithm, overlap in itertools.product(ALGORITHMS, OVERLAPS[1:]):
        cell = Cell("plain", algorithm, natural(algorithm), overlap, world="one node")
        if refusal(cell):
            yield cell


def cover() -> list[Cell]:
    """Returns cells of the small worlds in which all pairs of things that can meet do so, the same in each run.

    They are each script with each algorithm, with other things in turn, and as few more, chosen greedily, as all other
    pairs need. An algorithm with a rule in one process has no codec in the former, so that it has to be equal.
    """
    draw, missing, found = random.Random(0), pairs(), list[Cell]()
    wanted = [
        {0: (script,), 1: (algorithm,), 2: (natural(algorithm),) if algorithm in RULES else KINDS[2], 3: ("none",)}
        for script, algorithm in itertools.product(FEATURES, ALGORITHMS)
    ]
    while wanted or missing:
        if wanted:
            fixed = wanted.pop()
        else:
            (one, name), (other, other_name) = min(missing)
            fixed = {one: (name,), other: (other_name,)}
        cell = max((_drawn(draw, fixed) for _ in range(DRAWS)), key=lambda cell: len(cell.pairs & missing))
        found.append(cell)
        missing -= cell.pairs
    order = {name: number for number, name in enumerate(FEATURES)}
    return sorted(found, key=lambda cell: (cell.world, order[cell.script], str(cell)))


def pairs() -> set[Pair]:
    """Returns all pairs of things that can meet in a small world."""
    found: set[Pair] = set()
    for names in itertools.product(*KINDS[1:5]):
        cell = Cell(FEATURES[0], *names)
        if goes_together(cell):
            found |= cell.pairs
    free = {0, 5, 6}  # which go together with everything
    for (one, names), (other, other_names) in itertools.combinations(enumerate(KINDS), 2):
        if {one, other} & free:
            found |= {((one, name), (other, other_name)) for name in names for other_name in other_names}
    return found


def properties() -> list[Cell]:
    """Returns the cells in which properties are judged, and those of the large worlds."""
    return [cell for cell in dict.fromkeys(_properties()) if goes_together(cell)]


def _properties() -> Iterator[Cell]:
    rest, optimum, ledger = "ranks that begin apart and wait, at rate 0", "a quadratic loss, to its optimum", LEDGER
    for algorithm in ALGORITHMS:
        for script in (optimum, rest, SET):
            yield Cell(script, algorithm, natural(algorithm))
        if algorithms.parse(ALGORITHMS[algorithm]).signal is algorithms.Signal.PARAMETER:
            yield Cell("many small steps", algorithm, "fp16")
            yield Cell("many small steps", algorithm, "bf16")
    for codec in CODECS:
        yield Cell(optimum, "bsp", codec)
        yield Cell(optimum, "choco", codec)
        yield Cell(rest, "choco", codec)
        if codec in SAVING:
            yield Cell(f"{ledger}, scale doubles", "allreduce", codec, rates="falls a hundredfold")
            yield Cell(ledger, "allreduce", codec, world="six ranks")
    for codec in ("fp16", "topk", "int8"):
        yield Cell(optimum, "decoupled", codec)
    for algorithm in RULES:
        yield Cell("plain", algorithm, optimizer="Adam", world="four ranks")
    for algorithm in ("asp", "bsp", "choco", "diloco"):
        yield Cell("GradScaler, scale halves six times", algorithm, "topk", world="four ranks")
    for algorithm in ("dpsgd", "adpsgd", "sgp", "choco", "noloco", "easgd", "local_sgd"):
        yield Cell(rest, algorithm, natural(algorithm), world="four ranks")
    for world in ("six ranks", "eight ranks"):
        for algorithm in ("dpsgd", "adpsgd", "sgp", "choco", "noloco"):
            yield Cell(rest, algorithm, natural(algorithm), world=world)
        for algorithm in ("allreduce", "bsp", "dpsgd", "sgp", "noloco"):
            yield Cell("plain", algorithm, optimizer="SGD with momentum", world=world)
        for algorithm in ("dpsgd", "sgp", "choco"):
            yield Cell(SET, algorithm, natural(algorithm), world=world)
        yield Cell("consensus, weights pruned, then reseed()", "sgp", optimizer="Adam", world=world)


def natural(algorithm: str) -> str:
    """Returns the first codec that an algorithm takes."""
    return "topk" if algorithm == "choco" else "dense"


def _drawn(draw: random.Random, fixed: Mapping[int, Sequence[str]]) -> Cell:
    """Draws a cell of things that go together, of these for some kinds."""
    while True:
        cell = Cell(*(draw.choice(fixed.get(kind, names)) for kind, names in enumerate(KINDS)))
        if goes_together(cell):
            return cell
