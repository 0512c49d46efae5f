"""Which process of pytest-xdist runs which tests."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadGroupScheduling


class ByFile(LoadGroupScheduling):
    """Keeps the tests of a file together, which share jobs, unless they have a group of their own."""

    def _split_scope(self, nodeid: str) -> str:
        group: str = super()._split_scope(nodeid)
        return nodeid.partition("::")[0] if group == nodeid else group

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
