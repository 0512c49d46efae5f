"""How a distributed optimizer is made of the script's: what all kinds of it have in common.

It is an instance of a class made for it, which derives from the script's, so that `isinstance`, LR schedulers and
`state_dict` see what they know. It shares the original's state and parameter groups.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fusion_rt.torch.sync.feedback import KEY
from fusion_rt.torch.sync.manner import Manner
from fusion_rt.torch.sync.parameters import Trained
from fusion_rt.torch.sync.synchroniser import GradientExchange, OptimizerStatistics
from fusion_rt.trace_format import Kind


class Wrapped(torch.optim.Optimizer):
    """What is put in front of the script's optimizer class. Instances come from `wrap` only.

    Attributes:
        backward_passes_per_step: backward passes whose gradients are accumulated before they are reduced.
    """

    _script_class: type[torch.optim.Optimizer]
    _script_optimizer: torch.optim.Optimizer
    _exchange: GradientExchange
    _parameter_names: dict[torch.Tensor, str]

    @property
    def backward_passes_per_step(self) -> int:
        return self._exchange.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Backward passes whose gradients are accumulated before they are reduced, from the next step on."""
        self._exchange.set_passes(checked_passes(passes))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the script's optimizer's. If the last `backward()` has failed, no rank takes this step: on the others,
        `backward()` raises `HorovodInternalError`, which names this rank and its exception.

        Raises:
            AssertionError: gradients are being reduced.
            HorovodInternalError: the job has failed.
        """
        self._exchange.zeroed()
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As the script's optimizer's. With a codec that remembers what it has not sent, this node's memory is under
        "fusion_rt", so that a checkpoint of each node (of one of its ranks) has to be kept."""
        state = self.plain_state_dict()
        remembered = self._exchange.memory.codec_state()
        return state if remembered is None else {**state, KEY: remembered}

    def plain_state_dict(self) -> dict[str, Any]:
        """The `state_dict` of the script's optimizer."""
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the script's optimizer's; gradients that have arrived since the last step are forgotten."""
        self._exchange.discard()
        super().load_state_dict({key: value for key, value in state_dict.items() if key != KEY})
        if KEY in state_dict:
            self._exchange.memory.load_codec_state(state_dict[KEY])

    def reseed(self) -> None:
        """Goes on from the parameters as the script has set them, the same on all ranks. That needs no telling where
        every rank steps from its own, and so does nothing here."""

    def statistics(self) -> OptimizerStatistics:
        """What the communication of this optimizer has cost so far."""
        return self._exchange.statistics()

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The script's optimizer's step."""
        # A scheduler made for the original asks this of it, and would warn that it was never stepped.
        self._script_optimizer._opt_called = True  # type: ignore[attr-defined]
        steps = self._exchange.steps
        steps.trace.record(Kind.APPLY_BEGIN, "", 0, steps.number)
        result = super().step(closure) if closure is not None else super().step()
        steps.trace.record(Kind.APPLY_END, "", 0, steps.number)
        return result

    def __reduce__(self) -> Any:
        """What is pickled or copied is the script's optimizer, with its state: a connection cannot be, and the copy's
        parameters are others. Wrap it again."""
        return _new, (self._script_class,), self.__getstate__()


WrappedT = TypeVar("WrappedT", bound=Wrapped)


def wrap(
    kind: type[WrappedT],
    optimizer: torch.optim.Optimizer,
    names: dict[torch.Tensor, str],
    together: dict[torch.Tensor, int],
    manner: Manner,
    passes: int,
) -> WrappedT:
    """The optimizer, made distributed.

    Args:
        kind: what is put in front of its class.
        optimizer: the script's.
        names: of its parameters.
        together: numbers of the groups of those that are reduced together.
        manner: how gradients are reduced.
        passes: backward passes that make up a gradient.
    """
    script_class = type(optimizer)
    space = {"__module__": "fusion_rt.torch.optimizer", "_script_class": script_class}
    made = type(script_class.__name__, (kind, script_class), space)
    wrapped: Any = object.__new__(made)
    # Not by __init__, whose arguments only the script knows; the state, which may have been loaded, is taken over, too.
    wrapped.__dict__.update(optimizer.__dict__)
    wrapped.__dict__.pop("step", None)  # an LR scheduler puts a wrapper there, bound to the original
    wrapped._script_optimizer, wrapped._parameter_names = optimizer, names
    trained = Trained(weakref.ref(wrapped), together, manner.process_set)
    wrapped._exchange = (manner.exchange or GradientExchange)(manner, checked_passes(passes), trained)
    weakref.finalize(wrapped, wrapped._exchange.release).atexit = False
    return wrapped  # type: ignore[no-any-return]


def _new(script_class: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    return script_class.__new__(script_class)


def checked_passes(passes: int) -> int:
    """Raises `ValueError` unless it is a positive number."""
    if passes <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    return passes
