"""Exchanges by the kind of an operation: modules declare them, each kind has one."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from pathlib import Path

from fusion_rt import wire
from fusiond import collectives
from fusiond.collectives.by_kind import MAKERS


def test_every_kind_has_the_exchange_of_one_module() -> None:
    names = [path.stem for folder in collectives.__path__ for path in Path(folder).glob("*.py")]
    modules = [import_module(f"{collectives.__name__}.{name}") for name in names if name != "__init__"]
    declared = Counter(kind for module in modules for kind in getattr(module, "EXCHANGES", ()))
    assert declared == Counter(set(wire.KINDS) - {"allreduce"})  # which is an algorithm's
    assert set(MAKERS) == set(declared)
