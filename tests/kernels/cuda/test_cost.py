"""What a selection costs, counted in the simulator: launches, bytes of the arrays, and atomic operations."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

if os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
    pytest.skip("test_simulator runs this in a process of its own", allow_module_level=True)

from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

from fusion_rt.kernels.cuda import selection
from fusion_rt.kernels.cuda._words import BINS, COLLECTED, TICKET
from fusion_rt.kernels.cuda.selection import Found, Memory, Taken, words
from fusion_rt.kernels.cuda.shim import cuda
from tests.kernels import reference

N, K = 600, 12
AFTER = ["place", "take"]
DIGITS = ["count"] * 3


class Counted(FakeCUDAArray):
    """An array that counts how many of its elements are read and written."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        super().__init__(array)
        self.reads = self.writes = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.writes += 1
        super().__setitem__(index, value)


class Watched:
    """A kernel that writes down when it is launched."""

    def __init__(self, name: str, kernel: Any, launches: list[str]) -> None:
        self._name, self._kernel, self._launches = name, kernel, launches

    def __getitem__(self, grid: Any) -> Any:
        self._launches.append(self._name)
        return self._kernel[grid]


def watched(launches: list[str]) -> Any:
    code = selection.kernels(threads=4, warps=False)
    kernels = [field.name for field in fields(code) if field.name not in ("threads", "teams")]
    return replace(code, **{name: Watched(name, getattr(code, name), launches) for name in kernels})


def cost(
    floor: int, values: npt.NDArray[np.float32], surveys: bool = True, digits: bool = False
) -> tuple[Taken, int, list[str], float, int]:
    """Selects; returns the result, how many elements were collected, the launches, the bytes of residual and gradient
    for each element, and how often what blocks have in common was changed."""
    launches: list[str] = []
    found = Found([[(0, N)]], [K], watched(launches), parts=4)
    found.histogram, found.ticket = Counted(np.zeros((1, BINS), np.int32)), Counted(np.zeros((1, TICKET), np.int32))
    residual, gradient = Counted(values.copy()), Counted(np.zeros(N, np.float32))
    out = cuda.to_device(np.zeros(words(K), np.int32))
    selection.take_largest(Memory(residual, gradient), found, [K], out, [floor], surveys, digits)
    taken = Taken(out.copy_to_host())
    if taken.open:
        assert residual.copy_to_host().tobytes() == values.tobytes(), "nothing has been taken"
        selection.take_open(residual, found, out)
        taken = Taken(out.copy_to_host())
    assert taken.indices.tolist() == reference.largest(values, K).tolist()
    nbytes = 4 * sum(array.reads + array.writes for array in (residual, gradient)) / N
    collected = int(found.state.copy_to_host()[0, COLLECTED])
    return taken, collected, launches, nbytes, found.histogram.writes + found.ticket.writes


@pytest.fixture(scope="module")
def values() -> npt.NDArray[np.float32]:
    return np.random.default_rng(4).standard_normal(N, np.float32)


def test_with_a_threshold_that_is_expected_memory_is_passed_once(values: npt.NDArray[np.float32]) -> None:
    taken, _, launches, nbytes, _ = cost(0, values)
    assert launches == ["survey", "collect", *AFTER]
    assert 16 <= nbytes < 18.5

    taken, collected, launches, nbytes, atomics = cost(taken.expected, values, False)
    assert launches == ["collect", *AFTER]
    assert K <= collected < 3 * K
    assert 12 <= nbytes < 14.5
    pick, blocks = BINS, 4
    assert atomics <= pick + 2 * collected + 2 * (blocks + 1) + 2 * blocks, "none for an element that is left"


@pytest.mark.parametrize(
    ("digits", "expected"),
    [(True, ["collect", *DIGITS, *AFTER]), (False, ["collect", *AFTER, *DIGITS, *AFTER])],
)
def test_a_threshold_that_too_few_reach_costs_passes_and_launches_if_nobody_has_seen_it_come(
    values: npt.NDArray[np.float32], digits: bool, expected: list[str]
) -> None:
    taken, collected, launches, nbytes, _ = cost(int(np.float32(100.0).view(np.int32)), values, False, digits)
    assert collected == 0
    assert taken.count == K
    assert launches == expected
    assert nbytes < 34


@pytest.mark.parametrize("groups", [1, 2, 12])
def test_any_number_of_groups_takes_as_many_launches_as_one(groups: int, values: npt.NDArray[np.float32]) -> None:
    """A bucket of 40 parameters, each compared with itself (`scope='tensor'`)."""
    launches: list[str] = []
    edges = [N * group // groups for group in range(groups + 1)]
    found = Found([[edge] for edge in pairwise(edges)], [2] * groups, watched(launches), parts=4)
    memory = Memory(cuda.to_device(values), cuda.to_device(np.zeros(N, np.float32)))
    out = cuda.to_device(np.zeros(found.offsets[-1], np.int32))
    for step in range(2):
        launches.clear()
        before = memory.residual.copy_to_host()
        selection.take_largest(memory, found, [2] * groups, out, None, surveys=step == 0)
        assert launches == (["survey"] if step == 0 else []) + ["collect", *DIGITS, *AFTER]
        written = out.copy_to_host()
        for (low, high), first, end in zip(pairwise(edges), found.offsets, found.offsets[1:], strict=False):
            expected = low + reference.largest(before[low:high], 2)
            assert Taken(written[first:end]).indices.tolist() == expected.tolist()
