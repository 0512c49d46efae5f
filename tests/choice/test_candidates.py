"""What may be tuned, and between which values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fusion_rt import wire
from fusion_rt.choice.candidates import Space
from fusion_rt.units import KIB, MIB
from tests.torch.autotune.fakes import DEFAULT

AROUND: dict[str, Any] = {"nbytes": 100 * MIB, "nodes": 4, "cores": 4, "largest_chunk": 2 * MIB}


def test_the_default_is_always_among_the_values() -> None:
    odd = replace(DEFAULT, threshold=12345, chunk_bytes=5000, window_bytes=7777, threads=3, exchange="ring")
    for keep_order in (False, True):
        for nodes in (1, 4):
            space = Space.around(odd, **{**AROUND, "nodes": nodes}, keep_order=keep_order)
            assert space.default == odd
            assert odd.threshold in space.values["threshold"]
            assert odd.chunk_bytes in space.values["chunk_bytes"]
            assert odd.window_bytes in space.values["window_bytes"]
            assert odd.threads in space.values["threads"]
            assert odd.exchange in space.values["exchange"]


def test_buckets_go_from_a_part_of_the_gradients_to_all_of_them() -> None:
    space = Space.around(DEFAULT, **AROUND)
    assert space.values["threshold"] == tuple(MIB << n for n in range(1, 8))
    assert Space.around(DEFAULT, **{**AROUND, "nbytes": 100 * KIB}).values["threshold"] == (
        64 * KIB,
        128 * KIB,
        16 * MIB,
    )


def test_no_message_is_larger_than_the_others_take() -> None:
    assert max(Space.around(DEFAULT, **{**AROUND, "largest_chunk": 512 * KIB}).values["chunk_bytes"]) == 512 * KIB


def test_on_one_node_nothing_travels() -> None:
    space = Space.around(DEFAULT, **{**AROUND, "nodes": 1})
    assert len(space.values["chunk_bytes"]) == len(space.values["window_bytes"]) == len(space.values["exchange"]) == 1
    assert space.values["threads"] == (1, 2, 4)
    assert space.size == len(space.values["threshold"]) * 3


def test_the_order_of_additions_can_be_kept() -> None:
    space = Space.around(DEFAULT, **AROUND, keep_order=True)
    assert space.values["threshold"] == (DEFAULT.threshold,)
    assert space.values["exchange"] == (DEFAULT.exchange,)
    assert len(space.values["chunk_bytes"]) > 1


def test_a_setting_becomes_the_tuning_of_a_plan() -> None:
    tuning = DEFAULT.tuning(7, "a sample")
    assert tuning == wire.Tuning(16 * MIB, 256 * KIB, 16 * MIB, 2, "auto", steps=7, why="a sample")
    assert str(DEFAULT) == "buckets of 16 MiB, chunks of 256 KiB, a window of 16 MiB, 2 kernel threads, all-reduce auto"
