"""Mixing without gradients: does the mean stay, and how fast do ranks come together? `python -m benchmarks.gossip`.

The daemon's own classes (homes, algorithms, codecs) exchange in one process, without network and clock: eight ranks
begin with normally distributed vectors (float32) of their own. After every exchange *spread* is the root mean square of
their distances from the mean, and *mean* that by which the mean has moved, both divided by the first spread. What outer
momentum (noloco) still brings a rank counts as its own. In a second run one rank, another one each time, waits
elsewhere at a fifth of the exchanges.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.common import arguments as shared
from benchmarks.common import results
from benchmarks.common.results import Record
from benchmarks.common.tables import Table
from fusion_rt import algorithms, codecs
from fusion_rt.codecs import Layout
from fusion_rt.core.dtypes import DTYPES
from fusiond.algorithms import HomeAlgorithm, make
from fusiond.algorithms.home import Answer, Home, Passed, Send
from fusiond.core.contribution import NO_VALUES, Contribution

Array = npt.NDArray[Any]

NAME = "gossip"
RESULTS = results.RESULTS / f"{NAME}.json"
RANKS, ELEMENTS = 8, 1000
WAITS = 5  # one of so many exchanges is without one of the ranks
LEVEL = 1e-3  # spread that counts as together
CASES = {
    f"{name}, {graph}": (text.format(graph), codec)
    for name, text, codec, graphs in (
        ("dpsgd", "dpsgd(topology='{}')", "dense", ("ring", "exponential", "one-peer-exponential")),
        ("sgp", "sgp(topology='{}')", "dense", ("ring", "exponential", "one-peer-exponential")),
        ("noloco", "noloco(steps=1, topology='{}')", "dense", ("ring", "random-pairs")),
        ("choco topk 10 %", "choco(topology='{}')", "topk(density=0.1, minimum=0)", ("ring", "hypercube")),
        ("choco topk 1 %", "choco(topology='{}')", "topk(density=0.01, minimum=0)", ("ring",)),
        ("choco fp16", "choco(topology='{}')", "fp16", ("ring",)),
        ("dpsgd fp16", "dpsgd(topology='{}')", "fp16", ("ring",)),
    )
    for graph in graphs
}


@dataclass
class Rank:
    """A rank, and its home.

    Attributes:
        x: its parameters.
        momentum: of outer steps, where there are any.
        clock: the exchanges that it has taken part in, or passed.
    """

    home: Home
    x: Array
    momentum: Array
    clock: int = 0


class Job:
    """Eight ranks that exchange by an algorithm.

    Args:
        text, codec: of the algorithm, and of what it sends.
    """

    def __init__(self, text: str, codec: str, seed: int = 0) -> None:
        made = make(text, RANKS)
        assert isinstance(made, HomeAlgorithm)
        self.algorithm, self.spec = made, algorithms.parse(text)
        algorithms.check_use(self.spec, codecs.parse(codec), "average", RANKS)
        layout, chosen = Layout(DTYPES["float32"], ELEMENTS), codecs.parse(codec)
        values = np.random.default_rng(seed).standard_normal((RANKS, ELEMENTS)).astype(np.float32)
        self.ranks = []
        for rank, value in enumerate(values):
            opened = None if chosen.lossless else codecs.open_bucket(chosen.without_memory(), layout)
            home = Home(rank, RANKS, layout.dtype, ELEMENTS, ((0, ELEMENTS, 0),), True, opened)
            home.value = value.copy() if made.keeps_value else None
            made.begun(home)
            self.ranks.append(Rank(home, value.copy(), np.zeros_like(value)))
        self.begun = self.mean()
        self.first = self.spread()

    def exchange(self, waits: int = -1) -> None:
        """All ranks exchange once; `waits`: the rank that passes; -1: none does."""
        queue: deque[tuple[int, Contribution]] = deque()
        posted: dict[int, Array] = {}
        for number, rank in enumerate(self.ranks):
            kind, values = ("pass", NO_VALUES) if number == waits else ("post", self._posted(rank))
            queue.append((number, Contribution(number, values, kind=kind, clock=rank.clock)))  # type: ignore[arg-type]
            posted[number] = values
            rank.clock += 1
        while queue:
            to, part = queue.popleft()
            for step in self.algorithm.received(self.ranks[to].home, part):
                if isinstance(step, Send):
                    values = step.values.copy()
                    for receiver in step.ranks if step.kind != "want" else ():
                        sent = Contribution(to, values, kind=step.kind, clock=step.clock, weight=step.weight)
                        queue.append((receiver, sent))
                elif isinstance(step, Answer):
                    self._take(self.ranks[to], step.values)
                else:
                    assert isinstance(step, Passed)

    def _posted(self, rank: Rank) -> Array:
        factor = self.spec.consensus if isinstance(self.spec, algorithms.NoLoCo) else 1.0
        posted: Array = rank.x * np.float32(factor)
        return posted

    def _take(self, rank: Rank, change: Array) -> None:
        if isinstance(self.spec, algorithms.NoLoCo):
            rank.momentum = rank.momentum * np.float32(self.spec.outer_momentum) + change
            change = rank.momentum
        rank.x = rank.x + change

    def held(self) -> list[tuple[float, Array]]:
        """Returns what each rank comes to, with what its home and its momentum have for it, and the weight of that."""
        found = []
        for number, rank in enumerate(self.ranks):
            owed = self.algorithm.asked(rank.home, Contribution(number, NO_VALUES, kind="ask"))
            _, momentum = self.spec.outer
            coming = rank.momentum * (momentum / (1 - momentum))  # where outer momentum would carry it
            found.append((owed.weight, rank.x.astype(np.float64) + owed.values + coming))
        return found

    def mean(self) -> Array:
        """Returns the weighted mean."""
        held = self.held()
        mean: Array = np.average([x for _, x in held], axis=0, weights=[weight for weight, _ in held])
        return mean

    def spread(self) -> float:
        """Returns the root mean square of the distances from the mean."""
        mean = self.mean()
        return float(np.sqrt(np.mean([(x - mean) ** 2 for _, x in self.held()])))


def measured(text: str, codec: str, exchanges: int, waits: bool) -> dict[str, list[float]]:
    """Returns, at exchanges that are spread evenly by their logarithm, the spread and by how much the mean has moved,
    both divided by the first spread."""
    job, draws = Job(text, codec), np.random.default_rng(1)
    shown = {round(10 ** (step / 12)) for step in range(12 * 4 + 1)} | {exchanges}
    found: dict[str, list[float]] = {"exchanges": [], "spread": [], "mean": []}
    for number in range(1, exchanges + 1):
        passing = int(draws.integers(RANKS)) if waits and draws.random() < 1 / WAITS else -1
        job.exchange(passing)
        if number in shown:
            found["exchanges"].append(number)
            found["spread"].append(job.spread() / job.first)
            found["mean"].append(float(np.sqrt(np.mean((job.mean() - job.begun) ** 2))) / job.first)
    return found


def table(record: Record) -> Table:
    """Makes a table with a row for each algorithm, graph and codec."""
    exchanges = record.setting["exchanges"]
    made = Table([
        "", f"exchanges to a spread of {LEVEL:g}", f"spread after {exchanges}", "the mean has moved by",
        "to the same spread, ranks wait", f"spread after {exchanges}, ranks wait", "the mean has moved by, ranks wait",
    ])  # fmt: skip
    for name, runs in record.details.items():
        cells: list[str] = []
        for run in (runs["all"], runs["waits"]):
            there = [n for n, spread in zip(run["exchanges"], run["spread"], strict=True) if spread <= LEVEL]
            cells += [f"{there[0]:.0f}" if there else "more", f"{run['spread'][-1]:.1e}", f"{max(run['mean']):.0e}"]
        made.add(name, *cells)
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what the command line asks for."""
    parser = shared.parser(NAME, __doc__)
    parser.add_argument("--exchanges", type=int, default=2000, help="of each run (%(default)s)")
    shared.add_out(parser, RESULTS)
    options = parser.parse_args(argv)
    begun = results.begin()
    details = {}
    for name, (text, codec) in CASES.items():
        runs = {kind: measured(text, codec, options.exchanges, kind == "waits") for kind in ("all", "waits")}
        details[name] = {
            kind: {key: results.rounded(values) for key, values in run.items()} for kind, run in runs.items()
        }
    setting = {"ranks": RANKS, "elements": ELEMENTS, "exchanges": options.exchanges}
    made = Record(setting, [], begun[0], begun[1], results.command_line(), details)
    results.keep(options.out, NAME, made)
    table(made).show()


if __name__ == "__main__":
    main()
