"""Chooses the connection to close when strangers open too many. No I/O."""

from __future__ import annotations

from collections import Counter
from typing import Generic, TypeVar

K = TypeVar("K")


class Pending(Generic[K]):
    """Connections that have not shown yet that they belong to the job.

    Members of the job show that within a moment. So when there are too many connections, the oldest one is closed, of
    the host that has most of them, and strangers only displace each other. Connections that are expected from a host
    are not counted: how many hosts a job has does not change the share of strangers of other hosts.

    Args:
        most: connections at a time that are not expected, in all.
        most_of_host: the same, from one host.
    """

    def __init__(self, most: int, most_of_host: int) -> None:
        self._most = most
        self._most_of_host = most_of_host
        self._hosts: dict[str, dict[K, None]] = {}  # each host's, the oldest first
        self._host_of: dict[K, str] = {}
        self._expected: Counter[str] = Counter()  # by host
        self._strangers = 0  # those that are not expected, in all

    def __len__(self) -> int:
        return len(self._host_of)

    def expect(self, host: str) -> None:
        """Expects one more connection from a host."""
        self._strangers -= self._strangers_of(host)
        self._expected[host] += 1
        self._strangers += self._strangers_of(host)

    def expect_no_more(self, host: str) -> K | None:
        """Takes back one `expect` of that host. Returns, as `add`, the connection that has to be closed for it."""
        self._strangers -= self._strangers_of(host)
        self._expected[host] -= 1
        self._strangers += self._strangers_of(host)
        if not self._expected[host]:
            del self._expected[host]
        return self._one_too_many(host)

    def add(self, connection: K, host: str) -> K | None:
        """Counts a new connection. Returns the one that has to be closed for it, which is not counted any more."""
        self.remove(connection)
        self._strangers -= self._strangers_of(host)
        self._host_of[connection] = host
        self._hosts.setdefault(host, {})[connection] = None
        self._strangers += self._strangers_of(host)
        return self._one_too_many(host)

    def remove(self, connection: K) -> None:
        """Stops counting a connection, which has shown that it belongs to the job, or has ended."""
        host = self._host_of.pop(connection, None)
        if host is not None:
            self._strangers -= self._strangers_of(host)
            del self._hosts[host][connection]
            self._strangers += self._strangers_of(host)
            if not self._hosts[host]:
                del self._hosts[host]

    def _one_too_many(self, host: str) -> K | None:
        """Returns the oldest connection of the host that gives way, if there are too many since one of `host`."""
        if self._strangers_of(host) <= self._most_of_host:
            if self._strangers <= self._most:
                return None
            host = max(self._hosts, key=self._strangers_of)
        oldest = next(iter(self._hosts[host]))
        self.remove(oldest)
        return oldest

    def _strangers_of(self, host: str) -> int:
        return max(0, len(self._hosts.get(host, ())) - self._expected[host])
