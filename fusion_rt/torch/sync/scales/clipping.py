"""A warning where a script clips gradients that a codec has sent.

A codec with a residual sends few elements in a step, each with the sum of many that waited, so that its results may be
longer than the gradients of a batch. A script that then clips them by their norm, as one without a codec does, takes
away much of them, for good, since the codec believes that it has arrived. It has to clip in the codec.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from fusion_rt import codecs

FAR = 2.0
"""Results that are more than this many times as long as this rank's own gradient are too long to be clipped.

Without a codec there is about 1 at most, since a mean is no longer than the longest of its parts. A net of 5,000
parameters on two nodes had .5 to .7 with int4, .9 to 1.2 with topk of 1 %, and .7 to 3.1 with randomk of 1 %. With
gradients that stay the same topk of 1 % has 10."""

_FIRST = 16  # exchanges, by when a residual has some length; then after twice as many, each time
_CLIPPED = 0.99  # of the length that there was


class Clipping:
    """The lengths of gradients and results in some steps.

    Attributes:
        looks: it wants to know the lengths of this step.
        result: the length of the last exchange's results, if it has looked; else None.
    """

    def __init__(self) -> None:
        self.looks = False
        self._exchanges, self._next = 0, _FIRST
        self._given: list[torch.Tensor] = []
        self.result: torch.Tensor | None = None

    def given(self, parameters: Sequence[torch.Tensor]) -> None:
        """Takes the gradients of some parameters, before they are sent."""
        self._given += _norms(parameters)

    def reduced(self, parameters: Sequence[torch.Tensor]) -> None:
        """Counts an exchange, and takes the results of all parameters if it looks."""
        self.result = _length(_norms(parameters)) if self.looks else None
        self._exchanges += 1
        self.looks = self._exchanges == self._next
        if self.looks:
            self._next *= 2

    def stepping(self, parameters: Sequence[torch.Tensor], codec: str, loss_scale: float) -> None:
        """Compares with the gradients with which a step is taken, and warns, once.

        Args:
            codec: that has sent the results.
            loss_scale: of the gradients as sent; the step's are without.
        """
        result, given, self.result, self._given = self.result, self._given, None, []
        if result is None or not given:
            return
        times = float(result / _length(given))
        if times > FAR and float(_length(_norms(parameters)) * loss_scale) < _CLIPPED * float(result):
            self._next = 0  # which no exchange is
            name = codecs.parse(codec).name
            remedy = f"{name}(clip=...)" if hasattr(codecs.parse(codec), "clip") else "a codec that clips, such as topk"
            warnings.warn(
                f"the script clips gradients after the codec {name} has sent them, when they are {times:.1f} times as "
                f"long as those of a batch, and so loses a part of them; clip in the codec instead, by {remedy} "
                "(docs/compression.md, residuals)",
                stacklevel=5,
            )


def _norms(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    gradients = [p.grad.detach() for p in parameters if p.grad is not None and not p.grad.is_sparse]
    return list(torch._foreach_norm(gradients)) if gradients else []


def _length(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    where = norms[0].device if norms else torch.device("cpu")
    parts = [norm.to(where, torch.float32) for norm in norms] or [torch.zeros(())]
    length: torch.Tensor = torch.linalg.vector_norm(torch.stack(parts))
    return length
