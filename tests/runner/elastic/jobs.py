"""Whole elastic jobs under `fusionrun`, as a test sees them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

from tests import forks
from tests.runner.family import below

WORKER = Path(__file__).with_name("worker.py")
STARTED = re.compile(r"\[(\d+)\]<stdout>:epoch (\d+) rank (\d+) of (\d+) step (\d+) pid (\d+)")
TIMEOUT_S = 180.0


class Job:
    """A running job, and what it has printed so far."""

    def __init__(
        self,
        fusionrun: Any,
        until: Callable[..., Any],
        arguments: tuple[str | Path, ...],
        command: Sequence[str | Path] = (),
        **variables: str,
    ) -> None:
        self.directory: Path = fusionrun.directory
        self._until = until
        command = command or (*forks.interpreter(forks.DAEMON), WORKER)
        self.process = fusionrun.start(*arguments, *command, self.directory, **variables)
        self.out: list[str] = []
        self.err: list[str] = []
        self._readers = [self._read(self.process.stdout, self.out), self._read(self.process.stderr, self.err)]

    @staticmethod
    def _read(stream: IO[str], lines: list[str]) -> threading.Thread:
        thread = threading.Thread(target=lambda: lines.extend(line.rstrip("\n") for line in stream))
        thread.start()
        return thread

    def epoch(self, number: int, size: int) -> list[tuple[int, int]]:
        """Waits until all ranks have taken a step of an epoch; the step at which each began, and its process."""
        return self._epoch(range(number, number + 1), size)[1]

    def epoch_from(self, number: int, size: int) -> tuple[int, list[tuple[int, int]]]:
        """The same of this epoch or a later one, and which it was: one that begins while a network falls apart may find
        that out."""
        return self._epoch(range(number, 100), size)

    def _epoch(self, numbers: range, size: int) -> tuple[int, list[tuple[int, int]]]:
        def begun() -> tuple[int, list[tuple[int, int]]] | None:
            found = [STARTED.fullmatch(line) for line in self.out]
            lines = [tuple(map(int, match.groups())) for match in found if match]
            assert self.process.poll() is None, "\n".join(self.out + self.err)
            assert all(mark == rank for mark, _, rank, _, _, _ in lines)
            for number in sorted({epoch for _, epoch, _, of, _, _ in lines if of == size and epoch in numbers}):
                ranks = {rank: (step, pid) for _, epoch, rank, of, step, pid in lines if (epoch, of) == (number, size)}
                if len(ranks) == size:
                    return number, [ranks[rank] for rank in range(size)]
            return None

        try:
            found: tuple[int, list[tuple[int, int]]] = self._until(
                begun, f"epoch {numbers[0]} with {size} workers", TIMEOUT_S
            )
        except AssertionError as error:
            raise AssertionError("\n".join([str(error), *self.out, *self.err])) from None
        return found

    def changes(self) -> list[str]:
        """The lines on changes of membership."""
        return [line for line in self.err if line.startswith("fusionrun: membership epoch ")]

    def stop(self) -> int:
        """Has the workers end well."""
        (self.directory / "stop").touch()
        return self.wait()

    def wait(self, seconds: float = TIMEOUT_S) -> int:
        """Waits for its end; the exit status."""
        status: int = self.process.wait(seconds)
        for reader in self._readers:
            reader.join()
        return status

    def processes(self, word: str) -> list[psutil.Process]:
        """Its processes of a kind, by a word of their command lines, oldest first."""
        found = below(self.process.pid, "cmdline")
        return sorted((process for process, words in found if word in words), key=psutil.Process.create_time)
