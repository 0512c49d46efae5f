"""What may be tuned, and between which values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from fusion_rt import wire
from fusion_rt.units import KIB, MIB

_CHUNKS = [64 * KIB << n for n in range(6)]
_WINDOWS = [MIB << n for n in range(7)]
_LEAST_BUCKET = 64 * KIB
_BUCKETS = 64  # buckets into which gradients are cut at most


@dataclass(frozen=True)
class Setting:
    """Values of all that is tuned.

    Attributes:
        threshold: bytes of the largest bucket.
        chunk_bytes: largest payload of a message between daemons.
        window_bytes: what may be under way to a peer for one bucket.
        threads: of a daemon that reduce a bucket.
        exchange: which all-reduce it is between nodes.
    """

    threshold: int
    chunk_bytes: int
    window_bytes: int
    threads: int
    exchange: wire.Route

    def tuning(self, steps: int, why: str = "") -> wire.Tuning:
        """For a plan that lasts so many steps; 0: to the end."""
        return wire.Tuning(**asdict(self), steps=steps, why=why)

    def __str__(self) -> str:
        return (
            f"buckets of {self.threshold / MIB:g} MiB, chunks of {self.chunk_bytes / KIB:g} KiB, a window of "
            f"{self.window_bytes / MIB:g} MiB, {self.threads} kernel thread{'s' * (self.threads > 1)}, "
            f"all-reduce {self.exchange}"
        )


@dataclass(frozen=True)
class Space:
    """The values that are tried, of each in rising order; `default` is among them."""

    default: Setting
    thresholds: tuple[int, ...]
    chunks: tuple[int, ...]
    windows: tuple[int, ...]
    threads: tuple[int, ...]
    exchanges: tuple[wire.Route, ...]

    @property
    def size(self) -> int:
        """How many settings there are."""
        return len(self.thresholds) * len(self.chunks) * len(self.windows) * len(self.threads) * len(self.exchanges)

    @classmethod
    def around(
        cls, default: Setting, *, nbytes: int, nodes: int, cores: int, largest_chunk: int, keep_order: bool = False
    ) -> Space:
        """What makes sense.

        Args:
            default: what holds without tuning.
            nbytes: of gradients in a step.
            nodes: that take part; where it is one, nothing travels.
            cores: of a node.
            largest_chunk: bytes that a message may have.
            keep_order: nothing that changes in which order elements are added up.
        """
        sizes = [default.threshold]
        if not keep_order:
            size = _LEAST_BUCKET
            while size < nbytes:
                if size * _BUCKETS >= nbytes:
                    sizes.append(size)
                size *= 2
            sizes.append(size)  # everything in one
            sizes = [value for value in sizes if value <= size or value == default.threshold]
        threads = [default.threads, *(1 << n for n in range(8) if 1 << n <= cores)]
        if nodes == 1:
            return cls(default, _rising(sizes), (default.chunk_bytes,), (default.window_bytes,), _rising(threads),
                       (default.exchange,))  # fmt: skip
        chunks = [default.chunk_bytes, *(chunk for chunk in _CHUNKS if chunk <= largest_chunk)]
        exchanges: tuple[wire.Route, ...] = (default.exchange,) if keep_order else ("auto", "ring", "doubling")
        return cls(
            default, _rising(sizes), _rising(chunks), _rising([default.window_bytes, *_WINDOWS[2:]]), _rising(threads),
            exchanges,
        )  # fmt: skip


def _rising(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(set(values)))
