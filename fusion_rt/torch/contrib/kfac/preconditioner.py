"""`KFAC`: the steps, from the hooks in the model to the gradients in their place."""

from __future__ import annotations

import math
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from fusion_rt.torch.contrib.kfac.assignment import assign, decomposition_cost
from fusion_rt.torch.contrib.kfac.factors import FactorExchange, LayerState
from fusion_rt.torch.contrib.kfac.layers import find_layers
from fusion_rt.torch.core.process_sets import ProcessSet, global_process_set, takes_part
from fusion_rt.torch.core.runtime import runtime
from fusion_rt.torch.ops.broadcast import broadcast_async_
from fusion_rt.torch.ops.handles import synchronize

Number: TypeAlias = float | Callable[[], float]

_SAVED_OPTIONS = ("lr", "damping", "factor_decay", "kl_clip", "factor_update_steps", "inverse_update_steps")


@dataclass(frozen=True)
class KFACStatistics:
    """Work of a preconditioner on this rank so far.

    Attributes:
        steps: how often gradients were preconditioned.
        factor_updates: how often factors were averaged over the ranks.
        inverse_updates: how often they were decomposed.
        decompositions: how many layers this rank has decomposed, all times together.
        factor_nbytes: bytes of factors that an update sends.
        waited_seconds: time for which factors and decompositions of other ranks kept the script waiting.
    """

    steps: int
    factor_updates: int
    inverse_updates: int
    decompositions: int
    factor_nbytes: int
    waited_seconds: float


class KFAC:
    """Preconditions the gradients of a model's `Linear` and `Conv2d` layers by K-FAC, on one rank or many.

    To be made on all ranks alike, before the first backward pass; `step()` is for between `synchronize()` and `step()`
    of a distributed optimizer, or before `step()` of a plain one. Factors are those of the empirical Fisher matrix: of
    the gradients that the script computes in training mode. Losses are means over the batch. A layer that runs several
    times before a step (it is used twice, or gradients are accumulated) counts each time as one more batch; if it runs
    more often than in the update before, what is too many is left out once.

    In an elastic job, ranks that come need the others' state: `kfac.load_state_dict(hvd.broadcast_object(
    kfac.state_dict(), 0))` on all ranks after a reset. After a step that failed, the next one decomposes the factors
    anew.

    Args:
        model: its layers get hooks; `remove` takes them off. Other modules' gradients stay as they are, with a warning.
        lr: the optimizer's learning rate, which only the KL clip needs: a number, which the script may change
            (`kfac.lr = ...`), or a function that tells it.
        damping: λ, added to the products of eigenvalues; a number, or a function that tells it.
        factor_decay: weight of what was there before in the running averages; smaller in the first updates.
        kl_clip: κ; preconditioned gradients P are multiplied by min(1, sqrt(κ / |Σ lr² G·P|)). None: they are not.
        factor_update_steps: factors are computed in every so many-th step.
        inverse_update_steps: they are decomposed in every so many-th step; in between the last decomposition is used.
        loss_scale: factor of losses before `backward()`: a number, or a function that returns it, such as
            `GradScaler.get_scale`; gradients must have been unscaled by `step()`. 1 / N for losses that are divided by
            N for accumulation. Updates with values that are not finite are dropped.
        skip_layers: names of modules (with all that is in them) and of classes that are left alone without a warning.
        name: the beginning of the names of the operations. Two preconditioners of a script need different ones.
        process_set: the ranks that take part; others work by themselves.

    Attributes:
        lr, damping, factor_decay, kl_clip, factor_update_steps, inverse_update_steps, loss_scale: as they were given;
            may be changed, on all ranks alike.

    Raises:
        ValueError: an argument is out of its range, the model has nothing to precondition, or layers without a shape.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        lr: Number = 0.1,
        damping: Number = 0.001,
        factor_decay: float = 0.95,
        kl_clip: float | None = 0.001,
        factor_update_steps: int = 1,
        inverse_update_steps: int = 1,
        loss_scale: Number = 1.0,
        skip_layers: Iterable[str] = (),
        name: str = "kfac",
        process_set: ProcessSet = global_process_set,
    ) -> None:
        _check(lr, damping, factor_decay, kl_clip, factor_update_steps, inverse_update_steps)
        self.lr, self.damping, self.factor_decay, self.kl_clip = lr, damping, factor_decay, kl_clip
        self.factor_update_steps, self.inverse_update_steps = factor_update_steps, inverse_update_steps
        self.loss_scale = loss_scale
        layers, left_alone = find_layers(model, (skip_layers,) if isinstance(skip_layers, str) else skip_layers)
        if not layers:
            why = "; ".join(left_alone) or "nothing in it is trained, or all is in skip_layers"
            raise ValueError(f"K-FAC preconditions Linear and Conv2d layers, and the model has none that it can: {why}")
        if left_alone:
            warnings.warn(f"K-FAC leaves the gradients of these layers as they are: {'; '.join(left_alone)}. Name "
                          "them, or their classes, in skip_layers if that is meant.", stacklevel=2)  # fmt: skip
        self._name = name
        self._process_set = process_set
        self._states = {layer.module: LayerState(layer) for layer in layers}
        self._decompositions: dict[LayerState, _Decomposition] = {}
        self._exchange = FactorExchange(list(self._states.values()), name, process_set)
        self._steps = self._inverse_updates = self._decomposed = 0
        self._waited = 0.0
        self._never_ran_told = False
        hook = _Hook(self)
        self._hooks = [module.register_forward_hook(hook, with_kwargs=True) for module in self._states]

    @torch.no_grad()
    def step(self) -> None:
        """Preconditions the gradients in place. They have to be the same on all ranks, which call this together.

        A layer stays as it is while it has no gradient, or has not been decomposed yet.

        Raises:
            RuntimeError: after `remove`.
            HorovodInternalError: communication failed, on all ranks.
        """
        if not self._hooks:
            raise RuntimeError("KFAC.step() after remove(); make a new KFAC for the model")
        try:
            if self._steps % self.factor_update_steps == 0:
                self._exchange.flush(self.factor_decay)
            if self._steps % self.inverse_update_steps == 0 or not self._decompositions:
                self._exchange.settle(self.factor_decay)
                self._decompose()
            self._precondition()
        except BaseException:
            self._forget()
            raise
        self._steps += 1

    def owners(self) -> dict[str, int]:
        """Returns the rank that decomposes each layer, by the layer's name, with work about equal (see `assign`)."""
        costs = {
            state.layer.name: float(decomposition_cost((state.layer.a_size, state.layer.g_size)))
            for state in self._states.values()
        }
        return assign(costs, self._process_set.ranks if takes_part(self._process_set) else [0])

    def statistics(self) -> KFACStatistics:
        """Returns the work done so far."""
        exchange = self._exchange
        return KFACStatistics(
            self._steps,
            exchange.updates,
            self._inverse_updates,
            self._decomposed,
            exchange.nbytes,
            self._waited + exchange.waited_seconds,
        )

    def remove(self) -> None:
        """Takes the hooks off the model; to be called on all ranks or none. What is under way is forgotten."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._exchange.drop()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for `load_state_dict`: options that are numbers, and layers' factors and decompositions.

        To be called between steps. It waits for what all ranks have sent, and sends nothing: one rank may call it
        alone. All ranks have the same state.
        """
        self._exchange.settle(self.factor_decay)
        options = {option: getattr(self, option) for option in _SAVED_OPTIONS}
        return {
            "steps": self._steps,
            "options": {option: value for option, value in options.items() if not callable(value)},
            "layers": {state.layer.name: self._saved(state) for state in self._states.values()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from a state, to be loaded on all ranks; training continues as if it had not been interrupted.

        Raises:
            ValueError: it is the state of another model; nothing has been changed then.
        """
        saved = state_dict["layers"]
        names = [state.layer.name for state in self._states.values()]
        if sorted(saved) != sorted(names):
            raise ValueError(
                f"the state is of a model with the layers {sorted(saved)}, and this one has {sorted(names)}"
            )
        for state in self._states.values():
            _check_saved(state, saved[state.layer.name])
        self._exchange.drop()
        self._steps = state_dict["steps"]
        for option, value in state_dict["options"].items():
            if not callable(getattr(self, option)):
                setattr(self, option, value)
        self._decompositions = {}
        for state in self._states.values():
            self._load(state, saved[state.layer.name])

    def _ran(self, module: torch.nn.Module, inputs: torch.Tensor, output: torch.Tensor) -> None:
        """Registers a hook on the output of a layer that has run forward, for the output's gradient."""
        state = self._states.get(module)
        if state is None or not module.training or not output.requires_grad:
            return
        if self._steps % self.factor_update_steps:
            return
        reference, step, seen = weakref.ref(self), self._steps, inputs.detach()

        def arrived(gradient: torch.Tensor) -> None:
            kfac = reference()
            if kfac is not None and kfac._hooks and kfac._steps == step:
                kfac._arrived(state, seen, gradient)

        output.register_hook(arrived)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _arrived(self, state: LayerState, inputs: torch.Tensor, gradient: torch.Tensor) -> None:
        scale = _value(self.loss_scale)
        self._exchange.arrived(state, lambda: state.layer.factors(inputs, gradient, scale), self.factor_decay)

    def _decompose(self) -> None:
        """Decomposes the factors that have changed, each on its owner, and begins to send the results to all."""
        fresh = [state for state in self._states.values() if state.fresh]
        together = takes_part(self._process_set)
        owners = self.owners() if together else {}
        if together:
            own = runtime().rank
            for state in fresh:  # before any work: what the others have done may come while this rank decomposes
                if owners[state.layer.name] != own:
                    self._send(state, torch.empty(_packed_size(state), **_like(state)), owners[state.layer.name])
        for state in fresh:
            state.fresh = False
            if not together:
                self._decompositions[state] = _Decomposition(state, _decomposed(state), None)
            elif owners[state.layer.name] == own:
                self._send(state, _decomposed(state), own)
            else:
                continue
            self._decomposed += 1
        self._inverse_updates += bool(fresh)
        never = [state.layer.name for state in self._states.values() if not state.updates]
        if fresh and never and not self._never_ran_told:
            self._never_ran_told = True
            warnings.warn("K-FAC has not seen these layers run forward and backward in training mode, and leaves their "
                          f"gradients as they are until it does: {', '.join(never)}", stacklevel=4)  # fmt: skip

    def _forget(self) -> None:
        """Forgets all decompositions after a failure, so that the next step makes them anew."""
        self._exchange.drop()
        self._decompositions = {}
        for state in self._states.values():
            state.fresh = state.updates > 0

    def _send(self, state: LayerState, packed: torch.Tensor, owner: int) -> None:
        name = f"{self._name}.{state.layer.name}"
        handle = broadcast_async_(packed, owner, name, self._process_set)
        self._decompositions[state] = _Decomposition(state, packed, handle)

    def _precondition(self) -> None:
        damping, lr = float(_value(self.damping)), float(_value(self.lr))
        results = []
        products = []
        for state in self._states.values():
            gradient, decomposition = state.layer.gradient(), self._decompositions.get(state)
            if decomposition is None:
                continue
            started = time.perf_counter()
            decomposition.wait()
            self._waited += time.perf_counter() - started
            if gradient is None:
                continue
            preconditioned = decomposition.apply(gradient, damping)
            results.append((state, preconditioned))
            products.append((gradient * preconditioned).sum())
        factor = 1.0
        if self.kl_clip is not None and products:
            total = abs(lr**2 * sum(product.item() for product in products))
            factor = min(1.0, math.sqrt(self.kl_clip / total)) if total else 1.0
        for state, preconditioned in results:
            state.layer.assign(preconditioned.mul_(factor))

    def _saved(self, state: LayerState) -> dict[str, Any]:
        decomposition = self._decompositions.get(state)
        return {
            "updates": state.updates,
            "runs": state.expected_runs,
            "fresh": state.fresh,
            "a": None if state.a is None else state.a.clone(),
            "g": None if state.g is None else state.g.clone(),
            "decomposition": None if decomposition is None else decomposition.packed.clone(),
        }

    def _load(self, state: LayerState, saved: Mapping[str, Any]) -> None:
        like = _like(state)
        state.updates, state.expected_runs, state.fresh = saved["updates"], saved["runs"], saved["fresh"]
        state.a, state.g = (None if saved[key] is None else saved[key].to(**like, copy=True) for key in ("a", "g"))
        if saved["decomposition"] is not None:
            packed = saved["decomposition"].to(**like, copy=True)
            self._decompositions[state] = _Decomposition(state, packed, None)


class _Hook:
    """Forward hook of the layers. Copies of the model, and pickled ones, have hooks that do nothing."""

    def __init__(self, kfac: KFAC | None = None) -> None:
        self._kfac = None if kfac is None else weakref.ref(kfac)

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        kfac = None if self._kfac is None else self._kfac()
        if kfac is not None:
            kfac._ran(module, args[0] if args else kwargs["input"], output)

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return (_Hook, ())


class _Decomposition:
    """A layer's factors as Q diag(λ) Q^T.

    Args:
        state: the layer.
        packed: Q_A, λ_A, Q_G and λ_G, one after the other.
        handle: of the operation that fills it in; None if it is complete.
    """

    def __init__(self, state: LayerState, packed: torch.Tensor, handle: int | None) -> None:
        self.packed = packed
        self._handle = handle
        self._sizes = (state.layer.a_size, state.layer.g_size)

    def wait(self) -> None:
        """Waits until it is there. Raises `HorovodInternalError` if it failed, on all ranks."""
        handle, self._handle = self._handle, None
        if handle is not None:
            synchronize(handle)

    def apply(self, gradient: torch.Tensor, damping: float) -> torch.Tensor:
        """Returns Q_G [(Q_G^T gradient Q_A) / (λ_G λ_A^T + damping)] Q_A^T; gradient is [g_size, a_size]."""
        n_a, n_g = self._sizes
        q_a, l_a, q_g, l_g = torch.split(self.packed, [n_a * n_a, n_a, n_g * n_g, n_g])
        q_a, q_g = q_a.view(n_a, n_a), q_g.view(n_g, n_g)
        with torch.autocast(gradient.device.type, enabled=False):
            rotated: torch.Tensor = q_g.T @ gradient @ q_a
            rotated /= torch.outer(l_g, l_a).add_(damping)
            preconditioned: torch.Tensor = q_g @ rotated @ q_a.T
        return preconditioned


def _decomposed(state: LayerState) -> torch.Tensor:
    """Decomposes a layer's factors, packed for `_Decomposition`. Negative eigenvalues, due to rounding, become 0."""
    parts = []
    for factor in (state.a, state.g):
        assert factor is not None
        try:
            values, vectors = torch.linalg.eigh(factor)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # single precision may not do where eigenvalues are close together
            values, vectors = torch.linalg.eigh(factor.to("cpu", torch.float64))
        parts += [vectors.reshape(-1), values.clamp_(min=0)]
    return torch.cat([part.to(**_like(state)) for part in parts])


def _packed_size(state: LayerState) -> int:
    return sum(size * (size + 1) for size in (state.layer.a_size, state.layer.g_size))


def _like(state: LayerState) -> dict[str, Any]:
    return {"dtype": state.layer.dtype, "device": state.layer.weight.device}


def _value(number: Number) -> float:
    return number() if callable(number) else number


def _check_saved(state: LayerState, saved: Mapping[str, Any]) -> None:
    """Raises `ValueError` unless the sizes are those of the layer."""
    layer = state.layer
    for key, shape in (
        ("a", (layer.a_size, layer.a_size)),
        ("g", (layer.g_size, layer.g_size)),
        ("decomposition", (_packed_size(state),)),
    ):
        if saved[key] is not None and tuple(saved[key].shape) != shape:
            found = tuple(saved[key].shape)
            raise ValueError(f"the state of layer {layer.name!r} has {key!r} of shape {found}, and the layer needs "
                             f"{shape}; it is the state of another model")  # fmt: skip


def _check(
    lr: Number, damping: Number, factor_decay: float, kl_clip: float | None, factor_steps: int, inverse_steps: int
) -> None:
    """Raises `ValueError` for options that are out of their range."""
    if not callable(lr) and lr < 0:
        raise ValueError(f"lr is the optimizer's learning rate, and cannot be negative: {lr}")
    if not callable(damping) and damping <= 0:
        raise ValueError(f"damping has to be positive, since factors may be singular: {damping}")
    if not 0 <= factor_decay < 1:
        raise ValueError(f"factor_decay has to be in [0, 1): {factor_decay}")
    if kl_clip is not None and kl_clip <= 0:
        raise ValueError(f"kl_clip has to be positive, or None for none: {kl_clip}")
    for option, steps in (("factor_update_steps", factor_steps), ("inverse_update_steps", inverse_steps)):
        if steps < 1:
            raise ValueError(f"{option} has to be 1 or more: {steps}")
