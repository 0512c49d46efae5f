"""Choice of the address on which a host's daemon listens.

In a job of `fusionrun`, in this order: 127.0.0.1 when all is on one machine; the first interface of
`--network-interface` that the host has; the address that the host's own name in `-H` resolves to, if it is this host's;
the source address of the default route; the only address the host has. In a job of another launcher, the address from
which this host reaches the place where the nodes meet replaces that of the name. A loopback address is used only when
it is asked for: other hosts cannot reach it.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

from fusion_rt.core.errors import FusionError

_ELSEWHERE = ("192.0.2.1", "2001:db8::1")  # documentation addresses, never ours


def listen_address(host: str, interfaces: tuple[str, ...], loopback: bool) -> str:
    """Returns the IP address for the daemon of this machine, which the job calls `host`.

    Raises:
        FusionError: no interface of that name has an address, or none of the machine's addresses can be chosen.
    """
    if interfaces:
        return _of_interfaces(interfaces)
    if loopback:
        return "127.0.0.1"
    return _of_name(host) or _of_default_route() or _only_one()


def address_towards(meeting: Iterable[str], interfaces: tuple[str, ...]) -> str:
    """Returns the IP address for the daemon of this machine in a job whose nodes meet at one of these hosts.

    Args:
        meeting: names or IP addresses, the likeliest first. If they are loopback addresses, so is the result, since all
            nodes are on this machine then.
        interfaces: of `--network-interface`; empty: any.

    Raises:
        FusionError: no interface of that name has an address, or none of the machine's addresses can be chosen.
    """
    if interfaces:
        return _of_interfaces(interfaces)
    for host in meeting:
        for source in _sources(host):
            if is_loopback(host) or not ipaddress.ip_address(source).is_loopback:
                return source
    return _of_default_route() or _only_one()


def is_loopback(host: str) -> bool:
    """Returns whether a host is a loopback address or `localhost`; other names are not resolved."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _sources(host: str) -> list[str]:
    """Returns the source addresses that this machine would use for each address of a host."""
    try:
        resolved = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return []
    found = []
    for family, kind, _, _, address in resolved:
        with socket.socket(family, kind) as probe:
            try:
                probe.connect(address)  # chooses a route; UDP sends nothing on connect
            except OSError:
                continue
            found.append(str(probe.getsockname()[0]))
    return found


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
                    continue  # another host's address, for example a gateway's in front of this host
                return str(address[0])
    return ""


def _of_default_route() -> str:
    return next((source for elsewhere in _ELSEWHERE for source in _sources(elsewhere)), "")


def _only_one() -> str:
    """Returns the address of the only interface that is not loopback; its IPv4 address when it has several."""
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
    """Returns the addresses of each interface, IPv4 first; IPv6 link-local ones are left out."""
    import psutil  # takes a while, and a job of one host need not wait for it

    found = {}
    for interface, entries in psutil.net_if_addrs().items():
        found[interface] = [e.address for e in entries if e.family == socket.AF_INET]
        found[interface] += [
            e.address for e in entries if e.family == socket.AF_INET6 and not e.address.lower().startswith("fe80")
        ]
    return found
