"""The optimizer of a shard that outlives its formation: it notes the updates for the shard's mirror, and, where the
shards have to agree which update was the last one, keeps what the shard was before that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from fusion_rt.local import array_codec
from fusiond.algorithms.home import Home
from fusiond.algorithms.shard_optimizer import ShardOptimizer
from fusiond.collectives.base import Array


class ToMirror(NamedTuple):
    """A message to a mirror: all that its shard has, or an update.

    Attributes:
        clock: `Home.clock` after it.
        rates: of the update, with its gradient as `payload`.
    """

    kind: Literal["image", "update"]
    clock: int
    payload: memoryview
    rates: tuple[float, ...] = ()


class RecordedOptimizer(ShardOptimizer):
    """Applies gradients to a home as another optimizer does, and notes them. One thread at a time uses it.

    Args:
        home: its home.
        optimizer: takes the steps.
        keeps_before: what the home was before the last update is wanted.
        outbox: for the mirror; None if there is none.
    """

    def __init__(
        self, home: Home, optimizer: ShardOptimizer, keeps_before: bool, outbox: list[ToMirror] | None
    ) -> None:
        self._home, self._optimizer, self._keeps_before, self._outbox = home, optimizer, keeps_before, outbox
        self._clock = home.clock
        self._before: tuple[int, Array, dict[str, Array]] | None = None

    def step(self, gradient: Array, rates: Sequence[float]) -> None:
        home = self._home
        assert home.value is not None
        if self._keeps_before:
            value = home.value.copy() if self._before is None else self._before[1]
            np.copyto(value, home.value)
            self._before = self._clock, value, self._optimizer.state()
        self._clock = home.clock
        if self._outbox is not None:
            # A mean is nobody else's; what came from a worker lies in its arena, or in a message.
            sent: Array = (gradient if gradient.flags.owndata else gradient.copy()).view(np.uint8)
            self._outbox.append(ToMirror("update", home.clock, sent.data, tuple(rates)))
        self._optimizer.step(gradient, rates)

    def state(self) -> dict[str, Array]:
        return self._optimizer.state()

    def load(self, state: Mapping[str, Array]) -> None:
        self._optimizer.load(state)

    def tell_all(self) -> None:
        """Has the mirror told all that the home has, which was set to something else than the last update's result."""
        self._before = None
        if self._outbox is not None:
            self._outbox.append(ToMirror("image", self._home.clock, image_of(self._home)))

    def state_at(self, clock: int) -> dict[str, Array] | None:
        """Returns copies of what the home had when all contributions before a clock counted, and no other ones; None if
        that is not known any more. Keys are those of a saved home."""
        if self._home.clock <= clock:
            return state_of(self._home)
        if self._before is None or self._before[0] > clock:
            return None
        _, value, optimizer = self._before
        return {"value": value.copy(), **{f"optimizer/{key}": entry for key, entry in optimizer.items()}}


def state_of(home: Home) -> dict[str, Array]:
    """Returns copies of a home's value and its optimizer's state, by the keys of a saved home."""
    assert home.value is not None
    assert home.optimizer is not None
    return {"value": home.value.copy(), **{f"optimizer/{key}": value for key, value in home.optimizer.state().items()}}


def image_of(home: Home) -> memoryview:
    """Returns the same as bytes."""
    state = state_of(home)
    image = np.empty(array_codec.nbytes_of(state), np.uint8)
    array_codec.write(state, image)
    return image.data
