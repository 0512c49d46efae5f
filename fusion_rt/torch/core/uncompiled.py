"""Keeps `torch.compile` away from this package: none of its functions is compiled, or becomes part of a graph.

torch calls this package from within compiled code: the reducer of DDP has the process group broadcast buffers, autograd
runs hooks. Its compiler would trace these calls, anew whenever some state has changed, and cannot trace what they have
to do with sockets and shared memory.

The compiler keeps a list of directories that it skips, the same since torch 2.2 (`torch._dynamo.trace_rules`). To
import it for an entry in that list would cost each worker some seconds. So where nothing has imported it, the entry
waits for its import. Rejected: a decorator on each function that torch may call, which the next such function would
lack.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_RULES = "torch._dynamo.trace_rules"
_PACKAGE = __name__.partition(".")[0]


class _WhenImported(importlib.abc.MetaPathFinder):
    """Adds the entry when the compiler is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the ordinary spec of the compiler's rules, which adds the entry to them; None for other modules."""
        if fullname != _RULES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader = None if spec is None else spec.loader
        if loader is None:
            return spec
        run = loader.exec_module

        def run_and_add(module: ModuleType) -> None:
            del loader.exec_module  # the attribute that hides the method
            run(module)
            module.add(_PACKAGE)

        loader.exec_module = run_and_add  # type: ignore[method-assign]
        return spec


def keep_out_of_graphs() -> None:
    """Has the compiler skip this package; costs nothing in a process that compiles nothing. To be called once."""
    if _RULES in sys.modules:
        importlib.import_module(_RULES).add(_PACKAGE)
    else:
        sys.meta_path.insert(0, _WhenImported())
