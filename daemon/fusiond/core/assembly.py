"""Bytes that come in pieces, in any order, put together: messages to homes, and those from one rank to another."""

from __future__ import annotations

import numpy as np

from fusion_rt.core.errors import WireError
from fusiond.core.contribution import Array


class BytesInPieces:
    """Memory into which all of its bytes come, each once.

    Args:
        what: it is, for errors.
        memory: theirs (uint8, 1-D).

    Attributes:
        missing: number of bytes that have not come.
    """

    def __init__(self, what: str, memory: Array) -> None:
        self.missing = len(memory)
        self._what = what
        self._memory = memory
        self._ends: dict[int, int] = {}  # of each piece, by its start

    def add(self, start: int, payload: memoryview) -> bool:
        """Takes a piece. Returns whether all bytes are there.

        Raises:
            WireError: the piece is empty, too long, came before, or overlaps others.
        """
        end = start + len(payload)
        if start in self._ends or not start < end <= len(self._memory) or len(payload) > self.missing:
            raise WireError(
                f"bytes {start} to {end} of {self._what} do not fit the others: it has {len(self._memory)}, of which "
                f"{self.missing} are missing"
            )
        self._ends[start] = end
        self._memory[start:end] = np.frombuffer(payload, np.uint8)
        self.missing -= len(payload)
        if not self.missing and not self._is_whole():
            raise WireError(f"pieces of {self._what} overlap")
        return not self.missing

    def _is_whole(self) -> bool:
        """Returns whether each piece begins where another one ends."""
        end = 0
        while end in self._ends:
            end = self._ends[end]
        return end == len(self._memory)
