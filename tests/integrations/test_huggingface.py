"""Accelerate and Transformers on the backend "fusion" train as on gloo, with all that they do around a step."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests import forks
from tests.c10d.script import KEPT
from tests.harness import ROOT, Job, WorkerError

pytest.importorskip("accelerate", reason="needs Accelerate and Transformers: pip install '.[hf]'")
pytest.importorskip("transformers", reason="needs Accelerate and Transformers: pip install '.[hf]'")
pytestmark = pytest.mark.multiprocess

MODULES = (*forks.WORKER, "accelerate", "transformers.trainer", "fusion_rt.c10d")
ENVIRONMENT = {"HOROVOD_START_TIMEOUT": "120", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with Job((2,), ENVIRONMENT, init=False, modules=MODULES) as running:
        yield running


# --- on the ranks -----------------------------------------------------------------------------------------------------


def run_example(name: str, backend: str, arguments: list[str]) -> dict[str, Any]:
    """Runs `main` of an example in this process; returns the model's parameters, and whether DDP ran on the backend."""
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, GradientState, PartialState

    from fusion_rt.torch.core.runtime import leave

    sys.path.insert(0, str(ROOT / "examples"))
    warnings.simplefilter("ignore")
    module = __import__(name)
    seen = SimpleNamespace(model=None, backend="")

    class Watched(torch.nn.parallel.DistributedDataParallel):
        def __init__(self, module: torch.nn.Module, *positional: Any, **keywords: Any) -> None:
            super().__init__(module, *positional, **keywords)
            seen.model, seen.backend = module, dist.get_backend(self.process_group)
            KEPT.append(self.process_group)

    before, torch.nn.parallel.DistributedDataParallel = torch.nn.parallel.DistributedDataParallel, Watched  # type: ignore[misc]
    sys.argv = [name, "--backend", backend, *arguments]
    try:
        module.main()
    except Exception as error:
        leave(f"{type(error).__name__}: {error}")  # as the process does at its end, where nobody catches it
        raise
    finally:
        torch.nn.parallel.DistributedDataParallel = before  # type: ignore[misc]
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state(*([True] if state is AcceleratorState else []))
        if dist.is_initialized():
            dist.destroy_process_group()
    parameters = [p.detach().numpy().copy() for p in seen.model.parameters()]
    return {"parameters": parameters, "backend": seen.backend}


def run_failing(name: str) -> str:
    """Returns the exception of this rank, of which rank 1's fails by itself in its third step."""
    steps = 0
    forward = torch.nn.Flatten.forward

    def failing(self: Any, *inputs: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 3 and os.environ["RANK"] == "1":
            raise ArithmeticError("rank 1 was told to fail")
        return forward(self, *inputs)

    torch.nn.Flatten.forward = failing  # type: ignore[method-assign]
    try:
        run_example(name, "fusion", ["--epochs", "1"])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def backend_chosen(cpu: bool, cuda: bool, backend: str | None) -> tuple[str | None, str]:
    """Returns what Accelerate chooses where it is told of CPUs, and of a backend, on a machine that may have CUDA."""
    from accelerate.state import PartialState

    from fusion_rt.integrations import torchrun

    torchrun.set_variables()
    available = torch.cuda.is_available
    torch.cuda.is_available = lambda: cuda
    try:
        chosen, kind = PartialState._prepare_backend(PartialState.__new__(PartialState), cpu, backend=backend)
    finally:
        torch.cuda.is_available = available
    return chosen, kind.value


def trained(job: Job, name: str, backend: str, *arguments: str) -> list[np.ndarray]:
    first, second = job.run(run_example, name, backend, [*arguments])
    assert first["backend"] == second["backend"] == backend
    for mine, theirs in zip(first["parameters"], second["parameters"], strict=True):
        np.testing.assert_array_equal(mine, theirs)
    found: list[np.ndarray] = first["parameters"]
    return found


def assert_equal(found: list[np.ndarray], expected: list[np.ndarray], rtol: float = 1e-4) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=rtol, atol=1e-5)


def test_a_saved_model_is_tuned_as_on_gloo(job: Job, tmp_path: Path) -> None:
    """From the folder that a model of random weights was saved to, and with a codec that changes no gradient."""
    few = ["--lines", "100", "--epochs", "1"]
    trained(job, "finetune", "fusion", *few, "--directory", str(tmp_path / "first"))
    further = [*few, "--model", str(tmp_path / "first"), "--lr", "0.001", "--directory", str(tmp_path / "second")]
    with Job((2,), ENVIRONMENT, init=False, modules=MODULES) as other:
        expected = trained(other, "finetune", "gloo", *further)
    assert_equal(trained(job, "finetune", "fusion", *further, "--codec", "dense"), expected)


EXAMPLES = pytest.mark.parametrize("name", ["digits_accelerate", "digits_trainer"])


@pytest.mark.parametrize("flags", [(), ("--accumulate", "3", "--clip", "0.05"), ("--bf16",)], ids=" ".join)
@EXAMPLES
def test_training_is_that_on_gloo(job: Job, name: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    arguments = ["--epochs", "1", "--directory", str(tmp_path), *flags]
    # In workers of its own: gloo finds the addresses of earlier process groups in a store, and waits for them.
    with Job((2,), ENVIRONMENT, init=False, modules=MODULES) as other:
        expected = trained(other, name, "gloo", *arguments)
    assert_equal(trained(job, name, "fusion", *arguments), expected)


@pytest.mark.parametrize(("name", "saved"), [("digits_accelerate", "epoch0"), ("digits_trainer", "checkpoint-44")])
def test_a_run_that_is_resumed_ends_as_one_that_was_not(job: Job, name: str, saved: str, tmp_path: Path) -> None:
    whole = trained(job, name, "fusion", "--epochs", "2", "--directory", str(tmp_path))
    again = trained(
        job, name, "fusion", "--epochs", "2", "--directory", str(tmp_path), "--resume", f"{tmp_path}/{saved}"
    )
    assert_equal(again, whole, rtol=0)


@EXAMPLES
def test_an_exception_on_one_rank_ends_the_others(name: str, tmp_path: Path) -> None:
    with Job((2,), ENVIRONMENT, init=False, modules=MODULES) as job:
        first, second = job.run(run_failing, name)
    assert second == "ArithmeticError: rank 1 was told to fail"
    assert "rank 1 (host node0) failed" in first
    assert "rank 1 was told to fail" in first


def test_accelerate_takes_the_backend_where_there_is_cuda(job: Job) -> None:
    assert job.run(backend_chosen, False, True, "fusion") == [("fusion", "MULTI_GPU")] * 2


def test_accelerate_takes_gloo_on_cpus_whatever_it_is_told(job: Job) -> None:
    """If this fails, examples and docs/frameworks.md need no process group of their own any more."""
    assert job.run(backend_chosen, True, False, "fusion") == [("gloo", "MULTI_CPU")] * 2
    assert job.run(backend_chosen, False, False, None) == [(None, "NO")] * 2  # each rank would train by itself


def test_transformers_refuses_the_backend_on_cpus(job: Job) -> None:
    with pytest.raises(WorkerError, match="Your assigned backend fusion is not available, please use gloo"):
        job.run(use_ddp_backend)


def use_ddp_backend() -> None:
    from transformers import TrainingArguments

    from fusion_rt.integrations import torchrun

    torchrun.set_variables()
    _ = TrainingArguments("/tmp/unused", use_cpu=True, ddp_backend="fusion").device
