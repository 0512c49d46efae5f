"""Silent loss of packets in one direction, as a broken switch or a firewall causes.

An ingress filter at the bridge's port of the sender redirects them to an interface that leads nowhere. (`tc` has an
action that drops, but not every kernel has the action.) Address resolution still works, so that no host gets an error
that the other one is unreachable.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.netlab.iproute import command

_SINK = "sink"  # one end of a veth pair whose other end nobody reads


@dataclass(frozen=True)
class Drop:
    """A filter that drops packets.

    Attributes:
        bridge: namespace of the lab's bridge.
        port: the sender's interface in it.
        number: the filter's priority there, which identifies it.
    """

    bridge: str
    port: str
    number: int


def begin(bridge: str, port: str, number: int, receiver: str | None, tcp_port: int | None) -> Drop:
    """Drops IPv4 packets that come in at `port`.

    Args:
        bridge: namespace of the lab's bridge.
        port: its interface to the sender.
        number: 1 to 65535, of no other drop of this interface.
        receiver: only those for this address; None: all.
        tcp_port: only those for this port; None: all.
    """
    if f" {_SINK}@" not in command("ip", "-n", bridge, "link", "show"):
        command("ip", "-n", bridge, "link", "add", _SINK, "type", "veth", "peer", "name", f"{_SINK}end")
        command("ip", "-n", bridge, "link", "set", _SINK, "up")
        command("ip", "-n", bridge, "link", "set", f"{_SINK}end", "up")
    if " clsact " not in command("tc", "-n", bridge, "qdisc", "show", "dev", port):
        command("tc", "-n", bridge, "qdisc", "add", "dev", port, "clsact")
    match = ["match", "ip", "dst", f"{receiver}/32" if receiver else "0.0.0.0/0"]
    if tcp_port is not None:
        match += ["match", "ip", "dport", str(tcp_port), "0xffff"]
    where = ("dev", port, "ingress", "prio", str(number), "protocol", "ip")
    sink = ("action", "mirred", "egress", "redirect", "dev", _SINK)
    command("tc", "-n", bridge, "filter", "add", *where, "u32", *match, *sink)
    return Drop(bridge, port, number)


def end(drop: Drop) -> None:
    """Removes the filter of a drop, so that packets pass again."""
    where = ("dev", drop.port, "ingress", "prio", str(drop.number), "protocol", "ip")
    command("tc", "-n", drop.bridge, "filter", "del", *where)
