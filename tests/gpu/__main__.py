"""python -m tests.gpu: what can only be tried on a GPU, in ten minutes, with a table and a file of what was measured.

    python -m tests.gpu                          all cases
    python -m tests.gpu --cases kernels,topk     some
    python -m tests.gpu --together 6             those that time nothing, six at once: with 16 processors, two minutes
    python -m tests.gpu --list                   only what there is
    python -m tests.gpu --device cpu             those that need no GPU, to see that they run

The exit status is 0 if all have passed, 1 if one has failed or there was no time for it, and 3 if there is no GPU, so
that nothing was tried. A case that fails or hangs does not stop the others; the file is written anew after each one, so
that it has what was measured whatever ends this command. It needs no network, once there is a folder of wheels:

    pip download -d WHEELS setuptools wheel '.[dev,cuda13]'    where there is a network; cuda12 for CUDA 12
    pip install --no-index --no-build-isolation --find-links WHEELS setuptools wheel
    pip install --no-index --no-build-isolation --find-links WHEELS -e '.[dev,cuda13]'
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch

from fusion_rt.core.dtypes import DTYPES
from fusion_rt.kernels import coding, cpu, ordinary, selection
from tests.gpu import ranks
from tests.gpu.cases import CASES, DTYPE_NAMES, ROOT

NO_GPU = 3
_ANSWER = "tests.gpu:"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the cases that are asked for; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", default=",".join(CASES), help="names, with commas between them (all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(%(default)s)")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu.json", help="file of results (%(default)s)")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all of them (%(default)s)")
    parser.add_argument("--together", type=int, default=1, help="of those that time nothing, so many (%(default)s)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        faulthandler.dump_traceback_later(0.9 * CASES[options.one].seconds)  # where it hangs, before it is ended
        ranks.heed_warnings()
        print(_ANSWER + json.dumps(CASES[options.one].run(options.device)), flush=True)
        return 0
    names = options.cases.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"there is no case {unknown[0]!r}; there are {', '.join(CASES)}")
    if options.list:
        for name in names:
            print(f"{name:14} {CASES[name].says}")
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"torch {torch.__version__} finds no GPU on this machine: none of the {len(names)} cases was tried.")
        return NO_GPU
    if options.device == "cpu":
        names = [name for name in names if CASES[name].anywhere]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * options.minutes
    prepare()
    results: dict[str, dict[str, Any]] = {}
    writing = threading.Lock()

    def tried(name: str) -> None:
        result = run(name, options.device, deadline - time.monotonic())
        with writing:
            results[name] = result
            written = json.dumps({"device": options.device, "cases": results}, indent=1, default=str)
            part = options.out.with_suffix(".part")
            part.write_text(written, encoding="utf-8")
            part.replace(options.out)

    for name in names:
        if CASES[name].timed:
            tried(name)
    with ThreadPoolExecutor(options.together) as pool:
        list(pool.map(tried, [name for name in names if not CASES[name].timed]))
    failed = [name for name, result in results.items() if not result["passed"]]
    print(f"{len(results) - len(failed)} of {len(results)} passed; {options.out}")
    return 1 if failed else 0


def prepare() -> None:
    """Compiles the kernels of daemons. On a machine that has none yet, those of all cases would do that at once."""
    exact, *halves = (DTYPES[name] for name in DTYPE_NAMES)
    conversions = [pair for half in halves for pair in ((half, exact), (exact, half))]
    cpu.prepare([exact, *halves], conversions, [*selection.ROUTINES, *coding.ROUTINES, *ordinary.ROUTINES])


def run(name: str, device: str, left: float = float("inf")) -> dict[str, Any]:
    """Runs a case in a process of its own, and prints a line; returns whether it passed, and what it measured.

    Args:
        left: seconds that there are for it.
    """
    case, began = CASES[name], time.perf_counter()
    if left <= 0:
        print(f"FAILED  {name:14}         there was no time left for it", flush=True)
        return {"passed": False, "seconds": 0.0, "measured": "there was no time left for it"}
    command = [sys.executable, "-m", "tests.gpu", "--one", name, "--device", device]
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            said = process.communicate(timeout=min(case.seconds, left))[0]
        except subprocess.TimeoutExpired:
            said = _ended(process) + f"\nit has taken more than {min(case.seconds, left):.0f} s"
        except BaseException:
            _ended(process)
            raise
    answer = next((line for line in reversed(said.splitlines()) if line.startswith(_ANSWER)), None)
    passed = process.returncode == 0 and answer is not None
    result = {
        "passed": passed,
        "seconds": round(time.perf_counter() - began, 1),
        "measured": json.loads(answer.removeprefix(_ANSWER)) if passed and answer else said[-4000:],
    }
    shown = result["measured"] if passed else said.strip().splitlines()[-1] if said.strip() else "it said nothing"
    print(f"{'passed' if passed else 'FAILED'}  {name:14} {result['seconds']:6.1f} s  {shown}", flush=True)
    return result


def _ended(process: subprocess.Popen[str]) -> str:
    """Kills a case with all processes that it has started, and returns what it had said."""
    family = psutil.Process(process.pid).children(recursive=True)  # some are in sessions of their own
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for each in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    try:
        return process.communicate(timeout=10)[0] or ""
    except subprocess.TimeoutExpired:
        return ""


if __name__ == "__main__":
    sys.exit(main())
