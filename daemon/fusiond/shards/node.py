"""This node, as the parts of this package share it, and its way to the other nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from msgspec.structs import replace

from fusion_rt import wire
from fusion_rt.core.topology import Topology
from fusion_rt.settings import Settings
from fusion_rt.tracing.recorder import NULL, Instrument
from fusiond.core.effects import Effects
from fusiond.operations.thread_work import Act, ThreadWork
from fusiond.shards.messages import pieces

Address: TypeAlias = tuple[int, int, int]  # plan, bucket, and a home's rank (-1: shard) or a worker's rank


@dataclass(slots=True)
class ThisNode:
    """This node, in one membership epoch.

    Attributes:
        topology, node: who is where, and which node this is.
        settings: sizes and time-outs.
        outside: acts for it.
        epoch: the membership epoch.
        work: the threads.
        failed: called with an exception when something cannot be gone on with.
        trace: what is done is recorded there.
        after: the mark of the operation that was completed last here, which goes with all that is sent.
        failure: why the job cannot go on, and so nothing is sent and nothing is begun; empty if it can.
    """

    topology: Topology
    node: int
    settings: Settings
    outside: Effects
    epoch: int
    work: ThreadWork
    failed: Callable[[BaseException], None]
    trace: Instrument = NULL
    after: int = 0
    failure: str = ""

    def do(self, plan: int, work: Act, nbytes: float, then: Act) -> None:
        """Runs `work` for a plan, on a thread if it works on much, and `then` in the event loop, unless the job cannot
        go on."""

        def done(error: BaseException | None) -> None:
            if self.failure:
                return
            if error is None:
                then()
            else:
                self.failed(error)

        self.work.do(plan, [work], nbytes, done)

    def send(self, node: int, message: wire.Piece, payload: memoryview) -> None:
        """Sends a message, whose payload nobody will change, to another node."""
        if not self.failure:
            for piece, data in pieces(replace(message, after=self.after), payload, self.settings.chunk_bytes):
                self.outside.send_piece(node, piece, data)
