"""Freed memory goes back to the system when a process says so."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# In a process of its own: the C library keeps more of what is freed in all the time that follows.
CODE = """
from pathlib import Path
import numpy as np
from fusion_rt.host.system_memory import return_freed_memory

PIECE = 3 << 20  # bytes

def resident():
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) * 1024

np.ones(PIECE, np.uint8)  # freed at once: from now on malloc keeps pieces of this size
pieces, kept = [], []
for _ in range(32):
    pieces.append(np.ones(PIECE, np.uint8))
    kept.append(np.ones(1000))
before = resident()
del pieces
return_freed_memory()
assert resident() <= before - 30 * PIECE, (before, resident())
assert all((each == 1).all() for each in kept)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps freed memory")
def test_freed_memory_is_returned_though_what_was_allocated_after_it_is_still_in_use() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
