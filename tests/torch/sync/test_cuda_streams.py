"""Gradients on a GPU that is made up, whose streams run as late, and in any order, as CUDA allows: `cuda_fake`.

The worker's own code runs, with a real daemon. Gradients are small whole numbers, so that results are exact.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.torch.core.runtime import runtime
from tests.harness import Job, on_ranks
from tests.torch.cuda_fake.streams import FakeStream
from tests.torch.cuda_fake.tensors import fake_cuda, on_gpu, value_of

SCHEDULES = range(6)
TIMEOUT_S = 60.0
LENGTHS = (300, 40)


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """Two ranks; buckets of 1 KiB, so that the longer parameter has one of its own."""
    with Job((2,), {"HOROVOD_FUSION_THRESHOLD": "1KiB", "HOROVOD_START_TIMEOUT": "120"}) as running:
        yield running


def gradient(number: int, step: int, rank: int, length: int) -> torch.Tensor:
    chosen = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
    return torch.randint(-9, 10, (length,), generator=chosen).float()


def mean(number: int, step: int, length: int, ranks: Sequence[int] | None = None) -> torch.Tensor:
    given = [gradient(number, step, rank, length) for rank in (range(hvd.size()) if ranks is None else ranks)]
    return torch.stack(given).sum(0) / hvd.size()


class Computed(torch.autograd.Function):
    """Something whose gradient is computed on a stream, which is the current one then. When the backward pass has
    ended, and before others are told of that, the caller's stream waits for all: so does autograd."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, values: torch.Tensor, *streams: FakeStream) -> torch.Tensor:
        ctx.given = values, *streams
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        values, stream, caller, *others = ctx.given
        gpus = FakeStream.gpus
        if gpus.current_stream() is caller:

            def ends() -> None:
                for other in others:
                    caller.wait_stream(other)
                gpus.set_stream(caller)

            torch.autograd.Variable._execution_engine.queue_callback(ends)
        stream.wait_stream(caller)
        values.record_stream(stream)
        gpus.set_stream(stream)
        return values * 1.0, *(None for _ in range(3 + len(others)))


def backward(
    parameters: Sequence[torch.Tensor], step: int, streams: Sequence[FakeStream] = (), leaves_out: int = -1
) -> None:
    """Computes gradients, each on its stream, from the last parameter's to the first's."""
    caller, computed = FakeStream.gpus.current_stream(), cast(Any, Computed).apply
    outputs = []
    for n, parameter in enumerate(parameters):
        if n != leaves_out:
            values = on_gpu(gradient(n, step, hvd.rank(), len(parameter)))
            outputs.append(computed(parameter, values, streams[n] if streams else caller, caller, *streams))
    torch.autograd.backward(outputs)
    for parameter in parameters if streams else ():
        cast(torch.Tensor, parameter.grad).record_stream(cast(Any, caller))  # on which the optimizer reads it


def make(lengths: Sequence[int] = LENGTHS, **options: Any) -> tuple[list[torch.nn.Parameter], Any]:
    parameters = [torch.nn.Parameter(on_gpu(torch.zeros(n))) for n in lengths]
    return parameters, hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), **options)


def trained(number: int, steps: range, length: int) -> torch.Tensor:
    return -sum((mean(number, step, length) for step in steps), torch.zeros(length))


@on_ranks
def test_steps_on_one_stream() -> None:
    for seed in SCHEDULES:
        with fake_cuda(seed):
            parameters, optimizer = make()
            for step in range(4):
                optimizer.zero_grad(set_to_none=bool(seed % 2))
                backward(parameters, step)
                optimizer.step()
            for number, parameter in enumerate(parameters):
                assert torch.equal(value_of(parameter), trained(number, range(4), len(parameter))), seed


@on_ranks
def test_gradients_that_are_computed_on_several_streams() -> None:
    """The hook of a bucket's last gradient runs on the stream of that one; the others may be far behind. The last
    bucket is sent when the backward pass has ended, the one before it in a hook."""
    for seed in SCHEDULES:
        with fake_cuda(seed):
            parameters, optimizer = make((60, 40, 190, 50))
            streams = [FakeStream() for _ in parameters]
            for step in range(4):
                optimizer.zero_grad()
                backward(parameters, step, streams)
                optimizer.step()
            for number, parameter in enumerate(parameters):
                assert torch.equal(value_of(parameter), trained(number, range(4), len(parameter))), (seed, number)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@on_ranks
def test_gradients_of_a_bucket_are_copied_together_in_both_directions(dtype: torch.dtype) -> None:
    """Also where one of them is missing, and where there is something between them."""
    lengths = (50, 7, 9, 30)
    for seed in SCHEDULES:
        with fake_cuda(seed) as gpus:
            parameters = [torch.nn.Parameter(on_gpu(torch.zeros(n, dtype=dtype))) for n in lengths]
            optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
            for step in range(4):
                optimizer.zero_grad(set_to_none=bool(seed % 2))
                given = [on_gpu(gradient(n, step, hvd.rank(), length).to(dtype)) for n, length in enumerate(lengths)]
                losses = [(p * g).sum() for p, g in zip(parameters, given, strict=True)]
                before = gpus.copied
                torch.autograd.backward(losses[1:] if step == 2 else losses)
                optimizer.step()
                assert gpus.copied - before <= 2 * len(optimizer._sync.plan.buckets) < 2 * len(lengths), (seed, step)
            for number, parameter in enumerate(parameters):
                steps = [step for step in range(4) if number or step != 2]
                expected = -sum((mean(number, step, lengths[number]) for step in steps), torch.zeros(lengths[number]))
                assert torch.equal(value_of(parameter).float(), expected), (seed, number)


@on_ranks
def test_memory_is_flat_where_each_step_has_new_gradients() -> None:
    for seed in SCHEDULES[:4]:
        with fake_cuda(seed) as gpus:
            parameters, optimizer = make()
            held = []
            for step in range(12):
                optimizer.zero_grad(set_to_none=True)
                backward(parameters, step)
                optimizer.step()
                gpus.finish()
                gc.collect()
                held.append(gpus.allocated)
            assert max(held[6:]) <= max(held[2:6]), held


@on_ranks
def test_gradients_that_are_forgotten_are_freed_while_their_results_may_still_come() -> None:
    """The forward pass has their memory, as with torch alone: results are copied on the stream that frees them."""
    for seed in SCHEDULES:
        with fake_cuda(seed) as gpus:
            parameters, optimizer = make()
            for step in range(3):
                backward(parameters, step)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                gc.collect()
                deadline = time.monotonic() + TIMEOUT_S
                while gpus.allocated > 4 * sum(LENGTHS):  # the thread that submits looks at what it has for a while
                    assert time.monotonic() < deadline, (seed, gpus.allocated)
                    time.sleep(1e-3)
                assert gpus.allocated == 4 * sum(LENGTHS), seed
            for number, parameter in enumerate(parameters):
                assert torch.equal(value_of(parameter), trained(number, range(3), len(parameter))), seed


class Waits(torch.autograd.Function):
    """The script waits in the midst of the backward pass, as long as it takes until something is submitted."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, submitted: threading.Event) -> torch.Tensor:
        ctx.submitted = submitted
        return values * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        assert ctx.submitted.wait(60), "nothing was submitted while the script waited"
        return gradients[0], None


@on_ranks
def test_what_has_been_copied_is_submitted_while_the_script_waits_in_the_backward_pass() -> None:
    channel = runtime().client.channel
    ready, submitted = channel.ready, threading.Event()

    def spy(*arguments: Any) -> Any:
        operation = ready(*arguments)
        submitted.set()
        return operation

    for seed in SCHEDULES:
        with fake_cuda(seed), pytest.MonkeyPatch.context() as patch:
            parameters, optimizer = make()
            for step in range(4):
                optimizer.zero_grad()
                if step == 1:
                    patch.setattr(channel, "ready", spy)
                submitted.clear()
                first, last = (on_gpu(gradient(n, step, hvd.rank(), n_of)) for n, n_of in enumerate(LENGTHS))
                waits = parameters[0] if step == 0 else cast(Any, Waits).apply(parameters[0], submitted)
                losses = [(waits * first).sum(), (parameters[1] * last).sum()]
                torch.autograd.backward(losses)
                optimizer.step()
            for number, parameter in enumerate(parameters):
                assert torch.equal(value_of(parameter), trained(number, range(4), len(parameter))), seed


@pytest.mark.parametrize("way", ["another plan", "no optimizer"])
@on_ranks
def test_memory_stays_registered_until_the_gpu_has_copied(way: str) -> None:
    pending = 0
    for seed in SCHEDULES:
        with fake_cuda(seed) as gpus:
            parameters, optimizer = make()
            for step in range(3):
                optimizer.zero_grad()
                backward(parameters, step)
                optimizer.step()
            pending += len(gpus.transfers)
            if way == "another plan":
                parameters[1].requires_grad_(False)
            else:
                del optimizer
                gc.collect()
                optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
            optimizer.zero_grad()
            backward(parameters[:1], 3)
            optimizer.step()
            assert not gpus.faults, seed
            assert torch.equal(value_of(parameters[0]), trained(0, range(4), LENGTHS[0])), seed
    assert pending, "no schedule had copies under way"


@pytest.mark.parametrize("lengths", [(60, 40), LENGTHS])
@on_ranks
def test_a_step_without_gradient_leaves_the_results_of_the_last_one(lengths: Sequence[int]) -> None:
    """Zeros, and what the daemon makes of them, go where the GPU may not have copied the last results from yet."""
    for seed in SCHEDULES:
        with fake_cuda(seed):
            parameters, optimizer = make(lengths)
            for step in range(4):
                optimizer.zero_grad()
                backward(parameters, step, leaves_out=0 if step % 2 else -1)
                optimizer.step()
            expected = -(mean(0, 0, lengths[0]) + mean(0, 2, lengths[0]))
            assert torch.equal(value_of(parameters[0]), expected), seed
