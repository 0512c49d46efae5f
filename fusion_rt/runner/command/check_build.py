"""The list that `fusionrun --check-build` prints, in Horovod's form: the abilities of this installation.

Versions are read from what pip has noted, and what only torch and the daemon know about themselves is asked of
short-lived processes: torch is not to be imported here.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from typing import Any

import fusion_rt
from fusion_rt.host import python_children
from fusion_rt.host.process_memory import Process
from fusion_rt.settings import Settings

_TIMEOUT_S = 120.0  # importing torch from a slow disk takes a while
_ASK_TORCH = """
import json, torch
nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
print(json.dumps({
    "cuda": torch.version.cuda or "",
    "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else "",
}))
"""
_ASK_DAEMON = """
import json, zmq, fusiond.app.cli
from fusion_rt.algorithms import ALGORITHMS
from fusion_rt.codecs import CODECS
print(json.dumps({
    "zmq": zmq.zmq_version(),
    "curve": zmq.has("curve"),
    "codecs": CODECS.names(),
    "algorithms": ALGORITHMS.names(),
}))
"""
_OFFER = """
import json, os
from fusion_rt.host.process_memory import OfferedText
offer = OfferedText(os.getppid())
print(json.dumps({"address": offer.address, "text": offer.text.hex()}), flush=True)
input()
print(offer.is_answered())
"""


def report() -> str:
    """The whole list."""
    torch, daemon = _ask(_ASK_TORCH), _ask(_ASK_DAEMON)
    cuda, nccl, curve = torch.get("cuda", ""), torch.get("nccl", ""), daemon.get("curve", False)
    sections = {
        "Frameworks": [_row("PyTorch", not torch.get("error"), torch.get("error") or _version("torch"))],
        "Controllers": [_row("fusiond", not daemon.get("error"), daemon.get("error") or fusion_rt.__version__)],
        "Features": [
            _row("CUDA", torch.get("device"), f"{cuda} {torch.get('device') or '(no device)'}" if cuda else ""),
            _row("NCCL", nccl, nccl),
            *(_row(name, _version(name.lower()), _version(name.lower())) for name in ("Numba", "Numba-CUDA")),
            _row("ZeroMQ with CURVE", curve, daemon.get("zmq", "")),
            _row("Tensors read in place", *_own_memory()),
            *(_row(name, _version(name.lower()), _version(name.lower())) for name in ("Ray", "Horovod")),
        ],
        "Codecs": [_row(name) for name in daemon.get("codecs", ())],
        "Algorithms": [_row(name) for name in daemon.get("algorithms", ())],
    }
    lines = [f"fusion_rt v{fusion_rt.__version__}:"]
    for title, rows in sections.items():
        lines += ["", f"Available {title}:", *rows]
    return "\n".join(lines)


def _row(name: str, found: object = True, remark: str = "") -> str:
    return f"    [{'X' if found else ' '}] {name} {remark}".rstrip()


def _own_memory() -> tuple[bool, str]:
    """Returns whether a process can read and write the memory of another one here, as daemons would, and how."""
    if Settings.from_env().memory == "copy":
        return False, "(FUSION_MEMORY=copy: by way of shared memory)"
    command = [sys.executable, "-c", _OFFER]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=python_children.DIRECTORY,
        env=python_children.environment(os.environ),
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        offer = json.loads(worker.stdout.readline() or "{}")
        accepted = False
        if offer:
            process = Process(worker.pid, "a worker")
            accepted = process.accepts(offer["address"], bytes.fromhex(offer["text"]))
            process.end()
        answered = worker.communicate("\n", timeout=_TIMEOUT_S)[0].strip() == "True"
    if accepted and answered:
        return True, "(process_vm_readv)"
    return False, "(the kernel does not let one process read another one: by way of shared memory)"


def _version(distribution: str) -> str:
    """The version of an installed distribution; empty if it is not there."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _ask(code: str) -> dict[str, Any]:
    """Runs a piece of Python; returns its output as JSON, or its `error`."""
    try:
        run = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            cwd=python_children.DIRECTORY,
            env=python_children.environment(os.environ),
        )
    except subprocess.TimeoutExpired:
        return {"error": f"(no answer within {_TIMEOUT_S:g} s)"}
    if run.returncode != 0:
        return {"error": f"({(run.stderr.strip().splitlines() or ['it cannot be imported'])[-1]})"}
    answer: dict[str, Any] = json.loads(run.stdout)
    return answer
