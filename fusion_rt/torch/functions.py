"""Horovod's module of functions on parameters, states and objects, for scripts that import from it."""

from fusion_rt.torch.ops.objects import allgather_object, broadcast_object
from fusion_rt.torch.sync.broadcasting import broadcast_optimizer_state, broadcast_parameters

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
