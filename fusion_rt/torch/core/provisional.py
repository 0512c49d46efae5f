"""The membership of a worker of an elastic job that begins while the others train, until it has a place among them; and
a warning at the start of such a job of the limits of these workers."""

from __future__ import annotations

import sys
import warnings
from typing import Any, NoReturn

from fusion_rt import wire
from fusion_rt.core.errors import FusionError
from fusion_rt.core.topology import GLOBAL_SET, ProcessSet, Topology
from fusion_rt.launchers.environment import Environment
from fusion_rt.settings import Settings
from fusion_rt.torch.core.runtime import Runtime

_WHERE = (
    "operations of all ranks belong into the function of hvd.elastic.run, which brings the state to all of them "
    "(docs/elastic.md)"
)


class ProvisionalClient:
    """Substitutes for the client: knows the place that the worker is to have, and refuses operations.

    Args:
        where: the worker's place.
        topology: of the job with it.
        settings: every knob; the job's algorithm and compression are what its own say.
    """

    def __init__(self, where: Environment, topology: Topology, settings: Settings) -> None:
        self.job = where.job
        self.rank = where.rank
        self.topology = topology
        self.process_sets = {GLOBAL_SET: ProcessSet(GLOBAL_SET, tuple(range(topology.size)))}
        self.welcome = wire.Welcome(
            topology, where.node, settings.fusion_threshold, settings.algorithm, settings.compression
        )
        self.joins = 0

    def save_state(self, *where: object, **how: object) -> dict[str, Any]:
        """Returns nothing, since no daemon remembers anything for this worker yet."""
        return {}

    def load_state(self, *what: object, **how: object) -> None:
        """Loads nothing: this worker gets the others' state when it comes to them."""

    def start_timeline(self, *what: object) -> str:
        """Starts nothing; returns no reason why not."""
        return ""

    def stop_timeline(self) -> None:
        """Stops nothing."""

    def leave(self, error: str) -> bool:
        """Leaves nothing, and cannot be come back from."""
        return False

    def close(self) -> None:
        """Closes nothing."""

    def __getattr__(self, name: str) -> NoReturn:
        raise FusionError(
            f"rank {self.rank} is a new worker of an elastic job that runs, and the others are in the middle of the "
            f"training function: {_WHERE}"
        )


def provisional(where: Environment, topology: Topology, settings: Settings) -> Runtime:
    """Makes the membership of a worker that has no place yet; arguments as those of `ProvisionalClient`."""
    return Runtime(where, ProvisionalClient(where, topology, settings), None)  # type: ignore[arg-type]


def warn_of_operations(here: Runtime) -> None:
    """Has rank 0 warn of its next operation, which a worker that begins later could not take part in."""
    if here.rank == 0:
        here.client.watch = lambda kind: _warn(here, kind)


def _warn(here: Runtime, kind: str) -> None:
    here.client.watch = None
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == __name__.split(".")[0]:
        frame = frame.f_back
    warnings.warn_explicit(
        f"{kind} outside of the training function of an elastic job: now all ranks are here, but a worker that comes "
        f"later will fail at this line: {_WHERE}",
        RuntimeWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
    )
