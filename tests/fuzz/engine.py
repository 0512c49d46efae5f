"""A fuzzer by seeded mutation that needs nothing but Python: what it runs, what it counts, and what it calls a crash.

A target takes bytes and says whether they were accepted. It may raise the exceptions that are documented for it; any
other one is a crash, and so is more memory than its bound, and more processor time than `SECONDS`. The same seed and
count give the same inputs.
"""

from __future__ import annotations

import random
import time
import traceback
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.fuzz.mutation import mutated

SECONDS = 5.0  # of processor time for one input
_POOL = 400  # inputs that are mutated further
_CRASHES = 5  # of a target that are kept
_WATCHED = 20  # one input in so many runs under tracemalloc, which makes it slow


@dataclass(frozen=True)
class Target:
    """Something that reads what others have written.

    Attributes:
        name: of it.
        seeds: inputs that it accepts, or nearly.
        run: whether it accepts an input; raises what is in `errors` if not.
        errors: the exceptions that are documented.
        nbytes: memory that an input may take.
        words: what is put into inputs, as it has a meaning here.
        cost: how many times as long as a plain decoder it takes.
    """

    name: str
    seeds: Sequence[bytes]
    run: Callable[[bytes], bool]
    errors: tuple[type[Exception], ...]
    nbytes: int = 16 << 20
    words: Sequence[bytes] = ()
    cost: int = 1


@dataclass(frozen=True)
class Crash:
    """An input that should have been refused, and what happened instead."""

    data: bytes
    why: str


@dataclass
class Outcome:
    """What came of a target's inputs."""

    target: str
    accepted: int = 0
    rejected: int = 0
    crashed: int = 0
    seconds: float = 0.0
    nbytes: int = 0  # the most memory that one took, of those that were watched
    crashes: list[Crash] = field(default_factory=list)

    @property
    def executions(self) -> int:
        return self.accepted + self.rejected + self.crashed


def fuzz(target: Target, count: int, seed: int) -> Outcome:
    """Runs `count` inputs, the seeds first."""
    rng = random.Random(f"{seed} {target.name}")
    outcome = Outcome(target.name)
    pool = list(target.seeds)
    began = time.perf_counter()
    for number in range(count):
        data = target.seeds[number] if number < len(target.seeds) else mutated(pool, target.words, rng)
        if attempt(target, data, outcome, watched=number % _WATCHED == 0) and rng.random() < 0.1:
            if len(pool) < _POOL:
                pool.append(data)
            else:  # the seeds stay
                pool[rng.randrange(len(target.seeds), _POOL) if len(target.seeds) < _POOL else 0] = data
    outcome.seconds = time.perf_counter() - began
    return outcome


def attempt(target: Target, data: bytes, outcome: Outcome, watched: bool = True) -> bool:
    """Runs one input, and notes what came of it; whether it was accepted.

    Args:
        watched: memory is measured.
    """
    if watched:
        tracemalloc.start()
    cpu = time.thread_time()
    why = ""
    accepted = False
    try:
        accepted = target.run(data)
    except target.errors:
        pass
    except Exception:
        why = traceback.format_exc()
    cpu = time.thread_time() - cpu
    if watched:
        nbytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        outcome.nbytes = max(outcome.nbytes, nbytes)
        if nbytes > target.nbytes:
            why = why or f"took {nbytes} bytes, and {target.nbytes} are allowed"
    if cpu > SECONDS:
        why = why or f"took {cpu:.1f} s of processor time"
    if why:
        outcome.crashed += 1
        if len(outcome.crashes) < _CRASHES:
            outcome.crashes.append(Crash(data, why))
    elif accepted:
        outcome.accepted += 1
    else:
        outcome.rejected += 1
    return accepted
