"""A distributed optimizer, made from the script's.

It is an instance of a class made for it, which derives from the script's, so that `isinstance`, LR schedulers and
`state_dict` see the class that they know. It shares the original's state and parameter groups. Its
synchroniser talks to the other ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from fusion_rt.torch.core.process_sets import ProcessSet
from fusion_rt.torch.sync.checkpoint import KEY
from fusion_rt.torch.sync.options import Options
from fusion_rt.torch.sync.parameters import Trained, TrainedShards, are_shards
from fusion_rt.torch.sync.scales.conversion import checked_scale
from fusion_rt.torch.sync.step_schedule import Schedule
from fusion_rt.torch.sync.synchroniser import OptimizerStatistics, Synchroniser
from fusion_rt.tracing.format import Kind

_OWN = "fusion_rt_local"
"""Key in a `state_dict`: the steps taken, and an outer optimizer, where ranks take local steps."""
_SCALED = "_step_supports_amp_scaling"
_APPLY_BEGIN, _APPLY_END = int(Kind.APPLY_BEGIN), int(Kind.APPLY_END)


class Wrapped(torch.optim.Optimizer):
    """Mixin in front of the script's optimizer class. Instances come from `wrap` only.

    Attributes:
        op, gradient_predivide_factor, sparse_as_dense, process_set: as they were given.
        backward_passes_per_step: backward passes whose gradients are accumulated before they are reduced.
        samples: how many samples this rank's next gradients come from, for algorithms that weigh them.
        loss_scale: by which the script multiplies its loss itself, the same on all ranks, so that codecs remember
            gradients without it; None, the default: as a `GradScaler` does. Gradients that leave at `step()` count as
            unscaled by then.
    """

    op: Any = None
    gradient_predivide_factor = 1.0
    sparse_as_dense = False
    process_set: ProcessSet
    _script_class: type[torch.optim.Optimizer]
    _script_optimizer: torch.optim.Optimizer
    _schedule: Schedule
    _sync: Synchroniser  # the schedule's
    _released: Any  # the finalizer
    _parameter_names: dict[torch.Tensor, str]

    # --- steps --------------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes a step: the script's optimizer's, or that of the algorithm, together with the other ranks.

        Raises:
            HorovodInternalError: an exchange failed, on all ranks.
            ValueError: the script has made a change since the last step that cannot be followed; the text says which.
        """
        result = self._schedule.step(self, closure)
        if self._sync.after_step is not None:
            self._sync.after_step()
        return result

    step.hooked = True  # type: ignore[attr-defined]  # torch wraps the script's class's step with its hooks already

    def synchronize(self) -> None:
        """Sees to it that every `p.grad` is reduced, which it is after `backward()`: that leaves backward passes that
        `backward_passes_per_step` still waits for, and ranks without one, whose gradients count as zeros. Does nothing
        where gradients are this rank's own until `step()`, and may be clipped at any time before.

        Raises:
            HorovodInternalError: a reduction failed, on all ranks.
        """
        self._schedule.synchronize()

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Inside this context `step` does not call `synchronize`, as scripts for Horovod have it::

        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        """
        return self._schedule.skip_synchronize()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Resets gradients as the script's optimizer does, by its arguments and their defaults. If the last
        `backward()` has failed, no rank takes this step: on the others, `backward()` raises `HorovodInternalError`,
        which names this rank and its exception.

        Raises:
            AssertionError: gradients are being reduced.
            HorovodInternalError: the job has failed.
        """
        self._schedule.zeroed()
        super().zero_grad(*args, **kwargs)

    def reseed(self) -> None:
        """Goes on from the parameters as they are now, which have to be the same on all ranks: after the script has set
        them between steps (`load_state_dict`, pruning), and `hvd.broadcast_parameters`. To be called on all ranks.

        The script's optimizer's state stays. All else of earlier weights is forgotten: exchanges under way, residuals
        of codecs, contributions that homes still collect, their copies of each rank's parameters, and outer momentum.

        Raises:
            HorovodInternalError: it failed.
            ValueError: an update still waits, with `overlap`, and the script has set one of its parameters.
        """
        self._schedule.reseed()

    def drain(self) -> None:
        """Takes the answers to posts under way. Raises `ValueError` if the script has set a parameter since."""
        self._schedule.drain()

    @property
    def backward_passes_per_step(self) -> int:
        return self._schedule.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets how many backward passes are accumulated before gradients are reduced, from the next step on."""
        self._schedule.set_passes(checked_passes(passes))

    @property
    def samples(self) -> int:
        return self._schedule.samples

    @samples.setter
    def samples(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"gradients come from at least one sample, not {count}")
        self._schedule.samples = count

    @property
    def loss_scale(self) -> float | None:
        return self._sync.checkpoint.units.said

    @loss_scale.setter
    def loss_scale(self, scale: float | None) -> None:
        self._sync.checkpoint.units.said = checked_scale(scale)

    def statistics(self) -> OptimizerStatistics:
        """Returns the cost of this optimizer's communication so far."""
        return self._sync.statistics()

    # --- in checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the script's optimizer's state. With a codec that has a residual, this node's memory
        is under "fusion_rt", so that a checkpoint of each node (of one of its ranks) has to be kept. Where ranks take
        local steps, their number is there too; what is under way is waited for and taken, so save the model after
        this."""
        own = self.own_state()
        state = self.plain_state_dict()
        remembered = self._sync.checkpoint.codec_state()
        state |= {} if remembered is None else {KEY: remembered}
        return state if own is None else {**state, _OWN: own}

    def plain_state_dict(self) -> dict[str, Any]:
        """Returns the `state_dict` of the script's optimizer, after updates that wait."""
        self._schedule.finish()
        return super().state_dict()

    def own_state(self) -> dict[str, Any] | None:
        """Returns the number of local steps and the outer optimizer, the same on all ranks; None if there are none."""
        return self._schedule.own_state()

    def load_own_state(self, own: dict[str, Any] | None) -> None:
        """Resumes from an `own_state` and the parameters that belong to it."""
        if own is not None:
            self._schedule.load_own_state(own)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a `state_dict`; gradients that have arrived since the last step are forgotten."""
        self._schedule.finish_or_drop()
        self._schedule.discard()
        super().load_state_dict({key: value for key, value in state_dict.items() if key not in (KEY, _OWN)})
        if KEY in state_dict:
            self._sync.checkpoint.load_codec_state(state_dict[KEY])
            self._schedule.homes_are_loaded()
        self.load_own_state(state_dict.get(_OWN))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes a state that is loaded, together with the script's optimizer: schedulers that were made for that one
        change its groups, which torch would replace in this one alone."""
        groups = self.param_groups
        super().__setstate__(state)
        for group, loaded in zip(groups, state["param_groups"], strict=True):
            if group is not loaded:
                group.clear()
                group.update(loaded)
        # Into __dict__: a class may have these as properties, of an optimizer inside.
        self.__dict__["param_groups"], self._script_optimizer.__dict__["state"] = groups, self.state

    def __reduce__(self) -> Any:
        """Pickles or copies the script's optimizer, with its state, without the connection. The copy, whose parameters
        are others, has to be wrapped again."""
        self._schedule.finish()
        return _new, (self._script_class,), self.__getstate__()

    # --- for the schedule ---------------------------------------------------------------------------------------------

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes the script's optimizer's step, and records it."""
        self._note_step()
        steps = self._sync.steps
        steps.trace.record(_APPLY_BEGIN, "", 0, steps.number)
        result = super().step(closure) if closure is not None else super().step()
        steps.trace.record(_APPLY_END, "", 0, steps.number)
        return result

    def _note_step(self) -> None:
        """Marks the original as stepped: a scheduler made for it would warn that it never was."""
        self._script_optimizer._opt_called = True  # type: ignore[attr-defined]

    def _overflowed(self) -> bool:
        """Tells whether a `GradScaler`, which calls `step()`, found that gradients are not finite. Unscales them if it
        has left that to the optimizer."""
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is not None:
            self._unscale(scale)
        if found is not None:
            self.grad_scale = self.found_inf = None  # the script's optimizer has nothing to do with them
        return bool(found)

    def _unscale(self, scale: torch.Tensor) -> None:
        inverse = scale.double().reciprocal().float()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(inverse.to(parameter.grad.device))


def wrap(
    optimizer: torch.optim.Optimizer,
    names: dict[torch.Tensor, str],
    together: dict[torch.Tensor, int],
    options: Options,
    kind: type[Schedule],
    passes: int,
) -> Any:
    """Makes an optimizer distributed.

    Args:
        optimizer: the script's.
        names: of its parameters.
        together: numbers of the groups of those that are reduced together.
        options: how its parameters are exchanged.
        kind: of schedule.
        passes: backward passes that make up a gradient.
    """
    script_class = type(optimizer)
    space = {"__module__": "fusion_rt.torch.optimizer", "_script_class": script_class}
    made = type(script_class.__name__, (Wrapped, script_class), space)
    wrapped: Any = object.__new__(made)
    # Not by __init__, whose arguments only the script knows; the state, which may have been loaded, is taken over, too.
    wrapped.__dict__.update(optimizer.__dict__)
    wrapped.__dict__.pop("step", None)  # an LR scheduler puts a wrapper there, bound to the original
    wrapped._script_optimizer, wrapped._parameter_names = optimizer, names
    trained = (TrainedShards if are_shards(optimizer) else Trained)(weakref.ref(wrapped), together, options.process_set)
    _follow(wrapped, kind(options, trained, passes))
    return wrapped


def rewrap(wrapped: Any, options: Options, kind: type[Schedule]) -> None:
    """Has a distributed optimizer exchange otherwise from the next step on. To be called on all ranks, between steps,
    when nothing is under way.

    Args:
        options, kind: as those of `wrap`.
    """
    before: Schedule = wrapped._schedule
    wrapped._released.detach()
    for slot in before.sync.slots:
        gradient = slot.parameter.grad
        if gradient is not None and not gradient.is_sparse:
            slot.parameter.grad = gradient.clone()  # the arena's memory is another optimizer's soon
    before.release()
    _follow(wrapped, kind(options, before.sync.trained, before.passes))
    wrapped._schedule.samples = before.samples
    wrapped.loss_scale = before.sync.checkpoint.units.said


def _follow(wrapped: Any, schedule: Schedule) -> None:
    wrapped._schedule, wrapped._sync = schedule, schedule.sync
    scaled = vars(wrapped._script_optimizer).get(_SCALED, False)  # torch's fused optimizers have it
    setattr(wrapped, _SCALED, scaled or schedule.own_gradients)
    if schedule.delays or hasattr(wrapped, "synchronize_parameters"):
        wrapped.synchronize_parameters = schedule.finish
    wrapped._released = weakref.finalize(wrapped, schedule.release)
    wrapped._released.atexit = False


def checked_passes(passes: int) -> int:
    """Raises `ValueError` unless it is a positive number."""
    if passes <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    return passes


def _new(script_class: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    return script_class.__new__(script_class)
