"""Payloads whose length the receiver does not know, as chunks: pieces of `port.chunk_bytes`, the last shorter.

A chunk's `start` is where the piece begins in the payload, in bytes. Pieces may come in any order.
"""

from __future__ import annotations

from fusiond.collectives.base import ExchangeError, Port


def send(port: Port, position: int, part: int, payload: memoryview | bytes) -> None:
    """Sends a payload to a peer. It is empty pieces that end one whose length is a multiple of a chunk's."""
    view = memoryview(payload)
    for start in range(0, view.nbytes + 1, port.chunk_bytes):
        port.send(position, part, start, 0, view[start : start + port.chunk_bytes])


class Assembly:
    """A payload that comes piece by piece.

    Args:
        limit: the most bytes that it can have.
        piece: bytes of every piece but the last.
    """

    def __init__(self, limit: int, piece: int) -> None:
        self._limit, self._piece = limit, piece
        self._pieces: dict[int, bytes | memoryview] = {}
        self._expected = 0  # pieces; 0 until the last has come

    def add(self, start: int, payload: memoryview) -> bool:
        """Takes a piece; returns whether the payload is complete. One that is a single piece is not copied.

        Raises:
            ExchangeError: the piece is not part of a payload of that limit, or came before.
        """
        last = payload.nbytes < self._piece
        number, odd = divmod(start, self._piece)
        beyond = bool(self._expected) and (last or number >= self._expected)
        too_soon = last and any(other >= start for other in self._pieces)
        if odd or payload.nbytes > self._piece or start + payload.nbytes > self._limit or beyond or too_soon:
            raise ExchangeError(f"{payload.nbytes} bytes at {start} are no piece of at most {self._limit} bytes")
        if start in self._pieces:
            raise ExchangeError(f"the piece at {start} came twice")
        if last:
            self._expected = number + 1
        self._pieces[start] = payload if last and number == 0 else bytes(payload)
        return len(self._pieces) == self._expected

    def whole(self) -> memoryview:
        """Returns the complete payload, and forgets its pieces."""
        found = [self._pieces[at] for at in sorted(self._pieces)]
        self._pieces.clear()
        return memoryview(found[0] if len(found) == 1 else b"".join(found))
