"""Where a worker selects from a bucket itself, and has its residual: what of that is left to the node's daemon.

It has the *corrections*: what the worker has taken out of its residual, and what this node as an owner has cut of a
sum, that was not sent (`trays`). The worker gets them with the next result. Should the daemon have to select in
between, or be asked for its state, corrections become a residual here, as it is where daemons select.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np

from fusion_rt.codecs.base import Array
from fusion_rt.codecs.feedback import FeedbackBucketCodec
from fusion_rt.codecs.packing import Selection
from fusion_rt.codecs.trays import Corrections, Tray
from fusion_rt.kernels import selection


class AdoptingBucketCodec(FeedbackBucketCodec):
    """One bucket's codec on one node, whose residual may be a worker's.

    Attributes:
        corrections: for the worker; None while the residual is here.
    """

    corrections: Corrections | None = None

    @abstractmethod
    def adopt(self, tray: Tray) -> Selection:
        """Contributes what a worker has selected, in place of its gradient.

        Raises:
            CodecError: it is no selection of this bucket; nothing has changed.
        """

    @abstractmethod
    def disown(self, tray: Tray) -> None:
        """Gives back what a worker has selected, for a step that did not begin. Raises as `adopt`."""

    def correct(self, tray: Tray, undone: bool) -> None:
        """Tells the worker by what to correct its residual, and whether the step is undone."""
        if self.corrections is not None:
            tray.answer(*self.corrections.take(tray.shape.corrections), self.step, undone)

    def take_back(self) -> None:
        """What there is of the residual is here again."""
        if self.corrections is not None:
            selection.put(*self.corrections.take(self.layout.elements), self._residual, add=True)
            self.corrections = None

    def scale_residual(self, factors: Sequence[float]) -> None:
        if self.corrections is None:
            super().scale_residual(factors)
        else:
            self.corrections.scale(self.layout.spans, factors)

    def residual_norm(self) -> float:
        """The L2 norm of the residual, without padding; of what is here of it."""
        return super().residual_norm() if self.corrections is None else self.corrections.norm()

    def state_dict(self) -> dict[str, Array]:
        self.take_back()
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Array], partial: bool = False) -> None:
        self.take_back()
        super().load_state_dict(state, partial)

    def _given(self, tray: Tray) -> Selection:
        """What a worker has selected; from now on the residual is the worker's. Raises `CodecError`."""
        indices, values, always = tray.selected()
        if self.corrections is None:
            self.corrections = Corrections.of(self._residual)
        return Selection(0, self.layout.elements, indices, values, always, self.step)


def left(wanted: Array, sent: Array) -> Array:
    """What is not sent of some values; nothing of what is not finite."""
    with np.errstate(invalid="ignore"):
        rest: Array = wanted - sent
    rest[~np.isfinite(wanted)] = 0
    return rest
