"""Starts of Python processes that run modules of this project, and none of the current directory.

`-m` and `-c` put the directory in which they start at the front of Python's path, where any user could have left a
`json.py` if it is /tmp. PYTHONSAFEPATH prevents that from Python 3.11 on only. So such a process starts in `/`, which
belongs to root.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

DIRECTORY = "/"


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a process that starts in `DIRECTORY`, made from this process's: entries of PYTHONPATH
    mean the same directories there."""
    paths = [os.path.abspath(path) for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
