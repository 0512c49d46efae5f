"""Simulated training processes. A program says what a rank does in each of its steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fusion_rt.algorithms import Algorithm
from fusion_trace.simulate.simulator import Processor, Simulator

SLICE = 2e-3  # s, for which a worker computes before it may have to wait for a processor again


@dataclass(frozen=True, slots=True)
class Compute:
    """An action: computes for so many seconds, if it has not to wait for a processor, which it uses for some of them
    (more than all of them if it has several threads)."""

    seconds: float
    used: float = 0.0


@dataclass(frozen=True, slots=True)
class Submit:
    """An action: hands its part of a bucket to the daemon; with `if_answered` not while the last one is under way."""

    bucket: int
    if_answered: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """An action: waits for what was submitted of a bucket last, if it has not come."""

    bucket: int


@dataclass(frozen=True)
class Gradient:
    """A mark in a recorded step: a gradient is complete."""

    name: str


Action: TypeAlias = Compute | Submit | Wait
Event: TypeAlias = Action | Gradient
Step: TypeAlias = Sequence[Action]
Program: TypeAlias = Sequence[Step]


def around_steps(steps: Iterable[float], buckets: int, spec: Algorithm) -> list[list[Action]]:
    """Returns the program of a rank that posts parameters, or changes of them, around its own steps.

    Args:
        steps: seconds for which it computes in each.
        buckets: how many there are.
    """

    def of(piece: int) -> range:
        """Returns the buckets of a fragment."""
        return range(piece, buckets, spec.pieces)

    found: list[list[Action]] = []
    for number, seconds in enumerate(steps, 1):
        actions: list[Action] = [Compute(seconds)]
        back = spec.due(number - spec.lag) if number > spec.lag and spec.waits_for_answers else ()
        due = [bucket for piece in spec.due(number) for bucket in of(piece)]
        if spec.lag:
            actions += [Wait(bucket) for piece in back for bucket in of(piece)]
        actions += [Submit(bucket, if_answered=not spec.waits_for_answers) for bucket in due]
        if not spec.lag:
            actions += [Wait(bucket) for bucket in due]
        found.append(actions)
    return found


class Worker:
    """One rank.

    Args:
        submit: called with (rank, bucket, clock).
        ended: called with the rank when its program has ended.
        processor: that it shares with others; None: it never waits for one.

    Attributes:
        ends: when each step ended (s).
        waited: seconds for which each step was kept waiting.
    """

    def __init__(
        self,
        simulator: Simulator,
        rank: int,
        program: Program,
        submit: Callable[[int, int, int], None],
        ended: Callable[[int], None] = lambda rank: None,
        processor: Processor | None = None,
    ) -> None:
        self.rank = rank
        self.ends: list[float] = []
        self.waited: list[float] = []
        self._simulator, self._submit, self._ended = simulator, submit, ended
        self._processor = processor
        self._threads = 0
        self._program = program
        self._clocks: dict[int, int] = {}
        self._under_way: set[int] = set()
        self._awaited: int | None = None
        self._since = 0.0
        self._waited = 0.0
        self._steps = iter(program)
        self._actions = iter(next(self._steps, ()))

    def begin(self) -> None:
        self._go_on()

    @property
    def done(self) -> bool:
        return len(self.ends) == len(self._program)

    def answered(self, bucket: int) -> None:
        """Receives what it has submitted of a bucket."""
        self._under_way.discard(bucket)
        if self._awaited == bucket:
            self._awaited = None
            self._waited += self._simulator.now - self._since
            self._go_on()

    def _go_on(self) -> None:
        while not self.done:
            for action in self._actions:
                if isinstance(action, Compute):
                    self._compute(action)
                    return
                if isinstance(action, Submit):
                    if action.if_answered and action.bucket in self._under_way:
                        continue
                    clock = self._clocks.get(action.bucket, 0)
                    self._clocks[action.bucket] = clock + 1
                    self._under_way.add(action.bucket)
                    self._submit(self.rank, action.bucket, clock)
                elif action.bucket in self._under_way:
                    self._awaited, self._since = action.bucket, self._simulator.now
                    return
            self.ends.append(self._simulator.now)
            self.waited.append(self._waited)
            self._waited = 0.0
            self._actions = iter(next(self._steps, ()))
        self._ended(self.rank)

    def _compute(self, action: Compute) -> None:
        """Computes in slices, each of them partly on a processor; with several threads if it uses more than one."""
        if self._processor is None or not action.used:
            self._simulator.after(action.seconds, self._go_on)
            return
        self._threads = math.ceil(action.used / max(action.seconds, 1e-9) - 1e-6)
        slices = math.ceil(action.seconds / SLICE)
        busy = action.used / self._threads / slices
        idle = max(action.seconds / slices - busy, 0.0)
        for _ in range(self._threads):
            self._slice(self._processor, slices, busy, idle)

    def _slice(self, processor: Processor, left: int, busy: float, idle: float) -> None:
        def ran() -> None:
            processor.give()
            self._simulator.after(idle, self._slice, processor, left - 1, busy, idle)

        if left:
            processor.take(lambda: self._simulator.after(busy, ran))
            return
        self._threads -= 1
        if not self._threads:
            self._go_on()
