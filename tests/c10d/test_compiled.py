"""Scripts that compile with torch's compiler what uses the backend, beside the same over gloo."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fusion_rt.torch as hvd
from tests.c10d.script import START, process_group
from tests.harness import Job, on_ranks
from tests.torch.sync.test_compiled import compiled_files

STEPS = 20
CXX = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler, g++")
CASES = [
    *(pytest.param("eager", whole, first) for whole in (False, True) for first in (False, True)),
    pytest.param("aot_eager", False, True),
    pytest.param("aot_eager", True, False),
    pytest.param("inductor", False, False, marks=CXX),
]
"""The compiler's backend; whether a step is compiled, and not just the module; and whether something has been compiled
before there is a group."""


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """Two ranks of one node."""
    with Job((2,), START) as running:
        yield running


@contextlib.contextmanager
def compiler() -> Iterator[None]:
    """The compiler as in a new process, with a cache of its own, which leaves no processes behind."""
    torch.compiler.reset()
    own = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict("os.environ", own, TORCHINDUCTOR_CACHE_DIR=cache):
        yield
    torch.compiler.reset()


def a_model() -> torch.nn.Module:
    """It has buffers, which DDP broadcasts before each forward pass."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    return torch.nn.Sequential(*layers)


def losses(over: str, compile: Callable[..., Callable[..., torch.Tensor]], whole: bool, first: bool) -> list[float]:
    """Trains with a compiled module, or a compiled step, over a backend of `torch.distributed`."""
    torch.compiler.reset()
    if first:
        compile(lambda tensor: tensor + 1)(torch.ones(2))
    with process_group(over):
        module = DistributedDataParallel(a_model())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = module if whole else compile(module)
        generator = torch.Generator().manual_seed(hvd.rank())

        def step(batch: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        taken = compile(step) if whole else step
        return [float(taken(torch.randn(4, 8, generator=generator))) for _ in range(STEPS)]


@pytest.mark.parametrize(("backend", "whole", "first"), CASES)
@on_ranks
def test_compiled_data_parallel_training_is_that_over_gloo(backend: str, whole: bool, first: bool) -> None:
    def compile(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return torch.compile(function, backend=backend)

    with compiler():
        expected = losses("gloo", compile, whole, first)
        assert losses("fusion", compile, whole, first) == pytest.approx(expected, rel=1e-6)
        assert compiled_files() == set()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@on_ranks
def test_an_operation_that_goes_on_may_be_begun_in_a_compiled_function(backend: str) -> None:
    def step(tensor: torch.Tensor) -> torch.Tensor:
        doubled = 2 * tensor
        work = dist.all_reduce(doubled, async_op=True)
        work.wait()
        return doubled + 1

    with compiler(), process_group():
        compiled = torch.compile(step, backend=backend)
        results = [float(compiled(torch.full((3,), float(n + hvd.rank())))[0]) for n in range(STEPS)]
        assert results == [2.0 * (2 * n + 1) + 1 for n in range(STEPS)]
        assert compiled_files() == set()
