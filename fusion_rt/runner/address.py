"""Which of a host's addresses its daemon listens on.

In this order: 127.0.0.1 in a job that is all on one machine; the first interface of `--network-interface` that the host
has; the address that the host's own name in `-H` resolves to, if it is this host's; the source address of the default
route; the only address the host has. A loopback address is used only when it is asked for: other hosts cannot reach it.
"""

from __future__ import annotations

import ipaddress
import socket

import psutil

from fusion_rt.errors import FusionError

_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))  # documentation addresses, never ours


def listen_address(host: str, interfaces: tuple[str, ...], loopback: bool) -> str:
    """The IP address for the daemon of this machine, which the job calls `host`.

    Raises:
        FusionError: no interface of that name has an address, or none of the machine's addresses can be chosen.
    """
    if interfaces:
        return _of_interfaces(interfaces)
    if loopback:
        return "127.0.0.1"
    return _of_name(host) or _of_default_route() or _only_one()


def _of_interfaces(wanted: tuple[str, ...]) -> str:
    found = _addresses()
    for interface in wanted:
        if found.get(interface):
            return found[interface][0]
    raise FusionError(f"no network interface {' or '.join(wanted)} with an address; there are {', '.join(found)}")


def _of_name(host: str) -> str:
    try:
        resolved = socket.getaddrinfo(host.rpartition("@")[2], None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ""  # a name that only ssh's configuration knows
    for family, kind, _, _, address in resolved:
        if not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
            with socket.socket(family, kind) as probe:
                try:
                    probe.bind(address)
                except OSError:
                    continue  # somebody else's address, such as a gateway's in front of this host
                return str(address[0])
    return ""


def _of_default_route() -> str:
    for family, elsewhere in _ELSEWHERE:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((elsewhere, 9))  # chooses a route; UDP sends nothing on connect
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return ""


def _only_one() -> str:
    """The address of the only interface that is not loopback; its IPv4 address when it has several."""
    others = [
        addresses
        for addresses in _addresses().values()
        if addresses and not ipaddress.ip_address(addresses[0].partition("%")[0]).is_loopback
    ]
    if len(others) != 1:
        raise FusionError(
            f"no default route and {len(others)} network interfaces to choose from; name one with --network-interface"
        )
    return others[0][0]


def _addresses() -> dict[str, list[str]]:
    """Addresses of each interface, IPv4 first; IPv6 link-local ones are left out."""
    found = {}
    for interface, entries in psutil.net_if_addrs().items():
        found[interface] = [e.address for e in entries if e.family == socket.AF_INET]
        found[interface] += [
            e.address for e in entries if e.family == socket.AF_INET6 and not e.address.lower().startswith("fe80")
        ]
    return found
