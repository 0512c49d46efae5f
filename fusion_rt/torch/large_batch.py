"""Training with very large batches: optimizers whose rate is fitted to each tensor, and rates that follow the batch.

::

    optimizer = LARS(model.parameters(), lr=0.1, weight_decay=1e-4)  # the rate for 256 samples a step
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    scheduler = LinearScaling(optimizer, batch_per_rank=64, dataset_size=len(dataset))

`scheduler.step()` follows each `optimizer.step()`.

A step of LARS or LAMB measures all tensors first and then changes them, so that the norms of tensors that are split
over ranks are summed in one message. Norms stay on the device of the tensors; nothing waits for their values on the
host.

- LARS: Y. You, I. Gitman, B. Ginsburg, "Large Batch Training of Convolutional Networks", arXiv 1708.03888
- LAMB: Y. You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", arXiv 1904.00962
- LinearScaling: P. Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", arXiv 1706.02677,
  sections 2.1 (linear scaling) and 2.2 (gradual warm-up)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch

from fusion_rt.torch.core import runtime
from fusion_rt.torch.core.process_sets import ProcessSet, global_process_set
from fusion_rt.torch.ops.reduce import allreduce
from fusion_rt.torch.ops.signatures import Sum

Norms: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
Exclude: TypeAlias = bool | Callable[[torch.Tensor], bool]
# Of a group, its adapted or its excluded parameters: the options for them, those with gradients, and their updates.
Measured: TypeAlias = tuple[dict[str, Any], list[torch.Tensor], list[torch.Tensor]]

_HALF = (torch.float16, torch.bfloat16)
Scaling: TypeAlias = Literal["linear", "sqrt", "none"]

_SCALINGS: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt, "none": lambda _: 1.0}
_SAVED = ("base_lrs", "last_epoch", "_step_count", "_last_lr", "_ranks", "_batch", "_ramp", "_epochs")


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
        """Takes a step; returns the result of the closure, which is evaluated once, before.

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


class LAMB(LayerAdaptive):
    """Adam whose step is as long as the tensor it changes, times the rate (algorithm 2)::

        m ← β₁ m + (1 − β₁) g          v ← β₂ v + (1 − β₂) g²
        r = m / (1 − β₁ᵗ) / (√(v / (1 − β₂ᵗ)) + eps)
        w ← w − lr φ(‖w‖) / ‖r + λ w‖ (r + λ w)

    The ratio is 1 where φ(‖w‖) or ‖r + λ w‖ is 0, as in the authors' implementation.

    Args:
        params: as of any `torch.optim.Optimizer`.
        lr: the rate.
        betas: β₁ and β₂, from 0 to below 1.
        eps: keeps r finite.
        weight_decay: λ.
        bias_correction: whether m and v are divided by 1 − βᵗ, as in the algorithm.
        clip: γ_l and γ_u of φ(z) = min(max(z, γ_l), γ_u); None for φ(z) = z.
        exclude_1d, norms: see `LayerAdaptive`. An excluded parameter takes Adam's step: its ratio is 1, and λ = 0.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        bias_correction: bool = True,
        clip: tuple[float, float] | None = None,
        exclude_1d: Exclude = True,
        norms: Norms | None = None,
    ) -> None:
        checked("LAMB", {"lr": lr, "eps": eps, "weight_decay": weight_decay})
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"LAMB: betas are {betas}; both have to be from 0 to below 1")
        if clip is not None and not 0.0 <= clip[0] <= clip[1]:
            raise ValueError(f"LAMB: clip is {clip}; it has to be a lower and an upper bound, 0 or more")
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction,
            "clip": clip,
        }  # fmt: skip
        super().__init__(params, defaults, exclude_1d, norms)

    def _updates(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        states = [self._state_of(parameter) for parameter in parameters]
        for state in states:
            state["step"] += 1
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        first, second = group["betas"]
        means, squares = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
        roots, updates = list(torch._foreach_sqrt(squares)), means
        if group["bias_correction"]:
            torch._foreach_div_(roots, [(1 - second ** state["step"]) ** 0.5 for state in states])
            updates = list(torch._foreach_div(means, [1 - first ** state["step"] for state in states]))
        torch._foreach_add_(roots, group["eps"])
        updates = list(torch._foreach_div(updates, roots))
        torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        return updates

    def _trust(self, group: dict[str, Any], weights: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
        lengths = weights if group["clip"] is None else weights.clamp(*group["clip"])
        return torch.where((lengths == 0) | (updates == 0), 1.0, lengths / updates)

    def _apply(
        self,
        group: dict[str, Any],
        parameters: list[torch.Tensor],
        updates: list[torch.Tensor],
        ratios: list[torch.Tensor] | None,
    ) -> None:
        scaled_(updates, float(group["lr"]), ratios)
        torch._foreach_sub_(parameters, updates)

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = 0  # a number: its powers are needed in full precision, on the host
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


class LARS(LayerAdaptive):
    """Momentum SGD whose learning rate is fitted to each tensor (algorithm 1; the trust ratio λ is equation 6)::

        λ = c ‖w‖ / (‖g‖ + β ‖w‖ + eps)
        v ← m v + lr λ (g + β w)
        w ← w − v                               (nesterov: w − m v − lr λ (g + β w))

    λ is 1 where ‖w‖ or ‖g‖ is 0, as in the authors' implementation. As in the paper, and unlike in `torch.optim.SGD`,
    v holds the rates of the steps that it comes from, so a new rate counts for new gradients only.

    Args:
        params: as of any `torch.optim.Optimizer`.
        lr: the global rate; 1 to 30 for thousands of samples a step, since c makes it small.
        momentum: m. Without it there is no v.
        weight_decay: β, within λ.
        nesterov: looks ahead by the momentum; not in the paper.
        trust_coefficient: c.
        eps: keeps λ finite.
        exclude_1d, norms: see `LayerAdaptive`. An excluded parameter has λ = 1 and β = 0.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        nesterov: bool = False,
        trust_coefficient: float = 0.001,
        eps: float = 1e-9,
        exclude_1d: Exclude = True,
        norms: Norms | None = None,
    ) -> None:
        numbers = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust_coefficient": trust_coefficient,
            "eps": eps,
        }  # fmt: skip
        checked("LARS", numbers)
        if nesterov and not momentum:
            raise ValueError("LARS: nesterov needs a momentum above 0")
        super().__init__(params, {**numbers, "nesterov": nesterov}, exclude_1d, norms)

    def _updates(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def _trust(self, group: dict[str, Any], weights: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
        denominator = updates + group["weight_decay"] * weights + group["eps"]
        ratios = group["trust_coefficient"] * weights / denominator
        return torch.where((weights == 0) | (updates == 0), 1.0, ratios)

    def _apply(
        self,
        group: dict[str, Any],
        parameters: list[torch.Tensor],
        updates: list[torch.Tensor],
        ratios: list[torch.Tensor] | None,
    ) -> None:
        steps = list(torch._foreach_add(updates, parameters, alpha=group["weight_decay"]))
        scaled_(steps, float(group["lr"]), ratios)
        momentum = group["momentum"]
        if momentum:
            for parameter in parameters:
                if "momentum_buffer" not in self.state[parameter]:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            velocities = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
            torch._foreach_mul_(velocities, momentum)
            torch._foreach_add_(velocities, steps)
            if group["nesterov"]:
                torch._foreach_add_(steps, velocities, alpha=momentum)
            else:
                steps = velocities
        torch._foreach_sub_(parameters, steps)


class LinearScaling(torch.optim.lr_scheduler.LRScheduler):
    """Scales the rates with the batch of all ranks, after a gradual warm-up; to be stepped after each optimizer step.

    The effective batch is batch_per_rank · `hvd.size()` · `backward_passes_per_step`, and the scale is k = effective
    batch / base_batch for "linear", √k for "sqrt", 1 for "none". With e the epochs done so far, a group that was given
    the rate lr has::

        lr (1 + (scale − 1) e / warmup_epochs)    while e < warmup_epochs
        lr · scale · after(e)                     from then on

    The batch is asked for in every step. When it has changed, because ranks have come or gone, or with
    `set_backward_passes_per_step`, the scale moves to its new value linearly within the next `rewarm_steps` steps, and
    from then on an epoch of `dataset_size` has another number of steps. Epochs done stay done.

    Args:
        optimizer: the script's; the rates of its groups are those for base_batch. Give it the `DistributedOptimizer`
            where there is one, since the optimizer in it does not know its backward passes, and make it after `init`.
            With several passes the loss has to be divided by their number, as gradients are summed.
        batch_per_rank: samples in a backward pass of one rank.
        base_batch: samples in a step for which the rates were chosen.
        dataset_size: samples in an epoch of all ranks together; an epoch's steps follow, rounded up.
        steps_per_epoch: instead of it, and whatever the batch is.
        warmup_epochs: epochs of warm-up; may be a fraction, and 0 for none.
        scaling: how the rates follow the batch. "linear" is for SGD and LARS, "sqrt" for LAMB and other adaptive ones,
            "none" for `hvd.Adasum`, which adapts by itself.
        after: a factor for the rates after the warm-up, from the epochs or steps done since the start of training. It
            is not part of the state.
        after_by: which of both `after` is given: "epoch" (float, with fractions) or "step" (int).
        rewarm_steps: steps within which the scale moves after a change; 0 for at once.
        last_epoch: steps done before, as of any scheduler; -1 to begin.

    Raises:
        ValueError: an argument is out of range, or both or none of dataset_size and steps_per_epoch are given.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        batch_per_rank: int,
        base_batch: int = 256,
        dataset_size: int | None = None,
        steps_per_epoch: int | None = None,
        warmup_epochs: float = 5.0,
        scaling: Scaling = "linear",
        after: Callable[[Any], float] | None = None,
        after_by: Literal["epoch", "step"] = "epoch",
        rewarm_steps: int = 100,
        last_epoch: int = -1,
    ) -> None:
        if (dataset_size is None) == (steps_per_epoch is None):
            raise ValueError(
                "LinearScaling: give one of dataset_size and steps_per_epoch, to tell how long an epoch is"
            )
        positive = {"batch_per_rank": batch_per_rank, "base_batch": base_batch, "dataset_size": dataset_size,
                    "steps_per_epoch": steps_per_epoch}  # fmt: skip
        for name, number in positive.items():
            if number is not None and number <= 0:
                raise ValueError(f"LinearScaling: {name} is {number}; it has to be above 0")
        for name, length in (("warmup_epochs", warmup_epochs), ("rewarm_steps", rewarm_steps)):
            if not length >= 0:
                raise ValueError(f"LinearScaling: {name} is {length}; it has to be 0 or more")
        if scaling not in _SCALINGS:
            raise ValueError(f"LinearScaling: scaling is {scaling!r}; it has to be one of {', '.join(_SCALINGS)}")
        if after_by not in ("epoch", "step"):
            raise ValueError(f"LinearScaling: after_by is {after_by!r}; it has to be epoch or step")
        self.batch_per_rank, self.base_batch = batch_per_rank, base_batch
        self.dataset_size, self.steps_per_epoch = dataset_size, steps_per_epoch
        self.warmup_epochs, self.rewarm_steps, self.scaling = warmup_epochs, rewarm_steps, scaling
        self.after, self.after_by = after, after_by
        self.optimizer = optimizer  # torch does so too, but the next lines need it already
        self._ranks = 1  # as it was known last
        self._batch = self._current_batch()
        self._ramp = (0, self._target(), 0)  # step at which the scale begins to move, from where, within how many steps
        self._epochs = (0, 0.0)  # a step, and the epochs that had been done by then
        super().__init__(optimizer, last_epoch)

    @property
    def effective_batch(self) -> int:
        """Samples in a step of all ranks, as of the last `step`."""
        return self._batch

    @property
    def scale(self) -> float:
        """Factor of the rates after the warm-up."""
        begin, start, steps = self._ramp
        done = self.last_epoch - begin
        return self._target() if done >= steps else start + (self._target() - start) * done / steps

    @property
    def epochs_done(self) -> float:
        """Epochs that are done, with fractions."""
        step, epochs = self._epochs
        return epochs + (self.last_epoch - step) / self._steps_in_epoch()

    def get_lr(self) -> list[float | torch.Tensor]:
        """Returns the groups' rates for the next step. It is called by `step`."""
        self._follow()
        epochs, scale = self.epochs_done, self.scale
        if epochs < self.warmup_epochs:
            factor = 1.0 + (scale - 1.0) * epochs / self.warmup_epochs
        elif self.after is None:
            factor = scale
        else:
            factor = scale * self.after(epochs if self.after_by == "epoch" else self.last_epoch)
        return [float(rate) * factor for rate in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Returns the progress of training. The scheduler's arguments are not in it, so that a job with another batch
        can resume from it: it moves to its own rates within `rewarm_steps`."""
        return {name: self.__dict__[name] for name in _SAVED}

    def _follow(self) -> None:
        """Notes a change of the batch."""
        batch = self._current_batch()
        if batch == self._batch:
            return
        self.last_epoch -= 1  # the step that was just taken is the first with the new batch
        self._epochs = (self.last_epoch, self.epochs_done)
        self._ramp = (self.last_epoch, self.scale, self.rewarm_steps)
        self._batch = batch
        self.last_epoch += 1

    def _current_batch(self) -> int:
        if runtime.is_initialized():  # between leaving and coming back, the last number counts
            self._ranks = runtime.size()
        passes: int = getattr(self.optimizer, "backward_passes_per_step", 1)
        return self.batch_per_rank * self._ranks * passes

    def _target(self) -> float:
        return _SCALINGS[self.scaling](self._batch / self.base_batch)

    def _steps_in_epoch(self) -> int:
        if self.steps_per_epoch is not None:
            return self.steps_per_epoch
        assert self.dataset_size is not None
        return math.ceil(self.dataset_size / self._batch)
