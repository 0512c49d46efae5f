"""Bytes that come in pieces, in any order: messages to homes, and those from one rank to another."""

from __future__ import annotations

from fusion_rt.core.errors import WireError


class BytesInPieces:
    """Bytes of which each comes once, as seen from where their pieces begin and end.

    Attributes:
        missing: number of bytes that have not come.

    Args:
        what: they are, for errors.
        nbytes: how many.
    """

    def __init__(self, what: str, nbytes: int) -> None:
        self.missing = nbytes
        self._what = what
        self._nbytes = nbytes
        self._ends: dict[int, int] = {}  # of each piece, by its start

    def add(self, start: int, nbytes: int) -> bool:
        """Notes a piece. Returns whether all bytes are there.

        Raises:
            WireError: the piece is empty, too long, came before, or overlaps others.
        """
        end = start + nbytes
        if start in self._ends or not start < end <= self._nbytes or nbytes > self.missing:
            raise WireError(
                f"bytes {start} to {end} of {self._what} do not fit the others: it has {self._nbytes}, of which "
                f"{self.missing} are missing"
            )
        self._ends[start] = end
        self.missing -= nbytes
        if not self.missing and not self._is_whole():
            raise WireError(f"pieces of {self._what} overlap")
        return not self.missing

    def _is_whole(self) -> bool:
        """Returns whether each piece begins where another one ends."""
        end = 0
        while end in self._ends:
            end = self._ends[end]
        return end == self._nbytes
