"""What every rank contributes, and what has to come of it, computed in one process with plain torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

import fusion_rt.torch as hvd

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
OPS = (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)
SIZES = {"inline": 7, "arena": 5001}

Shape = int | Sequence[int]


def tensor_of(rank: int, shape: Shape, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """What a rank contributes: small integers, so that no dtype rounds a sum or a product."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    low = 0 if dtype in (torch.uint8, torch.bool) else -4
    dimensions = (shape,) if isinstance(shape, int) else tuple(shape)
    return torch.randint(low, 2 if dtype == torch.bool else 5, dimensions, generator=generator).to(dtype)


def mine(shape: Shape, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return tensor_of(hvd.rank(), shape, dtype, seed)


def everybodys(shape: Shape, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    return [tensor_of(rank, shape, dtype, seed) for rank in range(hvd.size())]


def combined(op: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The combination, in float64 or int64 and back."""
    wide = [p.double() if p.is_floating_point() else p.long() for p in parts]
    fold: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "sum": torch.add,
        "average": torch.add,
        "min": torch.minimum,
        "max": torch.maximum,
        "product": torch.mul,
    }
    result = functools.reduce(fold[op], wide)
    if op == "average":
        result = torch.div(result, len(parts), rounding_mode=None if result.is_floating_point() else "trunc")
    return result.ne(0) if parts[0].dtype == torch.bool else result.to(parts[0].dtype)


def can(op: str, dtype: torch.dtype) -> bool:
    """Whether there is such a combination."""
    return not (op == hvd.Average and dtype == torch.bool)


def rows_of(rank: int, rows: int, ranks: int) -> slice:
    """The rows that a reduce-scatter gives a rank: as many as others, and one more for the first ones."""
    sizes = [rows // ranks + (r < rows % ranks) for r in range(ranks)]
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
