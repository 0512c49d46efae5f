"""Checks of parameters and gradients that a script may have changed: weights set between steps, values not finite."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fusion_rt.torch.sync.slots import Slot


class Weights:
    """What parameters were when the optimizer saw them last. A script may have set them since: by `load_state_dict`, or
    through `p.data`, which has no version that would tell."""

    def __init__(self) -> None:
        self._seen: list[tuple[Slot, torch.Tensor]] = []

    def note(self, slots: Iterable[Slot]) -> None:
        """Parameters are what they should be."""
        now = [(slot, slot.parameter.detach()) for slot in slots]
        known = [slot for slot, _ in self._seen] == [slot for slot, _ in now]
        if known and all(_alike(value, copy) for (_, value), (_, copy) in zip(now, self._seen, strict=True)):
            if now:
                torch._foreach_copy_([copy for _, copy in self._seen], [value for _, value in now])
        else:
            self._seen = [(slot, value.clone()) for slot, value in now]

    def forget(self) -> None:
        """Whatever parameters are is right."""
        self._seen = []

    def changed(self) -> str:
        """The name of a parameter that is not what it was; empty if there is none."""
        return next((slot.name for slot, copy in self._seen if not _same(slot.parameter.detach(), copy)), "")


def not_finite(slots: Iterable[Slot]) -> str:
    """The name of a parameter whose gradient has an element that is not finite; empty if there is none."""
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


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not _alike(one, other):
        return False
    return torch.equal(one, other) or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
