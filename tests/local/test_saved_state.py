"""The keys of a saved state, and its counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_rt import wire
from fusion_rt.core.errors import WireError
from fusion_rt.local.saved_state import State, StateOwner, by_owner, counts
from tests.for_each import for_each

OWNERS = (
    StateOwner("codec", 0),
    StateOwner("codec", 12),
    StateOwner("home", 12),
    StateOwner("home", 0, 3),
    StateOwner("mirror", 1),
    StateOwner("sender", 1, 7),
)


@given(st.dictionaries(st.sampled_from(OWNERS), st.sets(st.text(min_size=1, max_size=9), min_size=1, max_size=3)))
def test_entries_of_all_owners_are_told_apart_whatever_their_names(names: dict[StateOwner, set[str]]) -> None:
    state: State = {}
    for owner, entries in names.items():
        state |= owner.keyed({entry: np.array([hash(entry) % 9]) for entry in entries})
    found = by_owner(state)
    assert {owner: set(entries) for owner, entries in found.items()} == names
    assert all(found[owner][entry] == hash(entry) % 9 for owner, entries in names.items() for entry in entries)
    assert all(owner.rank == wire.SHARD for owner in found if owner.kind in ("codec", "mirror"))


@for_each(
    "key",
    [
        *("", "value", "0:", ":step", "x:step", "-1:step", "\u0663:step", "9" * 10 + ":step", "9" * 5000 + ":step"),
        *("home:0:value", "home:0:-2:value", "home:0:-1:", "other:0:0:value", "sender:0:1", " 0:step"),
    ],
)
def test_a_key_of_nothing_is_refused(key: str) -> None:
    with pytest.raises(WireError, match="cannot be in a saved state; it is damaged, or of another program"):
        by_owner({key: np.ones(1)})


@for_each(
    ("saved", "why"),
    [
        (None, "does not have the 2 counts of rank 3"),
        (np.ones(1, np.int64), "does not have the 2 counts"),
        (np.ones(2), "does not have the 2 counts"),
        (np.array([-1, 0]), r"has the counts \[-1, 0\] of rank 3"),
        (np.array([0, 2**48]), "which cannot be"),
    ],
)
def test_counts_that_cannot_be_are_refused(saved: np.ndarray | None, why: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(WireError, match=why):
        counts(saved, 2, "rank 3")


def test_counts_are_numbers() -> None:
    assert counts(np.array([0, 2**48 - 1]), 2, "rank 3") == [0, 2**48 - 1]
