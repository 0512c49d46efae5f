"""`Netlab` makes the namespaces, links and rates of one lab, and ensures that they are removed.

They are removed at the end of the `with` block, after an exception, Ctrl-C, SIGTERM and SIGHUP, and at the end of the
interpreter. After a SIGKILL the next lab on this machine, or `python -m benchmarks.netlab clean`, removes the rest.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path as FilePath
from types import FrameType, TracebackType
from typing import Any

from benchmarks.netlab import drops, registry
from benchmarks.netlab.iproute import NetlabError, bits_per_second, command, preflight, shape
from benchmarks.netlab.paths import Path, Paths, matrix

MAX_HOSTS = 250  # the last byte of the address
_ROOT = FilePath(__file__).resolve().parents[2]
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Host:
    """One host of a lab.

    Attributes:
        index: 0, 1, …
        name: name of its namespace, which every host of the lab resolves to `address`.
        address: its IPv4 address, on interface eth0.
    """

    index: int
    name: str
    address: str


class Netlab:
    """Several hosts on one machine, as a context manager.

    Args:
        hosts: how many, 1 to 250.
        rate: limit of every link in each direction, such as "1gbit"; None for no limit.
        rates: limits of single hosts by index, in place of `rate`.
        mtu: bytes in a packet, on every interface.
        path: what packets meet between any two hosts: delay, jitter, loss, and a rate of the pair; with one, or with
            `paths`, a relay in user space carries all packets, as over a long way (`relay`).
        paths: what is special about single hosts and pairs, in place of `path`.
        congestion: TCP's congestion control between the hosts, such as "cubic"; None for the machine's own. It needs
            a path, if only one with a delay of 0.
        seed: of the relay's loss and jitter.

    Attributes:
        relayed: once a lab with a path has ended, what its relay did: `packets`, `bytes`, those `lost` at random,
            `overflowed` and `refused`, and the ms by which it was late itself (`late_ms_median`, `late_ms_99`,
            `late_ms_99.9`). On a machine without a core for it that is no small part of the delay.

    Raises:
        NetlabError: no lab can be made (the message says why), or an argument makes no sense.
    """

    def __init__(
        self,
        hosts: int,
        rate: str | None = None,
        *,
        rates: Mapping[int, str | None] | None = None,
        mtu: int = 1500,
        path: Path | None = None,
        paths: Paths | None = None,
        congestion: str | None = None,
        seed: int = 1,
    ) -> None:
        if not 1 <= hosts <= MAX_HOSTS:
            raise NetlabError(f"{hosts} hosts cannot be made: ask for 1 to {MAX_HOSTS}.")
        if unknown := sorted(set(rates or {}) - set(range(hosts))):
            raise NetlabError(f"there is no host {unknown[0]} to limit: the hosts are 0 to {hosts - 1}.")
        self._rates = [(rates or {}).get(index, rate) for index in range(hosts)]
        for each in filter(None, self._rates):
            bits_per_second(each)
        self._mtu = mtu
        self._paths = matrix(hosts, path or Path(), paths or {}, always=path is not None)
        if congestion is not None and self._paths is None:
            raise NetlabError("a congestion control is chosen for hosts that a relay joins: give a path, too.")
        self._congestion = congestion
        self._seed = seed
        self._relay: subprocess.Popen[bytes] | None = None
        self.relayed: dict[str, float] = {}
        self._lab = -1
        self._owner = -1
        self._started: list[subprocess.Popen[Any]] = []
        self._replaced_handlers: dict[int, Any] = {}
        self._ended_by: int | None = None
        self._starting = False  # a process that runs already and is not in `_started` yet
        self._drops = 0  # so far
        self.hosts: tuple[Host, ...] = ()

    @property
    def agent(self) -> str:
        """The template of `fusionrun --rsh-agent` for these hosts; the command runs as given, without a shell."""
        return "ip netns exec {host}"

    def __enter__(self) -> Netlab:
        if problem := preflight():
            raise NetlabError(problem)
        self._owner = os.getpid()
        self._catch_signals()
        try:
            self._lab = registry.claim()
            atexit.register(self.close)
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, host: int | str | Host | None, argv: Sequence[str], **popen: Any) -> subprocess.Popen[Any]:
        """Starts `argv` on a host, or (None) beside the lab in the machine's own network.

        Keyword arguments are those of `subprocess.Popen`. Processes that still run when the lab ends are terminated,
        and killed a second later, with all their descendants.

        Raises:
            NetlabError: the lab has no such host.
        """
        words = argv if host is None else ["ip", "netns", "exec", self._find(host).name, *argv]
        self._starting = True
        try:
            process = subprocess.Popen(words, **popen)
            self._started.append(process)
        finally:
            self._starting = False
            if self._ended_by is not None:
                raise SystemExit(128 + self._ended_by)
        return process

    def set_rate(self, host: int | str | Host, rate: str | None) -> None:
        """Limits a host's link in both directions from now on, or lifts the limit; connections stay open.

        Raises:
            NetlabError: the lab has no such host, or `rate` is not a rate.
        """
        found = self._find(host)
        shape(found.name, "eth0" if self._paths is None else "wan0", rate)
        shape(registry.bridge_name(self._lab), f"h{found.index}", rate)

    @contextmanager
    def dropping(
        self, sender: int | str | Host, receiver: int | str | Host | None = None, port: int | None = None
    ) -> Iterator[None]:
        """Drops IPv4 packets from one host to another, or to all, silently within the block; connections stay open, and
        TCP sends dropped packets again.

        Args:
            sender, receiver: hosts; the direction back is not affected.
            port: only packets to this TCP port.

        Raises:
            NetlabError: the lab has no such host.
        """
        address = None if receiver is None else self._find(receiver).address
        self._drops += 1
        interface = f"{self._inlet}{self._find(sender).index}"
        drop = drops.begin(registry.bridge_name(self._lab), interface, self._drops, address, port)
        try:
            yield
        finally:
            drops.end(drop)

    @contextmanager
    def cut_off(self, host: int | str | Host) -> Iterator[None]:
        """Drops all IPv4 packets to and from a host silently within the block.

        Raises:
            NetlabError: the lab has no such host.
        """
        found = self._find(host)
        with ExitStack() as stack:
            stack.enter_context(self.dropping(found))
            for other in self.hosts:
                if other is not found:
                    stack.enter_context(self.dropping(other, found))
            yield

    @contextmanager
    def rejecting(
        self, sender: int | str | Host, receiver: int | str | Host, reason: str = "prohibit"
    ) -> Iterator[None]:
        """Has a router answer packets from one host to another with ICMP errors within the block, as firewalls do;
        connections stay open, and new ones are refused ("No route to host").

        Args:
            sender, receiver: hosts; the direction back is not affected.
            reason: "prohibit" (communication is administratively prohibited) or "unreachable" (the network is).

        Raises:
            NetlabError: the lab has no such hosts, or a relay joins them.
        """
        if self._paths is not None:
            raise NetlabError("a relay joins these hosts, and no router: make the lab without paths.")
        bridge, host, peer = registry.bridge_name(self._lab), self._find(sender), self._find(receiver)
        router = f"10.77.{self._lab}.254"
        command("ip", "-n", bridge, "address", "replace", f"{router}/24", "dev", "br0")
        for name, value in (("ip_forward", 1), ("icmp_ratelimit", 0)):
            command("ip", "netns", "exec", bridge, "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{name}")
        forwarded = ("from", host.address, "to", peer.address, "iif", "br0", reason)  # and not the router's own errors
        command("ip", "-n", bridge, "rule", "add", *forwarded)
        command("ip", "-n", host.name, "route", "replace", peer.address, "via", router)
        try:
            yield
        finally:
            command("ip", "-n", host.name, "route", "delete", peer.address)
            command("ip", "-n", bridge, "rule", "delete", *forwarded)

    def set_link(self, host: int | str | Host, up: bool) -> None:
        """Takes a host's link down, or up again; addresses and open connections stay.

        Raises:
            NetlabError: the lab has no such host.
        """
        index = self._find(host).index
        for port in sorted({f"h{index}", f"{self._inlet}{index}"}):
            command("ip", "-n", registry.bridge_name(self._lab), "link", "set", port, "up" if up else "down")

    def reset(self, host: int | str | Host, peer: int | str | Host, port: int | None = None) -> int:
        """Resets the TCP connections that a host has to another one; both ends get an error.

        Args:
            port: only those to this port of the peer.

        Returns: the number of connections that were reset.

        Raises:
            NetlabError: the lab has no such hosts, or the kernel cannot reset connections (INET_DIAG_DESTROY).
        """
        which = ["dst", self._find(peer).address, *(["dport", "=", str(port)] if port is not None else [])]
        told = command("ip", "netns", "exec", self._find(host).name, "ss", "-K", "-H", "-t", *which)
        return len(told.splitlines())

    def close(self) -> None:
        """Removes the lab; further calls, and calls in a forked child, do nothing.

        Raises:
            NetlabError: something could not be removed.
        """
        if self._owner != os.getpid():
            return
        if self._lab >= 0:
            self._end_relay()
            registry.destroy(self._lab, [each.pid for each in self._started if each.poll() is None])
            for process in self._started:
                process.wait()
            atexit.unregister(self.close)
        self._lab = self._owner = -1
        self._started.clear()
        self.hosts = ()
        self._release_signals()

    def _build(self) -> None:
        lab, bridge = self._lab, registry.bridge_name(self._lab)
        self.hosts = tuple(
            Host(index, registry.host_name(lab, index), f"10.77.{lab}.{index + 1}") for index in range(len(self._rates))
        )
        command("ip", "netns", "add", bridge)
        command("ip", "-n", bridge, "link", "add", "br0", "type", "bridge", "stp_state", "0", "forward_delay", "0")
        command("ip", "-n", bridge, "link", "set", "br0", "mtu", str(self._mtu), "up")
        for host in self.hosts:
            command("ip", "netns", "add", host.name)
            port = f"h{host.index}"
            # Made inside the two namespaces: neither end is ever seen in the machine's own network.
            veth = ("type", "veth", "peer", "name", "eth0", "mtu", str(self._mtu), "netns", host.name)
            command("ip", "-n", bridge, "link", "add", port, "mtu", str(self._mtu), *veth)
            command("ip", "-n", bridge, "link", "set", port, "master", "br0", "up")
            command("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            command("ip", "-n", host.name, "link", "set", "eth0", "up")
            command("ip", "-n", host.name, "link", "set", "lo", "up")
            self._write_hosts_file(host)
        if self._paths is not None:
            self._begin_relay(self._paths)
        for host, rate in zip(self.hosts, self._rates, strict=True):
            if rate is not None:
                self.set_rate(host, rate)

    @property
    def _inlet(self) -> str:
        """First letter of the bridge's ports at which packets of hosts come in."""
        return "h" if self._paths is None else "w"

    def _begin_relay(self, paths: Sequence[Sequence[Path]]) -> None:
        """Lets hosts send through wan0 of the relay, and receive through eth0 as before."""
        bridge = registry.bridge_name(self._lab)
        macs = [f"02:4e:4c:{self._lab:02x}:01:{host.index:02x}" for host in self.hosts]
        for host, mac in zip(self.hosts, macs, strict=True):
            command("ip", "-n", host.name, "link", "set", "eth0", "address", mac)
            # eth0 sends nothing from which the bridge could learn where it is.
            command("bridge", "-n", bridge, "fdb", "replace", mac, "dev", f"h{host.index}", "master", "static")
        order = {
            "bridge": bridge,
            "hosts": [{"namespace": host.name, "address": host.address, "mac": mac}
                      for host, mac in zip(self.hosts, macs, strict=True)],
            "paths": [[dataclasses.asdict(path) for path in row] for row in paths],
            "seed": self._seed,
        }  # fmt: skip
        # A session of its own: Ctrl-C must not end it before it is asked what it did.
        argv = [sys.executable, "-m", "benchmarks.netlab.relay"]
        relay = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, cwd=_ROOT)
        self._relay = relay
        assert relay.stdin is not None
        assert relay.stdout is not None
        relay.stdin.write(json.dumps(order).encode() + b"\n")
        relay.stdin.flush()
        if relay.stdout.readline() != b"ready\n":
            raise NetlabError("the relay between the hosts could not start; its message is above.")
        chosen = ("congctl", self._congestion) if self._congestion else ()
        for host in self.hosts:
            port = f"w{host.index}"
            command("ip", "-n", bridge, "link", "set", port, "mtu", str(self._mtu), "master", "br0", "up")
            command("ip", "-n", host.name, "link", "set", "wan0", "mtu", str(self._mtu), "txqueuelen", "1000", "up")
            net = f"10.77.{self._lab}.0/24"
            command("ip", "-n", host.name, "address", "del", f"{host.address}/24", "dev", "eth0")
            command("ip", "-n", host.name, "address", "add", f"{host.address}/32", "dev", "eth0")
            command("ip", "-n", host.name, "route", "replace", net, "dev", "wan0", "src", host.address, *chosen)

    def _end_relay(self) -> None:
        if self._relay is None:
            return
        relay, self._relay = self._relay, None
        told = relay.communicate()[0].splitlines()
        self.relayed = json.loads(told[-1]) if relay.returncode == 0 and told else {}

    def _write_hosts_file(self, host: Host) -> None:
        # All hosts share the machine's own name. On each it resolves to that host's address, so that programs which
        # look up their host's name to find the address to listen on (gloo does) get one that their peers can reach.
        lines = ["127.0.0.1 localhost", "::1 localhost", f"{host.address} {socket.gethostname()}"]
        lines += [f"{each.address} {each.name}" for each in self.hosts]
        folder = registry.NETNS_ETC / host.name
        folder.mkdir(parents=True)
        (folder / "hosts").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def _find(self, host: int | str | Host) -> Host:
        for each in self.hosts:
            if host in (each, each.index, each.name):
                return each
        names = ", ".join(each.name for each in self.hosts) or "none, it is not running"
        raise NetlabError(f"{host!r} is not a host of this lab: it has {names}.")

    def _catch_signals(self) -> None:
        """Replaces default handlers of ending signals by one that raises an exception, which unwinds the `with` blocks.

        A handler that the program has set itself stays.
        """
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may set handlers; the next lab removes this one after a death by signal
        for number in _ENDING_SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                self._replaced_handlers[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        for each in self._replaced_handlers:
            signal.signal(each, signal.SIG_IGN)  # a second one must not cut the removal short
        self._ended_by = number
        if not self._starting:
            raise SystemExit(128 + number)

    def _release_signals(self) -> None:
        for number, handler in self._replaced_handlers.items():
            signal.signal(number, handler)
        self._replaced_handlers.clear()
        if self._ended_by is not None:
            # The lab is gone; now die of the signal as if it had not been caught, even where SystemExit is swallowed.
            os.kill(os.getpid(), self._ended_by)
