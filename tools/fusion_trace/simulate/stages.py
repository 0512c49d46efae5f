"""Thousands of nodes at once: what each thread and network card of each node is busy with, as vectors.

A message passes the stages of `daemons` and `network` in the same order and with the same times, each of them first
come, first served. Credit is left out, but for the time that it takes.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fusion_trace.simulate.model import HEAD_NBYTES, Costs, Link

Times: TypeAlias = npt.NDArray[np.float64]
Nodes: TypeAlias = npt.NDArray[np.int64]


class Stages:
    """All nodes, with equal links and costs.

    Attributes:
        loop, pool: when each node's event loop and its pool are free (s).
        sent, messages: payload bytes and messages of each node.
    """

    def __init__(self, nodes: int, link: Link, costs: Costs, chunk_bytes: int, window_bytes: int) -> None:
        self.nodes, self.link, self.costs = nodes, link, costs
        self.everyone: Nodes = np.arange(nodes)
        self.loop, self.pool = np.zeros(nodes), np.zeros(nodes)
        self.sent, self.messages = np.zeros(nodes), np.zeros(nodes)
        self._out, self._up, self._down, self._in = (np.zeros(nodes) for _ in range(4))
        self.credit = 2 * costs.control / max(1, max(2, window_bytes // chunk_bytes) // 4)

    def transfer(
        self, source: Nodes, target: Nodes, issued: Times, nbytes: float, unique: bool = False, pieces: int = 1
    ) -> Times:
        """When each message, handed over by its source's loop at `issued`, has been received by the target's ZeroMQ.

        Args:
            unique: no node is the source or the target of two of them, which is sooner worked out.
            pieces: a message is so many, of which each goes on by itself.
        """
        byte, costs, length = self.link.byte, self.costs, max(nbytes, 1) + HEAD_NBYTES * pieces
        np.add.at(self.sent, source, nbytes)
        np.add.at(self.messages, source, pieces)
        out, on_link, into = nbytes * costs.io_send, length * byte, nbytes * costs.io_receive
        apart = 1 - 1 / pieces  # what of a message is still to come when its first piece goes on
        ready = served(self._out, source, issued, out, unique) - min(out, on_link) * apart
        heads = served(self._up, source, ready, on_link, unique) - on_link + self.link.latency
        ready = served(self._down, target, heads, on_link, unique) - min(on_link, into) * apart
        return served(self._in, target, ready, into, unique)

    def handled(self, node: Nodes, ready: Times, seconds: float | Times, unique: bool = False) -> Times:
        """When the loops of these nodes have done what takes so long and is ready then."""
        return served(self.loop, node, ready, seconds, unique)

    def worked(self, node: Nodes, ready: Times, seconds: float | Times, unique: bool = False) -> Times:
        """When their pools have."""
        took = self.costs.job / 2 + np.asarray(seconds) / self.costs.threads
        return served(self.pool, node, ready, took, unique)


def served(free: Times, node: Nodes, ready: Times, seconds: Any, unique: bool = False) -> Times:
    """When each of some jobs is done. A node does one job after the other, in the order in which they are ready.

    Args:
        free: when each node is free; is changed.
        node, ready, seconds: of each job.
    """
    if unique:
        done: Times = np.maximum(free[node], ready) + seconds
        free[node] = done
        return done
    seconds = np.broadcast_to(np.asarray(seconds, float), ready.shape)
    order = np.lexsort((ready, node))
    nodes, begin, took = node[order], np.maximum(ready, free[node])[order], seconds[order]
    total = np.cumsum(took)
    before = total - took
    first = np.concatenate([[True], nodes[1:] != nodes[:-1]]) if len(nodes) else np.zeros(0, bool)
    group = np.cumsum(first) - 1
    lead = begin - before  # the end of job k is total_k plus the largest lead of its node's jobs up to k
    span = float(np.ptp(lead)) + 1.0 if len(lead) else 1.0
    largest = np.maximum.accumulate(lead + group * span) - group * span
    ended_sorted = total + largest
    ended = np.empty_like(ended_sorted)
    ended[order] = ended_sorted
    np.maximum.at(free, nodes, ended_sorted)
    return ended
