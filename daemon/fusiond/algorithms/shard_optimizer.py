"""The optimizer of a shard: applies gradients to the home of a bucket.

Plain SGD is a line of numpy, which several threads may run on one home at the same time. Everything else is torch's own
optimizer on views of the home. Importing torch takes seconds, and only this module does it, when such an optimizer is
made; `prepare` does it beside the event loop.
"""

from __future__ import annotations

import inspect
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fusion_rt import wire
from fusion_rt.core import scratch
from fusion_rt.core.errors import FusionError

Array = npt.NDArray[Any]
_PLAIN = {"momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": False}


class ShardOptimizerError(FusionError, ValueError):
    """A shard cannot have this optimizer."""


class ShardOptimizer(ABC):
    """Applies gradients to a home, in place."""

    @abstractmethod
    def step(self, gradient: Array, rates: Sequence[float]) -> None:
        """Takes a step.

        Args:
            gradient: of all elements of the bucket; left as it is.
            rates: learning rate of each parameter group.
        """

    def state(self) -> dict[str, Array]:
        """Returns copies of its state, to be saved."""
        return {}

    def load(self, state: Mapping[str, Array]) -> None:
        """Goes on from a `state`. Raises `ShardOptimizerError` if it is another optimizer's."""
        if state:
            raise ShardOptimizerError("the saved state of a shard is of another optimizer than this job's")


class PlainSGD(ShardOptimizer):
    """Plain SGD: w -= rate * g; `spans`: begin, end and parameter group of each tensor."""

    def __init__(self, value: Array, spans: Sequence[tuple[int, int, int]]) -> None:
        self._value = value
        self._spans = spans

    def step(self, gradient: Array, rates: Sequence[float]) -> None:
        kind = self._value.dtype.type
        if len(set(rates)) == 1:
            self._move(0, len(self._value), kind(rates[0]), gradient)
            return
        for begin, end, group in self._spans:
            self._move(begin, end, kind(rates[group]), gradient)

    def _move(self, begin: int, end: int, rate: np.generic, gradient: Array) -> None:
        part = gradient[begin:end]
        self._value[begin:end] -= np.multiply(rate, part, out=scratch.empty(len(part), part.dtype))


class TorchOptimizer(ShardOptimizer):
    """An optimizer of `torch.optim` on views of the home."""

    def __init__(self, spec: wire.OptimizerSpec, bucket: wire.Bucket, value: Array) -> None:
        torch, kind = _torch_class(spec.name)
        used = {tensor.group for tensor in bucket.tensors}
        if used and max(used) >= len(spec.groups):
            raise ShardOptimizerError(
                f"the optimizer {spec.name} has {len(spec.groups)} parameter groups, and a tensor is in number "
                f"{max(used)}"
            )
        whole = torch.from_numpy(value)
        self._parameters: list[Any] = []
        self._spans: list[tuple[int, int]] = []
        groups: dict[int, list[Any]] = {}
        for tensor in bucket.tensors:
            end = tensor.start + tensor.numel
            parameter = torch.nn.Parameter(whole[tensor.start : end].view(tensor.shape))
            groups.setdefault(tensor.group, []).append(parameter)
            self._parameters.append(parameter)
            self._spans.append((tensor.start, end))
        arguments = [{**_arguments(spec.groups[group]), "params": groups[group], "lr": 0.0} for group in sorted(groups)]
        self._groups = sorted(groups)
        self._name = spec.name
        # Arguments are tried on parameters of one element each: torch looks at those of a group when it takes a step.
        probes = {p: torch.zeros([1] * p.dim(), dtype=p.dtype) for p in self._parameters}
        tried = [{**given, "params": [probes[p] for p in given["params"]]} for given in arguments]
        names = inspect.signature(kind).parameters.keys() - {"params", "lr"}
        try:
            for given in tried:
                kind(given["params"], **{name: value for name, value in given.items() if name in names})
            probe = kind(tried)
            for tensor in probes.values():
                tensor.grad = torch.zeros_like(tensor)
            probe.step()
            # Some (Adagrad's initial sums) are taken from the call, and not from groups; an option a group lacks has
            # its usual value all the same, and not that of the first group.
            whole_groups = [{**probe.defaults, **given} for given in arguments]
            self._optimizer = kind(whole_groups, **{name: arguments[0][name] for name in names & arguments[0].keys()})
        except (
            ArithmeticError,
            AssertionError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise ShardOptimizerError(f"a shard cannot have the optimizer {spec.name}: {error}") from None
        self._ordered = [parameter for number in self._groups for parameter in groups[number]]
        self._entries = {index: set(found) for index, found in probe.state_dict()["state"].items()}
        self._torch = torch
        self._stepping = threading.Lock()  # gradients are put where the optimizer looks for them

    def step(self, gradient: Array, rates: Sequence[float]) -> None:
        whole = self._torch.from_numpy(np.require(gradient, requirements="W"))
        with self._stepping:
            for parameter, (begin, end) in zip(self._parameters, self._spans, strict=True):
                parameter.grad = whole[begin:end].view(parameter.shape)
            for group, number in zip(self._optimizer.param_groups, self._groups, strict=True):
                group["lr"] = rates[number]
            self._optimizer.step()
            for parameter in self._parameters:
                parameter.grad = None

    def state(self) -> dict[str, Array]:
        found = {}
        for index, entries in self._optimizer.state_dict()["state"].items():
            for key, value in entries.items():
                if value is not None:
                    array = value.detach().numpy() if hasattr(value, "detach") else np.array(value)
                    found[f"{index}/{key}"] = np.array(array)
        return found

    def load(self, state: Mapping[str, Array]) -> None:
        entries: dict[int, dict[str, Any]] = {}
        for name, array in state.items():
            index, slash, key = name.partition("/")
            if not slash or not index.isdecimal() or len(index) > 9 or int(index) >= len(self._parameters):
                raise ShardOptimizerError(
                    f"the saved state of a shard has {name[:200]!r}, which is no state of its optimizer"
                )
            if key not in self._entries.get(int(index), ()) or not _may_be_of(array, self._ordered[int(index)].shape):
                raise ShardOptimizerError(
                    f"the saved state of a shard has {name!r} of shape {list(array.shape)}, which is no state of its "
                    f"optimizer {self._name}"
                )
            entries.setdefault(int(index), {})[key] = self._torch.from_numpy(np.array(array))
        current = self._optimizer.state_dict()
        self._optimizer.load_state_dict({"state": entries, "param_groups": current["param_groups"]})


def _may_be_of(array: Array, shape: Sequence[int]) -> bool:
    """Returns whether an optimizer may keep this for a tensor of that shape: something of it, or of some of its
    dimensions, or a number."""
    if array.ndim != len(shape):
        return array.size == 1
    return all(mine in (1, its) for mine, its in zip(array.shape, shape, strict=True))


def make(spec: wire.OptimizerSpec | None, bucket: wire.Bucket, value: Array) -> ShardOptimizer:
    """Makes the optimizer of a bucket's home, whose elements are `value`.

    Raises:
        ShardOptimizerError: there is none, or not with these arguments.
    """
    if spec is None:
        raise ShardOptimizerError("a shard that applies gradients needs to know by which optimizer")
    if is_plain(spec):
        spans = [(tensor.start, tensor.start + tensor.numel, tensor.group) for tensor in bucket.tensors]
        return PlainSGD(value, spans)
    return TorchOptimizer(spec, bucket, value)


def is_plain(spec: wire.OptimizerSpec) -> bool:
    """Returns whether it is w -= rate * g."""
    if spec.name != "SGD":
        return False
    groups = [_arguments(group) for group in spec.groups]
    return all(group.get(name, default) == default for group in groups for name, default in _PLAIN.items())


def _torch_class(name: str) -> tuple[Any, Any]:
    """Returns torch, and the class of that name in `torch.optim`."""
    import torch

    kind = vars(torch.optim).get(name)
    known = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    if not known or name in wire.NOT_AT_HOMES:
        but = " and ".join(wire.NOT_AT_HOMES)
        raise ShardOptimizerError(
            f"a shard cannot have the optimizer {name}; it can those of torch.optim, but for {but}"
        )
    return torch, kind


def _arguments(text: str) -> dict[str, Any]:
    """Returns the arguments of a parameter group: numbers, switches, and tuples of numbers."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or "params" in found or "lr" in found:
        raise ShardOptimizerError(f"{text[:100]!r} are not the arguments of a parameter group")
    return {str(name): tuple(value) if isinstance(value, list) else value for name, value in found.items()}
