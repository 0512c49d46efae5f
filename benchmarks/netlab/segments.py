"""Packets as a TUN device hands them over: with `virtio_net_hdr`, several segments of TCP in one piece.

That spares both the kernel and the relay most of the work: a gigabit is 2,000 such packets a second and not 83,000.
But a path loses single segments. `without` cuts what is lost out of a packet. No I/O.
"""

from __future__ import annotations

import struct

VIRTIO = struct.Struct("<BBHHHH")  # flags, kind, length of all headers, segment, where the checksum begins, and is
_NEEDS_CSUM = 1
_TCP4 = 1
_ECN = 0x80
_FIN_PSH, _CWR = 0x09, 0x80


def count(packet: bytes) -> int:
    """Returns how many packets go over the wire for this one (`virtio_net_hdr`, then IPv4)."""
    segment: int
    _, kind, _, segment, _, _ = VIRTIO.unpack_from(packet)
    if kind & ~_ECN != _TCP4 or not segment:
        return 1
    return max(1, -(-(len(packet) - VIRTIO.size - _headers(packet)) // segment))


def without(packet: bytes, lost: list[int]) -> list[bytes]:
    """Returns what is left of a packet, in order, when the segments with these indices, in order, are lost."""
    pieces, start = [], 0
    total = count(packet)
    for index in [*lost, total]:
        if index > start:
            pieces.append(packet if index - start == total else _part(packet, start, index, total))
        start = index + 1
    return pieces


def framed(packet: bytes, ethernet: bytes) -> bytes:
    """Returns the packet with an Ethernet header, for a TAP device."""
    flags, kind, headers, segment, start, offset = VIRTIO.unpack_from(packet)
    moved = VIRTIO.pack(
        flags, kind, headers and headers + len(ethernet), segment, start and start + len(ethernet), offset
    )
    return b"".join((moved, ethernet, memoryview(packet)[VIRTIO.size :]))


def _headers(packet: bytes) -> int:
    """Returns the bytes of the headers of IP and TCP; what the kernel tells of them is a hint."""
    internet = (packet[VIRTIO.size] & 15) * 4
    return internet + (packet[VIRTIO.size + internet + 12] >> 4) * 4


def _part(packet: bytes, first: int, end: int, total: int) -> bytes:
    """Returns segments `first` to `end` - 1 of a packet as one packet."""
    flags, kind, _, segment, start, offset = VIRTIO.unpack_from(packet)
    body = VIRTIO.size
    internet = (packet[body] & 15) * 4
    headers = _headers(packet)
    payload = packet[body + headers + first * segment : body + headers + end * segment]
    head = bytearray(packet[body : body + headers])
    struct.pack_into(">H", head, 2, headers + len(payload))
    struct.pack_into(">H", head, 4, (int.from_bytes(head[4:6], "big") + first) & 0xFFFF)
    struct.pack_into(">H", head, 10, 0)
    struct.pack_into(">H", head, 10, ~_sum(bytes(head[:internet])) & 0xFFFF)
    sequence = (int.from_bytes(head[internet + 4 : internet + 8], "big") + first * segment) & 0xFFFFFFFF
    struct.pack_into(">I", head, internet + 4, sequence)
    if end < total:
        head[internet + 13] &= ~_FIN_PSH
    if first:
        head[internet + 13] &= ~_CWR
    # The kernel leaves the sum over the pseudo header there, from which whoever needs it goes on.
    pseudo = bytes(head[12:20]) + struct.pack(">HH", 6, headers - internet + len(payload))
    struct.pack_into(">H", head, internet + 16, _sum(pseudo))
    single = end - first == 1
    virtio = VIRTIO.pack(flags | _NEEDS_CSUM, 0 if single else kind, headers, 0 if single else segment, start, offset)
    return virtio + bytes(head) + payload


def _sum(data: bytes) -> int:
    """Returns the ones' complement sum of 16-bit words (RFC 1071)."""
    total: int = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total
