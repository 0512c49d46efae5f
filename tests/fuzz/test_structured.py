"""Hostile inputs that are well-formed in most of their parts: what mutation of bytes hardly ever comes to."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_rt import codecs, wire
from fusion_rt.codecs import CodecError, Layout
from fusion_rt.codecs.packing import HEADER
from fusion_rt.core.dtypes import DTYPES
from fusion_rt.core.errors import WireError
from fusion_rt.local import array_codec

CHANNELS = {
    "worker": (wire.WorkerMessage, wire.decode_worker_message),
    "daemon": (wire.DaemonMessage, wire.decode_daemon_message),
    "peer": (wire.PeerMessage, wire.decode_peer_message),
}
TAGS = {
    channel: [msgspec.structs.fields(kind) and kind.__struct_config__.tag for kind in union.__args__]
    for channel, (union, _) in CHANNELS.items()
}
HUGE = st.sampled_from([0, 1, -1, 2**31, 2**47, 2**48 - 1, 2**48, 2**63 - 1, 2**64 - 1])
ANYTHING = st.recursive(
    st.none() | st.booleans() | HUGE | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=15,
)


@pytest.mark.parametrize("channel", CHANNELS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_the_right_tag_with_any_fields_is_a_message_or_a_wire_error(channel: str, data: st.DataObject) -> None:
    union, decode = CHANNELS[channel]
    tag = data.draw(st.sampled_from([tag for tag in TAGS[channel] if tag]))
    encoded = msgspec.msgpack.encode([tag, *data.draw(st.lists(ANYTHING, max_size=10))])
    try:
        message = decode(encoded)
    except WireError:
        return
    assert isinstance(message, union.__args__)
    assert decode(wire.encode(message)) == message or "nan" in repr(message)


SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 2**31, 2**47]), max_size=wire.MAX_DIMS)


@settings(deadline=None, max_examples=100)
@given(
    entries=st.lists(
        st.tuples(st.text(max_size=3), st.sampled_from(["float32", "int64", "uint8", "object"]), SHAPES), max_size=5
    ),
    room=st.integers(0, 200),
    length=st.none() | HUGE,
)
def test_no_header_of_named_arrays_gives_more_than_there_is(entries: list[Any], room: int, length: int | None) -> None:
    header = msgspec.msgpack.encode(entries)
    size = len(header) if length is None or length < 0 else length % 2**64
    data = np.frombuffer(size.to_bytes(8, "little") + header + bytes(room), np.uint8)
    try:
        arrays = array_codec.read(data)
    except WireError:
        return
    assert sum(array.nbytes for array in arrays.values()) <= room + 8
    assert [list(array.shape) for array in arrays.values()] == [list(shape) for _, _, shape in entries]


TOPK: Any = codecs.parse("topk(density=0.02, minimum=0, value='fp32')").open(Layout(DTYPES["float32"], 1000))


@settings(deadline=None, max_examples=150)
@given(
    kinds=st.integers(0, 255),
    bits=st.integers(0, 255),
    phases=st.tuples(st.integers(0, 255), st.integers(0, 255)),
    count=st.sampled_from([0, 1, 2, 999, 1000, 1001, 2**31, 2**32 - 1]),
    body=st.binary(max_size=64) | st.integers(0, 9000).map(bytes),
)
def test_no_header_of_a_selection_gives_indices_outside_of_its_range(
    kinds: int, bits: int, phases: tuple[int, int], count: int, body: bytes
) -> None:
    payload = HEADER.pack(kinds, bits, *phases, count) + body
    try:
        selected = TOPK.unpack(payload, 100, 900)
    except CodecError:
        return
    assert len(selected.indices) == count == len(selected.values)
    assert all(100 <= index < 900 for index in selected.indices)
    assert (np.diff(selected.indices) > 0).all()
