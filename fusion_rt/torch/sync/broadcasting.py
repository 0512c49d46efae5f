"""Parameters, optimizer state and Python objects, from one rank to all or from all to all.

Objects travel pickled, between the workers of one job and nobody else: the daemon, and whoever could reach it over a
network, never unpickles anything.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from cloudpickle import dumps as _dumps  # type: ignore[import-untyped]  # also takes lambdas, and classes of __main__

from fusion_rt.torch import ops
from fusion_rt.torch.core.basics import rank
from fusion_rt.torch.core.process_sets import ProcessSet, global_process_set
from fusion_rt.torch.sync.overlap.watching import synchronize_parameters
from fusion_rt.torch.sync.wrapping import Wrapped


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[torch.Tensor | tuple[str, torch.Tensor]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Gives all ranks the parameters of rank `root_rank`, in place.

    Args:
        params: `model.state_dict()`, `model.named_parameters()` or `model.parameters()`. What is None is left out.
        root_rank: whose values count.
        process_set: the ranks that take part.

    Raises:
        ValueError: `params` is something else, or there is no such root.
        HorovodInternalError: it failed, on all ranks; for instance because the ranks' models differ.
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
    _broadcast_all(pairs, root_rank, process_set)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Gives all ranks the state of the optimizer of rank `root_rank`: options of its groups, momenta and so on.

    The other ranks' optimizers need not have any state yet (after a restart from a checkpoint only the root has). No
    step is taken to make some, unlike in Horovod, where weight decay then changes the parameters. What such a step
    leaves behind there, and scripts have come to expect, is left behind here too: an optimizer that had no state has
    gradients afterwards, which are zeros where there were none.

    What a codec has not sent is each node's own and is not broadcast: a node that is not in the root's step, since it
    has not loaded the checkpoint that the root has, starts with none.

    Args:
        optimizer: any optimizer, distributed or not, with the same parameters on all ranks.
        root_rank: whose state counts.
        model: Horovod's; not needed.
        process_set: the ranks that take part.

    Raises:
        ValueError: there is no such root, or the state does not fit this rank's parameters.
        HorovodInternalError: it failed, on all ranks.
    """
    is_root = rank() == root_rank
    tensors: list[torch.Tensor] = []
    memory = optimizer._exchange.memory if isinstance(optimizer, Wrapped) else None
    own = optimizer.plain_state_dict() if isinstance(optimizer, Wrapped) else optimizer.state_dict()
    codec = memory.common_codec_state() if memory is not None and is_root else {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = _without_tensors(own, tensors) if is_root else None
    like = [(tuple(tensor.shape), tensor.dtype, tensor.is_cpu) for tensor in tensors]
    state, like, codec = broadcast_object((state, like, codec), root_rank, "optimizer_state", process_set)
    if not is_root:
        device = next((p.device for p in parameters if not p.is_cpu), "cpu")  # of what is on a device at the root
        tensors = [torch.empty(shape, dtype=dtype, device="cpu" if host else device) for shape, dtype, host in like]
    pairs = [(f"optimizer_state.{i}", tensor) for i, tensor in enumerate(tensors)]
    _broadcast_all(pairs, root_rank, process_set)
    if not is_root:
        # load_state_dict makes new dicts of the groups; schedulers made for the original optimizer hold the old ones.
        groups = optimizer.param_groups
        optimizer.load_state_dict(_with_tensors(state, tensors))
        for group, loaded in zip(groups, optimizer.param_groups, strict=True):
            group.update(loaded)
        optimizer.param_groups = groups
    if memory is not None:
        memory.load_common_codec_state(codec)
    for parameter in parameters if not own["state"] else ():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The object of rank `root_rank`.

    Args:
        obj: anything that can be pickled; what other ranks than the root pass is ignored.
        root_rank: whose object is broadcast.
        name: pairs the ranks' operations.
        process_set: the ranks that take part.

    Returns:
        On the root the object itself, elsewhere a copy.

    Raises:
        ValueError: there is no such root.
        HorovodInternalError: it failed, on all ranks.
    """
    is_root = rank() == root_rank
    data = torch.frombuffer(bytearray(_dumps(obj)), dtype=torch.uint8) if is_root else None
    length = torch.tensor([0 if data is None else data.numel()])
    ops.broadcast_(length, root_rank, f"{name}.length" if name else None, process_set)
    if data is None:
        data = torch.empty(int(length), dtype=torch.uint8)
    ops.broadcast_(data, root_rank, f"{name}.data" if name else None, process_set)
    return obj if is_root else pickle.loads(data.numpy().tobytes())


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The objects of all ranks, in the order of ranks.

    Args:
        obj: anything that can be pickled.
        name: pairs the ranks' operations.
        process_set: the ranks that take part.

    Raises:
        HorovodInternalError: it failed, on all ranks.
    """
    data = torch.frombuffer(bytearray(_dumps(obj)), dtype=torch.uint8)
    length = ops.allgather_async(torch.tensor([data.numel()]), f"{name}.length" if name else None, process_set)
    gathered = ops.allgather(data, f"{name}.data" if name else None, process_set)
    parts = torch.split(gathered, ops.synchronize(length).tolist())
    return [pickle.loads(part.numpy().tobytes()) for part in parts]


def _broadcast_all(pairs: Iterable[tuple[str | None, torch.Tensor]], root_rank: int, process_set: ProcessSet) -> None:
    handles = [ops.broadcast_async_(tensor, root_rank, name, process_set) for name, tensor in pairs]
    for handle in handles:
        ops.synchronize(handle)


class _Place:
    """Stands for the tensor of this index."""

    def __init__(self, index: int) -> None:
        self.index = index


def _without_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A copy of nested dicts, lists and tuples with each tensor appended to `tensors` and replaced by its place."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1)
    if isinstance(value, dict):
        return {key: _without_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_without_tensors(item, tensors) for item in value])
    return value


def _with_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The reverse of `_without_tensors`."""
    if isinstance(value, _Place):
        return tensors[value.index]
    if isinstance(value, dict):
        return {key: _with_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_with_tensors(item, tensors) for item in value])
    return value
