"""python -m benchmarks.netlab.relay   (started by `Netlab`)   carries packets between hosts as over a long way.

For kernels without netem. Every host sends through a TUN device, wan0; this process reads each packet there, decides
what it meets on its way (`Road`), and writes it, when it is due, to the bridge of the lab (TAP device wI), from which
it gets to the receiver's eth0. The limits of rate are `tc`'s, on wan0 and on the receiver's port, as without a relay.

It is plain Python: TCP's segments come in pieces of up to 64 KB (`segments`), so that a gigabit is a few thousand calls
a second. It waits in select(2) for a packet, or until one is due. How late packets were written is counted: what this
process, or the lack of a core for it, adds to the delay. It reads what it has to do from the first line of standard
input (JSON), says `ready`, ends when standard input does, and says then what it did (JSON).
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import json
import math
import os
import random
import select
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from benchmarks.netlab.paths import Path
from benchmarks.netlab.segments import VIRTIO, count, framed, without

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x0002, 0x1000, 0x4000
_OFFLOADS = 0x01 | 0x02 | 0x08  # checksums, TSO of IPv4, with ECN
_CLONE_NEWNET = 0x40000000
_PR_SET_TIMERSLACK = 29
_LARGEST = 65536 + VIRTIO.size
_ETHERNET = 14  # bytes of a frame beside the packet
_BATCH = 32  # packets of one host before the others get their turn
_SWING_S = 20e-3  # between two turning points of jitter
_BIN_S, _BINS = 1e-5, 100_000  # of lateness


class Road:
    """The way from one host to another: when a packet that is sent now arrives, and what of it. No I/O.

    Attributes:
        lost, overflowed: packets dropped at random, and because too many waited for the rate.
    """

    def __init__(self, path: Path, seed: str) -> None:
        self.lost = 0
        self.overflowed = 0
        self._path = path
        self._random = random.Random(seed)
        self._busy_until = 0.0
        self._latest = 0.0
        self._turns = (0.0, 0.0, 0.0)  # when the last turning point of jitter was, its height, and the next one's
        self._until_loss = self._gap()

    def take(self, now: float, packet: bytes) -> list[tuple[float, bytes]]:
        """Returns when each piece that is left of a packet (`virtio_net_hdr`, then IPv4) arrives; times in seconds."""
        pieces = [packet]
        if self._path.loss:
            pieces = self._lose(packet)
        return [(due, piece) for piece in pieces if (due := self._due(now, piece)) is not None]

    def _lose(self, packet: bytes) -> list[bytes]:
        total = count(packet)
        if self._until_loss >= total:
            self._until_loss -= total
            return [packet]
        lost = []
        at = self._until_loss
        while at < total:
            lost.append(at)
            at += 1 + self._gap()
        self._until_loss = at - total
        self.lost += len(lost)
        return without(packet, lost)

    def _gap(self) -> int:
        """Returns how many packets pass before the next one that is lost."""
        if not self._path.loss:
            return 0
        return int(math.log(1.0 - self._random.random()) / math.log1p(-self._path.loss))

    def _due(self, now: float, packet: bytes) -> float | None:
        path, left = self._path, now
        if path.rate:
            begins = max(self._busy_until, now)
            if begins - now > path.queue:
                self.overflowed += count(packet)
                return None
            nbytes = len(packet) - VIRTIO.size + count(packet) * _ETHERNET
            left = self._busy_until = begins + 8 * nbytes / path.rate
        self._latest = max(self._latest, left + path.delay + (self._swing(now) if path.jitter else 0.0))
        return self._latest

    def _swing(self, now: float) -> float:
        began, height, following = self._turns
        if now - began >= _SWING_S:
            began, height, following = now, following, self._random.uniform(-1, 1)
            self._turns = began, height, following
        way = (now - began) / _SWING_S
        return max(-self._path.delay, self._path.jitter * (height + (following - height) * way))


class Lateness:
    """Records how much later than they were due packets were written (seconds)."""

    def __init__(self) -> None:
        self._bins = [0] * (_BINS + 1)
        self.packets = 0

    def note(self, seconds: float) -> None:
        self._bins[min(_BINS, max(0, int(seconds / _BIN_S)))] += 1
        self.packets += 1

    def quantile(self, part: float) -> float:
        """Returns the seconds by which that share of the packets was late at most."""
        seen = 0
        for index, number in enumerate(self._bins):
            seen += number
            if number and seen >= part * self.packets:
                return (index + 1) * _BIN_S
        return 0.0


class Relay:
    """The devices of a lab, and the packets between them.

    Args:
        bridge: namespace of the bridge.
        hosts: of each its `namespace`, `address` and `mac`.
        paths: fields of the `Path` from each host to each other.
        seed: of loss and jitter.
    """

    def __init__(self, bridge: str, hosts: list[dict[str, str]], paths: list[list[dict[str, Any]]], seed: int) -> None:
        self._roads = [
            [Road(Path(**path), f"{seed}/{i}/{j}") for j, path in enumerate(row)] for i, row in enumerate(paths)
        ]
        self._positions = {bytes(map(int, host["address"].split("."))): i for i, host in enumerate(hosts)}
        self._ethernet = [
            bytes.fromhex(host["mac"].replace(":", "")) + bytes.fromhex("024e4c000000") + b"\x08\x00" for host in hosts
        ]
        self._lateness = Lateness()
        self._bytes = 0
        self._refused = 0
        self._senders: dict[int, int] = {}
        self._ports = []
        for index, host in enumerate(hosts):
            with _inside(host["namespace"]):
                self._senders[_device("wan0", _IFF_TUN)] = index
            with _inside(bridge):
                self._ports.append(_device(f"w{index}", _IFF_TAP))

    def run(self) -> None:
        """Carries packets until standard input ends."""
        under_way: list[tuple[float, int, int, bytes]] = []
        serial = itertools.count()
        watched = [*self._senders, 0]
        clock = time.monotonic
        while True:
            wait = max(0.0, under_way[0][0] - clock()) if under_way else None
            ready = select.select(watched, (), (), wait)[0]
            for descriptor in ready:
                if descriptor == 0:
                    if not os.read(0, 4096):
                        return
                    continue
                sender = self._senders[descriptor]
                roads = self._roads[sender]
                for _ in range(_BATCH):
                    try:
                        packet = os.read(descriptor, _LARGEST)
                    except BlockingIOError:
                        break
                    to = self._positions.get(packet[VIRTIO.size + 16 : VIRTIO.size + 20])
                    if to is None or packet[VIRTIO.size] >> 4 != 4:  # router solicitations, and the like
                        continue
                    for due, piece in roads[to].take(clock(), packet):
                        heapq.heappush(under_way, (due, next(serial), sender, framed(piece, self._ethernet[to])))
            now = clock()
            while under_way and under_way[0][0] <= now:
                due, _, sender, frame = heapq.heappop(under_way)
                try:
                    os.write(self._ports[sender], frame)
                except OSError:  # the port is down: the packet is lost, as on any other network
                    self._refused += 1
                    continue
                self._lateness.note(clock() - due)
                self._bytes += len(frame) - VIRTIO.size

    def report(self) -> dict[str, float]:
        """Returns what was done: numbers of packets, bytes, and by how many ms packets were late."""
        every = [road for row in self._roads for road in row]
        return {
            "packets": self._lateness.packets,
            "bytes": self._bytes,
            "lost": sum(road.lost for road in every),
            "overflowed": sum(road.overflowed for road in every),
            "refused": self._refused,
            **{
                f"late_ms_{name}": round(1e3 * self._lateness.quantile(part), 2)
                for name, part in (("median", 0.5), ("99", 0.99), ("99.9", 0.999))
            },
        }


@contextmanager
def _inside(namespace: str) -> Iterator[None]:
    """Makes this thread's network that of a namespace, within the block."""
    library = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if library.setns(there, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"namespace {namespace} cannot be entered")
        try:
            yield
        finally:
            if library.setns(home, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "there is no way back from another namespace")
    finally:
        os.close(home)
        os.close(there)


def _device(name: str, kind: int) -> int:
    """Returns the descriptor of a new TUN or TAP device in the present namespace, which vanishes with it."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), kind | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _OFFLOADS)
    return descriptor


def main() -> None:
    with open(0, "rb", buffering=0, closefd=False) as given:  # no more than the line: the rest is waited for
        order: dict[str, Any] = json.loads(given.readline())
    relay = Relay(**order)
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    with suppress(PermissionError):  # a late relay is a slower network: it goes before the others, where it may
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    print("ready", flush=True)
    relay.run()
    print(json.dumps(relay.report()), flush=True)


if __name__ == "__main__":
    main()
