"""The exchange of each kind of operation other than all-reduce."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from fusion_rt import wire
from fusiond import collectives
from fusiond.collectives.agreed import Maker


def _declared() -> dict[wire.Kind, Maker]:
    """Returns the tables `EXCHANGES` of the modules of this folder, as one."""
    found: dict[wire.Kind, Maker] = {}
    for module in iter_modules(collectives.__path__, f"{collectives.__name__}."):
        found |= getattr(import_module(module.name), "EXCHANGES", {})
    return found


MAKERS = _declared()
