"""What `--check-build` prints."""

from __future__ import annotations

import importlib.metadata
import re

import pytest

import fusion_rt
from fusion_rt.algorithms import ALGORITHMS
from fusion_rt.codecs import CODECS
from fusion_rt.host import process_memory
from fusion_rt.runner.command import check_build
from fusion_rt.runner.command.cli import main


def test_the_list_has_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check-build"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"fusion_rt v{fusion_rt.__version__}:\n\nAvailable Frameworks:\n    [X] PyTorch ")
    assert f"[X] PyTorch {importlib.metadata.version('torch')}\n" in text
    assert f"[X] Numba {importlib.metadata.version('numba')}\n" in text
    assert re.search(r"^    \[[X ]\] ZeroMQ with CURVE \d+\.\d+\.\d+$", text, re.MULTILINE)
    for name in ("CUDA", "NCCL", "Numba-CUDA", "Ray", "Horovod"):
        assert re.search(rf"^    \[[X ]\] {name}\b", text, re.MULTILINE)
    for name in (*CODECS, *ALGORITHMS):
        assert f"\n    [X] {name}" in text


def test_it_is_tried_whether_tensors_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_build, "_ask", lambda code: {})
    works = "    [X] Tensors read in place (process_vm_readv)\n"
    refused = "    [ ] Tensors read in place (the kernel does not let one process read another one: by way of"
    text = check_build.report()
    assert works in text or refused in text
    monkeypatch.setenv("FUSION_MEMORY", "adopt")
    assert (works in check_build.report()) == (works in text)
    monkeypatch.setattr(process_memory.CALLS, "reads", 0)
    assert refused in check_build.report()
    monkeypatch.setenv("FUSION_MEMORY", "copy")
    assert "    [ ] Tensors read in place (FUSION_MEMORY=copy: by way of shared memory)\n" in check_build.report()


def test_what_cannot_be_imported_is_not_crossed_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_build, "_ASK_TORCH", "raise ImportError('libcudart.so is missing')")
    monkeypatch.setattr(check_build, "_ASK_DAEMON", "import json; print(json.dumps({'zmq': '4.3.5', 'curve': False}))")
    text = check_build.report()
    assert "    [ ] PyTorch (ImportError: libcudart.so is missing)\n" in text
    assert "    [ ] ZeroMQ with CURVE 4.3.5\n" in text


def test_a_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"cuda": "12.8", "device": "NVIDIA H100", "nccl": "2.27.3"}
    monkeypatch.setattr(check_build, "_ASK_TORCH", f"import json; print(json.dumps({facts}))")
    monkeypatch.setattr(check_build, "_ASK_DAEMON", "print('{}')")
    assert "    [X] CUDA 12.8 NVIDIA H100\n    [X] NCCL 2.27.3\n" in check_build.report()
    facts["device"] = ""
    monkeypatch.setattr(check_build, "_ASK_TORCH", f"import json; print(json.dumps({facts}))")
    assert "    [ ] CUDA 12.8 (no device)\n" in check_build.report()
