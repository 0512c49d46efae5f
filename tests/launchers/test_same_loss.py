"""One script written for Horovod, started in every way there is, ends with the same loss."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fusion_rt.as_horovod import python_path
from tests import forks
from tests.launchers.conftest import HERE, Sshd, fusionrun, horovodrun, logs, mpirun, run, torchrun

pytestmark = pytest.mark.multiprocess

AS_HOROVOD = ["-m", "fusion_rt.as_horovod", str(HERE / "train.py")]


def reference() -> float:
    """The loss of `train.py` on two ranks, by torch in this process."""
    torch.manual_seed(42)
    model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]
    for _ in range(6):
        losses, gradients = [], []
        for generator in generators:
            data = torch.randn(8, 10, generator=generator)
            losses.append(F.cross_entropy(model(data), torch.randint(3, (8,), generator=generator)))
            gradients.append(torch.autograd.grad(losses[-1], list(model.parameters())))
        for parameter, *both in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = (both[0] + both[1]) / 2
        optimizer.step()
    return ((losses[0] + losses[1]) / 2).item()


def check(done: subprocess.CompletedProcess[str], runtime_dir: Path) -> None:
    assert done.returncode == 0, done.stderr
    found = re.findall(r"final loss (\S+) of 2 ranks", done.stdout)
    assert [float.fromhex(text) for text in found] == [reference()], done.stdout + done.stderr
    assert logs(runtime_dir) == {}


def test_fusionrun(runtime_dir: Path, tmp_path: Path) -> None:
    command = [*fusionrun(), "-np", "2", "--as-horovod", sys.executable, HERE / "train.py"]
    check(run(*command, cwd=tmp_path), runtime_dir)


def test_horovodrun(runtime_dir: Path, tmp_path: Path) -> None:
    check(run(*horovodrun(), "-np", "2", "--gloo", sys.executable, *AS_HOROVOD, cwd=tmp_path), runtime_dir)


def test_torchrun(runtime_dir: Path, tmp_path: Path) -> None:
    command = [*torchrun(), "--standalone", "--nproc-per-node", "2", "--no-python", *forks.interpreter(forks.WORKER)]
    check(run(*command, HERE / "train.py", cwd=tmp_path, PYTHONPATH=python_path()), runtime_dir)


def test_mpirun(runtime_dir: Path, tmp_path: Path) -> None:
    command = [*mpirun(), "-np", "2", *forks.interpreter(forks.WORKER), HERE / "train.py"]
    check(run(*command, cwd=tmp_path, PYTHONPATH=python_path()), runtime_dir)


def test_ssh(runtime_dir: Path, tmp_path: Path, sshd: Sshd) -> None:
    done = run(
        *sshd.fusionrun("--as-horovod", *forks.interpreter(forks.WORKER), HERE / "train.py"),
        cwd=tmp_path,
        **sshd.environ,
    )
    check(done, runtime_dir)
