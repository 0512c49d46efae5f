"""Writes a picture in Perfetto's own format, a protobuf `Trace` of track events. Needs the extra `trace`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

from fusion_rt.tracing.reader import TraceError
from fusion_trace.export.output_file import opened
from fusion_trace.export.picture import Picture, Track

_SEQUENCE = 1


def write(path: str, picture: Picture) -> int:
    """Writes it to a file, compressed if it ends in .gz. Returns how many packets there are.

    Raises:
        OSError: the file cannot be written.
        TraceError: the package `perfetto` is not installed.
    """
    number = 0
    with opened(path) as file:
        for packet in packets(picture):
            _write(file, packet)
            number += 1
    return number


def packets(picture: Picture) -> Iterator[Any]:
    """Yields `TracePacket`s: descriptors of all tracks first, then their contents, by time."""
    proto = _protos()
    first = True
    tracks: list[tuple[int, Track]] = []
    for rows in picture.processes:
        packet = proto.TracePacket()
        packet.trusted_packet_sequence_id = _SEQUENCE
        if first:
            packet.sequence_flags = proto.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
            first = False
        descriptor = packet.track_descriptor
        descriptor.uuid = rows.pid << 20
        descriptor.process.pid = rows.pid
        descriptor.process.process_name = rows.name
        yield packet
        for tid, track in enumerate(rows.tracks, 1):
            packet = proto.TracePacket()
            packet.trusted_packet_sequence_id = _SEQUENCE
            descriptor = packet.track_descriptor
            descriptor.uuid = rows.pid << 20 | tid
            descriptor.parent_uuid = rows.pid << 20
            descriptor.name = track.name
            descriptor.sibling_order_rank = tid
            yield packet
            tracks.append((descriptor.uuid, track))
    for time, _, uuid, what in sorted(_events(tracks), key=lambda event: event[:2]):
        packet = proto.TracePacket()
        packet.timestamp = time - picture.begin
        packet.trusted_packet_sequence_id = _SEQUENCE
        event = packet.track_event
        event.track_uuid = uuid
        _fill(event, what)
        yield packet


def _events(tracks: list[tuple[int, Track]]) -> Iterator[tuple[int, int, int, Any]]:
    """Yields (time, order at the same time, track, what), where `what` is a mark, a slice that begins, or None: a slice
    ends."""
    for uuid, track in tracks:
        for each in track.slices:
            yield each.begin, 1, uuid, each
            yield each.end, 0, uuid, None
        for mark in track.marks:
            yield mark.time, 2, uuid, mark


def _fill(event: Any, what: Any) -> None:
    if what is None:
        event.type = event.TYPE_SLICE_END
        return
    event.name = what.name
    event.categories.append("fusion_rt")
    if hasattr(what, "begin"):
        event.type = event.TYPE_SLICE_BEGIN
        event.flow_ids.extend(what.arrows)
    else:
        event.type = event.TYPE_INSTANT
    for name, value in what.about.items():
        annotation = event.debug_annotations.add()
        annotation.name = name
        if isinstance(value, int):
            annotation.int_value = value
        else:
            annotation.string_value = str(value)


def _write(file: IO[bytes], packet: Any) -> None:
    """Writes a packet, which is field 1 of the message `Trace`, with its length."""
    data = packet.SerializeToString()
    length, head = len(data), bytearray(b"\x0a")
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    file.write(bytes(head) + data)


def _protos() -> Any:
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2
    except ImportError as error:
        raise TraceError(
            f"Perfetto's format needs the package perfetto ({error}): pip install perfetto, or write "
            "Chrome's, which Perfetto loads too"
        ) from error
    return perfetto_trace_pb2
