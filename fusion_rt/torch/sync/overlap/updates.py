"""One step of the script's optimizer, taken later than it was asked for, and perhaps in parts.

A part is a step of another instance of the script's optimizer class that has some of the parameters, and shares their
state. That is the same step, bit by bit, if the optimizer changes each parameter by its own gradient and state only, as
all of `torch.optim` do but L-BFGS. Of any other class that is not known, and its step is taken as a whole. So it is if
there are hooks on steps, which expect to see all of one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

_OF_THE_SCALER = ("grad_scale", "found_inf")  # values that a GradScaler tells an optimizer only while it steps


class Update:
    """A deferred call of `step()`, with the hyperparameters as they were when it was asked for.

    Args:
        optimizer: the distributed one.

    Attributes:
        optimizer: the same; so it lives at least until the update has been applied.
        whole: it cannot be applied in parts.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        groups = optimizer.param_groups
        self._options = [{key: _kept(value) for key, value in group.items() if key != "params"} for group in groups]
        self._group_of = {id(parameter): i for i, group in enumerate(groups) for parameter in group["params"]}
        self._told = {name: _kept(optimizer.__dict__[name]) for name in _OF_THE_SCALER if name in optimizer.__dict__}
        self.whole = not _is_separable(optimizer._script_class) or _has_hooks(optimizer)

    def parameters(self) -> list[torch.Tensor]:
        """Returns all parameters of the optimizer."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def apply(self, parameters: Sequence[torch.Tensor]) -> None:
        """Takes the step, by the gradients that the parameters have.

        Args:
            parameters: to be changed. If it is `whole`, all that have gradients.
        """
        with _outside(parameters):
            if self.whole:
                self._apply_whole()
            else:
                self._apply_part(parameters)

    def _apply_part(self, parameters: Sequence[torch.Tensor]) -> None:
        groups: dict[int, list[torch.Tensor]] = {}
        for parameter in parameters:
            groups.setdefault(self._group_of[id(parameter)], []).append(parameter)
        kind = self.optimizer._script_class
        part = object.__new__(kind)
        part.__dict__.update(self.optimizer.__dict__)
        part.__dict__.update(self._told)
        part.param_groups = [{**self._options[i], "params": groups[i]} for i in sorted(groups)]
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            part.__dict__[name] = OrderedDict()  # there were none when the step was asked for
        kind.step(part)

    def _apply_whole(self) -> None:
        optimizer = self.optimizer
        groups = optimizer.param_groups
        current = [dict(group) for group in groups]
        told = {name: optimizer.__dict__.pop(name) for name in _OF_THE_SCALER if name in optimizer.__dict__}
        optimizer.__dict__.update(self._told)
        for group, options in zip(groups, self._options, strict=False):  # groups may have been added since
            group.update(options)
        try:
            optimizer._step()
        finally:
            for name in self._told:
                del optimizer.__dict__[name]
            optimizer.__dict__.update(told)
            for group, before, options in zip(groups, current, self._options, strict=False):
                for key, value in options.items():
                    if key in before and group.get(key) is value:  # not changed by the step itself
                        group[key] = before[key]


def _kept(value: Any) -> Any:
    """Returns a hyperparameter as it is now; tensors are changed in place by schedulers and scalers."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _is_separable(kind: type[torch.optim.Optimizer]) -> bool:
    return getattr(torch.optim, kind.__name__, None) is kind and kind is not torch.optim.LBFGS


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    )


@contextmanager
def _outside(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Leaves inference mode and autocast, in which a forward pass may run: state that is made in inference mode could
    not be used elsewhere, and autocast would have an optimizer multiply matrices in another precision."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        for kind in {parameter.device.type for parameter in parameters}:
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
