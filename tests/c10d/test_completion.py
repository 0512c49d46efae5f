"""Futures completed by threads: a function that is called back may wait for another future, whatever has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from fusion_rt.c10d.completion import Completer, ReducerWaits
from fusion_rt.c10d.submission import Submission
from fusion_rt.client.channel import Channel
from fusion_rt.torch.core.runtime import runtime
from fusion_rt.tracing.format import Kind
from fusion_rt.tracing.reader import read
from fusion_rt.tracing.recorder import NULL, Recorder
from tests.c10d.script import START, backward, process_group
from tests.harness import Job, on_ranks


class _Part:
    watcher: Any = None
    done = False

    def end(self) -> None:
        self.done = True
        self.watcher()


class _Channel:
    """One that a thread reads: it comes back from it when something has been done, and says that it is reading."""

    def __init__(self) -> None:
        self.changed = threading.Condition()

    def read_until(self, awaited: Completer) -> None:
        with self.changed:
            self.changed.wait_for(lambda: awaited.done, 60)


class _Work:
    def __init__(self, calls_back: bool, then: Any = None) -> None:
        self.parts = [_Part()]
        self.calls_back = calls_back
        self.settled = threading.Event()
        self._then = then

    def settle(self) -> None:
        if self._then is not None:
            assert self._then()
        self.settled.set()


def test_what_ended_together_is_completed_while_a_function_that_is_called_back_waits_for_it() -> None:
    channel = _Channel()
    completer = Completer(channel)  # type: ignore[arg-type]
    second = _Work(False)
    first = _Work(True, lambda: second.settled.wait(30))
    completer.complete(first)  # type: ignore[arg-type]
    completer.complete(second)  # type: ignore[arg-type]
    with channel.changed:  # both, before any thread looks
        for work in (first, second):
            work.parts[0].end()
        channel.changed.notify_all()
    assert first.settled.wait(60)
    completer.close()


def test_a_work_that_has_ended_needs_no_thread() -> None:
    completer = Completer(_Channel())  # type: ignore[arg-type]
    work = _Work(False)
    work.parts[0].done = True
    before = threading.active_count()
    completer.complete(work)  # type: ignore[arg-type]
    assert work.settled.is_set()
    assert threading.active_count() == before
    completer.close()


def part_called(name: str) -> Submission:
    part = Submission()
    part.about = (name, 0, 0)
    return part


class Reducer:
    """Waits as DDP's reducer: at the end of a backward pass, for parts that end one after the other."""

    def __init__(self, trace: Any = None) -> None:
        self.found: list[tuple[Kind, str]] = []
        listed = SimpleNamespace(record=lambda kind, name, *_: self.found.append((Kind(kind), name)))
        self.waits = ReducerWaits(cast(Channel, SimpleNamespace(trace=trace or listed)))

    def end(self, part: Submission) -> None:
        part.watcher = self.waits.ended
        part.end()

    def backward(self, *parts: Submission, at_end: Callable[[], None]) -> None:
        weight = torch.ones(1, requires_grad=True)

        def hook(gradient: torch.Tensor) -> None:
            for part in parts:
                self.waits.expect([part])
            torch.autograd.Variable._execution_engine.queue_callback(at_end)

        weight.register_hook(hook)
        backward(weight.sum())


def test_the_reducer_waits_for_one_operation_after_the_other() -> None:
    reducer, (a, b, c) = Reducer(), map(part_called, "abc")
    reducer.end(a)  # which is there before the graph has been run

    def wait() -> None:
        reducer.end(c)
        assert reducer.found == [(Kind.WAIT_BEGIN, "b")]
        reducer.end(b)

    reducer.backward(a, b, c, at_end=wait)
    assert reducer.found == [(Kind.WAIT_BEGIN, "b"), (Kind.WAIT_END, "b")]


def test_the_next_wait_begins_where_one_ends() -> None:
    reducer, (a, b) = Reducer(), map(part_called, "ab")

    def wait() -> None:
        reducer.end(a)
        reducer.end(b)

    reducer.backward(a, b, at_end=wait)
    assert reducer.found == [(kind, name) for name in "ab" for kind in (Kind.WAIT_BEGIN, Kind.WAIT_END)]


def test_a_script_that_does_not_wait_has_no_wait_after_the_backward_pass() -> None:
    reducer, part = Reducer(), part_called("a")
    reducer.backward(part, at_end=lambda: None)
    assert reducer.found == [(Kind.WAIT_BEGIN, "a"), (Kind.WAIT_END, "a")]
    reducer.end(part)
    assert len(reducer.found) == 2


def test_a_backward_pass_that_fails_leaves_nothing_to_the_next_one() -> None:
    reducer, lost, next_one = Reducer(), part_called("lost"), part_called("next")
    weight = torch.ones(1, requires_grad=True)

    def fail(gradient: torch.Tensor) -> None:
        reducer.waits.expect([lost])
        raise RuntimeError("the script fails")

    weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="the script fails"):
        backward(weight.sum())
    reducer.backward(next_one, at_end=lambda: reducer.end(next_one))
    assert reducer.found == [(Kind.WAIT_BEGIN, "next"), (Kind.WAIT_END, "next")]


def test_nothing_is_noted_outside_of_a_backward_pass() -> None:
    reducer = Reducer()
    reducer.waits.expect([part_called("a")])
    reducer.backward(part_called("b"), at_end=lambda: None)
    assert {name for _, name in reducer.found} == {"b"}


def test_nothing_is_noted_where_nothing_is_recorded() -> None:
    reducer = Reducer(NULL)
    reducer.backward(part_called("a"), at_end=lambda: None)
    assert reducer.waits._graph == -1  # nothing was queued


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """Two ranks on two nodes."""
    with Job((1, 1), START) as running:
        yield running


@on_ranks
def test_ddp_waits_for_buffers_and_gradients_and_that_is_recorded() -> None:
    trace = runtime().trace
    assert isinstance(trace, Recorder)
    with process_group():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(40, 2000), torch.nn.BatchNorm1d(2000), torch.nn.Linear(2000, 300))
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        for _ in range(12):
            optimizer.zero_grad()
            backward(ddp(torch.randn(8, 40)).square().mean())
            optimizer.step()
        ring = read(trace.path)
    kinds = ring.records["kind"]
    ends = ring.records["time"][kinds == Kind.STEP_END]
    assert len(ends) == 12
    for begin, end in (
        (Kind.FORWARD_BEGIN, Kind.FORWARD_END),  # for the buffers of rank 0
        (Kind.BACKWARD_BEGIN, Kind.STEP_END),  # for gradients
    ):
        opened, closed = ring.records["time"][kinds == begin], ring.records["time"][kinds == end][-11:]
        waits = ring.records[(kinds == Kind.WAIT_BEGIN) | (kinds == Kind.WAIT_END)]
        inside = [
            [Kind(kind).name for kind in waits["kind"][(waits["time"] > low) & (waits["time"] < high)].tolist()]
            for low, high in zip(opened, closed, strict=True)
        ]
        assert any(inside), begin
        for each in inside:  # one after the other
            assert each == ["WAIT_BEGIN", "WAIT_END"] * (len(each) // 2)
