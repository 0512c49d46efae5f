"""The examples of docs/extending.md: a package with codecs and algorithms, installed and used by a job; a collective
and a launcher, as the page has them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusion_rt import codecs
from fusion_rt.codecs import Layout, Span
from fusion_rt.core import mixing
from fusion_rt.core.dtypes import DTYPES
from fusion_rt.launchers import environment
from fusiond.collectives.base import Exchange, Reducer
from fusiond.collectives.owned import Owned
from tests import forks
from tests.for_each import for_each
from tests.fusiond.collectives.group import Group, GroupPort
from tests.runner.conftest import fusionrun  # noqa: F401 - a fixture

PAGE = (Path(__file__).parent.parent / "docs" / "extending.md").read_text()
FILES = dict(re.findall(r"^`([\w/.]+)`:\n\n```\w+\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
STEP, RATE, STEPS, MIXED = 0.5, 0.125, 5, 9
JOB = f"""
import json
import torch
import fusion_rt.torch as hvd
hvd.init()
generator = torch.Generator().manual_seed(hvd.rank())
found = {{}}
values = torch.arange(-40, 40) * 0.5 if hvd.rank() else torch.linspace(-9, 9, 80)
found["values"] = values.tolist()
found["reduced"] = hvd.allreduce(values, op=hvd.Sum, compression=hvd.Compression.fixed(step={STEP})).tolist()
weight = torch.nn.Parameter(torch.zeros(80))
plain = hvd.DistributedOptimizer(torch.optim.SGD([weight], 1.0), named_parameters=[("w", weight)], op=hvd.Sum)
(weight * values).sum().backward()
plain.step()
found["stepped"] = weight.tolist()
ternary = hvd.allreduce(values, op=hvd.Sum, compression=hvd.Compression.ternary())
found["ternary"] = ternary.tolist()
target = torch.randn(50, generator=generator)
found["target"] = target.tolist()
voted = torch.nn.Parameter(torch.zeros(50))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD([voted], {RATE}), named_parameters=[("v", voted)], compression="dense", algorithm="majority"
)
for _ in range({STEPS}):
    optimizer.zero_grad()
    ((voted - target) ** 2).sum().backward()
    optimizer.step()
found["voted"] = voted.tolist()
mixed = torch.nn.Parameter(torch.arange(50.0))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD([mixed], {RATE}), named_parameters=[("m", mixed)], compression="dense", algorithm="matcha"
)
for _ in range({MIXED}):
    optimizer.zero_grad()
    ((mixed - target) ** 2).sum().backward()
    optimizer.step()
found["mixed"] = mixed.tolist()
print(json.dumps(found), flush=True)
hvd.shutdown()
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's package as pip leaves it there: its modules, and what it says of itself."""
    site = tmp_path_factory.mktemp("site")
    for path, text in FILES.items():
        if path.startswith("acme/") and path.endswith(".py"):
            (site / path.removeprefix("acme/")).write_text(text)
    project = FILES["acme/pyproject.toml"]
    information = site / "acme-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    groups = re.findall(r'^\[project\.entry-points\."([\w.]+)"\]\n((?:\w+ = "[\w:]+"\n)+)', project, re.MULTILINE)
    assert [group for group, _ in groups] == ["fusion_rt.codecs", "fusion_rt.algorithms"]
    (information / "entry_points.txt").write_text(
        "".join(f"[{group}]\n" + lines.replace('"', "") for group, lines in groups)
    )
    return site


def ternary(block: Any) -> Any:
    """Returns what `ternary` keeps of a block: values of at least half the largest size, each as their mean size."""
    size = np.abs(block)
    kept = size >= size.max() / 2
    return np.where(kept, np.sign(block) * np.mean(size[kept]), 0)


@pytest.mark.multiprocess
def test_a_job_uses_the_packages_codec_and_algorithm(package: Path, fusionrun: Any) -> None:  # noqa: F811
    fusionrun.real_daemon = True
    result = fusionrun(
        "-np", "2", "-H", "127.0.0.1:1,localhost:1", "--compression", f"fixed(step={STEP})",
        *forks.interpreter(forks.WORKER), "-c", JOB, PYTHONPATH=str(package),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    said = [json.loads(line.partition(":")[2]) for line in sorted(result.stdout.splitlines())]
    first, second = ({name: np.array(values, np.float32) for name, values in ranks.items()} for ranks in said)
    rounded = np.rint(first["values"] / STEP) * STEP + second["values"]  # the second's are whole steps
    assert not np.array_equal(rounded, first["values"] + second["values"])
    for found in (first, second):
        np.testing.assert_array_equal(found["reduced"], rounded)
        np.testing.assert_array_equal(found["stepped"], -rounded)
        expected = ternary(ternary(first["values"]) + ternary(second["values"]))
        np.testing.assert_allclose(found["ternary"], expected, rtol=1e-6)
    weight = np.zeros(50, np.float32)
    for _ in range(STEPS):
        weight -= RATE * np.sign(sum(np.sign(weight - found["target"]) for found in (first, second)))
    np.testing.assert_array_equal(first["voted"], weight)
    np.testing.assert_array_equal(second["voted"], weight)
    ranks, targets = np.tile(np.arange(50.0), (2, 1)), np.stack([first["target"], second["target"]])
    for step in range(MIXED):
        weights = drawn().matrix(step - 1) if step else np.eye(2)
        ranks = weights @ ranks - RATE * 2 * (ranks - targets)
    np.testing.assert_allclose([first["mixed"], second["mixed"]], ranks, rtol=1e-5)


def drawn(text: str = "ring", ranks: int = 2) -> Any:
    """Returns the page's graph."""
    scope: dict[str, Any] = {"__name__": __name__}
    exec(FILES["acme/acme_matcha.py"], scope)
    return scope["Matcha"](topology=text).graph(ranks)


@for_each("text", ["ring", "complete", "random-pairs"])
@for_each("ranks", [2, 5, 8])
def test_the_packages_graph_has_half_of_the_edges_and_brings_ranks_together(text: str, ranks: int) -> None:
    graph, whole = drawn(text, ranks), mixing.parse(text, ranks)
    matrices = [graph.matrix(clock) for clock in range(graph.period)]
    for clock, weights in enumerate(matrices):
        np.testing.assert_allclose(weights, weights.T)
        np.testing.assert_allclose(weights.sum(axis=1), 1)
        apart = ~np.eye(ranks, dtype=bool) & (weights != 0)
        np.testing.assert_array_equal(weights[apart], whole.matrix(clock)[apart])
    edges = sum(np.count_nonzero(weights) - ranks for weights in matrices)
    most = sum(np.count_nonzero(whole.matrix(clock) * ~np.eye(ranks, dtype=bool)) for clock in range(graph.period))
    assert 0.4 * most < edges < 0.6 * most
    np.testing.assert_allclose(np.linalg.multi_dot(matrices), 1 / ranks, atol=1e-3)


def test_a_prediction_has_the_packages_codec(package: Path) -> None:
    code = (
        "import sys; from fusion_rt import codecs; from fusion_rt.choice.codec_costs import measured; "
        "from fusion_rt.core.dtypes import DTYPES; "
        "print(measured(codecs.parse('fixed'), codecs.Layout(DTYPES['float32'], 1 << 10)).nbytes, "
        "'torch' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(package)}, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert run.stdout.split() == ["1024", "False"]


@pytest.mark.parametrize("nodes", [2, 3])
def test_the_packages_codec_with_a_residual_loses_nothing(nodes: int) -> None:
    """Results take the place of gradients, as in a plan; a step that is spoiled leaves the next ones alone."""
    scope: dict[str, Any] = {"__name__": __name__}
    exec(FILES["acme/acme_ternary.py"], scope)
    layout = Layout(DTYPES["float32"], 1005, (Span("first", 0, 700), Span("second", 704, 301)))
    inside = np.r_[0:700, 704:1005]
    buckets = [codecs.open_bucket(scope["Ternary"](), layout) for _ in range(nodes)]
    memory = [np.zeros(1005, np.float32) for _ in range(nodes)]
    choose = np.random.default_rng(nodes)

    def make(port: GroupPort) -> Exchange:
        here = memory[port.position]
        return Owned(port, Reducer("sum", layout.dtype), buckets[port.position], [here], [here])

    def waiting() -> Any:
        states = [bucket.state_dict() for bucket in buckets]
        return sum(np.concatenate([state["residual/first"], state["residual/second"]]) for state in states)

    for number in range(5):
        for place in memory:
            place[inside] = choose.standard_normal(1001)
        if number == 2:
            memory[0][3] = np.inf
        before, total = waiting(), np.sum(memory, axis=0, dtype=float)[inside]
        Group(nodes, make, seed=number).run()
        for place in memory:
            np.testing.assert_array_equal(place, memory[0])
            assert not place[700:704].any()
        if number == 2:
            assert np.isnan(memory[0][inside]).all()
            np.testing.assert_allclose(waiting(), before, atol=1e-5)
        else:
            np.testing.assert_allclose(waiting() + memory[0][inside], before + total, atol=1e-5)
    assert waiting().any()
    assert all(bucket.statistics()["seconds"] > 0 for bucket in buckets)


def test_the_packages_codec_with_a_residual_says_what_is_not_finite_and_what_is_not_its_own() -> None:
    scope: dict[str, Any] = {"__name__": __name__}
    exec(FILES["acme/acme_ternary.py"], scope)
    layout = Layout(DTYPES["float32"], 300)
    forgetful = codecs.open_bucket(scope["Ternary"]().without_memory(), layout)
    values = np.linspace(-1, 1, 300, dtype=np.float32)
    for bad in (np.nan, np.inf):
        assert np.isnan(forgetful.decoded(0, forgetful.encode(0, np.where(values > 0.9, bad, values)), 300)).all()
    got = forgetful.decoded(0, forgetful.encode(0, values), 300)
    np.testing.assert_allclose(got, [*ternary(values[:256]), *ternary(values[256:])], rtol=1e-6)
    assert forgetful.residual_norm() == 0
    for wrong in (bytes(3), np.full(2, -1, np.float32).tobytes() + bytes(76)):
        with pytest.raises(codecs.CodecError):
            forgetful.decode(0, wrong, np.empty(300, np.float32))


@for_each("codec", ["dense", "fp16"])
@for_each("op", ["sum", "average", "max"])
@for_each("nodes", [2, 3, 5])
def test_the_collective_adds_up(nodes: int, op: str, codec: str) -> None:
    scope: dict[str, Any] = {}
    exec(FILES["daemon/fusiond/collectives/direct.py"], scope)
    parts = [np.random.default_rng(node).integers(-9, 10, 300).astype(np.float32) for node in range(nodes)]
    reducer = Reducer("sum" if op == "average" else op, DTYPES["float32"], divisor=nodes if op == "average" else 1)
    expected = np.max(parts, 0) if op == "max" else np.sum(parts, 0) / np.float32(reducer.divisor)

    def make(port: GroupPort) -> Exchange:
        bucket = codecs.parse(codec).open(Layout(DTYPES["float32"], 300))
        exchange: Exchange = scope["Direct"](port, reducer, bucket, [parts[port.position]], [parts[port.position]])
        return exchange

    Group(nodes, make, seed=nodes).run()
    for part in parts:
        np.testing.assert_array_equal(part, expected)


def test_the_launcher_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    scope = dict(vars(environment))
    exec(next(block for block in BLOCKS if "_from_flux" in block), scope)
    monkeypatch.setattr(environment, "_LAUNCHERS", (*environment._LAUNCHERS, (scope["_FLUX"], scope["_from_flux"])))
    marks = (scope["_FLUX"][:1], scope["_FLUX"], "flux run or fusionrun")
    monkeypatch.setattr(environment, "_MARKS", (*environment._MARKS, marks))
    variables = dict(zip(scope["_FLUX"], ("5", "8", "1", "ƒ2x", "1"), strict=True))
    alone = environment.detect(variables)
    assert (alone.rank, alone.size, alone.local_rank, alone.meeting) == (5, 8, 1, None)
    several = environment.detect(variables | {"FLUX_JOB_NNODES": "4", "MASTER_ADDR": "h0", "MASTER_PORT": "4000"})
    assert several.meeting is not None
    assert several.meeting.addresses == (("h0", 4000),)
    with pytest.raises(environment.FusionError, match=r"FLUX_TASK_RANK set, but not FLUX_JOB_SIZE, .*flux run"):
        environment.detect({"FLUX_TASK_RANK": "5"})
