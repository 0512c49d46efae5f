"""Take the same script: every example runs with every algorithm, or gets the refusal that docs/algorithms.md has."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import fusion_rt.torch as hvd
from fusion_rt.algorithms import ALGORITHMS
from tests.harness import Job, run_script

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY_GPT = ("--batch-size", "2", "--context", "8", "--width", "8", "--layers", "1")

ARGUMENTS: dict[str, tuple[str, ...]] = {
    "char_gpt.py": ("--steps", "3", *TINY_GPT),
    "char_gpt_elastic.py": ("--samples", "12", "--commit-every", "2", *TINY_GPT),
    "digits.py": ("--epochs", "1", "--batch-size", "256"),
    "mnist.py": ("--epochs", "1", "--batch-size", "256", "--no-cuda"),
    "resnet.py": ("--epochs", "1", "--batch-size", "128", "--batches-per-allreduce", "2", "--no-cuda"),
    "synthetic_benchmark.py": (
        *("--num-warmup-batches", "1", "--num-batches-per-iter", "1", "--num-iters", "1", "--batch-size", "2"),
        *("--width", "4", "--image-size", "8", "--no-cuda"),
    ),
    "pipeline.py": ("--stages", "1", "--epochs", "1", "--batch-size", "256"),
}
REFUSED = {
    "choco": "choco sends a codec's selection of a difference, and dense selects nothing; use the codec topk, or the "
    "algorithm dpsgd"
}
TEXTS = {name: f"{name}(steps=2)" for name, kind in ALGORITHMS.items() if hasattr(kind, "steps")}


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """Two nodes."""
    with Job((1, 1), {"HOROVOD_START_TIMEOUT": "120"}) as running:
        yield running


def _run(directory: str, script: str, algorithm: str, arguments: tuple[str, ...]) -> str:
    """The script as it is, in a job that was started with this algorithm; what it was refused with, if it was."""
    sets: list[Any] = []  # which the next script adds again
    adds, plain, argv, path, here = hvd.add_process_set, hvd.DistributedOptimizer, sys.argv, list(sys.path), os.getcwd()

    def add(ranks: Any) -> Any:
        sets.append(adds(ranks))
        return sets[-1]

    made: Callable[..., Any] = functools.partial(plain, algorithm=algorithm)
    small = {"stdlib": str(EXAMPLES)}  # a text to learn that is read at once
    try:
        with (
            mock.patch.object(hvd, "DistributedOptimizer", made),
            mock.patch.object(hvd, "add_process_set", add),
            mock.patch("sysconfig.get_paths", return_value=small),
        ):
            run_script(directory, script, arguments, allowed="the optimizer has momentum, and")
    except ValueError as error:
        return str(error)
    finally:
        sys.argv, sys.path[:] = argv, path
        os.chdir(here)
        for process_set in sets:
            hvd.remove_process_set(process_set)
    return ""


def test_all_examples_are_here_or_in_the_tests_of_integrations() -> None:
    of_frameworks = {"finetune.py", *(f"digits_{name}.py" for name in ("accelerate", "lightning", "ray", "trainer"))}
    # Whose algorithm is what it shows; which has no DistributedOptimizer; which trains for seconds.
    of_their_own = {"muloco.py", "ddp.py", "compare.py"}
    assert sorted(of_frameworks.union(of_their_own, ARGUMENTS)) == sorted(path.name for path in EXAMPLES.glob("*.py"))


# One of each kind: at shards, elastic, gossip, between all ranks. All run with one script; all with all is for -m long.
KINDS = ("asp", "easgd", "adpsgd", "diloco")
FAST = [("char_gpt.py", name) for name in ALGORITHMS]
FAST += [(script, name) for script in ARGUMENTS if script != "char_gpt.py" for name in KINDS]
REST = [(script, name) for script in ARGUMENTS for name in ALGORITHMS if (script, name) not in FAST]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("script", "algorithm"), [*FAST, *(pytest.param(*pair, marks=pytest.mark.long) for pair in REST)]
)
def test_an_example_runs_with_every_algorithm_or_is_refused_as_documented(
    job: Job, tmp_path: Path, script: str, algorithm: str
) -> None:
    text = TEXTS.get(algorithm, algorithm)
    said = job.run(_run, str(tmp_path), str(EXAMPLES / script), text, ARGUMENTS[script])
    assert said == [REFUSED.get(algorithm, "")] * 2
