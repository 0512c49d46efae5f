"""What codecs and homes remember, across membership epochs. All numbers are such that sums are exact."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.torch.sync.carried import CarriedState
from tests.torch.elastic.jobs import ElasticJob, Worker, same

pytestmark = pytest.mark.multiprocess

SHAPES = {"first": (8, 8), "second": (300,), "third": (2, 70)}
RATE = 0.125
ROUNDING = 1e-3  # of sums of codecs whose numbers are not whole
Tensors: TypeAlias = dict[str, torch.Tensor]


def gradient(step: int, rank: int) -> Tensors:
    """What a rank contributes in a step: small whole numbers."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randint(-8, 9, shape, generator=generator).float() for name, shape in SHAPES.items()}


def remembered(state: Any) -> tuple[Tensors, Tensors]:
    """What this worker keeps for its node: residuals, and the values of homes."""
    kept: CarriedState = state._handlers["optimizer"]._kept or CarriedState()
    residuals = {name: torch.from_numpy(value).clone() for name, value in kept.residuals.items()}
    return residuals, {name: torch.from_numpy(piece["value"]).clone() for name, piece in kept.homes.items()}


def train(worker: Worker, steps: int, pauses: tuple[int, ...], how: dict[str, Any], momentum: float) -> dict[str, Any]:
    """Steps with given gradients. Whenever it begins or goes on, and at the pauses, it says what it remembers, and
    waits for a word."""
    hvd.init()
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    script_optimizer = torch.optim.SGD(parameters.values(), lr=RATE, momentum=momentum)
    optimizer = hvd.DistributedOptimizer(script_optimizer, parameters.items(), **how)
    model = torch.nn.ParameterDict(parameters)
    state: Any = hvd.elastic.TorchState(model, optimizer, trace=())

    def tell() -> None:
        worker.say((len(state.trace), remembered(state), {n: p.detach().clone() for n, p in parameters.items()}))
        worker.listen()

    @hvd.elastic.run
    def run(state: Any) -> None:
        tell()
        while len(state.trace) < steps:
            optimizer.zero_grad()
            given = gradient(len(state.trace), hvd.rank())
            sum((parameters[name] * given[name]).sum() for name in SHAPES).backward()  # type: ignore[union-attr]
            optimizer.step()
            state.trace = (*state.trace, hvd.size())
            state.commit()
            if len(state.trace) in pauses:
                tell()

    run(state)
    return {
        "trace": state.trace,
        "residuals": remembered(state)[0],
        "homes": remembered(state)[1],
        "parameters": {name: parameter.detach() for name, parameter in parameters.items()},
    }


def total(parts: list[Tensors]) -> Tensors:
    """The sums of tensors by name; zeros where nobody has any."""
    zeros = {name: torch.zeros(shape).flatten() for name, shape in SHAPES.items()}
    return {name: sum((part[name].flatten() for part in parts if name in part), zero) for name, zero in zeros.items()}


def minus(first: Tensors, second: Tensors) -> Tensors:
    return {name: first[name] - second[name] for name in first}


def assert_equal(first: Tensors, second: Tensors, within: float = 0) -> None:
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=within)


def residuals_of(reports: list[Any]) -> Tensors:
    return total([residuals for _, (residuals, _), _ in reports])


def check_sums(results: list[dict[str, Any]], lost: Tensors, within: float = 0) -> None:
    """What was applied and what is left are what was given, but for what was lost."""
    assert_equal(not_accounted_for(results), lost, within)


def not_accounted_for(results: list[dict[str, Any]]) -> Tensors:
    """What was given and neither applied nor is left."""
    trace = same([result["trace"] for result in results])
    for result in results[1:]:
        assert_equal(result["parameters"], results[0]["parameters"])
    given = total([gradient(step, rank) for step, size in enumerate(trace) for rank in range(size)])
    applied = total([{name: value / -RATE for name, value in results[0]["parameters"].items()}])
    left = total([result["residuals"] for result in results])
    return minus(minus(given, applied), left)


ALL_REDUCE = {"compression": hvd.Compression.topk(0.1, minimum=16), "op": hvd.Sum}


def test_residuals_of_those_who_live_are_conserved_when_a_node_dies() -> None:
    with ElasticJob(train, 9, (5,), ALL_REDUCE, 0.0, hosts={"a": 1, "b": 1, "c": 1}) as job:
        job.reports()
        job.tell("begin")
        *living, dead = job.reports()
        assert any(value.any() for value in residuals_of(living).values())
        job.kill(job.hands[2])
        job.tell("go on")
        job.change({"a": 1, "b": 1})
        results = job.finish()  # in place
    assert same([result["trace"] for result in results]) == (3,) * 5 + (2,) * 4
    lost, dead_ones = not_accounted_for(results), residuals_of([dead])
    dropped = [gradient(5, rank) for rank in (0, 1)]
    for name, value in lost.items():
        # Of the step that was dropped each node has the gradient in its residual where that bucket had begun.
        given = [each[name].flatten() for each in dropped]
        may_be = [torch.zeros_like(value), *given, given[0] + given[1]]
        assert any(torch.equal(value - dead_ones[name], each) for each in may_be), name


@pytest.mark.parametrize(
    ("codec", "within"),
    [
        ("topk(density=0.1, minimum=16)", 0),
        pytest.param("topk(density=0.1, minimum=16, value='int2')", ROUNDING, marks=pytest.mark.long),
        pytest.param("int4(minimum=16)", ROUNDING, marks=pytest.mark.long),
        pytest.param("int2(minimum=16)", ROUNDING, marks=pytest.mark.long),
        ("demo(density=0.1, minimum=16, chunk=8, decay=1)", ROUNDING),
    ],
)
def test_residuals_of_nodes_that_leave_in_good_order_stay(codec: str, within: float) -> None:
    how = {"compression": codec, "op": hvd.Sum}
    with ElasticJob(train, 9, (4,), how, 0.0, hosts={"a": 1, "b": 2, "c": 1}) as job:
        job.reports()
        job.tell("begin")
        job.reports()
        job.announce(removed=True)
        job.tell("go on")
        job.change({"c": 1, "b": 2})  # now b's first worker is rank 0
        assert job.topology.hosts == ("c", "b")
        reports = job.reports()
        assert [step for step, _, _ in reports] == [5] * 3
        given = total([gradient(step, rank) for step in range(5) for rank in range(4)])
        applied = total([{name: value / -RATE for name, value in reports[0][2].items()}])
        assert_equal(residuals_of(reports), minus(given, applied), within)
        job.tell("go on")
        results = job.finish()
    check_sums(results, total([]), within)


@pytest.mark.long
def test_residuals_are_applied_where_a_single_node_is_left_and_begin_anew_when_others_come() -> None:
    with ElasticJob(train, 12, (4, 8), ALL_REDUCE, 0.0, hosts={"a": 2, "b": 1}) as job:
        job.reports()
        job.tell("begin")
        job.reports()
        job.announce(removed=True)
        job.tell("go on")
        job.change({"a": 2})
        reports = job.reports()
        assert any(value.any() for value in residuals_of(reports).values())
        job.tell("go on")
        assert not any(value.any() for value in residuals_of(job.reports()).values())
        job.announce(added=True)
        job.tell("go on")
        job.change({"a": 2, "b": 1, "c": 1})
        job.reports()
        job.tell("go on")
        results = job.finish()
    assert same([result["trace"] for result in results]) == (3,) * 5 + (2,) * 4 + (4,) * 3
    check_sums(results, total([]))


# --- shards -----------------------------------------------------------------------------------------------------------


def alone(trace: tuple[int, ...], anew: Mapping[int, Collection[str]]) -> Tensors:
    """The parameters after the same steps in one process; `anew`: whose momentum begins anew before a step."""
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    optimizer = torch.optim.SGD(parameters.values(), lr=RATE, momentum=0.5)
    for step, size in enumerate(trace):
        for name in anew.get(step, ()):
            optimizer.state.pop(parameters[name])
        for name, parameter in parameters.items():
            parameter.grad = sum((gradient(step, rank)[name] for rank in range(size)), torch.zeros(())) / size
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def test_momentum_of_shards_moves_with_their_homes() -> None:
    with ElasticJob(train, 7, (2, 5), {"algorithm": "bsp"}, 0.5, hosts={"a": 1}) as job:
        job.reports()
        job.tell("begin")
        job.reports()
        job.announce(added=True)
        job.tell("go on")
        job.change({"a": 1, "b": 1})
        job.reports()
        job.tell("go on")
        job.reports()
        job.announce(removed=True)
        job.tell("go on")
        job.change({"b": 1})
        job.reports()
        job.tell("go on")
        results = job.finish()
    trace = same([result["trace"] for result in results])
    assert trace == (1, 1, 1, 2, 2, 2, 1)
    for result in results:
        assert_equal(result["parameters"], alone(trace, {}))


def by_numpy(trace: tuple[int, ...]) -> Tensors:
    """The parameters after the same steps of SGD with momentum, all of which count."""
    found: Tensors = {}
    for name, shape in SHAPES.items():
        value, velocity = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        for step, size in enumerate(trace):
            velocity = np.float32(0.5) * velocity + sum(gradient(step, r)[name].numpy() for r in range(size)) / size
            value = value - np.float32(RATE) * velocity
        found[name] = torch.from_numpy(value)
    return found


def test_shards_whose_host_dies_go_on_from_their_mirrors() -> None:
    """First a host is lost with its daemon between two updates, and its worker lives; then one with everything."""
    with ElasticJob(train, 9, (3, 6), {"algorithm": "bsp"}, 0.5, hosts={"a": 2, "b": 1, "c": 1}) as job:
        job.reports()
        job.tell("begin")
        on_b = set(job.reports()[2][1][1])
        assert on_b, "nothing would be lost"
        assert on_b < set(SHAPES)
        job.kill_daemon("b")
        job.tell("go on")
        job.change({"a": 2, "c": 1})
        job.reports()
        job.tell("go on")
        homes = [set(values) for _, (_, values), _ in job.reports()]
        assert homes[0] | homes[2] == set(SHAPES)
        assert homes[2]
        job.kill_daemon("c")
        job.kill(job.hands[2])
        job.tell("go on")
        job.change({"a": 2})
        job.reports()
        job.tell("go on")
        results = job.finish()
    trace = same([result["trace"] for result in results])
    assert trace == (4, 4, 4, 3, 3, 3, 2, 2, 2)
    for result in results:
        assert_equal(result["parameters"], by_numpy(trace))


@pytest.mark.long
def test_momentum_of_a_shard_without_a_mirror_begins_anew_when_its_home_dies() -> None:
    off = {"FUSION_MIRROR_SHARDS": "off"}
    with ElasticJob(train, 6, (3,), {"algorithm": "bsp"}, 0.5, hosts={"a": 1, "b": 1}, environment=off) as job:
        job.reports()
        job.tell("begin")
        mine, lost = [set(values) for _, (_, values), _ in job.reports()]
        assert mine
        assert lost
        assert mine | lost == set(SHAPES)
        job.kill(job.hands[1])
        job.tell("go on")
        job.change({"a": 1})
        job.reports()
        job.tell("go on")
        results = job.finish()
    trace = same([result["trace"] for result in results])
    assert trace == (2, 2, 2, 1, 1, 1)
    for result in results:
        assert_equal(result["parameters"], alone(trace, {3: lost}))


def test_what_workers_have_not_sent_to_shards_is_conserved() -> None:
    how = {"algorithm": "bsp", "compression": hvd.Compression.topk(0.1, minimum=16)}
    with ElasticJob(train, 7, (3,), how, 0.0, hosts={"a": 1, "b": 1, "c": 2}) as job:
        job.reports()
        job.tell("begin")
        job.reports()
        job.announce(removed=True)
        job.tell("go on")
        job.change({"a": 1, "c": 1})
        reports = job.reports()
        left = residuals_of(reports)
        assert any(value.any() for value in left.values())
        job.tell("go on")
        results = job.finish()
    trace = same([result["trace"] for result in results])
    assert trace == (4, 4, 4, 4, 2, 2, 2)
    given = [total([gradient(step, rank) for step in steps for rank in range(trace[steps[0]])])
             for steps in (range(4), range(4, 7))]  # fmt: skip
    # A step takes the mean of what has come: of four in the first epoch, of two in the second.
    before = total([{name: value for _, (_, values), _ in reports for name, value in values.items()}])
    assert_equal(scaled(before, 4 / -RATE), minus(given[0], left))
    after = minus(total([result["homes"] for result in results]), before)
    still_left = total([result["residuals"] for result in results])
    assert_equal(scaled(after, 2 / -RATE), minus(total([given[1], left]), still_left))


def scaled(values: Tensors, factor: float) -> Tensors:
    return {name: value * factor for name, value in values.items()}


@pytest.mark.parametrize(
    "algorithm",
    [
        "dpsgd",
        pytest.param("diloco(steps=2)", marks=pytest.mark.long),
        pytest.param("diloco(steps=3, fragments=2, delay=2, mix=0.5)", marks=pytest.mark.long),
        pytest.param("decoupled(steps=2, quorum=2)", marks=pytest.mark.long),
        pytest.param("noloco(steps=2)", marks=pytest.mark.long),
        pytest.param("ssp(staleness=1)", marks=pytest.mark.long),
    ],
)
def test_other_algorithms_go_on_when_ranks_die_and_come(algorithm: str) -> None:
    with ElasticJob(train, 7, (3,), {"algorithm": algorithm}, 0.0, hosts={"a": 1, "b": 1, "c": 1}) as job:
        job.reports()
        job.tell("begin")
        job.reports()
        job.kill(job.hands[0])
        job.tell("go on")
        job.change({"b": 1, "c": 1, "d": 1})
        parameters = [values for _, _, values in job.reports()]
        for each in parameters[1:]:
            assert_equal(each, parameters[0])
        assert any(value.any() for value in parameters[0].values())
        job.tell("go on")
        results = job.finish()
    assert same([result["trace"] for result in results]) == (3,) * 7
