"""Requests for the daemon's whole process."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import gc, weakref
import fusiond.app.daemon
from fusiond.host.process import exempt_from_collections

class Node:
    pass

def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)

exempt_from_collections()
assert len(gc.get_objects()) < 1000, "the modules are still looked at"
gone = cycle()
gc.collect()
assert gone() is None, "what was made later is not collected"
"""


def test_modules_are_exempt_from_collections_and_later_objects_are_not() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
