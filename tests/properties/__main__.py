"""Runs the properties, and prints how many cases there were, by ranks, nodes, graphs, algorithms and codecs.

python -m tests.properties            # those of each run of the tests
python -m tests.properties -m long    # the others; all of pytest's arguments
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fusion_rt import algorithms, codecs, wire
from fusion_rt.core.errors import MixingError
from fusion_rt.core.mixing import GRAPHS
from tests.fusiond.simulation import SimulatedJob
from tests.properties.reduced import LEAST_ENCODED, encoded_share


@dataclass(frozen=True)
class Case:
    """A plan that a test has trained by.

    Attributes:
        test: its name.
        layout: number of ranks of each node.
        encoded: share of the elements that the codec does not send as they are.
    """

    test: str
    layout: tuple[int, ...]
    algorithm: str
    codec: str
    encoded: float

    @property
    def graph(self) -> str:
        topology = getattr(algorithms.parse(self.algorithm), "topology", "no graph")
        return "file" if topology.startswith("file:") else str(topology)


@dataclass
class Tally:
    """Notes each plan of each test, as a plugin of pytest."""

    cases: list[Case] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)
    test: str = ""

    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        self.test = item.nodeid

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)

    def note(self, job: SimulatedJob, plan: wire.Plan) -> None:
        how, layout = plan.reduction, tuple(map(len, job.topology.ranks))
        share = encoded_share(plan.buckets, how.codec)
        self.cases.append(Case(self.test, layout, how.algorithm, how.codec, share))

    def report(self) -> str:
        cases, wrong = self.cases, [case for case in self.cases if case.test in self.failed]
        rows = {
            "ranks": Counter(sum(case.layout) for case in cases),
            "nodes": Counter(sum(n > 0 for n in case.layout) for case in cases),
            "graph": Counter(case.graph for case in cases),
            "algorithm": Counter(case.algorithm.partition("(")[0] for case in cases),
            "codec": Counter(case.codec.partition("(")[0] for case in cases),
        }
        lines = [
            f"{what:10s}" + ", ".join(f"{key} {n}" for key, n in sorted(row.items())) for what, row in rows.items()
        ]
        dense = sum(case.codec == "dense" for case in cases)
        encode = sum(case.encoded >= LEAST_ENCODED for case in cases)
        refused, possible = refusals()
        return "\n".join([
            *lines,
            f"{len(cases)} cases: {dense} dense, {encode} whose codec encodes at least {LEAST_ENCODED:.0%} of the "
            f"elements, {len(cases) - dense - encode} others, {len(wrong)} wrong",
            f"{refused} of {possible} combinations of an algorithm, a codec, a graph and 4, 6 or 8 ranks are refused",
        ])  # fmt: skip


def refusals() -> tuple[int, int]:
    """How many combinations of what there is are refused with a sentence, and how many there are."""
    refused = possible = 0
    for name, kind in algorithms.ALGORITHMS.items():
        graphs = GRAPHS if kind.place is algorithms.Place.REPLICA else ("",)
        for graph, codec, ranks in itertools.product(graphs, codecs.CODECS, (4, 6, 8)):
            text = f"{name}(topology={graph!r})" if graph else name
            possible += 1
            try:
                algorithms.check_use(algorithms.parse(text), codecs.parse(codec), "average", ranks)
            except (algorithms.AlgorithmError, MixingError):
                refused += 1
    return refused, possible


def main(arguments: list[str]) -> int:
    """Runs the tests of this folder with these arguments of pytest; returns its exit code."""
    tally, plan = Tally(), SimulatedJob.plan

    def noted(job: SimulatedJob, proposal: object) -> wire.Plan:
        made = plan(job, proposal)  # type: ignore[arg-type]
        tally.note(job, made)
        return made

    SimulatedJob.plan = noted  # type: ignore[method-assign, assignment]
    try:
        code = pytest.main(["-q", "-n", "0", str(Path(__file__).parent), *arguments], plugins=[tally])
    finally:
        SimulatedJob.plan = plan  # type: ignore[method-assign]
    print(tally.report())
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
