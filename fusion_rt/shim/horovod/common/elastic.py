"""The states, and what `elastic.run` is made of."""

from fusion_rt.core.errors import HorovodInternalError, HostsUpdatedInterrupt
from fusion_rt.torch.elastic import ObjectState, State, run_fn
from fusion_rt.torch.elastic.state import HostUpdateResult

__all__ = ["HorovodInternalError", "HostUpdateResult", "HostsUpdatedInterrupt", "ObjectState", "State", "run_fn"]
