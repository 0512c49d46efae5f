"""Optimizers whose gradients stay each rank's own until `step()`: what all of them have in common.

Until then `p.grad` is what it is in one process, so that it can be accumulated, unscaled and clipped as there. A
`GradScaler` has `step()` called in any case, as with torch's fused optimizers (`_step_supports_amp_scaling`), so that a
step in which this rank's gradients overflowed still counts for whoever counts steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from fusion_rt.torch.core.runtime import runtime
from fusion_rt.torch.sync.feedback import KEY
from fusion_rt.torch.sync.slots import Slot
from fusion_rt.torch.sync.wrapping import Wrapped

if TYPE_CHECKING:
    from fusion_rt.torch.sync.sharded import ShardExchange


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


class OwnGradients(Wrapped):
    """What is put in front of the script's optimizer class when gradients are each rank's own until `step()`."""

    _step_supports_amp_scaling = True
    _exchange: ShardExchange

    def synchronize(self) -> None:
        """Does nothing: gradients are this rank's own, and may be clipped at any time before `step()`."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Changes nothing, and is there so that scripts which clip synchronized gradients run as they are."""
        yield

    def drain(self) -> None:
        """Takes the answer to what is under way. Raises `ValueError` if the script has set a parameter since."""
        raise NotImplementedError

    def agree(self) -> None:
        """Takes the homes' copy, if there is one. To be called on all ranks, between two barriers."""
        raise NotImplementedError

    def reseed(self) -> None:
        """Goes on from the parameters as they are now, which have to be the same on all ranks: after the script has set
        them between steps (`load_state_dict`, pruning), and `hvd.broadcast_parameters`. To be called on all ranks.

        The optimizer's state stays. With an algorithm that needs no telling this only forgets what is under way.

        Raises:
            HorovodInternalError: it failed.
        """
        if self._exchange.is_of(runtime()):  # else they are what it begins with
            self._exchange.reseed()
            self._settled()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if KEY in state_dict:  # homes have the checkpoint's parameters, as the model has, or is about to
            self._exchange.weights.forget()

    def _settled(self) -> None:
        """Parameters are what all ranks have agreed upon, or were set back to what they were."""
        self._note_weights()

    def _note_weights(self) -> None:
        if self._exchange.keeps_weights and self._exchange.is_of(runtime()):
            self._exchange.weights.note(self._exchange.slots)

    def _check_weights(self) -> None:
        """Raises `ValueError` if the script has set a parameter since the last step."""
        exchange = self._exchange
        if exchange.is_of(runtime()) and (name := exchange.weights.changed()):
            raise ValueError(
                f"the parameter {name!r} was set since the last step, and {exchange.spec} would go on from what it was "
                "before; if all ranks have set the same (or after hvd.broadcast_parameters), call optimizer.reseed() "
                "on all of them before the next step"
            )

    def _overflowed(self) -> bool:
        """Whether a `GradScaler`, which calls `step()`, found that gradients are not finite. If it has left it to the
        optimizer to unscale them, that is done."""
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is not None:
            inverse = scale.double().reciprocal().float()
            for group in self.__dict__["param_groups"]:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(inverse.to(parameter.grad.device))
        if found is not None:
            self.grad_scale = self.found_inf = None  # the script's optimizer has nothing to do with them
        return bool(found)


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
