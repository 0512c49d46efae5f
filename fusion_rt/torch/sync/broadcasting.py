"""Parameters and optimizer state, from one rank to all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    broadcast_all(pairs, root_rank, process_set)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Gives all ranks the state of the optimizer of rank `root_rank`: options of its groups, momenta and so on.

    The other ranks' optimizers need not have any state yet (after a restart from a checkpoint only the root has).
    Unlike Horovod, this takes no step to make some, in which weight decay would change the parameters. An optimizer
    without state has gradients afterwards, as scripts for Horovod expect: zeros where there were none.

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
    is_root = runtime().rank == root_rank
    checkpoint = optimizer._sync.checkpoint if isinstance(optimizer, Wrapped) else None
    own = optimizer.plain_state_dict() if isinstance(optimizer, Wrapped) else optimizer.state_dict()
    codec = checkpoint.common_codec_state() if checkpoint is not None and is_root else {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    device = next((p.device for p in parameters if not p.is_cpu), "cpu")  # of what is on a device at the root
    state, codec = _broadcast_nested((own, codec), root_rank, "optimizer_state", process_set, device)
    if not is_root:
        # load_state_dict makes new dicts of the groups; schedulers made for the original optimizer hold the old ones.
        groups = optimizer.param_groups
        optimizer.load_state_dict(state)
        for group, loaded in zip(groups, optimizer.param_groups, strict=True):
            group.update(loaded)
        optimizer.param_groups = groups
    if checkpoint is not None:
        checkpoint.load_common_codec_state(codec)
    for parameter in parameters if not own["state"] else ():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def broadcast_step(optimizer: Wrapped, root_rank: int) -> None:
    """Gives all ranks the parameters of a distributed optimizer, and its state, as the last step has left them on rank
    `root_rank`. Options of its groups are each rank's own: a scheduler may be about to change them.

    Raises:
        HorovodInternalError: it failed, on all ranks.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    broadcast_all([(None, parameter.detach()) for parameter in parameters], root_rank, global_process_set)
    own = {index: optimizer.state[p] for index, p in enumerate(parameters) if p in optimizer.state}
    device = next((parameter.device for parameter in parameters if not parameter.is_cpu), "cpu")
    state = _broadcast_nested(own, root_rank, "step", global_process_set, device)
    if runtime().rank != root_rank:
        optimizer.state.clear()
        optimizer.state.update({parameters[index]: entry for index, entry in state.items()})


def _broadcast_nested(
    value: Any, root_rank: int, name: str, process_set: ProcessSet, device: torch.device | str
) -> Any:
    """Gives all ranks the root's nested dicts, lists and tuples. `device`: for tensors that are on one at the root."""
    is_root = runtime().rank == root_rank
    tensors: list[torch.Tensor] = []
    nested = _without_tensors(value, tensors) if is_root else None
    like = [(tuple(tensor.shape), tensor.dtype, tensor.is_cpu) for tensor in tensors]
    nested, like = broadcast_object((nested, like), root_rank, name, process_set)
    if not is_root:
        tensors = [torch.empty(shape, dtype=dtype, device="cpu" if host else device) for shape, dtype, host in like]
    broadcast_all([(f"{name}.{i}", tensor) for i, tensor in enumerate(tensors)], root_rank, process_set)
    return value if is_root else _with_tensors(nested, tensors)


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
