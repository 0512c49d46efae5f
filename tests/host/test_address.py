"""Which address a daemon listens on."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from fusion_rt.core.errors import FusionError
from fusion_rt.host import address
from fusion_rt.host.address import listen_address


def interface(*addresses: str) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(family=socket.AF_INET6 if ":" in each else socket.AF_INET, address=each) for each in addresses
    ]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[SimpleNamespace]]:
    """A machine with these interfaces, no name service and no default route."""
    interfaces = {"lo": interface("127.0.0.1"), "eth0": interface("10.1.0.5")}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    monkeypatch.setattr(address, "_of_name", lambda host: "")
    monkeypatch.setattr(address, "_of_default_route", lambda: "")
    return interfaces


def test_a_job_on_one_machine_listens_on_loopback() -> None:
    assert listen_address("localhost", (), loopback=True) == "127.0.0.1"


def test_a_named_interface_comes_before_everything() -> None:
    assert listen_address("localhost", ("none0", "lo"), loopback=True) == "127.0.0.1"


def test_the_first_named_interface_with_an_address_is_taken(machine: dict[str, list[SimpleNamespace]]) -> None:
    machine["ib0"] = interface()
    machine["ib1"] = interface("fe80::1%ib1", "2001:db8::7", "10.2.0.5")
    assert listen_address("a", ("ib0", "ib1", "eth0"), False) == "10.2.0.5"


def test_a_missing_interface_is_told_with_those_there_are(machine: dict[str, list[SimpleNamespace]]) -> None:
    with pytest.raises(FusionError, match=r"no network interface ib0 or ib1 with an address; there are lo, eth0"):
        listen_address("a", ("ib0", "ib1"), False)


def test_the_hosts_own_name_is_next(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [
        (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.1.1", 0)),  # what Debian writes into /etc/hosts
        (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("192.0.2.77", 0)),  # nobody's
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_keywords: answers)
    monkeypatch.setattr(address, "_of_default_route", lambda: "10.9.9.9")
    assert listen_address("ann@node7", (), False) == "10.9.9.9"


def test_then_the_default_route_then_the_only_address(
    machine: dict[str, list[SimpleNamespace]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert listen_address("a", (), False) == "10.1.0.5"
    monkeypatch.setattr(address, "_of_default_route", lambda: "10.3.0.1")
    assert listen_address("a", (), False) == "10.3.0.1"


def test_a_choice_that_only_a_person_can_make_is_asked_for(machine: dict[str, list[SimpleNamespace]]) -> None:
    machine["eth1"] = interface("10.2.0.5")
    with pytest.raises(FusionError, match=r"2 network interfaces to choose from; name one with --network-interface"):
        listen_address("a", (), False)


def test_a_name_that_nobody_knows_is_no_error() -> None:
    assert address._of_name("no-such-host.invalid") == ""
    assert address._of_name("x" * 300) == ""
