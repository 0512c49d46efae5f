from __future__ import annotations

import pytest
import torch

from fusion_rt.core.dtypes import DTYPES, DType, DTypeError
from tests.for_each import for_each


@for_each("name", DTYPES)
def test_an_element_type_is_what_torch_calls_so(name: str) -> None:
    dtype, theirs = DType.named(name), getattr(torch, name)
    assert (dtype.name, dtype.itemsize, dtype.is_floating) == (name, theirs.itemsize, theirs.is_floating_point)
    assert dtype.is_half == (dtype.is_floating and dtype.itemsize == 2)
    assert dtype.storage.itemsize == dtype.itemsize


def test_an_unknown_element_type_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(DTypeError, match=r"'complex64' cannot be communicated.*float64.*bool"):
        DType.named("complex64")
