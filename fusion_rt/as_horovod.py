"""Runs a script that was written for Horovod as it is: `import horovod.torch as hvd` means `fusion_rt.torch`.

::

    python -m fusion_rt.as_horovod train.py --epochs 3
    python -m fusion_rt.as_horovod -m package.train --epochs 3
    fusionrun -np 4 --as-horovod python train.py --epochs 3

A directory on PYTHONPATH holds a package `horovod` and nothing else. It comes before installed packages, so it does not
matter whether Horovod is; only a package `horovod` next to the script comes before it. This module puts the directory
there and then becomes the interpreter that runs the script, with all its own options. Rejected: `runpy`, whose
`__main__` is not quite the one of `python train.py` (multiprocessing, pickle and debuggers look at it), and an import
hook in the running interpreter, which the processes that the script starts would not have.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

_USAGE = "usage: python -m fusion_rt.as_horovod (SCRIPT | -m MODULE | -c CODE) [ARGUMENT ...]"


def python_path() -> str:
    """Returns the directory that has to come first in PYTHONPATH for `import horovod` to mean this project."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "shim")


def interpreter_options(original: list[str], arguments: int) -> list[str]:
    """Returns the options before `-m fusion_rt.as_horovod` in a command line of the interpreter.

    Args:
        original: all its words, as in `sys.orig_argv`.
        arguments: number of words after the module.
    """
    *options, module = original[1 : len(original) - arguments]
    joined = options.pop() if module == __spec__.name else module[: -len(__spec__.name)]  # `-m name`, or `-mname`
    letters = joined[:-1]  # `-um` is short for `-u -m`
    return [*options, letters] if letters != "-" else options


def main() -> NoReturn:
    """Replaces this process by an interpreter that runs the script, module or code of its arguments."""
    command = sys.argv[1:]
    if not command or command[0] in ("-h", "--help"):
        sys.exit(_USAGE)
    if sys.flags.ignore_environment:
        sys.exit("fusion_rt.as_horovod: Python ignores PYTHONPATH with the options -E and -I; leave them out")
    options = interpreter_options(sys.orig_argv, len(command))
    paths = [python_path(), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.execv(sys.executable, [sys.executable, *options, *command])


if __name__ == "__main__":
    main()
