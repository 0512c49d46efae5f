"""Messages between workers of real daemons: on one node, and between two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from fusion_rt import wire
from fusion_rt.client import Client, Operation
from fusion_rt.client.channel import Completion
from fusion_rt.core.errors import HorovodInternalError
from fusion_rt.host.arena import Region
from tests.fusiond.processes import NO_LIMITS, Daemons, kill

LARGE = 3_000_001


@pytest.fixture(params=[(2,), (1, 1)], ids=["a node", "two nodes"])
def daemons(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Daemons]:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    found = Daemons(directory, request.param, **NO_LIMITS)
    try:
        yield found.start()
    finally:
        found.close()


def put(client: Client, data: bytes) -> tuple[Region, tuple[int, int]]:
    region = client.allocate(max(len(data), 1))
    region.view[: len(data)] = data
    return region, (region.segment, region.offset)


def of(rank: int, nbytes: int) -> bytes:
    return np.random.default_rng(rank).bytes(nbytes)


def exchange(client: Client) -> tuple[list[bytes], list[tuple[int, ...]]]:
    """Sends and receives small and large ones, all of them under way at once."""
    other, sizes = 1 - client.rank, [0, 4, wire.MAX_INLINE, LARGE, 4]
    sends: list[Operation] = []
    regions: list[Region] = []
    receives: list[tuple[Operation, Region | None]] = []
    for tag, nbytes in enumerate(sizes):
        data = of(client.rank, nbytes)
        if nbytes <= wire.MAX_INLINE:
            sends.append(client.messages.send_to(0, other, tag, inline=data))
            receives.append((client.messages.receive_from(0, None if tag == 4 else other, tag, nbytes), None))
            continue
        region, place = put(client, data)
        regions.append(region)
        sends.append(client.messages.send_to(0, other, tag, place=place, nbytes=nbytes))
        into, place = put(client, bytes(nbytes))
        receives.append((client.messages.receive_from(0, other, tag, nbytes, place=place), into))
    for operation in sends:
        client.wait(operation)
    got = []
    for operation, into_region in receives:
        client.wait(operation)
        data = operation.inline if into_region is None else bytes(into_region.view[: operation.sizes[1]])
        assert data is not None
        got.append(data)
    return got, [operation.sizes for operation, _ in receives]


def test_ranks_exchange_messages_of_all_sizes(daemons: Daemons) -> None:
    daemons.join()
    for rank, result in daemons.on_clients(exchange).items():
        other = 1 - rank
        sizes = [0, 4, wire.MAX_INLINE, LARGE, 4]
        assert result == ([of(other, nbytes) for nbytes in sizes], [(other, nbytes) for nbytes in sizes])


def test_more_sends_than_are_kept_are_received_in_order(daemons: Daemons) -> None:
    def many(client: Client) -> list[int]:
        other = 1 - client.rank
        sends = [client.messages.send_to(0, other, 0, inline=number.to_bytes(4, "big")) for number in range(3000)]
        got = [client.messages.receive_from(0, other, 0, 4) for _ in sends]
        for operation in sends:
            client.wait(operation)
        return [int.from_bytes(client.wait(operation).inline or b"", "big") for operation in got]

    daemons.join()
    assert daemons.on_clients(many) == {0: list(range(3000)), 1: list(range(3000))}


def failed(wait: Callable[[], object]) -> str:
    with pytest.raises(HorovodInternalError) as raised:
        wait()
    return str(raised.value)


def test_a_rank_neither_sends_to_itself_nor_waits_longer_than_it_wants(daemons: Daemons) -> None:
    client = daemons.join()[0]
    with pytest.raises(ValueError, match="rank 0 can neither send to itself nor receive from itself"):
        client.messages.send_to(0, 0, 0, inline=b"x")
    with pytest.raises(ValueError, match="rank 0 can neither send to itself nor receive from itself"):
        client.messages.receive_from(0, 0, 0, 4)
    operation = client.messages.receive_from(0, 1, 3, 4, completion=Completion(seconds=0.2))
    assert "has waited 0.2 s: rank 1" in failed(lambda: client.wait(operation))
    assert "rank 2 is not in group 0" in failed(lambda: client.wait(client.messages.receive_from(0, 2, 3, 4)))


def test_who_waits_for_a_rank_that_dies_is_told_which(daemons: Daemons) -> None:
    dying = daemons.worker_process(
        1, "print('here', flush=True); client.wait(client.messages.receive_from(0, 0, 1, 4))"
    )
    client = daemons.join([0])[0]
    operation = client.messages.receive_from(0, 1, 0, 4)
    client.messages.send_to(0, 1, 5, inline=b"kept")
    kill(dying)
    text = failed(lambda: client.wait(operation))
    assert "rank 1 (host " in text
    assert "died" in text
