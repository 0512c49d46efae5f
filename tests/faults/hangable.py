"""A `fusiond` that tests can hang: a line in the FIFO that FUSION_TEST_HANG names makes the whole process hold the GIL
for that many seconds, as a C extension that never returns does. If that is a folder, each daemon makes a FIFO of its
own there, `hang.PID`.
"""

from __future__ import annotations

import os
import threading

from tests.faults.hanging import hold_gil


def hang_on_request(path: str) -> None:
    """Waits for requests, and holds the GIL for each."""
    while True:
        with open(path) as requests:
            for line in requests:
                hold_gil(float(line))


def own_fifo(path: str) -> str:
    """Returns the FIFO of this process, which it makes if only its folder is given."""
    if os.path.isdir(path):
        path = os.path.join(path, f"hang.{os.getpid()}")
        os.mkfifo(path)
    return path


if __name__ == "__main__":
    fifo = own_fifo(os.environ["FUSION_TEST_HANG"])
    threading.Thread(target=hang_on_request, args=(fifo,), daemon=True).start()
    from fusiond.app.cli import main

    main()
