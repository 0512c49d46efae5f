"""Messages: what is beyond a limit is refused."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from fusion_rt import wire
from fusion_rt.core.errors import WireError
from fusion_rt.core.topology import Topology
from tests.for_each import for_each
from tests.wire.channels import CHANNELS, every_channel

LIMITS: dict[str, tuple[Callable[[int], msgspec.Struct], int]] = {
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


@for_each("limit", LIMITS)
def test_what_is_beyond_a_limit_is_refused(limit: str) -> None:
    make, most = LIMITS[limit]
    assert wire.decode_worker_message(wire.encode(make(most))) == make(most)
    with pytest.raises(WireError):
        wire.decode_worker_message(wire.encode(make(most + 1)))


@for_each("value", [-1, 2**48, 2**64 - 1])
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
