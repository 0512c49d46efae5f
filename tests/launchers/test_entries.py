"""What ranks say in a store: as it was sealed or refused, and what it adds up to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_rt.core.errors import FusionError, WireError
from fusion_rt.host.bootstrap import Endpoint, StartError
from fusion_rt.launchers.entries import Arrival, Refusal, Word, assemble, name_ranks, seal, unseal
from tests.for_each import for_each

MESSAGES = [
    Arrival(5, -1, "node", "höst", "visit"),
    Endpoint(2, 1, "10.0.0.1", 1000, 2000, "k" * 40),
    StartError("é"),
    Refusal("no", ("a", "b")),
    Word("job"),
]


@given(message=st.sampled_from(MESSAGES), other=st.binary(max_size=80), place=st.integers(0))
def test_a_value_is_as_it_was_sealed_or_refused(message: Any, other: bytes, place: int) -> None:
    value = seal(b"k", "a", message)
    assert unseal(b"k", "a", value, type(message)) == message
    changed = bytearray(value)
    changed[place % len(value)] ^= 1
    for secret, name, wrong in ((b"", "a", value), (b"k", "b", value), (b"k", "a", bytes(changed)), (b"k", "a", other)):
        with pytest.raises(WireError, match="another process"):
            unseal(secret, name, wrong, type(message))


def test_a_sealed_value_of_another_kind_is_refused() -> None:
    for message in (Word("../x"), Arrival(1, 0, "n", "h" * 256, "v"), StartError("x")):
        with pytest.raises(WireError, match="not a start-up message"):
            unseal(b"k", "a", seal(b"k", "a", message), Arrival if isinstance(message, Arrival) else Word)


@for_each(
    ("arrivals", "ranks"),
    [
        ({0: (0, "a"), 1: (1, "a"), 2: (0, "b")}, ((0, 1), (2,))),
        (
            {0: (0, "a"), 1: (0, "b"), 2: (1, "a"), 3: (1, "b")},
            ((0, 2), (1, 3)),
        ),  # one after the other around the nodes
        ({0: (1, "b"), 1: (0, "b"), 2: (0, "a")}, ((1, 0), (2,))),
        ({0: (-1, "a"), 1: (-1, "b"), 2: (-1, "a")}, ((0, 2), (1,))),  # nobody was told its local rank
    ],
)
def test_the_topology_follows_from_what_the_ranks_say(
    arrivals: Mapping[int, tuple[int, str]], ranks: tuple[tuple[int, ...], ...]
) -> None:
    said = {rank: Arrival(len(arrivals), local, node, f"host-{node}", "v") for rank, (local, node) in arrivals.items()}
    topology = assemble(said)
    assert topology.ranks == ranks
    assert [arrivals[each[0]][1] for each in ranks] == [host.removeprefix("host-") for host in topology.hosts]


def test_ranks_that_contradict_each_other_are_an_error() -> None:
    with pytest.raises(FusionError, match=r"ranks 0, 1 came from one node \(host h\) with the local ranks 0, 0"):
        assemble({rank: Arrival(2, 0, "n", "h", "v") for rank in range(2)})
    with pytest.raises(FusionError, match="rank 1 was started as one of 3, and others as one of 2"):
        assemble({rank: Arrival(2 + rank, rank, "n", "h", "v") for rank in range(2)})


def test_a_few_ranks_stand_for_many() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([0, 2]) == "ranks 0, 2"
    assert name_ranks(list(range(1000))).endswith("14, 15 and 984 more")
