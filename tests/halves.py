"""Runs all tests, in two halves at the same time: `python -m tests.halves [arguments of pytest]`.

Much of the time tests wait for processes. What uses network namespaces, which are the machine's, is in one half. The
first half is shown as it goes; the second one when it is done.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

FIRST = (
    *("benchmarks", "examples", "faults", "launchers", "runner"),
    os.path.join("fusiond", "test_recording.py"),
)
SECOND = (os.path.join("runner", "test_failures.py"),)  # of folders of the first, so that both take as long
NO_TESTS = 5  # pytest's exit status when nothing was selected


def main(arguments: list[str]) -> int:
    """Returns the exit status: pytest's, of the first half that failed."""
    here = os.path.dirname(os.path.abspath(__file__))
    command = [sys.executable, "-m", "pytest", *arguments]
    if any(os.path.exists(argument.partition("::")[0]) for argument in arguments):  # somebody wants these only
        return subprocess.call(command)
    entries = sorted(os.listdir(here))
    folders = [name for name in entries if os.path.isdir(os.path.join(here, name)) and not name.startswith("__")]
    files = [name for name in entries if name.startswith("test_")]
    first = [os.path.join(here, name) for name in FIRST]
    moved = [os.path.join(here, name) for name in SECOND]
    others = [os.path.join(here, name) for name in (*folders, *files) if name not in FIRST]
    halves = [
        [*(f"--ignore={path}" for path in moved), *first],
        [*(f"--ignore={path}" for path in first if os.path.isfile(path)), *others, *moved],
    ]
    with tempfile.TemporaryFile() as output:
        second = subprocess.Popen([*command, *halves[1]], stdout=output, stderr=subprocess.STDOUT)
        try:
            statuses = [subprocess.call([*command, *halves[0]]), second.wait()]
        finally:
            second.kill()
            output.seek(0)
            sys.stdout.flush()
            sys.stdout.buffer.write(output.read())
            sys.stdout.flush()
    if statuses == [NO_TESTS, NO_TESTS]:
        return NO_TESTS
    return next((status for status in statuses if status not in (0, NO_TESTS)), 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
