"""The sends and receives of local ranks, until they are answered."""

from __future__ import annotations

from collections.abc import Iterator

from fusion_rt import wire
from fusion_rt.tracing.format import Kind
from fusion_rt.tracing.recorder import Instrument
from fusiond.core.effects import Effects
from fusiond.point_to_point.calls import Call


class Answers:
    """The calls of one engine that have not been answered, in order.

    Args:
        outside: takes the answers.
        trace: answers are recorded there.
    """

    def __init__(self, outside: Effects, trace: Instrument) -> None:
        self._outside = outside
        self._trace = trace
        self._calls: dict[Call, None] = {}
        self._warned: set[str] = set()

    def __contains__(self, call: Call) -> bool:
        return call in self._calls

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[Call]:
        """Yields those that wait now; one that is answered in between, by the end of another one, is left out."""
        return (call for call in [*self._calls] if call in self._calls)

    def await_end(self, call: Call) -> None:
        """Keeps a call until it is answered."""
        self._calls[call] = None

    def end(self, call: Call, inline: bytes | None = None, sizes: tuple[int, ...] = ()) -> bool:
        """Tells a worker the end of its request; returns False if it has been told another one."""
        if call not in self._calls:
            return False
        del self._calls[call]
        self.done(call.rank, call.handle, call.about, inline, sizes)
        return True

    def fail(self, call: Call, error: str) -> None:
        """Tells a worker that its request has failed, unless it has been told the end."""
        if call in self._calls:
            del self._calls[call]
            self.refuse(call.rank, call.handle, error, call.about)

    def done(
        self, rank: int, handle: int, about: tuple[str, int], inline: bytes | None = None, sizes: tuple[int, ...] = ()
    ) -> None:
        """Tells a worker the end of a request that was not kept.

        Args:
            handle: 0: it does not want to know.
            about: the name and clock under which it is recorded.
        """
        name, clock = about
        self._trace.record(Kind.RUN_END, name, 0, clock)
        self._trace.record(Kind.ANSWERED, name, 0, clock, 0, 0, rank)
        if handle:
            self._outside.to_worker(rank, wire.Done(handle, inline, sizes))

    def refuse(self, rank: int, handle: int, error: str, about: tuple[str, int]) -> None:
        """Tells a worker that something is not possible; logs it, once for each pair of ranks, if that does not want to
        know."""
        self._trace.record(Kind.FAILED, about[0], 0, about[1])
        if handle:
            self._outside.to_worker(rank, wire.Failed(handle, error))
        elif about[0] not in self._warned:
            self._warned.add(about[0])
            self._outside.warn(f"{error}; it was not told, since small messages are away when they are sent")

    def clear(self) -> None:
        """Forgets all of them: the job has failed, and workers are told so."""
        self._calls.clear()
