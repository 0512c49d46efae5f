"""A rank of the soak: operations on integers, step after step, each checked; the model depends on all results.

It reports events on its standard output, a line of JSON each, and reads from its standard input its start state, then
requests: {"stop": true} to stop soon, after the same step as all others; {"hang": seconds} to hold the GIL.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from fusion_rt import wire
from fusion_rt.client import Client
from fusion_rt.core.errors import FusionError
from tests.faults.hanging import hold_gil
from tests.faults.jobs import Array, add, part, total

SIZES = (10, 3_000, 100_000, 10, 400_000, 3_000)  # elements of the sums
EVERY = 5  # steps from one exchange of another kind to the next
MODEL = 1000  # elements
_MODULUS = 1_000_003


def count_of(step: int) -> int:
    return SIZES[step % len(SIZES)]


def updated(model: Array, result: Array) -> Array:
    """Returns the model after a step; steps that are left out, repeated or reordered make another model."""
    after = model * 3 % _MODULUS
    after[: len(result)] += result[:MODEL]
    return after


def reference(model: Array, ranks: Sequence[int], steps: range) -> Array:
    """Computes these steps in a single process."""
    for step in steps:
        model = updated(model, total(ranks, step, min(count_of(step), MODEL)))
    return model


class Rank:
    """One rank; `begin`: the first line of its input: path, job, rank, ranks, step, model, timeout."""

    def __init__(self, begin: dict[str, Any]) -> None:
        self._rank: int = begin["rank"]
        self._ranks: list[int] = begin["ranks"]
        self._stop = False  # somebody wants this rank to stop
        self._over = False  # all are to stop now
        self._hang = 0.0
        self._step: int = begin["step"]
        self._models = {self._step: np.array(begin["model"], np.int64)}  # after the last steps
        self._client = Client(begin["path"], begin["job"], self._rank, begin["timeout"])

    def run(self) -> None:
        say(joined=True)
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            while not self._over:
                if self._hang:
                    hang, self._hang = self._hang, 0.0
                    hold_gil(hang)
                self._take_step()
        except FusionError as error:
            say(error=str(error), at=time.monotonic(), kind=type(error).__name__, models=self._told())
        else:
            say(done=True, models=self._told())
            self._client.close()

    def _take_step(self) -> None:
        step = self._step
        result = add(self._client, step, count_of(step))
        wrong = not np.array_equal(result, total(self._ranks, step, count_of(step)))
        if step % EVERY == 0:
            wrong = not self._gathers(step) or wrong
            self._over = self._votes()
        self._models = {step: self._models[step], step + 1: updated(self._models[step], result)}
        self._step = step + 1
        say(step=step + 1, wrong=wrong, operations=3 if step % EVERY == 0 else 1, elements=count_of(step))

    def _gathers(self, step: int) -> bool:
        """Does an allgather or a broadcast; returns whether the result is right."""
        values = part(self._rank, step, 500)
        kind = "allgather" if step % 2 else "broadcast"
        root = self._ranks[step % len(self._ranks)]
        signature = wire.Signature(kind, "int64", (500,), root=root if kind == "broadcast" else 0)  # type: ignore[arg-type]
        operation = self._client.wait(self._client.submit(kind, signature, inline=values.tobytes()))
        data: Any = operation.inline if operation.output is None else operation.output.view
        whose = self._ranks if kind == "allgather" else [root]
        return np.array_equal(np.frombuffer(data, np.int64), np.concatenate([part(r, step, 500) for r in whose]))

    def _votes(self) -> bool:
        """Returns whether any rank has been asked to stop; the same on all ranks."""
        signature = wire.Signature("allreduce", "int64", (1,))
        vote = np.array([self._stop], np.int64).tobytes()
        return self._client.wait(self._client.submit("stop?", signature, inline=vote)).inline != bytes(8)

    def _told(self) -> dict[int, list[int]]:
        return {step: model.tolist() for step, model in self._models.items()}

    def _listen(self) -> None:
        for line in sys.stdin:
            request = json.loads(line)
            self._stop = request.get("stop", self._stop)
            self._hang = request.get("hang", 0.0)


def say(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    Rank(json.loads(sys.stdin.readline())).run()
