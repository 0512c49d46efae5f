"""The kernels as a GPU would run them, those for warps too, compiled to its assembly language, which needs no GPU."""

from __future__ import annotations

import importlib.util
import os
import warnings
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest

from fusion_rt.kernels.cuda import selection, shim

pytestmark = pytest.mark.skipif("NUMBA_ENABLE_CUDASIM" in os.environ, reason="the simulator compiles nothing")

HOPPER = (9, 0)
FORBIDDEN = (".f64", ".ftz", "fma.rn.f32")  # wider, with denormals lost, rounded once instead of twice
VOLTA = (7, 0)  # which CUDA 13 has no compiler for
OTHERS = ((7, 5), (8, 0), (10, 0))


@pytest.fixture(scope="module")
def cuda() -> Any:
    """`numba.cuda`, as if there were an H100."""
    if importlib.util.find_spec("numba_cuda") is None:
        pytest.skip("the package numba-cuda is not installed: pip install numba-cuda 'numba-cuda[cu12]'")
    from numba import cuda
    from numba.cuda import dispatcher
    from numba.cuda.cudadrv import nvvm

    try:
        nvvm.NVVM()
    except nvvm.NvvmSupportError as error:
        pytest.skip(f"NVIDIA's compiler is not installed, which pip install 'numba-cuda[cu12]' does: {error}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatcher, "get_current_device", lambda: SimpleNamespace(compute_capability=HOPPER))
        yield cuda


def signatures(types: Any) -> dict[str, tuple[Any, ...]]:
    floats, ints, longs, rows = types.float32[::1], types.int32[::1], types.int64[:, ::1], types.int32[:, ::1]
    added = (floats, floats, floats, rows, ints, types.int64, types.float32, types.float32)
    found = (floats, rows, ints, rows, ints)
    where = (*found, ints, ints, rows, types.int32[:, :, ::1], types.boolean)
    return {
        "survey": (*added, rows, rows, longs, longs),
        "collect": (*added, rows, ints, rows, rows, longs, longs),
        "count": (*found, rows, rows, longs, longs),
        "place": (*where, rows, longs),
        "take": (*where, ints, rows, longs, longs),
    }


@pytest.mark.parametrize("warps", [True, False])
def test_all_kernels_compile_and_round_like_the_cpu(cuda: Any, warps: bool) -> None:
    from numba import types

    code = selection.kernels(256, warps)
    for name, arguments in signatures(types).items():
        ptx, _ = cuda.compile_ptx(getattr(code, name).py_func, types.void(*arguments), cc=HOPPER)
        assert ".target sm_90" in ptx
        assert [text for text in FORBIDDEN if text in ptx] == [], name
        ranked = name in ("collect", "place", "take")
        assert ("vote.sync.ballot" in ptx) == (warps and ranked), name
        assert "barrier" in ptx or "bar." in ptx, name
        assert ("mul.rn.f32" in ptx) == (name in ("survey", "collect")), name


def test_nothing_is_in_local_memory_from_volta_to_blackwell(cuda: Any) -> None:
    from numba import types

    code = selection.kernels(256, True)
    volta = [VOLTA] if int(metadata.version("cuda-bindings").split(".")[0]) < 13 else []
    for name, arguments in signatures(types).items():
        for architecture in (HOPPER, *OTHERS, *volta):
            ptx, _ = cuda.compile_ptx(getattr(code, name).py_func, types.void(*arguments), cc=architecture)
            assert ".target sm_{}{}".format(*architecture) in ptx
            assert ".local" not in ptx, (name, architecture)


def test_a_small_grid_is_no_reason_to_warn(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.cuda import dispatcher

    monkeypatch.setattr(dispatcher.driver, "_to_core_stream", lambda stream: stream)  # needs a driver
    kernel = selection.kernels(256, True).place
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(Warning, match="Grid size 1"):
            kernel[1, 256, 0]
        shim.launcher(kernel, 1, 256, 0)
