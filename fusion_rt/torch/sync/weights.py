"""Checks of parameters and gradients that a script may have changed: weights set between steps, values not finite."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fusion_rt.torch.ops.digests import words
from fusion_rt.torch.sync.slots import Slot

_COLUMNS = 1021  # a prime, so that rows of no usual length begin at the same column


class Weights:
    """Digests of the parameters as the optimizer saw them last. A script may have set them since: by `load_state_dict`,
    or through `p.data`, which has no version that would tell.

    A digest of a parameter has the sums of every 1,021st word of it, which take no longer than a copy. Rejected:
    copies, which are as large as the model; and one sum of all words, which does not change when rows are sorted anew.
    """

    def __init__(self) -> None:
        self._noted: list[tuple[Slot, tuple[object, ...], torch.Tensor]] = []  # the kind of its values, and a digest

    def note(self, slots: Iterable[Slot]) -> None:
        """Notes the parameters, which are as they should be."""
        self._noted = [(slot, _kind(slot.parameter), _digest(slot.parameter)) for slot in slots]

    def forget(self) -> None:
        """Forgets them: any values are right."""
        self._noted = []

    def changed(self) -> str:
        """Returns the name of a parameter that has changed since; empty if there is none."""
        for slot, kind, noted in self._noted:
            if kind != _kind(slot.parameter) or not torch.equal(noted, _digest(slot.parameter)):
                return slot.name
        return ""


def not_finite(slots: Iterable[Slot]) -> str:
    """Returns the name of a parameter whose gradient has an element that is not finite; empty if there is none."""
    found = [(slot, slot.parameter.grad) for slot in slots if slot.parameter.grad is not None]
    values = [gradient._values() if gradient.is_sparse else gradient for _, gradient in found]
    values = [value if value.numel() else value.new_zeros(1) for value in values]
    for of_device in {value.device for value in values}:
        here = [index for index, value in enumerate(values) if value.device == of_device]
        largest = torch.stack([norm.float() for norm in torch._foreach_norm([values[i] for i in here], float("inf"))])
        if not bool(largest.isfinite().all()):
            return found[here[int((~largest.isfinite()).nonzero()[0])]][0].name
    return ""


def _digest(parameter: torch.Tensor) -> torch.Tensor:
    """Returns the digest of a parameter, int64 of shape (1,021,) at most."""
    found = words(parameter)
    whole = len(found) // _COLUMNS * _COLUMNS
    rest = found[whole:].to(torch.int64)
    if not whole:
        return rest.clone()
    sums = found[:whole].view(-1, _COLUMNS).sum(0, dtype=torch.int64)
    sums[: len(rest)] += rest
    return sums


def _kind(parameter: torch.Tensor) -> tuple[object, ...]:
    return parameter.shape, parameter.dtype, parameter.device
