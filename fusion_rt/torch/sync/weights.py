"""Checks of parameters and gradients that a script may have changed: weights set between steps, values not finite."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fusion_rt.torch.sync.slots import Slot


class Weights:
    """Copies of the parameters as the optimizer saw them last. A script may have set them since: by `load_state_dict`,
    or through `p.data`, which has no version that would tell."""

    def __init__(self) -> None:
        self._slots: list[Slot] = []
        self._copies: list[torch.Tensor] = []

    def note(self, slots: Iterable[Slot]) -> None:
        """Copies the parameters, which are as they should be."""
        slots = list(slots)
        values = [slot.parameter.detach() for slot in slots]
        if slots and slots == self._slots and all(map(_alike, values, self._copies)):
            torch._foreach_copy_(self._copies, values)
        else:
            self._slots, self._copies = slots, [value.clone() for value in values]

    def forget(self) -> None:
        """Drops the copies: any values are right."""
        self._slots, self._copies = [], []

    def changed(self) -> str:
        """Returns the name of a parameter that is not what it was; empty if there is none."""
        for slot, copy in zip(self._slots, self._copies, strict=True):
            value = slot.parameter.detach()
            if not (_alike(value, copy) and (torch.equal(value, copy) or _same_with_nan(value, copy))):
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


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def _same_with_nan(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
