"""Reads the variables of a launcher."""

from __future__ import annotations

from fusion_rt.launchers import environment


def get_env_rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of workers, before `hvd.init()`."""
    where = environment.detect()
    return where.rank, where.size
