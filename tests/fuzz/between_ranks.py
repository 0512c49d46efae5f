"""Target: the messages between ranks of an engine whose workers, and whose peer, say what is well-formed and makes no
sense, in any order.

Inputs are programs as those of `engines`. Whatever was refused, nothing may be left when all ranks have gone.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fusion_rt import wire
from fusion_rt.core.errors import FusionError
from tests.fusiond.simulation import SimulatedJob
from tests.fuzz.engine import Target
from tests.fuzz.engines import Program, checked, programs

_LAYOUTS = ((2,), (1, 1), (2, 1))
_RANKS = (0, 0, 1, 1, 2, 3, 65535)
_GROUP = wire.group_id("g")
_GROUPS = (0, 0, 0, 0, _GROUP, _GROUP, _GROUP, 1, 1 << 40)
_TAGS = (0, 0, 0, 1, 2**47)
_SIZES = (0, 4, 4, 4, wire.MAX_INLINE, 9000, 20_000)
_CLAIMS = (0, 4, 4, 9000, 20_000, 2**47)  # what a peer says that it has
_CLOCKS = (0, 0, 1, 2, 2**36, 2**47)
_SECONDS = (0.0, 0.0, 1.0, 1e-9, math.inf)


def targets() -> list[Target]:
    """Engines of jobs on one node and on two."""
    return [Target("engine: messages", programs(), _run, (FusionError,), nbytes=64 << 20, cost=20)]


def _run(data: bytes) -> bool:
    program = Program(data)
    job = SimulatedJob(program.of(_LAYOUTS))
    while not program.is_over and not any(node.failure for node in job.nodes):
        act = program.of((_send, _receive, _say, _data, _open_or_close))
        act(job, program)
        for _ in range(program.byte() % 16):
            job.step()
        if not program.byte() % 16:
            job.pass_time(1)
    while job.step():
        pass
    for rank in job.ranks:
        job.leave(rank)
    while job.step():
        pass
    assert all(node.engine.idle for node in job.nodes)
    return not any(node.failure for node in job.nodes)


def _send(job: SimulatedJob, program: Program) -> None:
    rank, nbytes, inline = program.of(job.ranks), program.of(_SIZES), bool(program.byte() % 2)
    data = bytes(min(nbytes, wire.MAX_INLINE)) if inline else None
    place = None if inline else wire.Place(1, 0)
    asked = wire.SendTo(
        program.byte(), program.of(_GROUPS), program.of(_RANKS), program.of(_TAGS), program.of(_CLOCKS), nbytes, place,
        data, program.of(_SECONDS),
    )  # fmt: skip
    memory = None if inline else np.zeros(nbytes, np.uint8)
    job.engine(rank).messages.send(rank, checked(asked), memory)


def _receive(job: SimulatedJob, program: Program) -> None:
    rank, nbytes, inline = program.of(job.ranks), program.of(_SIZES), bool(program.byte() % 2)
    asked = wire.ReceiveFrom(
        program.byte(), program.of(_GROUPS), program.of((wire.ANYBODY, *_RANKS)), program.of(_TAGS), 0, nbytes,
        None if inline else wire.Place(1, 0), program.of(_SECONDS),
    )  # fmt: skip
    job.engine(rank).messages.receive(rank, checked(asked), None if inline else np.zeros(nbytes, np.uint8))


def _say(job: SimulatedJob, program: Program) -> None:
    """A node says something to another one."""
    kind, source, target = program.byte() % 5, program.of(_RANKS), program.of(_RANKS)
    group, clock, nbytes = program.of(_GROUPS), program.of(_CLOCKS), program.of(_CLAIMS)
    key = wire.message_key(group, source, target, clock)
    data = bytes(nbytes) if nbytes <= wire.MAX_INLINE and program.byte() % 2 else None
    said: Any = (
        wire.MessageSent(group, source, target, program.of(_TAGS), clock, nbytes, data),
        wire.MessageAccepted(key),
        wire.MessageOver(key, "because"),
        wire.MessagesTaken(program.of((0, 1, 256, 2**47)), program.of((0, 4, 2**47))),
        wire.MessageCredit(key, program.of((0, 1, 2**47))),
    )[kind]
    _tell(job, program, said)


def _data(job: SimulatedJob, program: Program) -> None:
    key = wire.message_key(program.of(_GROUPS), program.of(_RANKS), program.of(_RANKS), program.of(_CLOCKS))
    chunk = wire.MessageChunk(key, program.byte(), program.byte(), program.of((0, 0, 4096, 2**47)), program.byte())
    _tell(job, program, chunk, memoryview(bytes(program.of((0, 4, 4, 4096, 20_000)))))


def _tell(job: SimulatedJob, program: Program, message: Any, *payload: memoryview) -> None:
    if len(job.nodes) == 1:
        return
    node = program.byte() % 2
    job.nodes[node].engine.peer_message(1 - node, wire.decode_peer_message(wire.encode(message)), *payload)


def _open_or_close(job: SimulatedJob, program: Program) -> None:
    """A rank opens a group, as others do or not, or closes it."""
    rank = program.of(job.ranks)
    if program.byte() % 4:
        opened = wire.OpenGroup(1, "g", program.of(((0, 1), (0, 1), (1,), tuple(job.ranks))))
        job.engine(rank).groups.open(rank, opened)
    else:
        job.engine(rank).groups.close(rank, wire.CloseGroup(1, _GROUP))
