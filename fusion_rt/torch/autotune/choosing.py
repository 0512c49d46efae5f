"""Whether an optimizer's plans are tuned, and by what, as the settings say."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from fusion_rt.settings import Settings
from fusion_rt.torch.autotune.director import Circumstances, Director, tell
from fusion_rt.torch.autotune.pilot import Pilot
from fusion_rt.torch.autotune.replanning import Replanning
from fusion_rt.torch.autotune.search import MISSING, AutotuneError
from fusion_rt.torch.autotune.tuner import Tuner

_FIRST = "optimizer.1"  # the plans of the first optimizer


def replanning(settings: Settings, why_not: str, rank: int) -> Callable[[], Replanning] | None:
    """What replaces the plans of an optimizer; None if nothing does.

    Args:
        why_not: its plans cannot be tuned, if so; told on rank 0.
        rank: this worker's.

    Raises:
        AutotuneError: optuna is not installed.
    """
    if not settings.autotune and settings.auto == "off":
        return None
    flag = "--autotune" if settings.autotune else "--auto"
    if why_not:
        if rank == 0:
            tell(f"{flag} leaves an optimizer as it is: {why_not}")
        return None
    if settings.autotune and importlib.util.find_spec("optuna") is None:
        raise AutotuneError(MISSING)
    return lambda: Replanning(lambda where: _director(settings, where))


def _director(settings: Settings, where: Circumstances) -> Director:
    if not settings.autotune:
        return Pilot(settings, where)
    path = settings.autotune_log_file
    return Tuner(settings, where, path if where.group == _FIRST or not path else f"{path}.{where.group}")
