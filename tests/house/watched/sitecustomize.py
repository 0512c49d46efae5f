"""Loaded by each Python process of a watched job: counts the calls of the product's functions while its flag is up.

The flag is a byte of a file: "0" before, "1" while calls are counted, "2" afterwards. The counts are written when a
process makes its first call after that; `tests.house.steady_step` reads them.
"""

import json
import mmap
import os
import sys
import threading
from collections import Counter
from types import FrameType

_UP, _AFTER = b"12"
_OF_PRODUCT = ("/fusion_rt/", "/fusiond/")


def _watch(directory: str) -> None:
    with open(os.path.join(directory, "flag"), "r+b") as file:
        flag = mmap.mmap(file.fileno(), 1)
    calls: Counter[tuple[str, int]] = Counter()
    written = threading.Lock()

    def note(frame: FrameType, event: str, argument: object) -> None:
        del argument
        if event == "call" and flag[0] == _UP:
            code = frame.f_code
            if any(part in code.co_filename for part in _OF_PRODUCT):
                calls[code.co_filename, code.co_firstlineno] += 1
        elif flag[0] == _AFTER and written.acquire(blocking=False):
            with open(os.path.join(directory, f"{os.getpid()}.json"), "w") as out:
                json.dump([[*where, number] for where, number in calls.items()], out)

    threading.setprofile(note)
    sys.setprofile(note)


if "FUSION_TEST_WATCHED" in os.environ:
    _watch(os.environ["FUSION_TEST_WATCHED"])
