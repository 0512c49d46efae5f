"""The history of a shard that outlives its formation: it notes the changes for the shard's mirror, and, where the
shards have to agree which change was the last one, keeps what the shard was before that."""

from __future__ import annotations

from collections import deque
from typing import Literal, NamedTuple

import numpy as np

from fusion_rt.local import array_codec
from fusiond.algorithms.home import Home
from fusiond.collectives.base import Array
from fusiond.core.contribution import Contribution


class ToMirror(NamedTuple):
    """A message to a mirror: all that its shard has, or a change (`HomeAlgorithm.change`).

    Attributes:
        clock: `Home.clock` after it.
        payloads: the image, or the values of the change, in pieces, until they are joined.
        rates, samples, rank: of the change.
    """

    kind: Literal["image", "update"]
    clock: int
    payloads: list[memoryview]
    rates: tuple[float, ...] = ()
    samples: int = 1
    rank: int = 0


class ShardHistory:
    """Notes the changes of a shard, each before it is made. One thread at a time uses it, or several if the shard's
    algorithm lets several threads at it.

    Args:
        home: the shard.
        keeps_before: what the shard was before the last change is wanted.
        outbox: for the mirror; None if there is none.
    """

    def __init__(self, home: Home, keeps_before: bool, outbox: deque[ToMirror] | None) -> None:
        self.home, self._keeps_before, self._outbox = home, keeps_before, outbox
        self._before: tuple[int, dict[str, Array]] | None = None

    def note(self, part: Contribution) -> None:
        """Notes a change that is about to be made."""
        home = self.home
        if self._keeps_before:
            value = None if self._before is None else self._before[1]["value"]
            self._before = home.clock, state_of(home, value)
        if self._outbox is not None:
            # A mean is owned here; a worker's values lie in its arena, or in a message.
            values: Array = part.values if part.values.flags.owndata else part.values.copy()
            payload = values.view(np.uint8).data if part.samples else memoryview(b"")
            self._outbox.append(ToMirror("update", part.clock + 1, [payload], part.rates, part.samples, part.rank))

    def tell_all(self) -> None:
        """Has the mirror told all that the shard has, which was set to something else than the last change's result."""
        self._before = None
        if self._outbox is not None:
            self._outbox.append(ToMirror("image", self.home.clock, [image_of(self.home)]))

    def state_at(self, clock: int) -> dict[str, Array] | None:
        """Returns copies of what the shard had when all contributions before a clock counted, and no other ones; None
        if that is not known any more. Keys are those of a saved home."""
        if self.home.clock <= clock:
            return state_of(self.home)
        if self._before is None or self._before[0] > clock:
            return None
        return {key: value.copy() for key, value in self._before[1].items()}


def state_of(home: Home, place: Array | None = None) -> dict[str, Array]:
    """Returns copies of all that lasts of a home, by the keys of a saved home: what `HomeAlgorithm.change` changes.

    Args:
        place: memory for the value; by default it is new.
    """
    state: dict[str, Array] = {f"aux/{key}": entry.copy() for key, entry in home.aux.items()}
    if home.value is not None:
        state["value"] = np.empty_like(home.value) if place is None else place
        np.copyto(state["value"], home.value)
    if home.optimizer is not None:
        state |= {f"optimizer/{key}": entry for key, entry in home.optimizer.state().items()}
    return state


def image_of(home: Home) -> memoryview:
    """Returns the same as bytes."""
    state = state_of(home)
    image = np.empty(array_codec.nbytes_of(state), np.uint8)
    array_codec.write(state, image)
    return image.data
