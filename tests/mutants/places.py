"""Which folders are changed, and the tests of each."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Group(NamedTuple):
    """Folders whose tests are the same."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]
    without: tuple[str, ...] = ()  # files of `sources`

    def modules(self, root: Path) -> list[str]:
        """Returns the modules, as paths from the root."""
        found: list[str] = []
        for source in self.sources:
            files = [root / source] if source.endswith(".py") else sorted((root / source).rglob("*.py"))
            found.extend(str(file.relative_to(root)) for file in files)
        return [module for module in found if not module.startswith(self.without)]


GROUPS = {
    "codecs": Group(
        ("fusion_rt/codecs",),
        (
            "tests/codecs",
            "tests/fusiond/buckets",
            "tests/fusiond/collectives/test_low_rank.py",
            "tests/fusiond/collectives/test_selected.py",
            "tests/torch/core/test_compression.py",
        ),
    ),
    # Reductions, selection, quantisation and their like. How kernels become machine code has its own tests, and what
    # the machine code of a change would do to the machine is not known.
    "kernels": Group(
        ("fusion_rt/kernels",),
        ("tests/kernels/test_*.py", "tests/codecs"),
        ("fusion_rt/kernels/cuda", "fusion_rt/kernels/llvm", "fusion_rt/kernels/machine_code.py"),
    ),
    "algorithms": Group(
        ("fusion_rt/algorithms", "daemon/fusiond/algorithms"),
        ("tests/fusiond/algorithms", "tests/fusiond/shards", "tests/test_algorithms.py"),
    ),
    "shards": Group(("daemon/fusiond/shards",), ("tests/fusiond/shards", "tests/fusiond/algorithms")),
    "engine": Group(
        ("daemon/fusiond/engine", "daemon/fusiond/operations", "daemon/fusiond/collectives"),
        ("tests/fusiond/engine", "tests/fusiond/operations", "tests/fusiond/collectives"),
    ),
    "synchroniser": Group(
        ("fusion_rt/torch/sync",), ("tests/torch/sync", "tests/torch/node", "tests/torch/test_optimizer.py")
    ),
    "sync_batch_norm": Group(("fusion_rt/torch/sync_batch_norm.py",), ("tests/torch/test_sync_batch_norm.py",)),
}
LEAST = 12  # changes of a group


def shares(sizes: dict[str, int], total: int) -> dict[str, int]:
    """Divides a sample among groups in proportion to the places that they have; each has at least `LEAST`."""
    whole = sum(sizes.values())
    given = {name: min(size, max(LEAST, round(total * size / whole))) for name, size in sizes.items()}
    largest = max(given, key=lambda name: given[name])
    given[largest] = min(sizes[largest], given[largest] + total - sum(given.values()))
    return given
