"""What gossip by clocks takes among thousands of nodes, by the times of `stages`; see `scaling`."""

from __future__ import annotations

import math

import numpy as np

from fusion_rt import mixing
from fusion_trace.simulate.ghost_codecs import wire_nbytes
from fusion_trace.simulate.model import Bucket, Cluster
from fusion_trace.simulate.scaling import Exchanging, Task
from fusion_trace.simulate.stages import Times


class Mixing(Exchanging):
    """Every rank's parameters go to its neighbours of a clock, and it goes on when theirs have come."""

    def __init__(self, cluster: Cluster, codec: str, graph: mixing.Mixing, clock: int) -> None:
        super().__init__(cluster, codec)
        edges = [(rank, other) for rank in range(cluster.nodes) for other, _ in graph.outgoing(rank, clock)]
        self._source = np.array([edge[0] for edge in edges], np.int64)
        self._target = np.array([edge[1] for edge in edges], np.int64)

    def _whole(self, bucket: Bucket, submitted: Times) -> Task:
        stages, costs = self.stages, self._costs
        wire, encode, decode = self._coded(bucket)
        pieces, half = self._pieces(bucket), costs.job / 2
        apply = bucket.nbytes * costs.apply
        ready = yield submitted + costs.local / 2
        ready = self._handled(ready, costs.local / 2)
        done = yield stages.worked(stages.everyone, ready, encode + apply, True)
        ready = self._handled(done, half)
        issued = stages.handled(self._source, ready[self._source], costs.send * pieces)
        came = yield stages.transfer(self._source, self._target, issued, float(wire), pieces=pieces)
        came = stages.handled(self._target, came, costs.receive * pieces)
        taken = yield stages.worked(self._target, came, decode + apply)
        ended = ready.copy()
        np.maximum.at(ended, self._target, taken)
        return self._handled(ended, half + costs.local / 2) + costs.local / 2

    def _pieces(self, bucket: Bucket) -> int:
        return max(1, math.ceil(wire_nbytes(self._codec, bucket, self._costs) / self._cluster.chunk_bytes))

    def _coded(self, bucket: Bucket) -> tuple[int, float, float]:
        """Bytes of a parcel, and what it takes to encode and to decode it."""
        wire = wire_nbytes(self._codec, bucket, self._costs)
        copied = bucket.nbytes * self._costs.copy
        encode = bucket.nbytes * self._coding.contribute + wire * self._coding.pack
        decode = wire * self._coding.unpack + copied
        return wire, encode + (copied if self._chosen.lossless else 0.0), decode
