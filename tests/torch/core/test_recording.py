"""What a worker records of its steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

from fusion_rt.torch.core import recording
from fusion_rt.torch.core.recording import ScriptSteps, Steps
from fusion_rt.tracing.format import NOBODY, Kind
from fusion_rt.tracing.recorder import NULL


class Listed:
    """An instrument that keeps kinds and clocks in a list, and what is held of memory in another."""

    def __init__(self) -> None:
        self.found: list[tuple[Kind, int]] = []
        self.memory: list[tuple[int, int]] = []

    def record(
        self,
        kind: int,
        name: str = "",
        value: int = 0,
        clock: int = 0,
        plan: int = 0,
        extra: int = 0,
        peer: int = NOBODY,
    ) -> None:
        if kind == Kind.MEMORY:
            self.memory.append((value, extra))
            return
        self.found.append((Kind(kind), clock))

    def close(self) -> None:
        """There is nothing to close."""


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listed]:
    monkeypatch.setattr(recording, "_compiles", lambda: False)  # whatever other tests have done
    listed = Listed()
    yield listed
    recording.forget(listed)


def model() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1))


def test_forward_and_backward_passes_of_a_step_are_seen_from_the_second_on(trace: Listed) -> None:
    net, steps = model(), Steps(trace)
    for _ in range(3):
        net(torch.ones(1, 2)).sum().backward()
        steps.begin()
        steps.end()
    first = [(Kind.STEP_BEGIN, 0), (Kind.STEP_END, 0)]
    kinds = [Kind.FORWARD_BEGIN, Kind.FORWARD_END, Kind.BACKWARD_BEGIN, Kind.BACKWARD_END]
    later = [[*((kind, n) for kind in kinds), (Kind.STEP_BEGIN, n), (Kind.STEP_END, n)] for n in (1, 2)]
    assert trace.found == first + later[0] + later[1]


def test_nothing_stays_on_the_modules(trace: Listed) -> None:
    net, steps = model(), Steps(trace)
    steps.end()
    net(torch.ones(1, 2)).sum().backward()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    recording.forget(trace)
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_each_pass_of_an_accumulated_gradient_is_seen(trace: Listed) -> None:
    net, steps = model(), Steps(trace)
    steps.end()
    trace.found.clear()
    for _ in range(2):
        net(torch.ones(1, 2)).sum().backward()
    kinds = [Kind.FORWARD_BEGIN, Kind.FORWARD_END, Kind.BACKWARD_BEGIN, Kind.BACKWARD_END]
    assert [kind for kind, _ in trace.found] == kinds * 2


def test_an_evaluation_is_no_forward_pass(trace: Listed) -> None:
    net, steps = model(), Steps(trace)
    steps.end()
    trace.found.clear()
    with torch.no_grad():
        net(torch.ones(1, 2))
    assert trace.found == []


def test_a_forward_pass_that_fails_leaves_no_hook(trace: Listed) -> None:
    net, steps = model(), Steps(trace)
    steps.end()
    with pytest.raises(RuntimeError):
        net(torch.ones(1, 3))
    assert not any(module._forward_hooks for module in net.modules())
    assert [kind for kind, _ in trace.found][-2:] == [Kind.FORWARD_BEGIN, Kind.FORWARD_END]


def test_a_script_that_compiles_is_left_alone(trace: Listed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_compiles", lambda: True)
    Steps(trace).end()
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_a_module_that_is_compiled_after_a_step_does_not_warn_of_a_hook() -> None:
    """Warnings are errors in tests."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    listed = Listed()
    net, steps = model(), Steps(listed)
    net(torch.ones(1, 2)).sum().backward()
    steps.end()
    assert torch.nn.modules.module._global_forward_pre_hooks
    compiled = torch.compile(net, backend="eager")
    for _ in range(2):
        assert not torch.nn.modules.module._has_any_global_hook()
        compiled(torch.ones(1, 2)).sum().backward()
        steps.end()
    recording.forget(listed)
    assert not torch.nn.modules.module._global_module_registration_hooks
    torch.compiler.reset()


def test_memory_is_told_twice_a_second_however_short_steps_are(trace: Listed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 10 ms, for five seconds; 3 GiB on two GPUs."""
    clock = itertools.count(0, 10_000_000)
    monkeypatch.setattr(recording.time, "monotonic_ns", clock.__next__)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: (device + 1) << 30)
    steps = Steps(trace)
    for _ in range(500):
        steps.end()
    assert len(trace.memory) == 10
    assert {on_gpus for _, on_gpus in trace.memory} == {3 << 20}
    held = psutil.Process().memory_info().rss
    assert trace.memory[-1][0] == pytest.approx(held, rel=0.05)


def an_optimizer() -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter], lr=0.1)


@pytest.fixture
def script_steps(trace: Listed) -> Iterator[ScriptSteps]:
    steps = ScriptSteps(trace)
    yield steps
    steps.close()


def ends(trace: Listed) -> list[int]:
    return [clock for kind, clock in trace.found if kind == Kind.STEP_END]


def test_steps_of_an_optimizer_of_torch_are_recorded(trace: Listed, script_steps: ScriptSteps) -> None:
    optimizer = an_optimizer()
    for _ in range(3):
        optimizer.step()
    kinds = (Kind.APPLY_BEGIN, Kind.APPLY_END, Kind.STEP_END)
    assert trace.found == [(kind, number) for number in range(3) for kind in kinds]
    script_steps.close()
    optimizer.step()
    assert ends(trace) == [0, 1, 2]


def test_forward_passes_are_seen_between_steps_of_an_optimizer_of_torch(
    trace: Listed, script_steps: ScriptSteps
) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert [kind for kind, clock in trace.found if clock == 1][:3] == [
        Kind.FORWARD_BEGIN, Kind.FORWARD_END, Kind.BACKWARD_BEGIN,
    ]  # fmt: skip


def test_optimizers_that_take_turns_share_a_step(trace: Listed, script_steps: ScriptSteps) -> None:
    first, second = an_optimizer(), an_optimizer()
    for _ in range(3):
        first.step()
        second.step()
    assert ends(trace) == [0, 1, 2]


def test_an_optimizer_that_replaces_another_goes_on_with_steps(trace: Listed, script_steps: ScriptSteps) -> None:
    first, second = an_optimizer(), an_optimizer()
    for optimizer in (first, second, second, second):
        optimizer.step()
    assert ends(trace) == [0, 1, 2]  # the first one of the second is part of the step before


@pytest.mark.usefixtures("script_steps")
def test_what_a_distributed_optimizer_records_is_not_recorded_twice(trace: Listed) -> None:
    optimizer, own = an_optimizer(), Steps(trace)
    for _ in range(2):
        own.begin()
        optimizer.step()
        own.end()
    assert trace.found == [(kind, number) for number in range(2) for kind in (Kind.STEP_BEGIN, Kind.STEP_END)]
    del own
    optimizer.step()
    assert ends(trace)[2:] == [0]  # nobody else records any more


def test_without_a_recorder_there_is_no_hook() -> None:
    before = len(_global_optimizer_post_hooks)
    ScriptSteps(NULL)
    assert len(_global_optimizer_post_hooks) == before
