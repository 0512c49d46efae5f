"""The digest of the messages between daemons, by which two versions know that they understand each other."""

from __future__ import annotations

import subprocess
import sys
from typing import TypeAlias

import msgspec
import pytest

from fusion_rt import wire
from fusion_rt.wire import coding


def test_it_is_the_same_in_each_process() -> None:
    code = "from fusion_rt import wire; print(wire.peer_schema())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.strip() == wire.peer_schema()


def test_a_message_with_another_field_has_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    class Credit(wire.Credit, tag="k", array_like=True):
        more: int = 0

    changed: TypeAlias = wire.Chunk | Credit
    before: TypeAlias = wire.Chunk | wire.Credit
    digests = []
    for messages in (before, changed):
        monkeypatch.setattr(coding, "PeerMessage", messages)
        digests.append(coding.peer_schema.__wrapped__())
    assert digests[0] != digests[1]
    assert msgspec.json.schema(before) != msgspec.json.schema(changed)
