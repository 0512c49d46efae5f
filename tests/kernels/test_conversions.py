"""Conversions to and from the half types: all patterns, against numpy (float16) and torch (bfloat16)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fusion_rt.core.dtypes import DTYPES, DType
from fusion_rt.kernels import _kernels, cpu, machine_code
from fusion_rt.kernels.llvm import vectors
from tests.for_each import for_each
from tests.kernels import reference

Array = npt.NDArray[Any]
Convert = Callable[[Array, DType, Array, DType], None]

F32, F64, F16, BF16 = (DTYPES[name] for name in ("float32", "float64", "float16", "bfloat16"))
PATTERNS = np.arange(2**16, dtype=np.uint16)


def floats() -> Array:
    """float32 numbers at, and right beside, every half number and every midpoint between two of them; and any bits."""
    with np.errstate(all="ignore"):
        halves = PATTERNS.view(np.float16).astype(np.float32).view(np.uint32)
        brains = PATTERNS.astype(np.uint32) << np.uint32(16)
        anchors = np.concatenate([halves, halves + np.uint32(1 << 12), brains, brains + np.uint32(1 << 15)])
        around = np.concatenate([anchors - np.uint32(1), anchors, anchors + np.uint32(1)])
    random = np.random.default_rng(1).integers(0, 2**32, 500_000, np.uint32)
    denormals = np.random.default_rng(2).integers(0, 1 << 23, 10_000, np.uint32)
    return np.concatenate([around, random, denormals]).view(np.float32)


def to_half_elsewhere(values: Array, dtype: DType) -> Array:
    if dtype is F16:
        with np.errstate(all="ignore"):
            return values.astype(np.float16).view(np.uint16)
    return torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def to_float_elsewhere(halves: Array, dtype: DType) -> Array:
    if dtype is F16:
        with np.errstate(all="ignore"):
            return halves.view(np.float16).astype(np.float32)
    return torch.from_numpy(halves.view(np.int16)).view(torch.bfloat16).to(torch.float32).numpy()


def software_convert(source: Array, source_dtype: DType, target: Array, target_dtype: DType) -> None:
    """As on a processor without instructions for float16."""
    name = f"convert-{source_dtype.name}-{target_dtype.name}"
    code = machine_code.MachineCode([])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vectors, "_processor_converts_float16", lambda: False)
        code.link(name, _kernels.machine_code(name))
        patch.setattr(cpu, "_code", code)
        patch.setattr(cpu, "_conversions", {})
        cpu.convert(source, source_dtype, target, target_dtype)


CASES: list[Any] = [
    pytest.param(cpu.convert, F16, id="float16"),
    pytest.param(cpu.convert, BF16, id="bfloat16"),
    pytest.param(software_convert, F16, id="float16 without instructions"),
    pytest.param(reference.convert, F16, id="float16 reference"),
    pytest.param(reference.convert, BF16, id="bfloat16 reference"),
]


@for_each(("convert", "dtype"), CASES)
def test_all_halves_become_the_right_float(convert: Convert, dtype: DType) -> None:
    actual = np.empty(PATTERNS.size, np.float32)
    convert(PATTERNS, dtype, actual, F32)
    expected = to_float_elsewhere(PATTERNS, dtype)
    nan = np.isnan(expected)
    assert (np.isnan(actual) == nan).all()
    assert (actual.view(np.uint32)[~nan] == expected.view(np.uint32)[~nan]).all()


@for_each(("convert", "dtype"), CASES)
def test_floats_become_the_nearest_half_with_ties_to_even(convert: Convert, dtype: DType) -> None:
    values = floats()
    actual = np.empty(values.size, np.uint16)
    convert(values, F32, actual, dtype)
    nan = np.isnan(values)
    assert np.isnan(to_float_elsewhere(actual, dtype)[nan]).all()
    wrong = np.flatnonzero((actual != to_half_elsewhere(values, dtype)) & ~nan)
    assert not wrong.size, f"{values[wrong[0]]!r} became {actual[wrong[0]]:#06x}"


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_doubles_go_by_way_of_float32(dtype: DType) -> None:
    values = np.concatenate(
        [np.random.default_rng(3).standard_normal(1000) * 1e3, [np.inf, -np.inf, -0.0, 1e300, 1e-300]]
    )
    halves = np.empty(values.size, np.uint16)
    cpu.convert(values, F64, halves, dtype)
    with np.errstate(over="ignore"):
        assert (halves == to_half_elsewhere(values.astype(np.float32), dtype)).all()
    back = np.empty_like(values)
    cpu.convert(halves, dtype, back, F64)
    assert (back == to_float_elsewhere(halves, dtype)).all()


def test_float32_and_float64_convert_into_each_other() -> None:
    values = np.random.default_rng(4).standard_normal(77)
    single = np.empty(77, np.float32)
    cpu.convert(values, F64, single, F32)
    assert (single == values.astype(np.float32)).all()
    cpu.convert(single, F32, values, F64)
    assert (values == single).all()


@for_each("n", [0, 1, 31, 32, 33, 100])
def test_every_length_is_converted_to_its_end_and_no_further(n: int) -> None:
    source = np.arange(n, dtype=np.float32)
    target = np.full(n + 1, 0x1234, np.uint16)
    cpu.convert(source, F32, target[:n], F16)
    assert (target[:n].view(np.float16) == source).all()
    assert target[n] == 0x1234


@for_each(("source", "target"), [("float32", "int32"), ("bool", "float16"), ("float16", "bfloat16")])
def test_there_are_no_other_conversions(source: str, target: str) -> None:
    arrays = [np.zeros(2, DTYPES[name].storage) for name in (source, target)]
    with pytest.raises(ValueError, match=f"no conversion from {source} to {target}"):
        cpu.convert(arrays[0], DTYPES[source], arrays[1], DTYPES[target])


def test_arrays_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="output of 3 elements"):
        cpu.convert(np.zeros(3, np.float32), F32, np.zeros(2, np.uint16), F16)
