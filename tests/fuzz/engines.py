"""Target: an engine whose workers, and peers, say what is well-formed and makes no sense, in any order.

Inputs are programs: each byte picks what is done next, or a value of it. What a message leads to is its sender's fault:
a `FusionError`, a failed operation or the end of the job; never another exception.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from fusion_rt import wire
from fusion_rt.core.dtypes import DTYPES
from fusion_rt.core.errors import FusionError, WireError
from fusion_rt.local import array_codec
from tests.fusiond.simulation import Array, SimulatedJob
from tests.fuzz.engine import Target

_LAYOUTS = ((2,), (1, 1), (2, 1))
_KINDS: tuple[wire.Kind, ...] = (
    "allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "join", "add_process_set",
    "remove_process_set", "reduce",
)  # fmt: skip
_POSTS: tuple[wire.PostKind, ...] = ("post", "post", "seed", "post", "ask", "reseed")
_OPS: tuple[wire.Op, ...] = ("sum", "average", "min", "product", "adasum", "band")
_GROUP = wire.group_id("g")
_SETS = (0, 0, 0, 0, 0, 0, 1, 2, _GROUP, _GROUP, _GROUP + 1)
_ROWS: tuple[tuple[int, ...], ...] = ((), (), (1, 1), (2, 0), (0, 2**47))
_TYPES = ("float32", "float32", "float32", "float64", "float16", "bfloat16", "int32", "uint8", "bool", "", "complex64")
_CODECS = (
    "dense",
    "dense",
    "dense",
    "fp16",
    "topk(minimum=0)",
    "int8(minimum=0)",
    "powersgd(minimum=0, rank=1)",
    "nonsense",
)
_ALGORITHMS = ("allreduce", "bsp", "asp", "easgd", "dpsgd(topology='ring')", "local_sgd(steps=2)", "partial", "hogwild")
_NAMES = ("x", "y", "", "z" * wire.MAX_NAME)
_SIZES = (0, 1, 2, 3, 64, 2**31, 2**47)
_SCALES = (1.0, 1.0, 1.0, 0.5, 0.0, -1.0, math.inf, math.nan)
_NUMBERS = (0, 1, 2, 3, 7, 2**36, 2**36 + 1, 2**47)
_MOST = 1 << 16  # bytes of a tensor that is really there
_LENGTH = 120  # choices of a program


class Program:
    """The bytes of an input as choices; those that are missing are 0."""

    def __init__(self, data: bytes) -> None:
        self._bytes: Iterator[int] = iter(data[:_LENGTH])
        self.is_over = False

    def byte(self) -> int:
        found = next(self._bytes, -1)
        self.is_over |= found < 0
        return max(found, 0)

    def of(self, values: Any) -> Any:
        return values[self.byte() % len(values)]

    def some(self, values: Any, most: int = 3) -> tuple[Any, ...]:
        return tuple(self.of(values) for _ in range(self.byte() % (most + 1)))


def targets() -> list[Target]:
    """Engines of jobs on one node and on two."""
    return [Target("engine: workers", programs(), _run, (FusionError,), nbytes=64 << 20, cost=40)]


def _run(data: bytes) -> bool:
    program = Program(data)
    job = SimulatedJob(program.of(_LAYOUTS), algorithm="allreduce")
    job.open_group("g", tuple(job.ranks)[:2])
    clocks: Counter[str] = Counter()
    handle = 0
    while not program.is_over and not any(node.failure for node in job.nodes):
        handle += 1
        ranks = program.of((tuple(job.ranks), tuple(job.ranks)[::-1], (program.of(job.ranks),)))
        try:
            _act(job, program, ranks, handle, clocks)
        except FusionError:
            return False  # its connection would be ended, and with it the job
        for _ in range(program.byte() % 64):
            job.step()
    for _ in range(2000):
        if not job.step():
            break
    return not any(node.failure for node in job.nodes)


def _act(job: SimulatedJob, program: Program, ranks: Sequence[int], handle: int, clocks: Counter[str]) -> None:
    """Some ranks say the same."""
    kind = program.byte() % 10
    if kind < 4:
        _submit(job, program, ranks, handle, clocks)
    elif kind < 6:
        proposal = checked(wire.Propose(handle, _proposal(program))).proposal
        for rank in ranks:
            job.engine(rank).propose(rank, handle, proposal)
    elif kind == 6:
        plan, bucket, clock = program.of((1, 1, 1, 2, 7)), program.of((0, 0, 1, 2**47)), program.of(_NUMBERS)
        rates, rescale, samples = program.some(_SCALES), program.of(((), (), (0.5,), (1.0, 2.0))), program.byte()
        for rank in ranks:
            ready = wire.Ready(handle, plan, bucket, clock, rescale, rates, samples, _POSTS[samples % len(_POSTS)])
            job.engine(rank).ready(rank, checked(ready))
    elif kind == 7:
        plan, nbytes = program.of(_NUMBERS[1:4]), program.of((4096, 4096, 64, 0))
        for rank in ranks:
            job.engine(rank).add_plan_memory(rank, plan, np.zeros(nbytes, np.uint8))
    elif kind == 8:
        save = checked(wire.SaveState(handle, program.of((0, 0, 1)), "g", bool(program.byte() % 2)))
        for rank in ranks:
            job.engine(rank).codecs.save_state(rank, save)
    else:
        arrays = {program.of(("0:step", "0:residual/x", "home:0:-1:value")): np.zeros(program.byte() % 4)}
        data = np.empty(array_codec.nbytes_of(arrays), np.uint8)
        array_codec.write(arrays, data)
        load = checked(wire.LoadState(handle, program.of((0, 0, 1)), "g", wire.Place(1, 0), len(data)))
        for rank in ranks:
            job.engine(rank).codecs.load_state(rank, load, data)


def _submit(job: SimulatedJob, program: Program, ranks: Sequence[int], handle: int, clocks: Counter[str]) -> None:
    name, signature, splits = program.of(_NAMES[:3]), _signature(program), program.of(((), (1, 1), (2, 0), (0, 2**47)))
    clock, is_inline = clocks[name] + program.of((0, 0, 0, 0, 0, 1, 2**36)), program.byte() % 2
    clocks[name] += 1
    nbytes = math.prod(signature.shape) * DTYPES[signature.dtype].itemsize if signature.dtype in DTYPES else 0
    if nbytes > _MOST:  # no worker has such an arena
        nbytes = 0
    inline = bytes(min(nbytes + program.of((0, 0, 0, 0, 0, 0, 0, 1)), wire.MAX_INLINE)) if is_inline else None
    receives, seconds, wanted = program.of(_ROWS), program.of((0.0, 0.0, 5.0)), program.byte() % 3
    for rank in ranks:
        target = np.zeros(256, np.uint8) if wanted == 2 else None
        memory = None if is_inline else np.zeros(nbytes, np.uint8)
        place = None if memory is None else wire.Place(1, 0)
        where = None if target is None else wire.Place(2, 0)
        submit = wire.Submit(handle, name, clock, signature, place, inline, splits, receives, where, seconds)
        into = None if target is None else partial(_part, target)
        job.engine(rank).submit(rank, checked(submit), memory, into)


def _part(target: Array, nbytes: int) -> Array:
    if nbytes > len(target):
        raise WireError("that is not in the arena")
    return target[:nbytes]


def _signature(program: Program) -> wire.Signature:
    return wire.Signature(
        program.of(_KINDS), program.of(_TYPES), program.some(_SIZES[2:], 2), program.of(_OPS), program.of(_SCALES),
        program.of(_SCALES), program.of((0, 1, 0, 0, 0, 0, 1, 3)), program.of(_SETS), program.of(_CODECS),
        program.of(((), (), (), ((2,), (1,)), ((2**47,),))), program.of(((), (), (0,), (0, 1), (1, 65535))),
        program.of(_ROWS),
    )  # fmt: skip


def _proposal(program: Program) -> wire.Proposal:
    tensors = tuple(
        wire.TensorSpec(
            program.of(_NAMES), program.of(_TYPES), program.some(_SIZES[:5], 2), program.byte() % 2, program.byte() % 3,
            program.byte() % 3,
        )
        for _ in range(program.byte() % 3)
    )  # fmt: skip
    optimizer = program.of((None, wire.OptimizerSpec("SGD", ("{}",)), wire.OptimizerSpec("SGD", ())))
    reduction = wire.Reduction(
        program.of(_OPS),
        program.of(_SCALES),
        program.of(_SCALES),
        program.of(_CODECS),
        program.of(_ALGORITHMS),
        optimizer,
    )
    return wire.Proposal("g", program.of(_SETS), program.of((0, 0, 1, 2)), reduction, tensors)


def checked(message: Any) -> Any:
    """As it comes over the local channel. Raises `WireError` where it would not come."""
    decoded = wire.decode_worker_message(wire.encode(message))
    if type(decoded) is not type(message):
        raise WireError("another message")
    return decoded


def programs() -> list[bytes]:
    """Some to begin with."""
    rng = np.random.default_rng(1)
    return [bytes(100), *(rng.integers(0, 256, _LENGTH, np.uint8).tobytes() for _ in range(30))]
