"""The names of Horovod 0.28 for scripts that are run as they are (`fusion_rt.as_horovod`).

`horovod.torch` *is* `fusion_rt.torch`, and each of its modules is the one of that name there, so that whichever name a
script or a library uses, there is one state and one set of classes. A module without a counterpart there is a file in
this package.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from fusion_rt import run

__all__ = ["__version__", "run"]
__version__ = "0.28.1"  # the version that is followed; scripts compare it

_TORCH = "horovod.torch"
_ABSENT = ("keras", "mxnet", "ray", "spark", "tensorflow")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `horovod.torch` and its modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package == "horovod" and name.partition(".")[0] in _ABSENT:
            sentence = (
                f"{fullname} is not there: this `horovod` is fusion_rt, which is for PyTorch only; run scripts for "
                "other frameworks with Horovod itself"
            )
            raise ModuleNotFoundError(sentence, name=fullname)
        if fullname != _TORCH and not fullname.startswith(f"{_TORCH}."):
            return None
        return ModuleSpec(fullname, self) if importlib.util.find_spec(_counterpart(fullname)) else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Leaves it to Python to make a module, which is dropped."""

    def exec_module(self, module: ModuleType) -> None:
        """Puts the module of this project into the place of the new one."""
        sys.modules[module.__name__] = importlib.import_module(_counterpart(module.__name__))


def _counterpart(name: str) -> str:
    return name.replace(_TORCH, "fusion_rt.torch", 1)


sys.meta_path.insert(0, _Finder())
