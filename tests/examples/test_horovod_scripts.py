"""The three scripts ported from Horovod: each runs on two ranks, and one of them under Horovod's own name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import forks
from tests.harness import run_scripts

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TIMEOUT_S = 300

pytestmark = pytest.mark.multiprocess


def on_two_ranks(script: str, *arguments: str, cwd: Path) -> list[str]:
    """What an example prints there when it runs on each rank, as fusionrun shows it: rank 0's lines, then rank 1's."""
    printed = run_scripts(cwd, EXAMPLES / script, *arguments)
    return [f"[{rank}]<stdout>:{line}" for rank, text in enumerate(printed) for line in text.splitlines()]


def launched_as_horovod(*command: str | Path, cwd: Path) -> list[str]:
    """The same of what fusionrun runs with Python, where `import horovod` means this project."""
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "fusion_rt.runner",
            "-np",
            "2",
            "--as-horovod",
            *forks.interpreter(forks.WORKER),
            *map(str, command),
        ],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "daemon")]), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert process.returncode == 0, process.stderr
    assert "warn" not in process.stderr.lower(), process.stderr
    return sorted(process.stdout.splitlines(), key=lambda line: line.startswith("[1]"))


def test_mnist_learns_to_read_and_is_the_same_under_horovods_name(tmp_path: Path) -> None:
    lines = on_two_ranks("mnist.py", "--fp16-allreduce", cwd=tmp_path)
    results = [line for line in lines if "Test set" in line]
    assert len(results) == 5
    found = re.fullmatch(r"\[0\]<stdout>:Test set: Average loss: [\d.]+, Accuracy: ([\d.]+)%", results[-1])
    assert found is not None
    assert float(found[1]) > 85
    assert sum(line.startswith("[1]<stdout>:Train Epoch") for line in lines) == 15

    source = (EXAMPLES / "mnist.py").read_text()
    changed = source.replace("import fusion_rt.torch as hvd", "import horovod.torch as hvd")
    assert changed != source
    script = tmp_path / "mnist.py"
    script.write_text(changed)
    # Same seeds, and results are the same bits from run to run: so is everything that is printed.
    assert launched_as_horovod(script, "--fp16-allreduce", cwd=tmp_path) == lines


def test_resnet_warms_up_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    pattern = (
        r"\[0\]<stdout>:Epoch (\d): lr ([\d.]+), train loss ([\d.]+), .*; validation loss [\d.]+, accuracy [\d.]+%"
    )
    options = ["--batches-per-allreduce", "2", "--gradient-predivide-factor", "2", "--warmup-epochs", "2"]
    losses = []
    for epoch, lr in [(1, 0.15), (2, 0.2)]:  # from 0.05 * 2 batches on one rank to that of two
        (line,) = on_two_ranks("resnet.py", *options, "--epochs", str(epoch), cwd=tmp_path)
        found = re.fullmatch(pattern, line)
        assert found is not None, line
        assert (int(found[1]), float(found[2])) == (epoch, lr)
        losses.append(float(found[3]))
        assert (tmp_path / f"checkpoint-{epoch}.pth.tar").is_file()
    assert losses[1] < losses[0] / 2  # the second job has not begun anew


def test_resnet_18_trains_on_folders_of_images(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="needs Pillow: pip install '.[examples]'")
    for part in ("train", "val"):
        for brightness, name in ((40, "dark"), (200, "light")):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for number in range(4):
                image.new("RGB", (40 + number, 50), (brightness + number,) * 3).save(folder / f"{number}.jpeg")
    options = ["--train-dir", "train", "--val-dir", "val", "--image-size", "32", "--workers", "1", "--base-lr", "0.002"]
    lines = on_two_ranks("resnet.py", *options, "--epochs", "2", "--no-cuda", cwd=tmp_path)
    losses = [float(re.findall(r"train loss ([\d.]+)", line)[0]) for line in lines]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    state = torch.load(tmp_path / "checkpoint-2.pth.tar")["model"]
    of_18_layers = 11_689_512 - 513 * 998  # with a thousand classes, as published
    assert sum(value.numel() for name, value in state.items() if name.endswith((".weight", ".bias"))) == of_18_layers


def test_the_benchmark_says_how_fast_each_rank_and_all_are(tmp_path: Path) -> None:
    options = [
        "--sync-batch-norm",
        "--use-adasum",
        "--num-iters",
        "2",
        "--num-batches-per-iter",
        "2",
        "--image-size",
        "16",
    ]
    lines = on_two_ranks("synthetic_benchmark.py", *options, cwd=tmp_path)
    assert all(line.startswith("[0]<stdout>:") for line in lines)
    assert sum("img/sec per CPU" in line for line in lines) == 2
    mean = re.fullmatch(r"\[0\]<stdout>:Img/sec per CPU: ([\d.]+) \+-[\d.]+", lines[-2])
    total = re.fullmatch(r"\[0\]<stdout>:Total img/sec on 2 CPU\(s\): ([\d.]+) \+-[\d.]+", lines[-1])
    assert mean is not None
    assert total is not None
    assert float(total[1]) == pytest.approx(2 * float(mean[1]), abs=0.2)
