"""`DistributedOptimizer`: the script's optimizer, with gradients reduced over all ranks before each step.

The wrapped optimizer is an instance of a class made for it, which derives from the script's, so that `isinstance`, LR
schedulers and `state_dict` see what they know. It shares the original's state and parameter groups. What gradients go
through is in `buckets.py`; here is when they do.

A step may be taken in several ways, and gradients are reduced once in each: `step()`; `synchronize()`, something that
looks at the gradients, and `step()` under `skip_synchronize()`; `step(closure)`; and `GradScaler.step`. The last one
unscales gradients before it calls `step()`, and nothing tells the optimizer, except that it reads `param_groups` to
find them. Hence that is a property here: whoever reads it while gradients are complete but not reduced has them
reduced first. (One who is not interested in gradients, and logs the learning rate between `backward()` and `step()`,
say, has the reduction done a little early.) Rejected: patching `GradScaler`, which other libraries subclass, and
`_step_supports_amp_scaling`, whose contract has changed twice.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fusion_rt import wire
from fusion_rt.torch import ops
from fusion_rt.torch.basics import ProcessSet, global_process_set, runtime
from fusion_rt.torch.buckets import GradientExchange, OptimizerStatistics
from fusion_rt.torch.compression import Compression, NoneCompressor, codec_of

_SYNCHRONIZED_TWICE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can "
    "cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if you use "
    "optimizer.synchronize() in your code."
)
_ZEROED_EARLY = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
    "This is prohibited as it can cause a race condition."
)


class _Distributed(torch.optim.Optimizer):
    """What is put in front of the script's optimizer class. Instances come from `DistributedOptimizer` only."""

    _exchange: GradientExchange
    _how: tuple[wire.Op, float, float]  # op, prescale, postscale
    _names: dict[int, str]  # by id of the parameter
    _skipping = False  # inside skip_synchronize()
    _synchronized = False  # synchronize() was called, and no step() since
    _reduced_early = False  # gradients were reduced because somebody read param_groups, and no step() since

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups. Gradients that are complete are reduced first: whoever reads this may change them."""
        exchange = self.__dict__.get("_exchange")
        if exchange is not None and exchange.complete() and not _in_backward():
            exchange.synchronize()
            self._reduced_early = True
        groups: list[dict[str, Any]] = self.__dict__["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    def synchronize(self) -> None:
        """Reduces the gradients and waits for it: afterwards every `p.grad` is the same on all ranks.

        A parameter that took no part in the backward passes contributes zeros. To be used with `skip_synchronize`.

        Raises:
            HorovodInternalError: a reduction failed, on all ranks.
        """
        self._exchange.synchronize()
        self._synchronized = True
        self._reduced_early = False

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside this context `step` does not reduce gradients::

        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        """
        self._skipping = True
        try:
            yield
        finally:
            self._skipping = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduces the gradients, unless that has been done, and takes the script's optimizer's step.

        With a closure, gradients are reduced after each of its evaluations, and the loss that it returns is reduced as
        they are: an optimizer that decides by the loss (L-BFGS) has to decide the same on all ranks.

        Raises:
            HorovodInternalError: a reduction failed, on all ranks.
        """
        if not self._skipping:
            if self._synchronized:
                warnings.warn(_SYNCHRONIZED_TWICE, stacklevel=2)
            if closure is None:
                if not (self._reduced_early and self._exchange.idle):
                    self.synchronize()
            else:
                if not self._exchange.idle:
                    self.synchronize()
                closure = self._reducing(closure)
        self._synchronized = self._reduced_early = False
        return super().step(closure) if closure is not None else super().step()

    step.hooked = True  # type: ignore[attr-defined]  # torch wraps the script's class's step with its hooks already

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the script's optimizer's. Raises `AssertionError` when gradients have arrived that were not reduced."""
        if not self._exchange.idle:
            raise AssertionError(_ZEROED_EARLY)
        self._reduced_early = False
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the script's optimizer's; gradients that have arrived since the last step are forgotten."""
        self._exchange.discard()
        self._synchronized = self._reduced_early = False
        super().load_state_dict(state_dict)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Backward passes whose gradients are accumulated before they are reduced, from the next step on."""
        self._exchange.set_passes(_checked_passes(passes))

    def statistics(self) -> OptimizerStatistics:
        """What the communication of this optimizer has cost so far."""
        return self._exchange.statistics()

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def reduced() -> Any:
            loss = closure()
            self._exchange.synchronize()
            return self._reduced_loss(loss)

        return reduced

    def _reduced_loss(self, loss: Any) -> Any:
        op, prescale, postscale = self._how
        if isinstance(loss, torch.Tensor):
            return ops.allreduce(loss.detach(), op=op, prescale_factor=prescale, postscale_factor=postscale)
        if isinstance(loss, float):
            return float(self._reduced_loss(torch.tensor(loss, dtype=torch.float64)))
        return loss


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: wire.Op = ops.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The optimizer, made to reduce gradients over all ranks before it takes a step.

    Reduction starts during the backward pass, as gradients arrive, in buckets that are agreed upon in the first step.
    From then on gradients lie in shared memory (`p.grad` is a view of it). Optimizers have to be made in the same order
    on all ranks. A parameter belongs to the distributed optimizer that was made for it last.

    Args:
        optimizer: any `torch.optim.Optimizer`. Use what this returns in its place from now on.
        named_parameters: `model.named_parameters()`; names the tensors in messages. All parameters of the optimizer
            have to be among them.
        compression: `Compression.none`, `.fp16`, `.bf16`, or a class with `compress` and `decompress`.
        backward_passes_per_step: backward passes whose gradients are accumulated locally before they are reduced.
        op: how the ranks' gradients are combined: `Average`, `Sum`, `Min`, `Max` or `Product`.
        gradient_predivide_factor: with `Average`, divides gradients by this before they are added up instead of
            dividing the sum only at the end: the result is the same, the range of values in between is not.
        num_groups, groups, sparse_as_dense: Horovod's; not supported, leave them out.
        process_set: the ranks that take part.

    Returns:
        An instance of a class derived from the optimizer's, with the methods `synchronize`, `skip_synchronize`,
        `set_backward_passes_per_step` and `statistics` besides.

    Raises:
        ValueError: before `init`, or for arguments that cannot be used.
    """
    if gradient_predivide_factor != 1.0 and op != ops.Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if groups or num_groups:
        raise ValueError("explicit groups of gradients are not supported; leave `groups` out, gradients are fused into "
                         "buckets anyway (HOROVOD_FUSION_THRESHOLD sets their size)")  # fmt: skip
    if sparse_as_dense:
        raise ValueError("sparse gradients are not supported; make the layer without sparse=True")
    if process_set is not global_process_set:
        raise ValueError("an optimizer over a part of the ranks is not supported; leave process_set out")
    if isinstance(optimizer, _Distributed):
        raise ValueError("this optimizer is a DistributedOptimizer already")
    names = _checked_names(optimizer, named_parameters)
    codec = codec_of(compression)
    here = runtime().client.welcome
    how = (ops.resolve(op), 1.0 / gradient_predivide_factor, gradient_predivide_factor)
    chosen = here.compression if compression is Compression.none else codec or "dense"
    reduction = wire.Reduction(*how, codec=chosen, algorithm=here.algorithm)

    script_class = type(optimizer)
    made = type(script_class.__name__, (_Distributed, script_class), {"__module__": _Distributed.__module__})
    wrapped: Any = object.__new__(made)
    # Not by __init__, whose arguments only the script knows; the state, which may have been loaded, is taken over, too.
    wrapped.__dict__.update(optimizer.__dict__)
    wrapped.__dict__.pop("step", None)  # an LR scheduler puts a wrapper there, bound to the original
    wrapped._how, wrapped._names = how, names
    wrapped._exchange = GradientExchange(
        reduction,
        NoneCompressor if codec is not None else compression,
        _checked_passes(backward_passes_per_step),
        _parameters_of(weakref.ref(wrapped)),
    )
    weakref.finalize(wrapped, wrapped._exchange.release).atexit = False
    return wrapped


def _parameters_of(reference: weakref.ref[Any]) -> Callable[[], list[tuple[str, torch.Tensor]]]:
    """What the exchange calls to learn what there is to reduce. It must not keep the optimizer alive."""

    def parameters() -> list[tuple[str, torch.Tensor]]:
        optimizer: Any = reference()  # not None: with it go the hooks, from which alone this is called
        names = optimizer._names
        return [
            (names.get(id(p)) or f"allreduce.noname.{i}.{j}", p)
            for i, group in enumerate(optimizer.__dict__["param_groups"])
            for j, p in enumerate(group["params"])
            if p.requires_grad and p.numel()
        ]

    return parameters


def _checked_names(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[int, str]:
    """Names by id of the parameter."""
    if named is None:
        return {}
    pairs = list(named)
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise ValueError("named_parameters should be a sequence of tuples (name, parameter), usually produced by "
                         "model.named_parameters().")  # fmt: skip
    seen: set[str] = set()
    twice = sorted({name for name, _ in pairs if name in seen or seen.add(name)})  # type: ignore[func-returns-value]
    if twice:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    names = {id(parameter): name for name, parameter in pairs}
    unnamed = [
        f"parameter {j} of group {i} ({list(p.shape)})"
        for i, group in enumerate(optimizer.param_groups)
        for j, p in enumerate(group["params"])
        if id(p) not in names
    ]
    if unnamed:
        raise ValueError(f"named_parameters was specified, but one or more model parameters were not named: "
                         f"{', '.join(unnamed)}")  # fmt: skip
    return names


def _checked_passes(passes: int) -> int:
    if passes <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    return passes


def _in_backward() -> bool:
    """Whether autograd is running on this thread, and gradients are still to come."""
    return bool(torch._C._current_graph_task_id() != -1)
