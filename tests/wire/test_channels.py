"""The messages: everything valid survives the way there, and nothing else gets in."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_rt import wire
from fusion_rt.core.errors import WireError
from tests.for_each import for_each
from tests.wire.channels import CHANNELS, MESSAGES, every_channel


@every_channel
@given(data=st.data())
def test_every_message_of_a_channel_survives_encoding_and_decoding(channel: str, data: st.DataObject) -> None:
    message = data.draw(MESSAGES[channel])
    assert CHANNELS[channel][1](wire.encode(message)) == message


@every_channel
@given(data=st.data())
def test_a_message_cut_short_is_a_wire_error(channel: str, data: st.DataObject) -> None:
    encoded = wire.encode(data.draw(MESSAGES[channel]))
    length = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(WireError):
        CHANNELS[channel][1](encoded[:length])


@every_channel
@given(data=st.data())
def test_a_flipped_bit_gives_a_message_or_a_wire_error(channel: str, data: st.DataObject) -> None:
    union, decode = CHANNELS[channel]
    encoded = bytearray(wire.encode(data.draw(MESSAGES[channel])))
    bit = data.draw(st.integers(0, 8 * len(encoded) - 1))
    encoded[bit // 8] ^= 1 << bit % 8
    try:
        message = decode(bytes(encoded))
    except WireError:
        return
    assert isinstance(message, get_args(union))


@every_channel
@given(noise=st.binary(max_size=200))
def test_arbitrary_bytes_give_a_message_or_a_wire_error(channel: str, noise: bytes) -> None:
    union, decode = CHANNELS[channel]
    try:
        message = decode(noise)
    except WireError:
        return
    assert isinstance(message, get_args(union))


SUBMIT = wire.Submit(1, "x", 0, wire.Signature("barrier"), None, None, ())
BROKEN = {
    "nothing": b"",
    "something behind the message": wire.encode(wire.Bye()) + b"\0",
    "a tuple that declares 4 billion elements": wire.encode(SUBMIT)[:-1] + b"\xdd\xff\xff\xff\xff",
    "bytes that declare 4 GiB": b"\x98\xa6submit\x01\xc6\xff\xff\xff\xff",
    "a message that declares 4 billion fields": b"\xdd\xff\xff\xff\xff\xa3bye",
    "nesting without end": wire.encode(wire.Bye())[:-1] + b"\x91" * 100_000,
    "text that is no UTF-8": wire.encode(wire.Bye("x"))[:-1] + b"\xff",
    "an extension type": b"\x92\xa3bye\xc7\x01\x01a",
    "an opcode that does not exist": b"\xc1",
    "the tag of another channel": wire.encode(wire.Heartbeat()),
}


@for_each("data", BROKEN.values())
def test_malformed_bytes_are_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError, match="not a message of this protocol"):
        wire.decode_worker_message(data)
