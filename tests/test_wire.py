"""The messages: everything valid survives the way there, and nothing else gets in."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_rt import wire
from fusion_rt.errors import WireError
from fusion_rt.topology import Topology

SOME_TOPOLOGIES = st.sampled_from([Topology(("a",), ((0,),)), Topology(("a", "b"), ((2, 0), (1,)))])
CHANNELS = {
    "worker": (wire.WorkerMessage, wire.decode_worker_message),
    "daemon": (wire.DaemonMessage, wire.decode_daemon_message),
    "peer": (wire.PeerMessage, wire.decode_peer_message),
}


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Every value that the schema allows, as msgspec itself describes the schema; long ones are left out."""
    info = kind if isinstance(kind, msgspec.inspect.Type) else msgspec.inspect.type_info(kind)
    match info:
        case msgspec.inspect.IntType():
            above = info.lt - 1 if info.lt is not None else 2**63 - 1
            return st.integers(info.ge if info.ge is not None else -(2**63), above)
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.FloatType():
            return st.floats(allow_nan=False)
        case msgspec.inspect.StrType():
            return st.text(max_size=min(info.max_length or 20, 20))
        case msgspec.inspect.BytesType():
            return st.binary(max_size=min(info.max_length or 20, 20))
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.LiteralType():
            return st.sampled_from(info.values)
        case msgspec.inspect.UnionType():
            return st.one_of([values_of(part) for part in info.types])
        case msgspec.inspect.VarTupleType():
            return st.lists(values_of(info.item_type), max_size=4).map(tuple)
        case msgspec.inspect.DictType():
            return st.dictionaries(values_of(info.key_type), values_of(info.value_type), max_size=3)
        case msgspec.inspect.NamedTupleType():
            return st.tuples(*[values_of(field.type) for field in info.fields]).map(lambda parts: info.cls(*parts))
        case msgspec.inspect.StructType() if info.cls is Topology:
            return SOME_TOPOLOGIES
        case msgspec.inspect.StructType():
            return st.builds(info.cls, **{field.name: values_of(field.type) for field in info.fields})
        case msgspec.inspect.Metadata():
            return values_of(info.type)
    raise NotImplementedError(info)


MESSAGES = {channel: values_of(union) for channel, (union, _) in CHANNELS.items()}
SIGNATURES = st.builds(
    wire.Signature,
    kind=st.sampled_from(get_args(wire.Kind)),
    dtype=st.sampled_from(["float32", "int32"]),
    shape=st.lists(st.integers(0, 2), max_size=2).map(tuple),
    op=st.sampled_from(["sum", "average"]),
    prescale=st.sampled_from([1.0, 0.5]),
    root=st.integers(0, 1),
    codec=st.sampled_from(["dense", "fp16"]),
)


every_channel = pytest.mark.parametrize("channel", CHANNELS)


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


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN.keys())
def test_malformed_bytes_are_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError, match="not a message of this protocol"):
        wire.decode_worker_message(data)


LIMITS = {
    "name": (
        lambda n: wire.Submit(1, "x" * n, 0, wire.Signature("barrier")),
        wire.MAX_NAME,
    ),
    "inline tensor": (
        lambda n: wire.Submit(1, "x", 0, wire.Signature("allreduce"), None, bytes(n)),
        wire.MAX_INLINE,
    ),
    "dimensions": (
        lambda n: wire.Submit(1, "x", 0, wire.Signature("allreduce", shape=(1,) * n)),
        wire.MAX_DIMS,
    ),
    "rank": (lambda n: wire.Hello(1, "job", n - 1, 7), wire.MAX_RANKS),
    "size": (lambda n: wire.AddSegment(1, n - 1), 2**48),
    "traceback": (lambda n: wire.Bye("x" * n), 256 * 1024),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_what_is_beyond_a_limit_is_refused(limit: str) -> None:
    make, most = LIMITS[limit]
    assert wire.decode_worker_message(wire.encode(make(most))) == make(most)
    with pytest.raises(WireError):
        wire.decode_worker_message(wire.encode(make(most + 1)))


@pytest.mark.parametrize("value", [-1, 2**48, 2**64 - 1])
def test_numbers_out_of_range_are_refused(value: int) -> None:
    with pytest.raises(WireError):
        wire.decode_worker_message(wire.encode(wire.DropSegment(value)))


@every_channel
def test_a_message_beyond_the_limit_is_refused_before_it_is_looked_at(channel: str) -> None:
    with pytest.raises(WireError, match=r"longer than the limit of 67108864"):
        CHANNELS[channel][1](bytes(wire.MAX_MESSAGE + 1))


def test_a_topology_that_lacks_a_rank_is_refused() -> None:
    welcome = wire.Welcome(Topology(("a",), ((0, 1),)), 0, 1, "allreduce", "dense")
    encoded = wire.encode(welcome).replace(b"\x92\x00\x01", b"\x92\x00\x02")  # ranks (0, 1) become (0, 2)
    with pytest.raises(WireError, match="not a topology"):
        wire.decode_daemon_message(encoded)


@given(first=SIGNATURES, second=SIGNATURES)
def test_digests_are_equal_exactly_when_ranks_agree(first: wire.Signature, second: wire.Signature) -> None:
    assert (wire.digest(first) == wire.digest(second)) == (first.common() == second.common())
    assert 0 <= wire.digest(first) < 2**63


def test_ranks_may_differ_in_the_rows_of_gathers_only() -> None:
    for kind in get_args(wire.Kind):
        short, long = wire.Signature(kind, "float32", (2, 3)), wire.Signature(kind, "float32", (5, 3))
        narrow = wire.Signature(kind, "float32", (2, 4))
        assert (short.common() == long.common()) == (kind in ("allgather", "alltoall"))
        assert short.common() != narrow.common()
