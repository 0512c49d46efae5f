"""`randomk`: k elements that all nodes draw alike, so that no indices are sent and sums are as sparse as their parts.

The elements of a group are divided into k ranges as equal as can be, and one is drawn from each, from a hash of the
seed, the step and the range: every element is as likely as the others to within one part in the length of a range, and
any part of the bucket can be drawn by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fusion_rt.codecs.base import Array, Layout, check_seed
from fusion_rt.codecs.packing import Selection, Spans
from fusion_rt.codecs.selecting import Selecting, SelectingBucketCodec
from fusion_rt.kernels.random_bits import mix
from fusion_rt.kernels.selection import NOTHING, Memory, collect_shares, share
from fusion_rt.kernels.team import ALONE, Team


class RandomKBucket(SelectingBucketCodec):
    codec: RandomK

    def __init__(self, layout: Layout, codec: RandomK, team: Team = ALONE) -> None:
        super().__init__(layout, codec, team, self._drawn)
        self._spans = [Spans(group.ranges) for group in self._groups]

    def _select(self, memory: Memory, group: int, k: int, team: Team) -> tuple[Array, Array]:
        collect_shares(memory, share(self._groups[group].ranges, team.threads), NOTHING, 0, team)
        indices = self._draw(group, k, self.step, 0, self.layout.elements)
        values = memory.residual[indices]
        memory.residual[indices] = 0
        return indices, values

    def conclude(self, total: Selection, nodes: int) -> Selection:
        """Keeps all: every node has drawn the same, so a sum is as sparse as its parts."""
        sent, left = self.rounded(total)
        self.reclaim(left)
        return sent

    def _drawn(self, step: int, low: int, high: int) -> Array:
        """Returns the indices that every node selects in [low, high) in a step: int32, ascending."""
        parts = [np.empty(0, np.int32)]
        for number, group in enumerate(self._groups):
            parts.append(self._draw(number, group.k(step, self.codec.warmup), step, low, high))
        return np.concatenate(parts)

    def _draw(self, group: int, k: int, step: int, low: int, high: int) -> Array:
        spans = self._spans[group]
        first, end = spans.rank(low), spans.rank(high)
        if first == end:
            return np.empty(0, np.int32)
        draws = np.arange(first * k // spans.size, min(k, -(-end * k // spans.size)), dtype=np.int64)
        begins, ends = draws * spans.size // k, (draws + 1) * spans.size // k
        with np.errstate(over="ignore"):
            hashes = mix(mix(np.uint64(self.codec.seed) + mix(np.uint64(step))) + np.uint64(group)) + draws.astype(
                np.uint64
            )
        ranks = begins + (mix(hashes) % (ends - begins).astype(np.uint64)).astype(np.int64)
        ranks = ranks[(ranks >= first) & (ranks < end)]
        return spans.elements(ranks).astype(np.int32)


@dataclass(frozen=True)
class RandomK(Selecting):
    """k of all elements.

    Args:
        seed: from 0 to 2**63 - 1; part of the codec's text, so the same on all nodes.
    """

    name = "randomk"
    bucket = RandomKBucket
    sends_indices = False

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed(self.seed, self.name)
