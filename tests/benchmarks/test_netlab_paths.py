"""Ways between hosts of a lab: what is said of them, which packets are lost, and when the others arrive."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path as FilePath

import pytest

from benchmarks.netlab import Netlab, NetlabError, Path, preflight
from benchmarks.netlab.paths import matrix, parsed
from benchmarks.netlab.relay import Lateness, Road
from benchmarks.netlab.segments import VIRTIO, count, framed, without
from tests.for_each import for_each

UNAVAILABLE = preflight()
TIMEOUT_S = 30
MSS = 1448


def checksum(data: bytes) -> int:
    """RFC 1071, word by word."""
    total = 0
    for low, high in zip(data[::2], data[1::2], strict=True):
        total += low << 8 | high
        total = (total & 0xFFFF) + (total >> 16)
    return total


def packet(payload: bytes, sequence: int = 2**32 - 3000, flags: int = 0x19, mss: int = MSS) -> bytes:
    """A packet of TCP as a TUN device hands it over, with several segments in one piece if it is long."""
    options = bytes(12)
    tcp = struct.pack(">HHIIBBHHH", 1, 2, sequence, 5, (5 + 3) << 4, flags, 100, 0, 0) + options
    internet = struct.pack(
        ">BBHHHBBH4s4s", 0x45, 0, 20 + len(tcp) + len(payload), 0xFFFF, 0, 64, 6, 0, b"\x0a\x4d\0\1", b"\x0a\x4d\0\2"
    )
    kind = 1 if len(payload) > mss else 0
    return VIRTIO.pack(1, kind, 52, mss if kind else 0, 20, 16) + internet + tcp + payload


def test_what_is_said_of_a_pair_beats_what_is_said_of_a_host_and_that_beats_the_rest() -> None:
    found = matrix(3, Path(delay=0.02), {(1, 0): "loss:0.1%", 0: "delay:50ms,jitter:5ms"})

    assert found is not None
    assert found[1][2] == found[2][1] == Path(delay=0.02)
    assert found[0][2] == found[2][0] == Path(delay=0.05, jitter=0.005)
    assert found[0][1] == found[1][0] == Path(delay=0.05, jitter=0.005, loss=0.001)


def test_a_lab_of_which_nothing_is_said_has_no_relay() -> None:
    assert matrix(2, Path(), {}) is None


@for_each("text", ["delay:40", "delay", "loss:100%", "loss:-1%", "speed:3", "rate:fast"])
def test_what_makes_no_sense_of_a_path_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(NetlabError):
        parsed(text, Path())


def test_a_path_of_a_host_that_is_not_there_is_refused() -> None:
    with pytest.raises(NetlabError, match="no host 2"):
        matrix(2, Path(), {(0, 2): "delay:1ms"})


@for_each("lost", [[0], [2], [6], [0, 1], [1, 3, 4], [0, 6], list(range(7))])
def test_lost_segments_are_cut_out_of_a_packet_and_the_others_stay_as_tcp_would_have_sent_them(lost: list[int]) -> None:
    payload = bytes(range(256)) * 38  # 9728 bytes: 7 segments, the last of them short
    whole = packet(payload)
    assert count(whole) == 7

    pieces = without(whole, lost)

    assert sum(map(count, pieces)) == 7 - len(lost)
    seen = []
    for piece in pieces:
        flags, kind, headers, segment, _, _ = VIRTIO.unpack_from(piece)
        internet, tcp, data = piece[10:30], piece[30:62], piece[62:]
        assert checksum(internet) == 0xFFFF
        assert struct.unpack(">H", internet[2:4])[0] == len(piece) - 10
        pseudo = internet[12:20] + struct.pack(">HH", 6, len(tcp) + len(data))
        assert struct.unpack(">H", tcp[16:18])[0] == checksum(pseudo)
        assert (flags, headers, kind, segment) == ((1, 52, 1, MSS) if count(piece) > 1 else (1, 52, 0, 0))
        start = (struct.unpack(">I", tcp[4:8])[0] - 2**32 + 3000) % 2**32
        assert start % MSS == 0
        assert data == payload[start : start + len(data)]
        assert bool(tcp[13] & 0x09) == (start + len(data) == len(payload))  # FIN and PSH
        assert struct.unpack(">H", internet[4:6])[0] == (0xFFFF + start // MSS) & 0xFFFF
        seen += range(start // MSS, start // MSS + count(piece))
    assert seen == [index for index in range(7) if index not in lost]


def test_an_ethernet_header_moves_what_the_header_of_virtio_points_at() -> None:
    whole = packet(bytes(3000))

    assert VIRTIO.unpack_from(framed(whole, bytes(14))) == (1, 1, 66, MSS, 34, 16)
    assert framed(whole, bytes(14))[24:] == whole[10:]


def test_packets_arrive_after_the_delay_one_after_the_other_at_the_rate() -> None:
    road = Road(Path(delay=0.02, rate=8_000_000, queue=1.0), "seed")
    whole = packet(bytes(948))  # 1,000 bytes; 1,014 with Ethernet's

    due = [road.take(5.0, whole)[0][0] for _ in range(3)]

    assert due == pytest.approx([5.02 + n * 1014e-6 for n in (1, 2, 3)], abs=1e-9)


def test_a_full_queue_drops() -> None:
    road = Road(Path(rate=8_000_000, queue=0.0095), "seed")

    taken = [road.take(1.0, packet(bytes(948))) for _ in range(20)]

    assert [bool(each) for each in taken] == [True] * 10 + [False] * 10
    assert road.overflowed == 10


def test_jitter_keeps_the_order_and_its_bounds_and_varies() -> None:
    road = Road(Path(delay=0.02, jitter=0.005), "seed")

    times = [n * 1e-3 for n in range(3000)]
    due = [road.take(now, packet(b"x"))[0][0] for now in times]

    assert due == sorted(due)
    late = [arrives - now - 0.02 for now, arrives in zip(times, due, strict=True)]
    assert -0.005 <= min(late) < -0.003
    assert 0.003 < max(late) <= 0.005 + 1e-9


@for_each("segments", [1, 5, 44])
def test_the_share_of_segments_that_is_lost_is_the_one_asked_for_however_they_come(segments: int) -> None:
    road = Road(Path(loss=0.01), "seed")
    whole = packet(bytes(MSS * segments))

    left = sum(count(piece) for _ in range(200_000 // segments) for _, piece in road.take(0.0, whole))

    sent = 200_000 // segments * segments
    assert road.lost == sent - left
    assert road.lost == pytest.approx(0.01 * sent, rel=0.1)  # 4.5 standard deviations


def test_lateness_is_told_by_quantiles() -> None:
    lateness = Lateness()
    for n in range(100):
        lateness.note(n * 1e-3)

    assert lateness.quantile(0.5) == pytest.approx(0.049, abs=2e-5)
    assert lateness.quantile(0.99) == pytest.approx(0.098, abs=2e-5)


# --- with a relay ---------------------------------------------------------------------------------------------------

_HAS_TUN = FilePath("/dev/net/tun").exists()
needs_relay = [
    pytest.mark.root,
    pytest.mark.multiprocess,
    pytest.mark.skipif(UNAVAILABLE is not None or not _HAS_TUN, reason=UNAVAILABLE or "there is no /dev/net/tun"),
]

# An echo of ICMP, as ping's (which not every machine has): round trips in seconds.
PING = """
import socket, struct, sys, time
def checksum(data):
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as raw:
    raw.settimeout(20)
    for n in range(10):
        began, blank = time.perf_counter(), struct.pack(">BBHHH", 8, 0, 0, 7, n)
        raw.sendto(struct.pack(">BBHHH", 8, 0, checksum(blank), 7, n), (sys.argv[1], 0))
        while raw.recv(100)[20] != 0:
            pass
        print(time.perf_counter() - began)
"""
# A stream whose window is the receiver's small buffer. What it carries is checked, and its rate from the middle on.
RECEIVE = """
import hashlib, socket, sys, time
with socket.socket() as server:
    server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, int(sys.argv[1]))
    server.bind(("", 5001)); server.listen()
    print("listening", flush=True)
    connection, _ = server.accept()
seen, marks, buffer = hashlib.blake2b(), [], bytearray(1 << 20)
size = 0
while got := connection.recv_into(buffer):
    size += got
    seen.update(memoryview(buffer)[:got])
    marks.append((time.perf_counter(), size))
half = next(mark for mark in marks if mark[1] > size / 2)
print((marks[-1][1] - half[1]) / (marks[-1][0] - half[0]), seen.hexdigest())
"""
SEND = """
import hashlib, random, socket, sys
data = random.Random(1).randbytes(int(sys.argv[2]))
with socket.create_connection((sys.argv[1], 5001), timeout=20) as connection:
    connection.sendall(data)
print(hashlib.blake2b(data).hexdigest())
"""


def stream(lab: Netlab, size: int, buffer: int) -> float:
    """B/s of a stream from host 0 to host 1, in its second half; checks that what came is what was sent."""
    server = lab.run(1, [sys.executable, "-c", RECEIVE, str(buffer)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"
    argv = [sys.executable, "-c", SEND, lab.hosts[1].name, str(size)]
    client = lab.run(0, argv, stdout=subprocess.PIPE, text=True)
    sent = client.communicate(timeout=TIMEOUT_S)[0].strip()
    rate, received = server.communicate(timeout=TIMEOUT_S)[0].split()
    assert received == sent
    return float(rate)


class TestRelay:
    pytestmark = needs_relay

    def test_a_round_trip_takes_twice_the_delay_and_a_pair_has_its_own(self) -> None:
        with Netlab(3, path=Path(delay=0.02), paths={(0, 2): "delay:50ms"}) as lab:
            found = {}
            for peer in (1, 2):
                argv = [sys.executable, "-c", PING, lab.hosts[peer].name]
                told = lab.run(0, argv, stdout=subprocess.PIPE, text=True).communicate(timeout=TIMEOUT_S)[0]
                found[peer] = sorted(map(float, told.split()))

        assert lab.relayed["packets"] == 40
        # The shortest: on a busy machine most are late, for want of a processor, and that one somewhat.
        assert 0.04 <= found[1][0] < 0.06
        assert 0.1 <= found[2][0] < 0.12

    def test_a_stream_carries_its_window_in_each_round_trip_and_no_more_than_the_link(self) -> None:
        with Netlab(2, path=Path(delay=0.02), congestion="cubic") as lab:
            # The kernel doubles the size of a buffer, and offers at most that much as a window.
            far = stream(lab, 3_000_000, 64 * 1024)
        with Netlab(2, "20mbit", path=Path(delay=0.005), congestion="cubic") as lab:
            limited = stream(lab, 5_000_000, 4_000_000)

        assert 0.25 * 131072 / 0.04 < far < 1.05 * 131072 / 0.04
        assert 0.7 * 20e6 / 8 < limited < 1.05 * 20e6 / 8

    def test_what_is_lost_is_sent_again_and_counted(self) -> None:
        with Netlab(2, path=Path(delay=0.001, loss=0.005)) as lab:
            stream(lab, 5_000_000, 1_000_000)

        assert lab.relayed["lost"] > 3
        assert lab.relayed["refused"] == 0

    def test_packets_can_be_dropped_in_one_direction_and_a_rate_changed_beside_a_relay(self) -> None:
        with Netlab(2, path=Path(delay=0.001)) as lab:
            lab.set_rate(0, "50mbit")
            hasty = PING.replace("settimeout(20)", "settimeout(0.3)")
            with lab.dropping(0, 1):
                argv = [sys.executable, "-c", hasty, lab.hosts[1].name]
                assert lab.run(0, argv, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL).wait(TIMEOUT_S) == 1
            argv = [sys.executable, "-c", PING, lab.hosts[1].name]
            assert lab.run(0, argv, stdout=subprocess.DEVNULL).wait(TIMEOUT_S) == 0
