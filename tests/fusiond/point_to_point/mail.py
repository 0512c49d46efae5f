"""Ranks of a simulated job that send each other messages."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from fusion_rt import wire
from fusion_rt.core.topology import ProcessSet
from fusion_rt.host.process_memory import Process
from fusion_rt.kernels.ordinary import Operand, Remote
from fusiond.collectives.base import Array
from tests.fusiond.simulation import GARBAGE, SimulatedJob


class Mail:
    """A job whose workers have handles of their own, and memory that they overwrite once they may.

    Args:
        local_sizes: workers of each node.
        settings: see `SimulatedJob`.
    """

    def __init__(self, local_sizes: Sequence[int], seed: int = 0, sets: Sequence[ProcessSet] = (), **settings: Any):
        self.job = SimulatedJob(local_sizes, seed, process_sets=sets, **settings)
        self._handles = 10_000  # those below are the job's
        self._clocks: Counter[tuple[int, int, int]] = Counter()
        self._memory: dict[int, Array] = {}

    def send(
        self, rank: int, target: int, data: bytes, tag: int = 0, *, inline: bool = False, group: int = 0,
        seconds: float = 0.0, answered: bool = True, own: bool = False,
    ) -> int:  # fmt: skip
        """A rank sends a message, which may be in its own memory; returns the handle."""
        self._handles += 1
        handle, memory = self._handles, None
        clock = self._clocks[group, rank, target]
        self._clocks[group, rank, target] += 1
        if not inline:
            memory = self._memory[handle] = np.frombuffer(data, np.uint8).copy()
        place = None if inline else wire.Place(1, 0)
        sent = wire.SendTo(
            handle if answered else 0, group, target, tag, clock, len(data), place, data if inline else None, seconds
        )
        decoded = wire.decode_worker_message(wire.encode(sent))
        assert isinstance(decoded, wire.SendTo)
        self.job.engine(rank).messages.send(rank, decoded, self._operand(memory, own))
        return handle

    def receive(
        self, rank: int, source: int, nbytes: int, tag: int = 0, *, inline: bool = False, group: int = 0,
        seconds: float = 0.0, own: bool = False,
    ) -> int:  # fmt: skip
        """A rank receives a message, which may go to its own memory; returns the handle."""
        self._handles += 1
        handle, memory = self._handles, None
        if not inline:
            memory = self._memory[handle] = np.full(nbytes, GARBAGE, np.uint8)
        place = None if inline else wire.Place(1, 0)
        asked = wire.ReceiveFrom(handle, group, source, tag, 0, nbytes, place, seconds)
        decoded = wire.decode_worker_message(wire.encode(asked))
        assert isinstance(decoded, wire.ReceiveFrom)
        self.job.engine(rank).messages.receive(rank, decoded, self._operand(memory, own))
        return handle

    @cached_property
    def process(self) -> Process:
        """All of them, for memory of their own."""
        return Process(os.getpid(), "the ranks")

    def _operand(self, memory: Array | None, own: bool) -> Operand | None:
        if memory is None or not own:
            return memory
        return Remote(self.process, memory.ctypes.data, memory.dtype, len(memory))

    def may_use_again(self, handle: int) -> None:
        """A worker overwrites the memory of a send that has been answered."""
        self._memory[handle][:] = GARBAGE

    def received(self, rank: int, handle: int) -> tuple[int, bytes]:
        """The source and the bytes of a message that a rank has received; fails when it got an error."""
        message, _ = self.job.answer(rank, handle)
        assert isinstance(message, wire.Done), message
        source, nbytes = message.sizes
        data = message.inline if handle not in self._memory else self._memory[handle][:nbytes].tobytes()
        assert data is not None
        assert len(data) == nbytes
        return source, data

    def sent(self, rank: int, handle: int) -> bool:
        """Whether a send is over; fails when it got an error."""
        if not self.job.is_answered(rank, handle):
            return False
        message, _ = self.job.answer(rank, handle)
        assert isinstance(message, wire.Done), message
        return True

    def nothing_is_left(self) -> None:
        """Fails when an engine still has a message, or waits for one."""
        for node in self.job.nodes:
            statistics: Any = node.engine.messages.statistics()
            assert (statistics["under_way"], statistics["kept"]) == (0, 0)
            assert node.engine.messages.is_empty
        self.job.nothing_is_left()
        if "process" in vars(self):
            self.process.end()
