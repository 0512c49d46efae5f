"""The states, and the parts of `elastic.run`."""

from fusion_rt.core.errors import HorovodInternalError, HostsUpdatedInterrupt
from fusion_rt.torch.elastic import ObjectState, State, run_fn
from fusion_rt.torch.elastic.state import HostUpdateResult

__all__ = ["HorovodInternalError", "HostUpdateResult", "HostsUpdatedInterrupt", "ObjectState", "State", "run_fn"]
