"""Chooses the connection to close when strangers open too many. No I/O."""

from __future__ import annotations

from typing import Generic, TypeVar

K = TypeVar("K")


class Pending(Generic[K]):
    """Connections that have not shown yet that they belong to the job.

    Members of the job show that within a moment. So when there are too many connections, the oldest one is closed, of
    the host that has most of them, and strangers only displace each other.

    Args:
        most: connections at a time, in all.
        most_of_host: connections at a time from one host.
    """

    def __init__(self, most: int, most_of_host: int) -> None:
        self._most = most
        self._most_of_host = most_of_host
        self._hosts: dict[str, dict[K, None]] = {}  # each host's, the oldest first
        self._host_of: dict[K, str] = {}

    def limit(self, most: int, most_of_host: int) -> None:
        """Changes the limits for connections that come from now on."""
        self._most, self._most_of_host = most, most_of_host

    def __len__(self) -> int:
        return len(self._host_of)

    def add(self, connection: K, host: str) -> K | None:
        """Counts a new connection. Returns the one that has to be closed for it, which is not counted any more."""
        self.remove(connection)
        self._host_of[connection] = host
        self._hosts.setdefault(host, {})[connection] = None
        if len(self._hosts[host]) <= self._most_of_host:
            if len(self._host_of) <= self._most:
                return None
            host = max(self._hosts, key=lambda each: len(self._hosts[each]))
        oldest = next(iter(self._hosts[host]))
        self.remove(oldest)
        return oldest

    def remove(self, connection: K) -> None:
        """Stops counting a connection, which has shown that it belongs to the job, or has ended."""
        host = self._host_of.pop(connection, None)
        if host is not None:
            del self._hosts[host][connection]
            if not self._hosts[host]:
                del self._hosts[host]
