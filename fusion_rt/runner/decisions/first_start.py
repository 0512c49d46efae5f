"""The start of an elastic job, until all its processes have come up once: from then on there is a state to keep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from fusion_rt.runner.decisions.host_list import Host

_FAILURES = 3  # epochs that one host's workers may end before the job has come up


class FirstStart:
    """Failures of hosts before the job has come up.

    Attributes:
        is_over: the job has come up. From now on somebody has to bring the state to each epoch.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._failed: set[tuple[str, int]] = set()  # hosts whose workers have failed, and in which epoch

    def fail(self, host: str, number: int) -> None:
        """A worker has failed in an epoch."""
        self._failed.add((host, number))

    def is_hopeless(self, hosts: Iterable[Host]) -> bool:
        """Tells whether workers failed on each of the hosts, or on one again and again.

        The script fails then, and would fail in every epoch. Others of its workers may have been ended before they came
        so far (`JobControl.abandon`). Horovod ends a job when all hosts that took part have had a failure
        (horovod/runner/elastic/registration.py).
        """
        times = Counter(host for host, _ in self._failed)
        return all(host.name in times for host in hosts) or max(times.values(), default=0) >= _FAILURES
