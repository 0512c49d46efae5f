"""Scripts that train by an algorithm whose buckets have homes, on a simulated job in virtual time, in any order.

A schedule is made from a seed: ranks of unequal speed take unequal numbers of steps, meet in barriers, evaluations and
operations of a few, and at the end agree on a model, or leave one after the other. Whatever the order, a script ends:
`run` fails on a state in which nothing can happen any more, and says who waits for whom.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fusion_rt import algorithms, wire
from fusion_rt.core.topology import ProcessSet
from fusiond.shards.hosted_home import HostedHome
from fusiond.shards.waits import key_of
from tests.fusiond.simulation import Array, SimulatedJob

LAYOUTS = ([3], [2, 1], [1, 1, 1], [4], [2, 2], [1, 1, 1, 1], [0, 3, 1])
_BUCKETS = 2
_IDLE_TICKS = 4  # seconds without anything else to happen in which daemons may still notice something
_SGD = wire.OptimizerSpec("SGD", ("{}",))


class StuckError(Exception):
    """Nothing can happen any more, or the script takes far longer than its steps do."""


@dataclass
class Waits:
    """A wait of a rank: for answers to these handles, or for a time (s)."""

    what: str
    handles: Sequence[int] = ()
    until: float = 0.0


@dataclass
class Training:
    """One rank's side of one plan.

    Attributes:
        posted: handles of what is under way, and `order`: of which buckets.
        clock: how many contributions it has made.
    """

    plan: wire.Plan
    spec: algorithms.Algorithm
    memory: Array
    posted: list[int] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    clock: int = 0


class _Job(SimulatedJob):
    """Knows which handles have been answered, so that asking costs nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.done: set[tuple[int, int]] = set()
        super().__init__(*args, **kwargs)

    def answered(self, rank: int, message: wire.DaemonMessage, data: Array | None) -> None:
        super().answered(rank, message, data)
        assert not isinstance(message, wire.Failed), f"rank {rank} is told: {message.message}"
        self.done.add((rank, getattr(message, "handle", -1)))


class Schedule:
    """One script on one job.

    Args:
        algorithm: its text.
        seed: decides everything else.
        optimizers: how many plans each rank trains.
        even: all ranks take as many steps between two operations of all, each with a gradient; None: the seed says.
        layouts: of which the seed chooses one.
    """

    def __init__(
        self,
        algorithm: str,
        seed: int,
        optimizers: int = 1,
        even: bool | None = None,
        layouts: Sequence[list[int]] = LAYOUTS,
    ) -> None:
        self._choose = choose = random.Random(seed)
        self._even = even
        self._layout = choose.choice(layouts)
        pair = ProcessSet(1, (0, 2))
        self._job = _Job(self._layout, seed=seed, process_sets=[pair])
        self._names = 0
        self._budget = 0.0  # seconds of computing, in all
        codec = "topk(density=0.5, minimum=0)" if algorithm.startswith("choco") else "dense"
        self._trainings = [self._train(algorithm, f"opt{i}", codec) for i in range(optimizers)]
        size = self._job.size
        self._paces = [choose.choice((0.0, 0.01, 0.1, 0.5)) for _ in range(size)]
        equal = choose.random() < 0.2 if even is None else even
        self._epochs = choose.randint(1, 3)
        self._steps_of = [
            [choose.randint(0, 5)] * size if equal else [choose.randint(0, 5) for _ in range(size)]
            for _ in range(self._epochs)
        ]
        meetings = ("barrier", "evaluation") if even else ("barrier", "evaluation", "pair", "late", "join")
        self._meetings = [choose.choice(meetings) for _ in range(self._epochs)]
        self._end = "consensus" if even else choose.choice(("consensus", "leave"))
        if self._end == "leave":
            self._meetings[-1] = "nothing"  # some still take steps when others have left
        self._waits: list[Waits] = [Waits("to begin") for _ in range(size)]
        self._scripts = [self._script(rank) for rank in range(size)]

    def _train(self, algorithm: str, group: str, codec: str) -> list[Training]:
        job, spec = self._job, algorithms.parse(algorithm)
        tensors = tuple(wire.TensorSpec(f"w{i}", self.dtype, (self.elements,), together=i + 1) for i in range(_BUCKETS))
        reduction = wire.Reduction(codec=self.codec or codec, algorithm=algorithm, optimizer=_SGD)
        plan = job.plan(wire.Proposal(group, 0, 0, reduction, tensors))
        assert len(plan.buckets) == _BUCKETS
        trainings = [Training(plan, spec, memory) for memory in job.add_plan_memory(plan)]
        for training in trainings:
            training.memory[:] = 0
        self.begin(trainings)
        for rank in [0] if spec.at_shards else job.ranks:
            for bucket in range(_BUCKETS):
                self._ready(rank, trainings[rank], bucket, "seed")
        job.settle()
        return trainings

    # --- what a rank's script does ------------------------------------------------------------------------------------

    def _script(self, rank: int) -> Iterator[Waits]:
        choose = self._choose
        for epoch in range(self._epochs):
            meeting = self._meetings[epoch]
            late = self._submit(rank, f"late{epoch}") if meeting == "late" else None
            order = list(range(len(self._trainings)))
            choose.shuffle(order)  # of the optimizers, which each rank trains one after the other
            for which in order:
                for _ in range(self._steps_of[epoch][rank]):
                    pace = self._paces[rank] * choose.random()
                    self._budget += pace
                    yield Waits("computes", until=self._job.now + pace)
                    yield from self._step(rank, self._trainings[which][rank])
            if late is not None:
                yield Waits(f"waits for late{epoch}", [late])
            if meeting == "pair" and rank in (0, 2):
                yield Waits(f"waits in pair{epoch}", [self._submit(rank, f"pair{epoch}", process_set=1)])
            if meeting == "join":
                yield from self._drain(rank)
                yield Waits(f"has joined{epoch}", [self._submit(rank, f"join{epoch}", "join")])
            if meeting == "evaluation":
                yield Waits(f"waits in eval{epoch}", [self._submit(rank, f"eval{epoch}")])
            if meeting in ("barrier", "pair", "late"):
                yield Waits(f"waits in barrier{epoch}", [self._submit(rank, f"barrier{epoch}", "barrier")])
        yield from self._drain(rank)
        if self._end == "leave":
            self._job.leave(rank)
            return
        yield Waits("waits in consensus.1", [self._submit(rank, "consensus.1", "barrier")])
        for training in (trainings[rank] for trainings in self._trainings):
            if training.spec.place is algorithms.Place.SHARD:
                handles = [self._ready(rank, training, bucket, "ask") for bucket in range(_BUCKETS)]
                yield Waits("asks the homes", handles)
        yield Waits("waits in consensus.2", [self._submit(rank, "consensus.2", "barrier")])

    def _step(self, rank: int, training: Training) -> Iterator[Waits]:
        """Posts in any order of buckets; waits for the answers now, or, with an algorithm that overlaps, at the next
        step."""
        yield from self._collect(rank, training)
        buckets = list(range(_BUCKETS))
        samples = 1
        if training.spec.signal is algorithms.Signal.GRADIENT:
            self._choose.shuffle(buckets)
            samples = int(self._even or self._choose.random() < 0.9)  # else this step has no gradient
        for bucket in buckets:
            self.fill(rank, training, bucket, samples)
            training.posted.append(self._ready(rank, training, bucket, samples=samples))
            training.order.append(bucket)
            yield Waits("posts")
        training.clock += 1
        if not training.spec.overlaps:
            yield from self._collect(rank, training)

    def _collect(self, rank: int, training: Training) -> Iterator[Waits]:
        if training.posted:
            handles, training.posted = training.posted, []
            buckets, training.order = training.order, []
            if not training.spec.waits_for_answers:  # as a worker that does tells its daemon
                self._job.engine(rank).homes.occupied.awaits_answers(rank, training.plan.id)
            yield Waits(f"waits at the homes of {training.plan.group} for its contribution {training.clock}", handles)
            for bucket, handle in zip(buckets, handles, strict=True):
                self.take(rank, training, bucket, self._job.answer(rank, handle)[0])

    # --- for subclasses, in which values matter -----------------------------------------------------------------------

    dtype, elements, codec = "float32", 4, ""

    def begin(self, trainings: Sequence[Training]) -> None:
        """Puts what homes begin with into the memory of rank 0."""

    def fill(self, rank: int, training: Training, bucket: int, samples: int) -> None:
        """Puts what a rank posts into its memory."""

    def take(self, rank: int, training: Training, bucket: int, message: wire.DaemonMessage) -> None:
        """Takes an answer from a rank's memory."""

    def _drain(self, rank: int) -> Iterator[Waits]:
        for trainings in self._trainings:
            yield from self._collect(rank, trainings[rank])

    def _submit(self, rank: int, name: str, kind: str = "allreduce", process_set: int = 0) -> int:
        if kind == "allreduce":
            signature = wire.Signature("allreduce", "float32", (1,), process_set=process_set)
            return self._job.submit(rank, name, signature, np.ones(1, np.float32), inline=True)
        return self._job.submit(rank, name, wire.Signature(kind, process_set=process_set))  # type: ignore[arg-type]

    def _ready(self, rank: int, training: Training, bucket: int, kind: wire.PostKind = "post", samples: int = 1) -> int:
        job = self._job
        job._handles += 1
        ready = wire.Ready(job._handles, training.plan.id, bucket, training.clock, (), (0.1,), samples, kind)
        job.engine(rank).ready(rank, ready)
        return job._handles

    # --- time ---------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Goes on until all scripts have ended.

        Raises:
            StuckError: they never will.
        """
        job, choose, idle = self._job, self._choose, 0
        live = {rank for rank in job.ranks}
        while live:
            able = [rank for rank in live if self._may_go_on(rank)]
            if (not able or choose.random() < 0.7) and job.step():
                idle = 0
            elif able:
                idle, rank = 0, choose.choice(able)
                try:
                    self._waits[rank] = next(self._scripts[rank])
                except StopIteration:
                    self._waits[rank] = Waits("has ended")
                    live.discard(rank)
            elif not self._pass_time(live):
                idle += 1
                if idle > _IDLE_TICKS:
                    raise StuckError(f"nothing can happen any more:\n{self.describe()}")
        for node in job.nodes:
            assert not node.failure, node.failure

    def _may_go_on(self, rank: int) -> bool:
        waits = self._waits[rank]
        return waits.until <= self._job.now and all((rank, handle) in self._job.done for handle in waits.handles)

    def _pass_time(self, live: set[int]) -> bool:
        """Passes time until something is due; False if that is only a daemon's tick."""
        job = self._job
        due = [self._waits[rank].until for rank in live if self._waits[rank].until > job.now]
        due += [at for at, _ in job.timers]
        ticks = job.now + 1
        job.now = min([*due, ticks])
        if job.now > 60 + 20 * self._budget:
            raise StuckError(f"after {job.now:.0f} s, of which {self._budget:.1f} were computed:\n{self.describe()}")
        callbacks = [callback for at, callback in job.timers if at <= job.now]
        job.timers = [timer for timer in job.timers if timer[0] > job.now]
        for callback in callbacks:
            callback()
        if job.now == ticks:
            for node in job.nodes:
                if not node.engine.idle:
                    node.engine.tick()
        return bool(due)

    @property
    def steps(self) -> list[int]:
        """Returns how many contributions each rank makes to each plan."""
        return [sum(epoch[rank] for epoch in self._steps_of) for rank in self._job.ranks]

    @property
    def hosted_homes(self) -> list[HostedHome]:
        """Returns all homes of the job."""
        return [hosted for node in self._job.nodes for hosted in node.engine.homes._server]

    def describe(self) -> str:
        """Describes who waits for whom."""
        lines = [f"{self._layout}, {self._meetings}, steps {self._steps_of}, then {self._end}"]
        lines += [f"  rank {rank} {waits.what}" for rank, waits in enumerate(self._waits)]
        for node in self._job.nodes:
            for hosted in node.engine.homes._server:
                awaited = node.engine.homes._server.awaited(hosted)
                if hosted.home.slots or hosted.home.waiting:
                    lines.append(
                        f"  home {key_of(hosted.plan, hosted.bucket, hosted.home.rank)} waits for ranks {awaited}"
                    )
        return "\n".join(lines)


def stuck(algorithm: str, seeds: Sequence[int], optimizers: int = 1) -> dict[int, str]:
    """The seeds whose schedules never end, and why."""
    found = {}
    for seed in seeds:
        try:
            Schedule(algorithm, seed, optimizers).run()
        except StuckError as error:
            found[seed] = str(error)
    return found
