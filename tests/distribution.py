"""Which process of pytest-xdist runs which tests."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).resolve().parent.parent
# These use network namespaces, which a machine has once, though nothing in them is marked `root`.
MACHINE = {"tests/faults/test_soak.py", "tests/test_leak_check.py"}


@functools.cache
def group_of(path: str) -> str:
    """The tests of a group run in one process, one after the other: those of a file, which share jobs, or of all files
    that use the machine as a whole."""
    file = ROOT / path
    return "machine" if path in MACHINE or (file.is_file() and "mark.root" in file.read_text()) else path


class ByGroup(LoadScopeScheduling):
    """Groups are of files. The marks of pytest-xdist (`xdist_group`) are lost under pytest 9.2: version 3.8 writes them
    into an attribute that pytest does not read any more."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid.partition("::")[0])

    def remove_node(self, node: Any) -> str | None:
        """A process has ended: gives what it has not begun to others.

        xdist would also run the test again with which it ended, and would hand out what was done already.

        Returns:
            That test; None if it had nothing to do.
        """
        left = {
            scope: [test for test, done in tests.items() if not done]
            for scope, tests in self.assigned_work[node].items()
        }
        running = next((tests.pop(0) for tests in left.values() if tests), None)
        self.assigned_work[node] = {scope: dict.fromkeys(tests, False) for scope, tests in left.items() if tests}
        super().remove_node(node)
        return running
