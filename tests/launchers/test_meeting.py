"""From a launcher's words to hosts and ports."""

from __future__ import annotations

import pytest

from fusion_rt.core.errors import FusionError
from fusion_rt.launchers.meeting import addresses_of, hosts_of_uri, identity
from tests.for_each import for_each


@for_each(
    ("uri", "hosts"),
    [
        ("", ()),
        ("1627258880.0", ()),
        ("1627258880.0;tcp://192.0.2.2:44359", ("192.0.2.2",)),
        ("1.0;tcp://192.0.2.2,10.0.0.1:4;tcp6://[fd00::2]:42651", ("192.0.2.2", "10.0.0.1", "fd00::2")),
    ],
)
def test_addresses_in_open_mpis_uri(uri: str, hosts: tuple[str, ...]) -> None:
    assert hosts_of_uri(uri) == hosts


def test_a_job_draws_its_ports_and_looks_at_few_hosts() -> None:
    drawn = addresses_of(tuple("abcdefgh"), "scope", "", 0)
    assert [host for host, _ in drawn] == [host for host in "abcd" for _ in range(4)]
    ports = [port for _, port in drawn[:4]]
    assert ports * 4 == [port for _, port in drawn]
    assert all(20000 <= port < 29000 for port in ports)
    assert addresses_of(("a",), "other", "", 0)[0][1] not in ports


def test_a_job_draws_its_ports_from_those_that_a_firewall_lets_through() -> None:
    drawn = [port for _, port in addresses_of(("a",), "scope", "", 0, range(30000, 30100))]
    assert len(drawn) == 4
    assert all(30000 <= port < 30100 for port in drawn)


def test_what_a_person_says_comes_first() -> None:
    assert addresses_of(("a", "b"), "scope", "m", 7) == (("m", 7),)
    assert addresses_of((), "scope", "m", 0)[0][0] == "m"
    with pytest.raises(FusionError, match="set MASTER_ADDR"):
        addresses_of((), "scope", "", 7)


def test_an_identity_is_short_and_its_own() -> None:
    assert len({identity("a", *parts) for parts in (("x", "y"), ("xy",), ("x", "", "y"), ("x", "y", ""))}) == 4
    assert len(identity("horovodrun", "x")) == 27
