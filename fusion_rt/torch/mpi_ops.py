"""Horovod's module of operations, for scripts that import from it: every name of `fusion_rt.torch`."""

from __future__ import annotations

import sys
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__all__":  # which would tell Python that this is a package
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(sys.modules["fusion_rt.torch"], name)
