"""Ranks with values of their own, that train by an algorithm with homes in any order.

A schedule (`tests.fusiond.algorithms.schedules`) has ranks wait in operations of all, of a few, and join, at random
moments. Here they have parameters, so that it can be asked what became of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fusion_rt import wire
from fusiond.algorithms.home import Home
from tests.fusiond.algorithms.schedules import Schedule, Training
from tests.fusiond.simulation import Array

LAYOUTS = {
    4: ([2, 2], [1, 3], [1, 1, 1, 1], [2, 1, 1]),
    6: ([3, 3], [2, 2, 2], [1, 2, 3], [2, 1, 2, 1]),
    8: ([4, 4], [2, 3, 3], [2, 2, 2, 2], [1, 3, 1, 3]),
}
"""By the number of ranks: how many are on each of two to four nodes."""
BUCKETS = 2
RATE_OF_SCHEDULES = 0.1
GRAPHS = {
    4: ("ring", "torus", "hypercube", "exponential", "one-peer-exponential", "random-pairs"),
    6: ("ring", "torus", "exponential", "one-peer-exponential", "random-pairs", "bipartite"),
    8: ("ring", "torus", "hypercube", "exponential", "one-peer-exponential", "random-pairs"),
}
SIZES = [(ranks, graph) for ranks, graphs in GRAPHS.items() for graph in graphs]


def starts(ranks: int, seed: int, dtype: type = np.float64, elements: int = 48) -> Array:
    return np.random.default_rng((seed, ranks)).standard_normal((ranks, 2 * elements)).astype(dtype)


def spread(xs: list[Array]) -> float:
    """The largest distance of a rank from the mean."""
    return float(np.abs(np.stack(xs) - np.mean(xs, axis=0)).max())


class Parameters(Schedule):
    """Ranks whose copies of a vector go on by an algorithm; all operations are over, and no rank has left, at the end.

    Args:
        ranks: their number.
        starts: what each begins with (ranks, 2 * elements).
        last: steps that all ranks take in the end.
        posts: of a rank, its number of contributions before and its parameters, to what it posts; by default the
            parameters.

    Attributes:
        x: each rank's copy (2 * elements,).
        counts: contributions of each rank.
    """

    def __init__(
        self,
        algorithm: str,
        seed: int,
        ranks: int,
        starts: Array,
        last: int = 0,
        codec: str = "",
        posts: Callable[[int, int, Array], Array] | None = None,
        even: bool | None = None,
    ) -> None:
        self.dtype, self.elements, self.codec = str(starts.dtype), starts.shape[1] // BUCKETS, codec
        self.x = list(starts.copy())
        self.counts = [0] * ranks
        self._posts = posts or (lambda rank, count, x: x)
        self._posted: dict[int, Array] = {}
        super().__init__(algorithm, seed, even=even, layouts=LAYOUTS[ranks])
        if self._end == "leave":
            self._end, self._meetings[-1] = "consensus", "barrier"
        self._epochs += 1
        self._steps_of.append([last] * ranks)
        self._meetings.append("barrier")

    def run(self) -> None:
        """Goes on until all scripts have ended and all messages have arrived. No clock is passed by halves then: the
        others wait in a barrier for the one that is ahead."""
        super().run()
        job, plan = self._job, self._trainings[0][0].plan.id
        clocks = [job.engine(rank).homes._clients[plan, 0, rank].clock for rank in job.ranks]
        for rank in sorted(job.ranks, key=clocks.__getitem__):
            self._submit(rank, "level", "barrier")
            job.settle()

    @property
    def job(self) -> Any:
        return self._job

    @property
    def where(self) -> str:
        """The layout and what ranks do, for whom a test fails."""
        return f"{self._layout}, {self._meetings}, steps {self._steps_of}"

    def place(self, rank: int, training: Training, bucket: int) -> Array:
        planned = training.plan.buckets[bucket]
        nbytes = planned.numel * self.x[rank].itemsize
        memory: Array = training.memory[planned.offset : planned.offset + nbytes].view(self.x[rank].dtype)
        return memory[: self.elements]

    def begin(self, trainings: Sequence[Training]) -> None:
        for rank, training in enumerate(trainings):
            for bucket in range(BUCKETS):
                self.place(rank, training, bucket)[:] = self.x[rank][self._part(bucket)]

    def fill(self, rank: int, training: Training, bucket: int, samples: int) -> None:
        if not training.order:  # of all buckets at once, as a script has them
            self._posted[rank] = self._posts(rank, self.counts[rank], self.x[rank])
            self.counts[rank] += samples > 0
        self.place(rank, training, bucket)[:] = self._posted[rank][self._part(bucket)] if samples else np.nan

    def take(self, rank: int, training: Training, bucket: int, message: wire.DaemonMessage) -> None:
        assert isinstance(message, wire.Done)
        part = self._part(bucket)
        added = message.sizes[:1] == (1,)
        self.x[rank][part] = self.place(rank, training, bucket) + (self.x[rank][part] if added else 0)

    def ask(self) -> None:
        """All ranks ask the homes for what they have, and take it."""
        trainings = self._trainings[0]
        for rank in self._job.ranks:
            handles = [self._ready(rank, trainings[rank], bucket, "ask") for bucket in range(BUCKETS)]
            self._job.settle()
            for bucket, handle in enumerate(handles):
                self.take(rank, trainings[rank], bucket, self._job.answer(rank, handle)[0])

    def _part(self, bucket: int) -> slice:
        return slice(bucket * self.elements, (bucket + 1) * self.elements)

    def homes(self, bucket: int) -> list[Home]:
        """The homes of a bucket, by rank."""
        found = [hosted.home for hosted in self.hosted_homes if hosted.bucket.index == bucket]
        return sorted(found, key=lambda home: home.rank)
