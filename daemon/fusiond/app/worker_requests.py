"""What workers ask of the engine, message by message."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fusion_rt import wire
from fusion_rt.dtypes import DTYPES
from fusion_rt.errors import WireError

if TYPE_CHECKING:
    from fusiond.engine.engine import Engine
    from fusiond.workers.connections import WorkerLink


def ask(engine: Engine, rank: int, link: WorkerLink, message: wire.WorkerMessage) -> None:
    """Passes a worker's message on.

    Raises:
        FusionError: it makes no sense.
    """
    if isinstance(message, wire.Ready):
        engine.ready(rank, message)
    elif isinstance(message, wire.Submit):
        memory = None
        if message.place is not None:
            memory = link.at(message.place, _nbytes(message.signature))
        engine.submit(rank, message, memory)
    elif isinstance(message, wire.SaveState):
        engine.codecs.save_state(rank, message)
    elif isinstance(message, wire.LoadState):
        engine.codecs.load_state(rank, message, link.at(message.place, message.nbytes))
    elif isinstance(message, wire.CompressionRequest):
        engine.codecs.statistics(rank, message.handle)
    elif isinstance(message, wire.StalenessRequest):
        engine.staleness(rank, message.handle)
    elif isinstance(message, wire.Propose):
        engine.propose(rank, message.handle, message.proposal)
    elif isinstance(message, wire.AddSegment):
        if message.plan:
            engine.add_plan_memory(rank, message.plan, link.memory[message.segment])
    elif isinstance(message, wire.DropSegment):
        if message.segment in link.plans:
            engine.drop_plan_memory(rank, link.plans[message.segment])
    else:
        raise WireError(f"{type(message).__name__} is not expected here")


def _nbytes(signature: wire.Signature) -> int:
    """Of a tensor; 0 where its dtype does not exist, which is the engine's to refuse."""
    return math.prod(signature.shape) * DTYPES[signature.dtype].itemsize if signature.dtype in DTYPES else 0
