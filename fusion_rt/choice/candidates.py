"""The settings that are tried: one record for all of them, and the candidates of `--autotune` and of `--auto`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from fusion_rt import algorithms, wire
from fusion_rt.choice.codec_costs import ALLREDUCE, CODECS, LOCAL
from fusion_rt.units import KIB, MIB

_CHUNKS = [64 * KIB << n for n in range(6)]
_WINDOWS = [MIB << n for n in range(7)]
_LEAST_BUCKET = 64 * KIB
_BUCKETS = 64  # buckets into which gradients are cut at most
_TO_BUCKETS = (4, 16)  # into how many buckets gradients are cut, where that is tried


class Mathematics(NamedTuple):
    """The mathematics of a setting: a codec, whether updates are one step late, and an algorithm."""

    codec: str
    late: bool = False
    algorithm: str = ALLREDUCE

    def __str__(self) -> str:
        if self.algorithm == ALLREDUCE:
            return self.codec + " one step late" * self.late
        return self.algorithm + f" by {self.codec}" * (self.codec != LOCAL.get(self.algorithm))


@dataclass(frozen=True)
class Setting:
    """One way to reduce gradients. Where a value is None, or the codec is empty, it is as without tuning.

    Attributes:
        threshold: bytes of the largest bucket.
        chunk_bytes: largest payload of a message between daemons.
        window_bytes: bytes that may be under way to a peer for one bucket.
        threads: of a daemon that reduce a bucket.
        exchange: which all-reduce it is between nodes, of buckets that are not compressed by selecting.
        codec: its text.
        late: updates are applied one step late.
        algorithm: its text; how the ranks' work becomes one model.
    """

    threshold: int
    chunk_bytes: int | None = None
    window_bytes: int | None = None
    threads: int | None = None
    exchange: wire.Route = "auto"
    codec: str = ""
    late: bool | None = None
    algorithm: str = ALLREDUCE

    @property
    def kind(self) -> Mathematics:
        """Settings that have this in common have the same mathematics."""
        return Mathematics(self.codec, bool(self.late), self.algorithm)

    @property
    def period(self) -> int:
        """Steps from one exchange to the next."""
        return algorithms.parse(self.algorithm).period

    def tuning(self, steps: int, why: str = "") -> wire.Tuning:
        """The tuning of a plan that lasts so many steps; 0: to the end."""
        own = asdict(self)
        del own["algorithm"]
        return wire.Tuning(**own, steps=steps, why=why)

    def __str__(self) -> str:
        parts = [f"{self.kind} in " * bool(self.codec) + f"buckets of {self.threshold / MIB:.4g} MiB"]
        if self.chunk_bytes is not None:
            parts.append(f"chunks of {self.chunk_bytes / KIB:g} KiB")
        if self.window_bytes is not None:
            parts.append(f"a window of {self.window_bytes / MIB:g} MiB")
        if self.threads is not None:
            parts.append(f"{self.threads} kernel thread{'s' * (self.threads > 1)}")
        parts.append(f"all-reduce {self.exchange}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Space:
    """The settings that `--autotune` searches.

    Attributes:
        default: the setting without tuning, which is among them.
        values: by the name of a field of `Setting`, the values that are tried; numbers in rising order.
    """

    default: Setting
    values: Mapping[str, tuple[Any, ...]]

    @property
    def size(self) -> int:
        """Number of settings."""
        return math.prod(map(len, self.values.values()))

    @classmethod
    def around(
        cls, default: Setting, *, nbytes: int, nodes: int, cores: int, largest_chunk: int, keep_order: bool = False
    ) -> Space:
        """The settings that make sense.

        Args:
            default: the setting without tuning.
            nbytes: of gradients in a step.
            nodes: that take part; where it is one, nothing travels.
            cores: of a node.
            largest_chunk: bytes that a message may have.
            keep_order: nothing that changes in which order elements are added up.
        """
        sizes = []
        if not keep_order:
            size = _LEAST_BUCKET
            while size < nbytes:
                if size * _BUCKETS >= nbytes:
                    sizes.append(size)
                size *= 2
            sizes.append(size)  # everything in one
        tried: dict[str, list[int]] = {
            "threshold": sizes,
            "chunk_bytes": [chunk for chunk in _CHUNKS if chunk <= largest_chunk] if nodes > 1 else [],
            "window_bytes": _WINDOWS[2:] if nodes > 1 else [],
            "threads": [1 << n for n in range(8) if 1 << n <= cores],
        }
        values = {name: tuple(sorted({getattr(default, name), *numbers})) for name, numbers in tried.items()}
        exchanges = (default.exchange,) if keep_order or nodes == 1 else ("auto", "ring", "halving", "doubling")
        return cls(default, {**values, "exchange": exchanges})


def candidates(
    level: str,
    default: Setting,
    *,
    nbytes: int,
    nodes: int,
    largest_chunk: int,
    codecs: bool,
    late: bool,
    local: bool = False,
) -> list[Setting]:
    """The settings that `--auto` chooses from, the default first, and larger changes behind smaller ones.

    Args:
        level: "lossless", "lossy" or "async".
        default: the setting without `--auto`.
        nbytes: of gradients in a step.
        nodes: that take part.
        largest_chunk: bytes of the largest message.
        codecs: gradients may be compressed by those of `CODECS`: nobody has asked for another one, and they are sums of
            floating-point numbers.
        late: updates can be applied one step late.
        local: ranks can take local steps instead, by the algorithms of `LOCAL`.
    """
    sizes = [default.threshold, (nbytes // MIB + 2) * MIB]  # the padded size fits in, too
    sizes += [-(-nbytes // parts) for parts in _TO_BUCKETS]
    routes: list[wire.Route] = [default.exchange, "doubling"] if nodes > 1 else [default.exchange]
    plain = [
        replace(default, threshold=threshold, exchange=exchange)
        for threshold in dict.fromkeys(size for size in sizes if size > 0 or size == default.threshold)
        for exchange in dict.fromkeys(routes)
        if exchange == default.exchange or threshold <= largest_chunk
    ]
    if level == "lossless" or nodes == 1:
        return plain
    found = []
    for codec, cost in CODECS.items() if codecs else [(default.codec, CODECS["dense"])]:
        coded = [
            replace(one, codec=codec) for one in plain if one.exchange == default.exchange or cost.exchange == "chunks"
        ]
        found += coded
        if level == "async" and late:
            found += [replace(one, late=True) for one in coded]
    if level == "async" and local:
        found += [replace(default, algorithm=algorithm, codec=codec) for algorithm, codec in LOCAL.items()]
    return found
