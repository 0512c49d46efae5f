"""Interface of all that an engine makes happen: messages to workers and nodes, timers, and work on threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from fusion_rt import wire
from fusion_rt.core.dtypes import DType
from fusiond.core.result import Result
from fusiond.core.tracing import Job


class Timers(Protocol):
    """The part of an engine's `Effects` that deals with time."""

    def clock(self) -> float:
        """Returns the time in seconds, from any origin."""

    def call_later(self, seconds: float, callback: Callable[[], None], /) -> object:
        """Calls back when that time has passed."""


class Outlet(Protocol):
    """The part of an engine's `Effects` that sends control messages."""

    def to_node(self, node: int, message: wire.PeerMessage, /) -> None:
        """Sends a control message to a peer, if it can be reached."""


class Correspondence(Outlet, Protocol):
    """The part of an engine's `Effects` that asks peers, and does not wait for their answers for ever."""

    def call_later(self, seconds: float, callback: Callable[[], None], /) -> object:
        """Calls back when that time has passed."""


class Effects(Timers, Correspondence, Protocol):
    """The way out of an engine, which does no I/O itself; `app.daemon_effects` is the one of daemons."""

    def to_worker(self, rank: int, message: wire.DaemonMessage, result: Result | None = None) -> None:
        """Sends a message to a local worker, with the memfd of a large result."""

    def send_chunk(self, node: int, chunk: wire.Chunk, payload: bytes | memoryview, /, urgency: int) -> bool:
        """Sends a chunk, the sooner the less its urgency is; returns whether its payload is borrowed until credit
        for it comes."""

    def when_received(self, then: Callable[[], None], /) -> None:
        """Calls back, at once or later, when peers have received all payloads that were sent so far, and so nothing
        is borrowed for these any more; peers that are lost do not count."""

    def send_piece(self, node: int, piece: wire.Piece, payload: memoryview, /) -> object:
        """Sends a piece of a message, whose payload will not change."""

    def run_jobs(self, jobs: Sequence[Job], then: Callable[[BaseException | None], None]) -> None:
        """Runs jobs outside the event loop, then `then` inside."""

    def has_kernels(self, dtype: DType, conversions: Sequence[tuple[DType, DType]], /) -> bool:
        """Returns whether arrays of this type can be reduced and converted so at once, and nothing has to be compiled
        before."""

    def run_on_files(self, job: Job, then: Callable[[BaseException | None], None], /) -> None:
        """Runs a job that waits for a file system, for ever perhaps, then `then` inside the event loop."""

    def locate(self, ranks: Sequence[int], then: Callable[[list[wire.Whereabouts]], None]) -> None:
        """Finds out where local workers are; calls back, at once or later."""

    def job_failed(self, error: str, /) -> None:
        """Ends the job with this sentence, because it cannot go on."""

    def warn(self, text: str, /) -> None:
        """Logs a warning."""
