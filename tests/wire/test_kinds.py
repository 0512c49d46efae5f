"""Kinds of operations: each is declared."""

from __future__ import annotations

from typing import get_args

from fusion_rt import wire


def test_every_kind_is_declared() -> None:
    assert set(get_args(wire.Kind)) == set(wire.KINDS)
