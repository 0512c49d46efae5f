"""Parameters and optimizer state, from one rank to all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from fusion_rt.torch.core.process_sets import ProcessSet, global_process_set
from fusion_rt.torch.core.runtime import runtime
from fusion_rt.torch.core.watching import synchronize_parameters
from fusion_rt.torch.ops.objects import broadcast_all, broadcast_object
from fusion_rt.torch.sync.wrapped import Wrapped


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[torch.Tensor | tuple[str, torch.Tensor]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Gives all ranks the parameters of rank `root_rank`, in place.

    Args:
        params: `model.state_dict()`, `model.named_parameters()` or `model.parameters()`. Entries that are None are left
            out.
        root_rank: whose values count.
        process_set: the ranks that take part.

    Raises:
        ValueError: `params` is something else, or there is no such root.
        HorovodInternalError: it failed, on all ranks; for example because the ranks' models differ.
    """
    broadcast_all(named_tensors(params), root_rank, process_set)


def named_tensors(
    params: Mapping[str, Any] | Iterable[torch.Tensor | tuple[str, torch.Tensor]],
) -> list[tuple[str | None, torch.Tensor]]:
    """Returns the tensors of a model with their names, as `broadcast_parameters` takes them; what waits for a forward
    pass is applied to them before.

    Raises:
        ValueError: `params` has something else.
        HorovodInternalError: the waiting update has failed, on all ranks.
    """
    if isinstance(params, Mapping):
        pairs: list[tuple[str | None, Any]] = list(sorted(params.items()))
    elif isinstance(params, Iterable) and not isinstance(params, (str, torch.Tensor)):
        pairs = [item if isinstance(item, tuple) else (None, item) for item in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    synchronize_parameters()
    pairs = [(name, tensor) for name, tensor in pairs if tensor is not None]
    for name, tensor in pairs:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"parameter {name!r} is a {type(tensor).__name__}, not a tensor; use broadcast_object for it"
            )
    return pairs


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Gives all ranks the state of the optimizer of rank `root_rank`: options of its groups, momenta and so on.

    The other ranks' optimizers need not have any state yet (after a restart from a checkpoint only the root has).
    Unlike Horovod, this takes no step to make some, in which weight decay would change the parameters. Where the root
    has no state, optimizers have gradients afterwards, as scripts for Horovod expect: zeros where there were none.

    A codec's residual is each node's own and is not broadcast. A node that has not loaded the root's checkpoint, and so
    is not in the root's step, starts with none.

    Args:
        optimizer: any optimizer, distributed or not, with the same parameters on all ranks.
        root_rank: whose state counts.
        model: Horovod's; not needed.
        process_set: the ranks that take part.

    Raises:
        ValueError: there is no such root, or the state does not fit this rank's parameters.
        HorovodInternalError: it failed, on all ranks.
    """
    state = OptimizerState(optimizer, "optimizer_state")
    broadcast_items([state], root_rank, process_set)
    # The same on all ranks: a gradient that others do not have would be stepped with here alone.
    for group in optimizer.param_groups if state.is_empty else ():
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def load_exactly(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Loads the state of the same optimizer on any rank, bit by bit, and in place.

    In `load_state_dict` torch gives each tensor the dtype of its parameter, which rounds or widens some: NAdam
    multiplies in float32 whatever its parameters are. And torch makes new dicts, but schedulers hold the groups, and a
    distributed optimizer that was made from this one has the same groups and state.
    """
    groups, shared = optimizer.param_groups, optimizer.state
    optimizer.load_state_dict(dict(state))
    parameters = [parameter for group in groups for parameter in group["params"]]
    indices = [index for group in state["param_groups"] for index in group["params"]]
    for index, parameter in zip(indices, parameters, strict=True):
        loaded = optimizer.state.get(parameter, {})
        for key, value in state["state"].get(index, {}).items():
            before = loaded.get(key)
            if isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor) and before.dtype != value.dtype:
                loaded[key] = value
    for group, taken in zip(groups, optimizer.param_groups, strict=True):
        group.update(taken)
    vars(optimizer)["param_groups"] = groups  # not by the attribute, which may be a property
    if not isinstance(optimizer, Wrapped):  # which sees to it itself
        values = dict(optimizer.state)
        shared.clear()
        shared.update(values)
        optimizer.state = shared


def broadcast_step(optimizer: Wrapped, root_rank: int) -> None:
    """Gives all ranks the parameters of a distributed optimizer, and its state, as the last step has left them on rank
    `root_rank`. Options of its groups are each rank's own: a scheduler may be about to change them.

    Raises:
        HorovodInternalError: it failed, on all ranks.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def take(state: dict[int, Any]) -> None:
        if runtime().rank != root_rank:
            optimizer.state.clear()
            optimizer.state.update({parameters[index]: entry for index, entry in state.items()})

    own = {index: optimizer.state[p] for index, p in enumerate(parameters) if p in optimizer.state}
    state = Nested("step", lambda: own, take, _device_of(parameters))
    tensors = Tensors([(f"parameter.{index}", parameter.detach()) for index, parameter in enumerate(parameters)])
    broadcast_items([tensors, state], root_rank)


def broadcast_items(items: Sequence[Item], root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Gives all ranks what rank `root_rank` has of several things: what is not a tensor together, and then all tensors
    at the same time. Ranks wait twice for each other, however many things these are.

    Args:
        items: the same on all ranks.
        root_rank: whose values count.
        process_set: the ranks that take part.

    Raises:
        ValueError: there is no such root, or a value does not fit this rank.
        HorovodInternalError: it failed, on all ranks.
    """
    is_root = runtime().rank == root_rank
    told = broadcast_object([item.tell() for item in items] if is_root else None, root_rank, "items", process_set)
    pairs = [pair for item, one in zip(items, told, strict=True) for pair in item.tensors(one, is_root)]
    broadcast_all(pairs, root_rank, process_set)
    for item in items:
        item.take()


class Item:
    """One of the things that `broadcast_items` gives to all ranks: an object that can be pickled.

    Args:
        give: returns the root's.
        put: called with it on all ranks.
    """

    def __init__(self, give: Callable[[], Any], put: Callable[[Any], object]) -> None:
        self._give, self._put = give, put
        self._told: Any = None

    def tell(self) -> Any:
        """Returns, on the root, the parts that are no tensors."""
        return self._give()

    def tensors(self, told: Any, is_root: bool) -> list[tuple[str | None, torch.Tensor]]:
        """Returns the tensors and their names, all of them unique, when the root's `tell` is known."""
        self._told = told
        return []

    def take(self) -> None:
        """Takes the received parts."""
        self._put(self._told)

    def keep(self) -> None:
        """Takes this rank's own parts, where others take the same: an object may have to deal something anew, among
        other ranks than those for which it did so last."""
        self._put(self._give())


class Tensors(Item):
    """Tensors that all ranks have, and whose values are replaced. `pairs`: with their names."""

    def __init__(self, pairs: list[tuple[str | None, torch.Tensor]]) -> None:
        super().__init__(lambda: None, lambda told: None)
        self._pairs = pairs

    def tensors(self, told: Any, is_root: bool) -> list[tuple[str | None, torch.Tensor]]:
        return self._pairs

    def keep(self) -> None:
        pass


class Nested(Item):
    """Nested dicts, lists and tuples, with the tensors in them, which other ranks need not have.

    Args:
        name: of the tensors, with a number.
        give: returns the root's.
        put: called with it on all ranks.
        device: for tensors that are on one at the root.
    """

    def __init__(
        self, name: str, give: Callable[[], Any], put: Callable[[Any], object], device: torch.device | str
    ) -> None:
        super().__init__(give, put)
        self._name, self._device = name, device
        self._tensors: list[torch.Tensor] = []

    def tell(self) -> Any:
        nested = _without_tensors(self._give(), self._tensors)
        return nested, [(tuple(tensor.shape), tensor.dtype, tensor.is_cpu) for tensor in self._tensors]

    def tensors(self, told: Any, is_root: bool) -> list[tuple[str | None, torch.Tensor]]:
        self._told, like = told
        if not is_root:
            self._tensors = [
                torch.empty(shape, dtype=dtype, device="cpu" if host else self._device) for shape, dtype, host in like
            ]
        return [(f"{self._name}.{index}", tensor) for index, tensor in enumerate(self._tensors)]

    def take(self) -> None:
        self._put(_with_tensors(self._told, self._tensors))

    def keep(self) -> None:
        pass


class OptimizerState(Nested):
    """The state of an optimizer, as `broadcast_optimizer_state` gives it to all. `name`: of its tensors.

    Attributes:
        is_empty: the root has none.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        self._optimizer = optimizer
        self._checkpoint = optimizer._sync.checkpoint if isinstance(optimizer, Wrapped) else None
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._own = optimizer.plain_state_dict() if isinstance(optimizer, Wrapped) else optimizer.state_dict()
        self._is_root = self.is_empty = False
        super().__init__(name, self._both, self._load, _device_of(parameters))

    def tensors(self, told: Any, is_root: bool) -> list[tuple[str | None, torch.Tensor]]:
        self._is_root = is_root
        return super().tensors(told, is_root)

    def _both(self) -> Any:
        return self._own, self._checkpoint.common_codec_state() if self._checkpoint is not None else {}

    def _load(self, both: Any) -> None:
        optimizer, (state, codec) = self._optimizer, both
        if not self._is_root:
            load_exactly(optimizer, state)
        if self._checkpoint is not None:
            self._checkpoint.load_common_codec_state(codec)
        self.is_empty = not state["state"]


def _device_of(tensors: Iterable[torch.Tensor]) -> torch.device | str:
    """Returns the device for a tensor that is on one at the root."""
    return next((tensor.device for tensor in tensors if not tensor.is_cpu), "cpu")


class _Place:
    """Substitutes for the tensor of this index."""

    def __init__(self, index: int) -> None:
        self.index = index


def _without_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Copies nested dicts, lists and tuples, with each tensor appended to `tensors` and replaced by its place."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1)
    if isinstance(value, dict):
        return {key: _without_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_without_tensors(item, tensors) for item in value])
    return value


def _with_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Reverses `_without_tensors`."""
    if isinstance(value, _Place):
        return tensors[value.index]
    if isinstance(value, dict):
        return {key: _with_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_with_tensors(item, tensors) for item in value])
    return value
