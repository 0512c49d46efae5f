"""Rules that say which tensors of a bucket are always sent whole, and how much is selected of the others.

A tensor is always sent whole when it is small, or its name is excluded; the rest is selected from, all of it together
or each tensor by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from fusion_rt.codecs.base import Array, CodecError, Layout, Span
from fusion_rt.kernels.selection import Range

_WARMUP_DENSITY = 0.25


@dataclass(frozen=True)
class Group:
    """Elements that are compared with each other.

    Attributes:
        name: of the tensor, or empty for those of a whole bucket.
        ranges: ascending; ranges that touch are one.
        shares: (elements, density) of its tensors.
        chunk: so many consecutive elements at most are compared with each other, and not all; 0: all are.
    """

    name: str
    ranges: tuple[Range, ...]
    shares: tuple[tuple[int, float], ...]
    chunk: int = 0

    @property
    def size(self) -> int:
        return sum(numel for numel, _ in self.shares)

    def k(self, step: int, warmup: int) -> int:
        """The number of elements that are sent in a step; at least one.

        In the first `warmup` steps the density falls from 25 % to its own as a geometric series, so that each fourth of
        them has about the density of an epoch in Lin et al., "Deep Gradient Compression", for .1 %.
        """
        if self.chunk:
            return int(self.chunks(step, warmup)[1].sum())
        densities = self.densities(step, warmup)
        wanted = sum(numel * density for (numel, _), density in zip(self.shares, densities, strict=True))
        return min(self.size, max(1, round(wanted)))

    def densities(self, step: int, warmup: int) -> list[float]:
        """Returns the density of each tensor in a step."""
        return [_warm(density, step, warmup) for _, density in self.shares]

    def chunks(self, step: int, warmup: int) -> tuple[Array, Array]:
        """Returns where chunks begin, and the end, and how many elements of each are sent (int64); at least one."""
        (low, high), density = self.ranges[0], self.densities(step, warmup)[0]
        edges = np.append(np.arange(low, high, self.chunk), high)
        wanted = np.rint(np.diff(edges) * density).clip(1).astype(np.int64)
        return edges, wanted


@dataclass(frozen=True)
class TensorRules:
    """Args:
    density: of tensors that `densities` does not name.
    scope: "bucket" or "tensor": whose elements are compared with each other.
    minimum: elements that a tensor must have to be selected from.
    exclude: patterns of names of tensors that are always sent, with commas between them; `*` is any text.
    densities: "pattern: density" with commas between them; the first pattern that fits counts.
    chunk: elements of a tensor that are compared with each other, and with nothing else; 0: see `scope`.

    Raises:
        CodecError: an argument is out of range, or not written like this.
    """

    density: float = 1.0
    scope: str = "bucket"
    minimum: int = 0
    exclude: str = ""
    densities: str = ""
    chunk: int = 0

    def __post_init__(self) -> None:
        _check_density(self.density, "the density")
        if self.scope not in ("bucket", "tensor"):
            raise CodecError(f'elements are selected by scope "bucket" or "tensor", not {self.scope!r}')
        if self.chunk < 0:
            raise CodecError(f"a chunk is a number of elements, or 0 where there are none, not {self.chunk}")
        if self.minimum < 0:
            raise CodecError(f"minimum is a number of elements from 0 on, not {self.minimum}")
        self._named_densities()

    def groups(self, layout: Layout) -> tuple[Group, ...]:
        """The elements that are selected from, ascending; those of different groups do not mix."""
        sparse = [span for span in layout.spans if span.numel and not self.is_dense(span)]
        if self.scope == "tensor" or self.chunk:
            return tuple(
                Group(span.name, ((span.start, span.end),), ((span.numel, self._density(span)),), self.chunk)
                for span in sparse
            )
        if not sparse:
            return ()
        shares = tuple((span.numel, self._density(span)) for span in sparse)
        return (Group("", joined([(span.start, span.end) for span in sparse]), shares),)

    def dense(self, layout: Layout) -> tuple[Range, ...]:
        """The elements that are always sent, ascending."""
        return joined([(span.start, span.end) for span in layout.spans if span.numel and self.is_dense(span)])

    def is_dense(self, span: Span) -> bool:
        """Says whether a tensor is always sent."""
        patterns = [pattern.strip() for pattern in self.exclude.split(",")]
        return span.numel < self.minimum or any(fnmatchcase(span.name, pattern) for pattern in patterns if pattern)

    def least_density(self) -> float:
        """Returns the least density of any tensor that is selected from."""
        return min(density for _, density in [("", self.density), *self._named_densities()])

    def _density(self, span: Span) -> float:
        fitting = (density for pattern, density in self._named_densities() if fnmatchcase(span.name, pattern))
        return next(fitting, self.density)

    def _named_densities(self) -> list[tuple[str, float]]:
        named = []
        for rule in filter(None, (rule.strip() for rule in self.densities.split(","))):
            pattern, _, number = rule.rpartition(":")
            try:
                density = float(number)
            except ValueError as error:
                raise CodecError(f"densities are written as 'pattern: density, ...', not as {rule!r}") from error
            _check_density(density, f"the density of {pattern!r}")
            named.append((pattern.strip(), density))
        return named


def _warm(density: float, step: int, warmup: int) -> float:
    """The density in a step, of `warmup` with more."""
    if step < warmup and density < _WARMUP_DENSITY:
        return _WARMUP_DENSITY * float((density / _WARMUP_DENSITY) ** (step / warmup))
    return density


def joined(ranges: list[Range]) -> tuple[Range, ...]:
    """Ascending ranges, of which those that touch have become one."""
    result: list[Range] = []
    for low, high in ranges:
        if result and result[-1][1] == low:
            low = result.pop()[0]
        result.append((low, high))
    return tuple(result)


def _check_density(density: float, whose: str) -> None:
    if not 0 < density <= 1:
        raise CodecError(f"{whose} is the share of elements that is sent, above 0 and at most 1, not {density}")
