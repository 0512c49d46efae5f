"""The memory that a process says it has."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from fusion_rt.tracing import resident_memory


def test_a_process_without_descriptors_says_what_it_had_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    known = resident_memory.nbytes()
    assert known > 1 << 20

    def full(*arguments: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("builtins.open", full)
    assert resident_memory.nbytes() == known
