"""Runs torch's tests, each in processes of its own with a limit of time, several at once."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests import forks
from tests.upstream import suites

LIMIT_S = 120.0  # for a test
GRACE_S = 20.0  # for torch to say, after the limit, where a test's ranks are, and for daemons to end after them
_MODULES = (*forks.DAEMON, *suites.PREPARED, "tests.upstream.suites")
_MARK = "FUSION_TEST_UPSTREAM"  # all processes of a test inherit it
_SKIPPED = re.compile(r"Process \d+ skipping test \S+ for following reason: (.*)")
_SAID_BY_A_RANK = "look at subprocess log"


@dataclass(frozen=True)
class Place:
    """Where ranks run.

    Attributes:
        nodes: number of ranks on each host.
    """

    nodes: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Place:
        """Returns the place that `str` names: `"3"` is 3 ranks on one host, `"2x2"` 2 hosts with 2 ranks each."""
        hosts, _, ranks = text.rpartition("x")
        return cls((int(ranks),) * int(hosts or 1))

    @property
    def ranks(self) -> int:
        return sum(self.nodes)

    def __str__(self) -> str:
        return str(self.ranks) if len(self.nodes) == 1 else f"{len(self.nodes)}x{self.nodes[0]}"


@dataclass(frozen=True)
class Outcome:
    """How a test went.

    Attributes:
        kind: `"pass"`, `"skip"` or `"fail"`.
        said: the reason of a skip, or the end of what a failed test has said.
    """

    kind: str
    said: str = ""


def contents(suite: str, ranks: int) -> dict[str, str]:
    """Returns the reason for which torch skips each test of a suite on so many ranks, empty if it does not, by its
    name."""
    with tempfile.TemporaryDirectory(prefix="frt", dir="/tmp") as directory:
        request = {
            "suite": suite,
            "test": "",
            "backend": "gloo",
            "ranks": ranks,
            "namespaces": [],
            "python": ["python"],
        }
        outcome = _run(directory, request, LIMIT_S)
    if outcome.kind == "fail":
        raise RuntimeError(f"the tests of {suite} cannot be found out:\n{outcome.said}")
    found: dict[str, str] = json.loads(outcome.said)
    return found


def run_all(
    suite: str, tests: Sequence[str], backend: str, place: Place, *, at_once: int = 2, limit_s: float = LIMIT_S
) -> Iterator[tuple[str, Outcome]]:
    """Runs tests of a suite; yields each with its outcome, in their order.

    Args:
        tests: their names.
        backend: `"gloo"`, `"fusion"`, or another that is registered.
        place: where their ranks run; several hosts need root.
        at_once: how many tests run at a time.
        limit_s: seconds for each.
    """
    with contextlib.ExitStack() as stack:
        namespaces: list[str] = []
        if len(place.nodes) > 1:
            from benchmarks.netlab import Netlab

            namespaces = [host.name for host in stack.enter_context(Netlab(len(place.nodes))).hosts]
        python = forks.interpreter(_MODULES)  # before several threads ask for the nursery

        def run(test: str) -> tuple[str, Outcome]:
            request = {
                "suite": suite,
                "test": test,
                "backend": backend,
                "ranks": place.ranks,
                "namespaces": namespaces,
                "python": [sys.executable] if namespaces else python,  # a nursery's daemons are in its network
            }
            directory = tempfile.mkdtemp(prefix="frt", dir="/tmp")  # short: it holds the paths of sockets
            try:
                return test, _run(directory, request, limit_s)
            finally:
                shutil.rmtree(directory)

        yield from stack.enter_context(ThreadPoolExecutor(at_once)).map(run, tests)


def _run(directory: str, request: dict[str, object], limit_s: float) -> Outcome:
    """Runs a test with `directory` as its folder of temporary files."""
    asked, said = Path(directory, "request"), Path(directory, "said")
    asked.write_text(json.dumps({**request, "seconds": limit_s}))
    mark = secrets.token_hex(8)
    own = {
        _MARK: mark,
        "TMPDIR": directory,
        "FUSION_RUNTIME_DIR": f"{directory}/run",
        "FUSION_TRACE_DIR": f"{directory}/traces",
        "FUSION_JOB_SECRET": secrets.token_hex(16),  # which hosts have to share
        "OMP_NUM_THREADS": "1",
    }
    with said.open("wb") as output:
        process = forks.popen(
            [sys.executable, "-m", "tests.upstream.one", str(asked)],
            _MODULES,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **own},
            cwd=forks.ROOT,
        )
    try:
        process.wait(limit_s + GRACE_S)
        ended = f"it ended with status {process.returncode}"
    except subprocess.TimeoutExpired:
        ended = f"it took longer than {limit_s:g} s"
    left = _end_those_marked(mark, GRACE_S if process.returncode is not None else 0.0)
    process.wait()
    text = said.read_text(errors="replace")
    try:
        kind, reason = json.loads(Path(f"{asked}.outcome").read_text())
    except FileNotFoundError:
        return Outcome("fail", f"{text}\n{ended}")
    if kind == "skip" and _SAID_BY_A_RANK in reason and (found := _SKIPPED.search(text)):
        reason = found[1]
    if kind == "fail":
        reason = f"{text}\n{reason}"
    elif left:
        return Outcome("fail", f"{text}\nit left behind: {', '.join(left)}")
    return Outcome(kind, reason)


def _end_those_marked(mark: str, grace_s: float) -> list[str]:
    """Waits for the processes of a test to end; kills, and returns, those that do not."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == mark:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # ended meanwhile, or another user's
    _, alive = psutil.wait_procs(found, timeout=grace_s)
    left = []
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.append(" ".join(process.cmdline()) or process.name())
            process.kill()
    psutil.wait_procs(alive, timeout=grace_s)
    return left
