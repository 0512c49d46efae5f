"""Healing of ranks that have not got the results of an exchange, from a rank that has them."""

from __future__ import annotations

import torch

from fusion_rt.torch.core.process_sets import global_process_set
from fusion_rt.torch.ops.objects import broadcast_all
from fusion_rt.torch.sync.at_step.outer_optimizer import OuterOptimizer
from fusion_rt.torch.sync.broadcasting import broadcast_step
from fusion_rt.torch.sync.step_schedule import Schedule


def heal(part: Schedule, root: int, is_behind: bool) -> None:
    """Gives all ranks what an optimizer's last exchange has made of its parameters, and of its state, on a rank.

    Where ranks take local steps this is the start of the next ones, and the outer optimizer, if there is one. If there
    is none, ranks that have not got the mean of the parameters go on with their own until the next exchange: nobody
    knows the mean any more.

    Args:
        part: the optimizer's.
        root: the rank that has the results.
        is_behind: this rank has not.

    Raises:
        HorovodInternalError: it failed, on all ranks.
    """
    if not part.local:
        broadcast_step(part.sync.trained.optimizer(), root)
    elif isinstance(part, OuterOptimizer):
        slots = list(part.sync.slots)
        for slot in slots:
            if slot.start is None:
                slot.start = slot.parameter.detach().clone()
            if slot.velocity is None:
                slot.velocity = torch.zeros_like(slot.parameter)
        tensors = [tensor for slot in slots for tensor in (slot.start, slot.velocity) if tensor is not None]
        broadcast_all([(None, tensor) for tensor in tensors], root, global_process_set)
        for slot in slots if is_behind else ():
            assert slot.start is not None
            slot.parameter.detach().copy_(slot.start)
