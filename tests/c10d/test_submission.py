"""Operations on adopted tensors of torch's, without a daemon: what becomes of them when something else happens."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusion_rt.c10d.submission import Collective, signature_for
from fusion_rt.client.adoption import Adoptions
from fusion_rt.core.errors import ArenaError
from fusion_rt.host.arena import Arena, Segment
from fusion_rt.torch.core.runtime import Runtime
from fusion_rt.torch.core.tensors import place_of

LARGE = 10_000_000  # elements: malloc maps them


class Here:
    """A membership whose daemon takes nothing but segments.

    Attributes:
        dropped: their ids, when they are given back.
    """

    def __init__(self) -> None:
        self.dropped: list[int] = []
        self.allocating = threading.RLock()
        self.retired: deque[int] = deque()
        arena = Arena(self._offered, self.dropped.append)
        own = SimpleNamespace(may_take=lambda nbytes: False)
        self.client = SimpleNamespace(
            arena=arena,
            adoptions=Adoptions(arena, True),
            own_memory=own,
            allocate=arena.allocate,
            check=lambda: None,
        )

    def _offered(self, number: int, segment: Segment, plan: int) -> None:
        os.close(segment.fd)
        segment.fd = -1

    def collect(self) -> None:
        Runtime.collect(self)  # type: ignore[arg-type]

    def uses(self, tensor: torch.Tensor, times: int = 1) -> bool:
        """Uses a tensor; returns whether it was adopted at the last time."""
        uses: list[Any] = []
        for _ in range(times):
            uses.clear()
            place_of(self, tensor, uses)  # type: ignore[arg-type]
            for use in uses:
                use.end(True)
        return bool(uses)


@pytest.fixture
def here() -> Iterator[Here]:
    made = Here()
    if not made.client.adoptions._wanted:
        pytest.skip("this system's malloc, or its kernel, is one under which nothing is adopted")
    yield made
    made.client.adoptions.close()
    made.client.arena.close()


def test_a_tensor_is_adopted_when_it_is_used_a_third_time(here: Here) -> None:
    tensor = torch.ones(LARGE)
    assert [here.uses(tensor) for _ in range(4)] == [False, False, True, True]
    assert torch.equal(tensor, torch.ones(LARGE))


def test_what_could_not_be_submitted_uses_nothing(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(nbytes: int) -> None:
        raise ArenaError("no memory")

    output = torch.ones(LARGE)
    assert here.uses(output, 3)
    monkeypatch.setattr(here.client, "allocate", fail)
    signature = signature_for("allgather", 3, "float32", LARGE // 2)
    with pytest.raises(ArenaError, match="no memory"):
        Collective(here, signature, [torch.ones(LARGE // 2)], [output])  # type: ignore[arg-type]
    del output
    here.collect()
    assert here.dropped == [1]


def test_what_nobody_holds_is_given_back_when_memory_is_collected(here: Here) -> None:
    tensor = torch.ones(LARGE)
    assert here.uses(tensor, 3)
    view = tensor.numpy()
    del tensor
    here.collect()
    assert not here.dropped
    assert view[LARGE // 2] == 1
    del view
    here.collect()
    assert here.dropped == [1]


def test_a_tensor_in_the_place_of_one_whose_storage_was_freed_is_another_one(here: Here) -> None:
    tensor = torch.ones(LARGE)
    assert here.uses(tensor, 3)
    low, high = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    tensor.untyped_storage().resize_(0)  # as FSDP1 does in each step
    for size in range(LARGE * 17 // 20, LARGE, 1037):  # until malloc maps one inside
        other = torch.empty(size)
        inside = low <= other.data_ptr() and other.data_ptr() + other.nbytes <= high
        assert not here.uses(other)
        if inside:
            break
    else:
        pytest.skip("this kernel maps nothing there")


def test_the_arena_in_the_place_of_a_tensor_whose_storage_was_freed_is_found_as_such(here: Here) -> None:
    tensors = [torch.ones(2 * LARGE) for _ in range(3)]
    assert here.uses(tensors[1], 3)
    low, high = tensors[1].data_ptr(), tensors[1].data_ptr() + tensors[1].nbytes
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)
    region = here.client.arena.allocate(4 * 4 * LARGE)
    parts = torch.frombuffer(region.view, dtype=torch.float32).split(LARGE // 10)
    inside = [part for part in parts if low <= part.data_ptr() and part.data_ptr() + part.nbytes <= high]
    for part in inside:
        uses: list[Any] = []
        assert place_of(here, part, uses) == (region.segment, part.data_ptr() - region.address)  # type: ignore[arg-type]
        assert not uses
    if not inside:
        pytest.skip("this kernel maps nothing there")
