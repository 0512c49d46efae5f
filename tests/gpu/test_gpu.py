"""`python -m tests.gpu`: its cases, on a machine with a GPU; on any machine, what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fusion_rt import codecs
from fusion_rt.core.dtypes import DTYPES
from fusion_rt.kernels import cpu
from fusion_rt.kernels.machine_code import MachineCode
from tests.gpu import __main__ as command
from tests.gpu.cases import CASES, DTYPE_NAMES, TOPK

GPU = torch.cuda.is_available()


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("name", CASES if GPU else ["all of them"])
def test_on_a_gpu(name: str) -> None:
    result = command.run(name, "cuda")
    assert result["passed"], result["measured"]


@pytest.mark.skipif(GPU, reason="needs a machine without one")
def test_without_a_gpu_it_says_that_nothing_was_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--out", str(tmp_path / "gpu.json")]) == command.NO_GPU
    assert f"none of the {len(CASES)} cases was tried" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["versions", pytest.param("two nodes", marks=pytest.mark.long)])
def test_what_needs_no_gpu_passes_on_the_cpu(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "gpu.json"
    assert command.main(["--device", "cpu", "--cases", f"{name},topk", "--out", str(out)]) == 0
    assert "1 of 1 passed" in capsys.readouterr().out
    assert set(json.loads(out.read_text())["cases"]) == {name}


def test_no_daemon_of_a_case_has_to_compile_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a new machine all daemons did, at once: of the 44 s of the case `selection`, 34 were that."""
    asked: list[str] = []
    monkeypatch.setattr(MachineCode, "prepare", lambda self, kernels: asked.extend(kernels))
    command.prepare()
    ready = set(asked)
    asked.clear()
    for name in DTYPE_NAMES:
        cpu.prepare([DTYPES[name]])
        codecs.open_bucket(codecs.parse(TOPK), codecs.Layout(DTYPES[name], 1))
    assert set(asked) <= ready


def test_a_case_that_fails_is_told_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not command.run("kernels", "cpu")["passed"], "it needs a GPU"
    assert "FAILED  kernels" in capsys.readouterr().out


def test_each_case_says_in_a_sentence_what_it_checks() -> None:
    assert all(case.says.endswith(".") for case in CASES.values())
    assert sum(case.seconds for case in CASES.values()) < 30 * 60  # all cases that hang; `--minutes` ends it before
