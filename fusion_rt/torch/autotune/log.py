"""The log file of `--autotune`: a line for each sample, and a last one for what was chosen, as Horovod writes it.

Horovod's columns come first, of which here only `tensor_fusion_threshold` (MiB) is ever anything else than what Horovod
writes where a switch is off; `score` is last, as there, and the same: bytes reduced in a microsecond.
"""

from __future__ import annotations

import os
import warnings

from fusion_rt.choice.candidates import Setting
from fusion_rt.host.private_files import open_private
from fusion_rt.units import KIB, MIB

COLUMNS = (
    "hierarchical_allreduce", "hierarchical_allgather", "torus_allreduce", "cache_enabled", "cycle_time_ms",
    "tensor_fusion_threshold", "chunk_kib", "window_mib", "kernel_threads", "dense_route", "score",
)  # fmt: skip


class Log:
    """The file, which is written anew, and closed after each line: nobody knows when training ends.

    Args:
        path: empty: there is none. One that cannot be written is warned of, and left out.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._write(",".join(COLUMNS), os.O_TRUNC)

    def sample(self, setting: Setting, score: float) -> None:
        """A setting, and its score."""
        values = (
            0, 0, 0, 1, 0, f"{setting.threshold / MIB:g}", f"{(setting.chunk_bytes or 0) / KIB:g}",
            f"{(setting.window_bytes or 0) / MIB:g}", setting.threads, setting.exchange, f"{score:g}",
        )  # fmt: skip
        self._write(",".join(map(str, values)), os.O_APPEND)

    def _write(self, line: str, flags: int) -> None:
        if not self._path:
            return
        try:
            with open(open_private(self._path, flags=os.O_WRONLY | flags), "w", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            warnings.warn(f"the log file of --autotune cannot be written: {error}", stacklevel=3)
            self._path = ""
