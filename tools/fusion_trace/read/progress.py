"""Tells a person at a terminal how far reading is."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence

_PATIENCE = 1.0  # seconds without a word


def told(what: str, every: Sequence[str]) -> Iterator[str]:
    """Yields all elements; once that takes long, a line on standard error, if it is a terminal, says how many are
    done. It is gone in the end."""
    began, shown = time.monotonic(), False
    try:
        for number, each in enumerate(every):
            if sys.stderr.isatty() and time.monotonic() - began > _PATIENCE:
                print(f"\r{what}: {number} of {len(every)}", end="\033[K", file=sys.stderr, flush=True)
                shown = True
            yield each
    finally:
        if shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
