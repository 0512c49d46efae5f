"""Parameters of an optimizer, as other ranks have to know them: names, groups, learning rates, and its arguments."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from fusion_rt import wire
from fusion_rt.torch.core.process_sets import ProcessSet, takes_part
from fusion_rt.torch.core.tensors import dtype_name

_HOW = ("fused", "foreach", "capturable", "differentiable")  # arguments of an optimizer that change no result
Groups: TypeAlias = int | Sequence[Sequence[torch.Tensor]]
Mark: TypeAlias = tuple[int, torch.dtype]
"""A parameter's id, and its dtype, which a script may change."""


class Named(NamedTuple):
    """A parameter that is exchanged; those with the same number in `together`, if it is not 0, share a bucket."""

    name: str
    parameter: torch.Tensor
    together: int = 0


def names_of(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """Returns the parameters' names: the given ones, or those that follow from their places in the optimizer.

    Raises:
        ValueError: `named` is something else than pairs, has a name twice, or lacks one of the optimizer's parameters.
    """
    places = [(i, j, p) for i, group in enumerate(optimizer.param_groups) for j, p in enumerate(group["params"])]
    if named is None:
        return {parameter: _default_name(i, j) for i, j, parameter in places}
    pairs = list(named)
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise ValueError("named_parameters should be a sequence of tuples (name, parameter), usually produced by "
                         "model.named_parameters().")  # fmt: skip
    seen: set[str] = set()
    twice = sorted({name for name, _ in pairs if name in seen or seen.add(name)})  # type: ignore[func-returns-value]
    if twice:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    names = {parameter: name for name, parameter in pairs}
    unnamed = [f"parameter {j} of group {i} ({list(p.shape)})" for i, j, p in places if p not in names]
    if unnamed:
        raise ValueError(f"named_parameters was specified, but one or more model parameters were not named: "
                         f"{', '.join(unnamed)}")  # fmt: skip
    return names


def check_dtypes(optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str]) -> None:
    """Raises `ValueError` if gradients of some of an optimizer's parameters cannot be exchanged."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                exchanged_dtype(names[parameter], parameter)


def exchanged_dtype(name: str, tensor: torch.Tensor) -> str:
    """Returns the name of the dtype that travels for a tensor. Raises `ValueError` if there is none."""
    try:
        return dtype_name(tensor.dtype)
    except ValueError as error:
        remedy = str(error)
    if tensor.is_complex():
        remedy = (
            "keep it as pairs of real numbers (torch.view_as_real), and make the complex tensor of them in the forward "
            "pass (torch.view_as_complex)"
        )
    raise ValueError(f"gradients of the parameter {name!r}, which is {tensor.dtype}, cannot be exchanged: {remedy}")


def groups_of(optimizer: torch.optim.Optimizer, groups: Groups | None) -> dict[torch.Tensor, int]:
    """Numbers, from 1 on, of the groups in which parameters are reduced together.

    Args:
        groups: lists of parameters; or how many groups of consecutive parameters there shall be, of about equal length.

    Raises:
        ValueError: `groups` is something else, or has a parameter twice.
    """
    if groups is None:
        return {}
    if isinstance(groups, int) and groups > 0:
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        return {parameter: 1 + i * groups // len(trained) for i, parameter in enumerate(trained)}
    if isinstance(groups, int) or not isinstance(groups, Sequence):
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    numbers: dict[torch.Tensor, int] = {}
    for number, group in enumerate(groups, 1):
        for parameter in group:
            if not isinstance(parameter, torch.Tensor):
                raise ValueError("groups must consist of torch.Tensor.")
            if parameter in numbers:
                raise ValueError("A parameter can only appear once in groups.")
            numbers[parameter] = number
    return numbers


class Trained:
    """The parameters of an optimizer that are to be reduced at the moment, in an order that is the same on all ranks.

    Args:
        reference: to the optimizer, which must not be kept alive.
        together: numbers of the groups of those that are reduced together.
        process_set: the ranks that reduce them.

    Attributes:
        optimizer: returns the optimizer.
    """

    def __init__(self, reference: weakref.ref[Any], together: dict[torch.Tensor, int], process_set: ProcessSet) -> None:
        self.optimizer: Callable[[], Any] = (
            reference  # which does not return None: with it go the hooks, from which alone this is asked
        )
        self._together = together
        self._process_set = process_set

    def named(self) -> list[Named]:
        """Returns the parameters with their names and groups."""
        names = self.optimizer()._parameter_names
        return [
            Named(names.get(parameter) or _default_name(i, j), parameter, self._together.get(parameter, 0))
            for i, j, parameter in self._places()
        ]

    def has_changed(self, marks: list[Mark]) -> bool:
        """Tells whether `named` returns other parameters than those with these marks, or in another order."""
        groups = self.optimizer().param_groups
        now = [(id(p), p.dtype) for group in groups for p in group["params"] if p.requires_grad and p.numel()]
        return now != marks and takes_part(self._process_set)

    def sizes(self) -> dict[str, int]:
        """Returns the number of elements of each parameter, by name."""
        return {named.name: named.parameter.numel() for named in self.named()}

    def group_rates(self) -> list[float]:
        """Returns the learning rates of the optimizer's groups; 0 where there is none."""
        return [float(group.get("lr", 0.0)) for group in self.optimizer().param_groups]

    def group_of(self, parameter: torch.Tensor) -> int:
        """Returns the index of the group that a parameter is in."""
        return next(i for i, _, found in self._places() if found is parameter)

    def rates(self) -> dict[str, float]:
        """Returns the parameters' learning rates, by name."""
        rates = self.group_rates()
        return {named.name: rates[i] for named, (i, _, _) in zip(self.named(), self._places(), strict=True)}

    def _places(self) -> list[tuple[int, int, torch.Tensor]]:
        if not takes_part(self._process_set):
            return []
        return [
            (i, j, parameter)
            for i, group in enumerate(self.optimizer().param_groups)
            for j, parameter in enumerate(group["params"])
            if parameter.requires_grad and parameter.numel()
        ]


class TrainedShards(Trained):
    """The parameters of an optimizer, of which this rank has a shard each (`DTensor`): as such they are exchanged."""

    def named(self) -> list[Named]:
        return [named._replace(parameter=shard_of(named.parameter)) for named in super().named()]

    def has_changed(self, marks: list[Mark]) -> bool:
        return [(id(named.parameter), named.parameter.dtype) for named in self.named()] != marks

    def group_of(self, parameter: torch.Tensor) -> int:
        return next(i for i, _, found in self._places() if shard_of(found) is parameter)

    def _places(self) -> list[tuple[int, int, torch.Tensor]]:
        return [place for place in super()._places() if shard_of(place[2]).numel()]


def shard_of(parameter: torch.Tensor) -> torch.Tensor:
    """Returns this rank's shard of a `DTensor`; of any other tensor, itself."""
    shard: torch.Tensor = getattr(parameter, "_local_tensor", parameter)
    return shard


def are_shards(optimizer: torch.optim.Optimizer) -> bool:
    """Tells whether this rank has only shards of some of an optimizer's parameters."""
    return any(shard_of(p) is not p for group in optimizer.param_groups for p in group["params"])


def check_memory(names: dict[torch.Tensor, str], spec: object) -> None:
    """Raises `ValueError` if parameters share their memory (`b.data = a.data`): shards would have a copy for each."""
    places: dict[tuple[torch.device, int], str] = {}
    for parameter, name in names.items():
        place = parameter.device, parameter.data_ptr() if parameter.numel() else 0
        if place[1] and places.setdefault(place, name) != name:
            raise ValueError(
                f"the parameters {places[place]!r} and {name!r} share their memory, and with {spec} shards would take "
                "the steps of each by itself; have the model use one parameter in both places"
            )


def _default_name(group: int, index: int) -> str:
    return f"allreduce.noname.{group}.{index}"


def optimizer_spec(optimizer: torch.optim.Optimizer) -> wire.OptimizerSpec:
    """Describes the optimizer for a shard.

    Raises:
        ValueError: a shard cannot have it.
    """
    kind: type[torch.optim.Optimizer] = getattr(optimizer, "_script_class", type(optimizer))
    if getattr(torch.optim, kind.__name__, None) is not kind:
        raise ValueError(
            f"with this algorithm shards take the steps, by an optimizer of torch.optim, which {kind.__module__}."
            f"{kind.__name__} is not; use one of these, or another algorithm"
        )
    if (needs := wire.NOT_AT_HOMES.get(kind.__name__)) is not None:
        raise ValueError(
            f"with this algorithm shards take the steps, and they have no {needs} for {kind.__name__}; "
            "use another optimizer, or an algorithm whose ranks take their own steps"
        )
    if len(optimizer.param_groups) > wire.MAX_GROUPS:
        raise ValueError(f"the optimizer has {len(optimizer.param_groups)} parameter groups, and shards can have "
                         f"{wire.MAX_GROUPS}")  # fmt: skip
    groups = []
    for arguments in arguments_of(optimizer):
        try:
            groups.append(json.dumps(arguments))
        except TypeError as error:
            raise ValueError(
                f"a shard cannot have the optimizer {kind.__name__} with these arguments: {error}"
            ) from None
    return wire.OptimizerSpec(kind.__name__, tuple(groups))


def arguments_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Arguments of each parameter group that a shard has to know; the learning rate comes with each gradient."""
    known = optimizer.defaults.keys() - {"lr", *_HOW}
    groups = optimizer.param_groups
    return [{name: group[name] for name in group if name in known and group[name] is not None} for group in groups]
