"""Runs one test of torch's in this process and its ranks: `python -m tests.upstream.one REQUEST`.

Torch starts each rank as a fresh process, which imports for two seconds. Here ranks are forked from this process, which
was forked from one that has imported torch (`tests/forks.py`), and end as a fresh process does. So is the daemon that
the first of them starts.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import logging
import os
import sys
import unittest
from collections.abc import Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from fusion_rt.host import daemon_start
from tests.upstream import suites

_CLONE_NEWNET = 0x40000000


class Rank(ForkProcess):
    """A rank of a test.

    Attributes:
        namespaces: names of the network namespaces of the hosts, in the order of nodes; empty for this process's.
        ranks: their number.
    """

    namespaces: Sequence[str] = ()
    ranks = 0

    def run(self) -> None:
        atexit._clear()  # what the parent would clean up
        if self.namespaces:
            rank = int(self.name.split()[-1])
            host = self.namespaces[rank * len(self.namespaces) // self.ranks]
            with open(f"/run/netns/{host}", "rb") as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), f"network namespace {host} cannot be entered")
            os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        try:
            super().run()
        finally:
            atexit._run_exitfuncs()


def main(request: str) -> None:
    """Runs the test that the file `request` describes, and writes beside it how it went (`outcome`)."""
    asked: dict[str, Any] = json.loads(Path(request).read_text())
    os.setsid()
    logging.basicConfig(format="%(message)s")
    Rank.namespaces, Rank.ranks = asked["namespaces"], asked["ranks"]
    daemon_start.DAEMON_COMMAND = (*asked["python"], *daemon_start.DAEMON_COMMAND[1:])
    from torch.testing._internal import common_distributed, common_utils

    common_utils.PRINT_REPRO_ON_FAILURE = False
    common_distributed.TIMEOUT_DEFAULT = asked["seconds"]
    common_distributed.TIMEOUT_OVERRIDE.clear()
    tests = suites.load(asked["suite"], asked["backend"], asked["ranks"])
    tests._spawn_processes = lambda self: self._start_processes(Rank)  # type: ignore[attr-defined]
    if not asked["test"]:
        return _write(request, "pass", json.dumps(suites.contents(tests)))
    result = unittest.TestResult()
    tests(asked["test"]).run(result)
    _write(request, *_outcome(result))


def _write(request: str, kind: str, said: str) -> None:
    Path(f"{request}.outcome").write_text(json.dumps([kind, said]))


def _outcome(result: unittest.TestResult) -> tuple[str, str]:
    for _, text in (*result.errors, *result.failures):
        return "fail", text
    for _, reason in result.skipped:
        return "skip", reason
    return "fail" if result.unexpectedSuccesses else "pass", ""


if __name__ == "__main__":
    main(sys.argv[1])
