"""A `fusiond` that tests can hang: a line in the FIFO that FUSION_TEST_HANG names makes the whole process hold the GIL
for that many seconds, as a C extension that never returns does.
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


if __name__ == "__main__":
    threading.Thread(target=hang_on_request, args=(os.environ["FUSION_TEST_HANG"],), daemon=True).start()
    from fusiond.app.cli import main

    main()
