"""Targets: what was saved, and is given back by a script or found in a file: codecs' state, snapshots of homes."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from functools import cache, cached_property
from typing import Any

import numpy as np

from fusion_rt import codecs, wire
from fusion_rt.codecs import CodecError, Layout, Span
from fusion_rt.core.dtypes import DTYPES
from fusion_rt.core.errors import FusionError, WireError
from fusion_rt.local import array_codec
from fusiond.buckets import codec_state
from fusiond.engine.snapshots import SnapshotError, SnapshotFiles
from tests.fusiond.algorithms.training import Workers
from tests.fusiond.simulation import SimulatedJob
from tests.fuzz.engine import Target

_LAYOUT = Layout(DTYPES["float32"], 600, (Span("a", 0, 400, (20, 20)), Span("b", 400, 200, (200,))))
_CODECS = ("topk(density=0.1, minimum=0)", "randomk(minimum=0, momentum=0.9)", "gaussiank(minimum=0)",
           "int2(minimum=0, decay=0.9)", "demo(minimum=0, chunk=8)", "int8(minimum=0)",
           "powersgd(minimum=0, rank=1)")  # fmt: skip
_WORDS = (b"float32", b"float64", b"int64", b"uint8", b"0:step", b"0:layout", b"0:bounds", b"residual/a",
          b"home:0:-1:value", b"version",
          b"\x93\xce\xff\xff\xff\xff\x00", b"\x92\x00\xcf\x00\x00\x7f\xff\xff\xff\xff\xff")  # fmt: skip


def targets(torch: bool = True) -> list[Target]:
    """Arrays with names; with them, the state of codecs and of homes. `torch`: of optimizers that take it, too."""
    return [
        Target("named arrays", [_arrays(), _arrays(empty=True)], _read, (WireError,), words=_WORDS),
        Target("codecs' state", _codec_states(), _restore, (WireError, CodecError), words=_WORDS, cost=8),
        Target("snapshot", _snapshots(), _read_snapshot, (SnapshotError,), words=_WORDS, cost=8),
        *(
            Target(
                f"homes' state, {name}",
                _homes(name).seeds(),
                _homes(name).restore,
                (FusionError,),
                words=_WORDS,
                cost=20,
            )
            for name in (_OPTIMIZERS if torch else ("plain",))
        ),
    ]


def _packed(arrays: dict[str, Any]) -> bytes:
    data = np.empty(array_codec.nbytes_of(arrays), np.uint8)
    array_codec.write(arrays, data)
    return data.tobytes()


def _arrays(empty: bool = False) -> bytes:
    if empty:
        return _packed({"x": np.zeros((0, 3), np.float32), "y": np.zeros((), np.int64)})
    return _packed({"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b/c": np.arange(3), "d": np.zeros(5, np.uint8)})


def _read(data: bytes) -> bool:
    for array in array_codec.read(np.frombuffer(data, np.uint8)).values():
        assert array.nbytes <= len(data)
        array.tobytes()
    return True


# --- codecs -----------------------------------------------------------------------------------------------------------


def _codec_states() -> list[bytes]:
    """One for each codec, after a step; the first byte says which."""
    found = []
    for number, text in enumerate(_CODECS):
        bucket: Any = codec_state.open_bucket(codecs.parse(text), _LAYOUT, 2)
        bucket.encode(0, np.sin(np.arange(600)).astype(np.float32))
        bucket.bounds = (0, 300, 600)
        found.append(bytes([number]) + _packed(codec_state.saved([bucket])))
    return found


@cache
def _bucket(number: int) -> Any:
    return codec_state.open_bucket(codecs.parse(_CODECS[number % len(_CODECS)]), _LAYOUT, 2)


def _restore(data: bytes) -> bool:
    bucket = _bucket(data[0] if data else 0)
    codec_state.restore([bucket], array_codec.read(np.frombuffer(data[1:], np.uint8)))
    bucket.encode(0, np.ones(600, np.float32))  # it goes on from whatever it was given
    return True


# --- homes ------------------------------------------------------------------------------------------------------------

_DIM = 30
_OPTIMIZERS = {
    "plain": wire.OptimizerSpec("SGD", ("{}",)),
    "Adam": wire.OptimizerSpec("Adam", (json.dumps({"betas": [0.8, 0.9]}),)),
}


@cache
def _directory() -> str:
    directory = tempfile.mkdtemp(prefix="fuzz")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


class _Homes:
    """A job of two nodes with homes that take steps with an optimizer."""

    def __init__(self, optimizer: str) -> None:
        self._spec = _OPTIMIZERS[optimizer]

    @cached_property
    def _workers(self) -> Workers:
        job = SimulatedJob((1, 1), snapshot_directory=_directory())
        workers = Workers((1, 1), "dc_asgd", np.ones(_DIM), 0.1, self._spec, job=job)
        workers.post(0, np.ones(_DIM))
        workers.collect(0)
        return workers

    @property
    def _owner(self) -> int:
        """The first node that has a home."""
        states = self._workers.job.saved_homes(self._workers.plan)
        return next(node for node, state in enumerate(states) if state)

    def seeds(self) -> list[bytes]:
        return [_packed(self._workers.job.saved_homes(self._workers.plan)[self._owner])]

    def restore(self, data: bytes) -> bool:
        arrays = array_codec.read(np.frombuffer(data, np.uint8))
        try:
            self._workers.job.load_homes(self._owner, arrays, self._workers.plan.group)
        except AssertionError:
            # An optimizer looks at its state when the home is free; if it cannot use it, the job ends with a sentence.
            failures = [node.failure for node in self._workers.job.nodes if node.failure]
            if not failures or any("the saved state of a shard" not in failure for failure in failures):
                raise
            del self.__dict__["_workers"]
            raise FusionError(failures[0]) from None
        return True

    def snapshots(self) -> list[bytes]:
        for node in self._workers.job.nodes:
            node.engine.snapshots.take()
        self._workers.job.settle()
        found = []
        for name in sorted(name for name in os.listdir(_directory()) if name.endswith(".snapshot")):
            with open(os.path.join(_directory(), name), "rb") as file:
                found.append(file.read())
        return found


@cache
def _homes(optimizer: str) -> _Homes:
    return _Homes(optimizer)


def _snapshots() -> list[bytes]:
    return _homes("plain").snapshots()


@cache
def _reader() -> tuple[SnapshotFiles, wire.Plan, str]:
    plan = _homes("plain")._workers.plan
    files = SnapshotFiles(tempfile.mkdtemp(dir=_directory()), 0)
    return files, plan, files.path(plan, 1)


def _read_snapshot(data: bytes) -> bool:
    files, plan, path = _reader()
    with open(path, "wb") as file:
        file.write(data)
    return bool(files.read(plan, 1))
