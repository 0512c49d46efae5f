"""What the step benchmark claims about its model and its stopwatches."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks import step
from benchmarks.common.peers import DDP
from benchmarks.common.resnet import shapes, silent_model
from benchmarks.common.results import Record
from benchmarks.common.stopwatch import Clock

ABOUT = {"tensors": 3, "parameters": 100, "buckets": 2, "messages": 4.0}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is to be measured, instead of measuring it."""
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(step, "measure", lambda *given: asked.append(given))
    monkeypatch.setattr(step, "show", lambda record: None)
    return asked


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str, gpus: int = 0) -> None:
    monkeypatch.setattr("sys.argv", ["step", *arguments])
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "H200")
    step.main()


def test_without_a_gpu_it_says_so_in_a_sentence(monkeypatch: pytest.MonkeyPatch, asked: list[Any]) -> None:
    with pytest.raises(SystemExit, match=r"^torch finds no GPU on this machine, so nothing was measured\.$"):
        run(monkeypatch, "--device", "cuda")
    assert not asked


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--hosts", "2"], "--device cuda measures on this host, and without --overlap"),
        (["--overlap"], "--device cuda measures on this host, and without --overlap"),
    ],
)
def test_what_cannot_be_measured_on_gpus_is_refused(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    asked: list[Any],
) -> None:  # fmt: skip
    with pytest.raises(SystemExit):
        run(monkeypatch, "--device", "cuda", *arguments, gpus=2)
    assert told in capsys.readouterr().err
    assert not asked


def test_gpus_are_measured_with_a_rank_for_each_and_at_least_two(
    monkeypatch: pytest.MonkeyPatch, asked: list[Any]
) -> None:
    run(monkeypatch, "--device", "cuda", "--runtimes", "fusion_rt;DDP;Horovod", gpus=8)
    run(monkeypatch, "--device", "cuda", "--ranks", "2", gpus=8)
    run(monkeypatch, "--device", "cuda", gpus=1)
    run(monkeypatch)
    assert [(ranks, gpu, there) for _, _, ranks, _, gpu, there in asked] == [
        (8, "H200", 8), (2, "H200", 8), (2, "H200", 1), (2, "", 0)
    ]  # fmt: skip
    (hosts, _, _, turns, _, _), *_, (_, _, _, on_cpu, _, _) = asked
    assert hosts == 1
    assert turns[turns.index("--device") + 1] == "cuda"
    assert turns[turns.index("--runtimes") + 1] == "fusion_rt;DDP"
    assert on_cpu[on_cpu.index("--device") + 1] == "cpu"


def test_ranks_combine_gradients_by_nccl_unless_the_script_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, str]] = []

    def fusionrun(ranks: int, arguments: list[str], variables: dict[str, str]) -> dict[str, Any]:
        given.append(variables)
        return {"found": found(1), "about": {"parameters": 100}}

    monkeypatch.setattr(step.launch, "fusionrun", fusionrun)
    monkeypatch.delenv("FUSION_NODE_REDUCTION", raising=False)
    for wanted in ("auto", "daemon"):
        if wanted == "daemon":
            monkeypatch.setenv("FUSION_NODE_REDUCTION", wanted)
        record = step.measure(1, "", 2, [], "H200", 2)
        assert record.setting == {"hosts": 1, "ranks": 2, "device": "H200", "node_reduction": wanted}
        assert given.pop() == {"FUSION_NODE_REDUCTION": wanted}
    step.measure(1, "", 2, [])
    assert given == [{}], "on the CPU all is as it was"
    shared = step.measure(1, "", 2, [], "H200", 1)
    assert shared.setting["shared_gpus"] == 1
    assert "2 ranks on one host, which share 1 H200, with DDP on gloo" in step.title(replace(shared, details=ABOUT))


def test_the_models_parameters_and_gradients_are_on_the_device() -> None:
    model = silent_model("meta")
    model().backward()
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {parameter.grad.device.type for parameter in model.parameters()} == {"meta"}


def test_the_tensors_are_those_of_resnet_50() -> None:
    assert len(shapes()) == 161
    assert sum(math.prod(shape) for shape in shapes()) == 25_557_032  # torchvision.models.resnet50()
    assert shapes()[0] == (64, 3, 7, 7)
    assert shapes()[-2:] == [(1000, 2048), (1000,)]


def test_time_counts_for_the_innermost_measured_function(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def work(seconds: float) -> None:
        now[0] += seconds

    def outer() -> str:
        work(1.0)
        module.inner()
        module.inner()
        return "returned"

    module = SimpleNamespace(inner=lambda: work(2.0), outer=outer)
    clock = Clock()
    clock.measure(module, "inner", "copy")
    clock.measure(module, "outer", "python")
    assert module.outer() == "returned"
    assert clock.take() == {"python": 1.0, "copy": 4.0}
    module.inner()
    assert clock.take() == {"copy": 2.0}


def test_the_time_a_waiting_function_computes_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    wall, computing = iter([10.0, 15.0]), iter([1.0, 2.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(wall))
    monkeypatch.setattr(time, "thread_time", lambda: next(computing))
    module = SimpleNamespace(receive=lambda: None)
    clock = Clock()
    clock.measure(module, "receive", "wait", busy="python")
    module.receive()
    assert clock.take() == {"wait": 4.0, "python": 1.0}


def found(hosts: int) -> dict[str, dict[str, list[float]]]:
    samples = {step.STEP: {step.OURS: [0.1, 0.2], DDP: [0.4, 0.4]}, step.CPU: {step.OURS: [0.2, 0.2], DDP: [0.3, 0.3]}}
    parts = {what: {step.OURS: [0.01, 0.01], DDP: [0.0, 0.0]} for what in step.PARTS.values()}
    sent = {step.OURS: [hosts * 1e8] * 2, DDP: [hosts * 2e8] * 2}
    return {**samples, **parts, step.SENT: sent, step.DAEMON: {step.OURS: [0.05, 0.1], DDP: [0.0, 0.0]}}


def test_the_daemons_cpu_is_told_by_bytes() -> None:
    """Two hosts with two ranks each, whose gradients have 100 MB; each host sends 100 MB in a step."""
    made = {each.name: each for each in step.measures(found(2), 100_000_000, ranks=4, hosts=2)}
    assert made[step.PER_REDUCED].samples == {step.OURS: pytest.approx([0.125, 0.25])}
    assert made[step.PER_SENT].samples == {step.OURS: pytest.approx([0.25, 0.5])}
    assert made[step.SENT].samples == {step.OURS: [1e8, 1e8], DDP: [2e8, 2e8]}
    assert made[step.SENT].portable
    assert (made[step.STEP].peer, made[step.PER_SENT].peer) == (DDP, "")


def test_a_single_rank_has_no_buckets(capsys: pytest.CaptureFixture[str]) -> None:
    """A run on a machine with one GPU ended in a division by their number."""
    measures = step.measures(found(1), 100_000_000, ranks=1, hosts=1)
    step.show(Record({"hosts": 1, "ranks": 1}, measures, details={**ABOUT, "buckets": 0}))
    assert "messages per bucket" not in capsys.readouterr().out


def test_one_host_sends_nothing() -> None:
    made = {each.name for each in step.measures(found(1), 100_000_000, ranks=2, hosts=1)}
    assert made == {step.STEP, step.CPU, *step.PARTS.values(), step.DAEMON, step.PER_REDUCED}
