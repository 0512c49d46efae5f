"""Common base of LARS and LAMB: a learning rate for each tensor, from the norms of the whole tensor.

A step measures all tensors first and then changes them, so that the norms of tensors that are split over ranks are
summed in one message. Norms stay on the device of the tensors; nothing waits for their values on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from fusion_rt.torch.core.process_sets import ProcessSet, global_process_set
from fusion_rt.torch.ops.reduce import allreduce
from fusion_rt.torch.ops.signatures import Sum

Norms: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
Exclude: TypeAlias = bool | Callable[[torch.Tensor], bool]
# Of a group, its adapted or its excluded parameters: the options for them, those with gradients, and their updates.
Measured: TypeAlias = tuple[dict[str, Any], list[torch.Tensor], list[torch.Tensor]]

_HALF = (torch.float16, torch.bfloat16)


class LayerAdaptive(torch.optim.Optimizer):
    """An optimizer that multiplies the update of each tensor by a ratio of two norms, its trust ratio.

    Args:
        params, defaults: as `torch.optim.Optimizer`'s; groups have "lr" and "weight_decay".
        exclude_1d: which parameters have a trust ratio of 1 and no weight decay: True for those with one dimension or
            none (biases, the parameters of normalization layers), False for none, or a function of the parameter. A
            parameter that is a flat part of a split tensor needs the function, since it has one dimension itself.
        norms: for parameters that are parts of tensors split over ranks. Once a step it is given the squared norms of
            this rank's parts, 1-D, float64, on the device of the first of them: for each parameter that is not
            excluded, in order, that of the weights and that of the gradient (LARS) or of the update (LAMB). It returns
            their sums over all ranks that hold parts. A parameter without a gradient counts with zero; a rank that
            holds nothing of a tensor has an empty parameter in its place.
    """

    norms: Norms | None
    _exclude: Exclude

    def __init__(self, params: Any, defaults: dict[str, Any], exclude_1d: Exclude, norms: Norms | None) -> None:
        self._exclude, self.norms = exclude_1d, norms
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes a step; returns what the closure returns, which is evaluated once, before.

        Raises:
            RuntimeError: a gradient is sparse or complex.
            ValueError: `norms` returned something else than one number for each it was given.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        adapted: list[Measured] = []
        excluded: list[Measured] = []
        for group in self.param_groups:
            sides: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
            for parameter in group["params"]:
                sides[self._excludes(parameter)].append(parameter)
            for excluding, batches in ((False, adapted), (True, excluded)):
                mine = sides[excluding]
                with_gradient = [p for p in mine if _has_gradient(p)]
                options = {**group, "params": mine, "weight_decay": 0.0 if excluding else group["weight_decay"]}
                updates = self._updates(options, with_gradient) if with_gradient else []
                batches.append((options, with_gradient, updates))
        ratios = self._ratios_of(adapted)
        for (options, parameters, updates), factors in zip(adapted, ratios, strict=True):
            if parameters:
                self._apply(options, parameters, updates, factors)
        for options, parameters, updates in excluded:
            if parameters:
                self._apply(options, parameters, updates, None)
        return loss

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for copies, with attributes that are no option of a group; torch keeps the rest only."""
        return {**super().__getstate__(), "_exclude": self._exclude, "norms": self.norms}

    def _updates(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns, for each parameter, the vector whose norm makes its trust ratio."""
        raise NotImplementedError

    def _trust(self, group: dict[str, Any], weights: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
        """Returns trust ratios, [n], from the norms of weights and updates, [n] each."""
        raise NotImplementedError

    def _apply(
        self,
        group: dict[str, Any],
        parameters: list[torch.Tensor],
        updates: list[torch.Tensor],
        ratios: list[torch.Tensor] | None,
    ) -> None:
        """Changes the parameters; `ratios` are their trust ratios (0-D, float64), None where all of them are 1."""
        raise NotImplementedError

    def _excludes(self, parameter: torch.Tensor) -> bool:
        if isinstance(self._exclude, bool):
            return self._exclude and parameter.dim() <= 1
        return bool(self._exclude(parameter))

    def _ratios_of(self, batches: Sequence[Measured]) -> list[list[torch.Tensor]]:
        """Returns the trust ratios of each batch's parameters with gradients."""
        measured: list[list[torch.Tensor]] = []  # parameters of each batch
        vectors: list[torch.Tensor] = []  # weights, update, weights, update, ...
        for options, parameters, updates in batches:
            # Over split tensors, those without a gradient count: it may be only here that there is none.
            measured.append(parameters if self.norms is None else options["params"])
            update_of = dict(zip(parameters, updates, strict=True))
            for parameter in measured[-1]:
                update = update_of.get(parameter)
                vectors += [parameter, parameter.new_zeros(()) if update is None else update]
        if not vectors:
            return [[] for _ in batches]
        pairs = self._summed(_squared_norms(vectors)).sqrt().view(-1, 2)
        ratios, start = [], 0
        for (options, parameters, _), those in zip(batches, measured, strict=True):
            known = set(parameters)
            part = pairs[start : start + len(those)]
            start += len(those)
            trust = self._trust(options, part[:, 0], part[:, 1]).unbind()
            ratios.append([t.to(p.device) for p, t in zip(those, trust, strict=True) if p in known])
        return ratios

    def _summed(self, squares: torch.Tensor) -> torch.Tensor:
        if self.norms is None:
            return squares
        summed = self.norms(squares)
        if summed.shape != squares.shape:
            raise ValueError(
                f"{type(self).__name__}: norms was given {list(squares.shape)} squared norms and returned "
                f"{list(summed.shape)}; it has to return the sum over ranks of each of them"
            )
        return summed.to(squares)


class _SumOver:
    """See `split_over`. A class, so that optimizers that have it can be pickled."""

    def __init__(self, process_set: ProcessSet) -> None:
        # None: a copy of the optimizer must not have a copy of the global set, which is filled in by `init`.
        self._process_set = None if process_set is global_process_set else process_set

    def __call__(self, squares: torch.Tensor) -> torch.Tensor:
        process_set = self._process_set or global_process_set
        return allreduce(squares, op=Sum, process_set=process_set)


def split_over(process_set: ProcessSet = global_process_set) -> Norms:
    """Returns the argument `norms` of LARS and LAMB, for tensors of which each rank of the process set holds a part.

    Every one of these ranks has to take every step, with parts of the same tensors in the same order; it costs one
    `allreduce` of 16 bytes a tensor. A tensor that all ranks hold whole does no harm as long as eps is negligible and
    norms are not clipped: both its norms grow alike.
    """
    return _SumOver(process_set)


def scaled_(tensors: list[torch.Tensor], rate: float, ratios: list[torch.Tensor] | None) -> None:
    """Multiplies the tensors, in place, by the learning rate and each by its trust ratio."""
    if ratios is not None:
        torch._foreach_mul_(tensors, ratios)
    torch._foreach_mul_(tensors, rate)


def checked(name: str, options: dict[str, float]) -> None:
    """Raises `ValueError` for an option of this optimizer's that is negative, or not a number."""
    for option, value in options.items():
        if not value >= 0.0:
            raise ValueError(f"{name}: {option} is {value}; it has to be 0 or more")


def _has_gradient(parameter: torch.Tensor) -> bool:
    if parameter.grad is None:
        return False
    if parameter.grad.is_sparse or parameter.is_complex():
        kind = "complex" if parameter.is_complex() else "sparse"
        raise RuntimeError(
            f"LARS and LAMB do not support {kind} gradients: a parameter of shape {list(parameter.shape)} has one; "
            f"give it to another optimizer"
        )
    return True


def _squared_norms(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Returns the squared norms, [n], float64, on the device of the first."""
    wide = [tensor.float() if tensor.dtype in _HALF else tensor for tensor in tensors]  # 16 bits overflow at 65504
    device = tensors[0].device
    return torch.stack([norm.to(device, torch.float64) for norm in torch._foreach_norm(wide)]).square()
