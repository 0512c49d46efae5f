"""Abbreviated lists of host names."""

from __future__ import annotations

import pytest

from fusion_rt.core.errors import FusionError
from fusion_rt.launchers.environment import hosts_of_list
from tests.for_each import for_each


@for_each(
    ("text", "names"),
    [
        ("", ""),
        ("a", "a"),
        ("a,b.cluster,c-1", "a b.cluster c-1"),
        ("a[01-03,7]", "a01 a02 a03 a7"),
        ("n[8-11],b", "n8 n9 n10 n11 b"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("rack[1-2]n[01-02]x", "rack1n01x rack1n02x rack2n01x rack2n02x"),
        ("vm,nl[1:0]h1,nl[1:0]h2", "vm nl0h1 nl0h2"),  # Open MPI's, with the number of digits
        ("n[3:9-11,20]", "n009 n010 n011 n020"),
    ],
)
def test_a_list_is_expanded(text: str, names: str) -> None:
    assert hosts_of_list(text) == tuple(names.split())


@for_each("text", ["a[", "a]", "a[]", "a[x]", "a[1-]", "a[1-2-3]", "a[x:1]"])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(FusionError, match="not a list of hosts"):
        hosts_of_list(text)


@pytest.mark.parametrize("text", ["a[0-99999999]", "a[0-999]b[0-999]", ",".join(["a[0-9999]"] * 7)])
def test_a_list_without_end_is_refused_before_it_is_made(text: str) -> None:
    with pytest.raises(FusionError, match="more than 65536 names"):
        hosts_of_list(text)
