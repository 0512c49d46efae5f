"""The record of one rank's contribution to an operation, from the worker's message to the algorithm that takes it
in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from fusion_rt import wire
from fusion_rt.codecs.summing import Portion

Array: TypeAlias = npt.NDArray[Any]

NO_VALUES: Array = np.zeros(0)
_BARRIER = wire.Signature("barrier")


class WorkerSelection(Protocol):
    """A worker's own selection from its gradient, which it sends in place of that."""

    def contribute(self) -> Portion:
        """Returns the node's contribution, in place of the codec's own."""

    def correct(self, undone: bool) -> None:
        """Hands the codec's rest of an ended operation to the worker; `undone`: it has to undo the step, too."""

    def disown(self) -> None:
        """Returns all that was taken to the worker, since the operation failed before it began."""


@dataclass(slots=True, eq=False)
class Contribution:
    """One rank's part of an operation.

    Attributes:
        rank: the position of its rank among those of the process set; between homes, the sender's.
        values: 1-D, its elements; valid until it is answered, and only to be read. None of one that came encoded and
            is not decoded yet. Of a tensor outside a plan, they may be in the worker's own memory:
            then this is a `Remote`, which only what takes `Operand`s may be given.
        handle: the number under which its worker, if that is on this node, waits for the answer.
        place: where in the arena the result goes: where the elements came from, unless its worker said otherwise; None
            when they came in a message, and the result goes back in one, or is longer than they are.
        kind: `post`: of a worker, which waits for an answer; `ask`, `seed`, `reseed`, `has`: see `wire.Ready`; `pass`:
            of a worker that waits in another operation and has nothing to contribute at this clock; else what one home
            sends another: see `wire.Piece`.
        clock: how many its sender had posted before; of what a home sent, its clock; in an exchange, see `wire.Ready`.
        version: of the home, when the sender last heard from it.
        rates: learning rate of each parameter group.
        samples: how many samples it comes from; 0: it has no gradient, and `values` says nothing.
        weight: push-sum weight.
        payload: the encoded values, of one that came from another node and is not decoded yet: pieces, in order.
        arrived: when it came to its home (s).
        signature, splits, receives: of a tensor outside a plan, as submitted.
        rescale: factor of each tensor's residual, applied first.
        urgency: the less, the sooner the worker needs it.
        selected: the worker's selection from a bucket, instead of the elements in `values`.
        share: whose contributions `values` has; see `wire.Ready`.
        passes, gives_up, asks_for_part, loss_scale: see `wire.Ready`.
    """

    rank: int
    values: Array
    handle: int = 0
    place: Array | None = None
    kind: wire.PieceKind = "post"
    clock: int = 0
    version: int = 0
    rates: tuple[float, ...] = ()
    samples: int = 1
    weight: float = 1.0
    payload: list[memoryview] | None = None
    arrived: float = 0.0
    signature: wire.Signature = _BARRIER
    splits: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()
    rescale: tuple[float, ...] = ()
    urgency: int = 0
    selected: WorkerSelection | None = None
    share: int = wire.OWN
    passes: int = 0
    gives_up: str = ""
    asks_for_part: bool = False
    loss_scale: float = 1.0
