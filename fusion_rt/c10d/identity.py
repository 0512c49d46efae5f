"""Identity of a process group: its names, its time-out, its store, and its end, as c10d asks for them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fusion_rt.c10d.inner import InnerGroup
from fusion_rt.c10d.membership import JoinedGroup
from fusion_rt.torch.core.runtime import Runtime
from fusion_rt.torch.core.tensors import Memory

_Base: Any = dist.ProcessGroup  # whose overloads torch's stubs give for its own callers


class GroupIdentity(_Base):  # type: ignore[misc]
    """All of a process group that is not an operation.

    Args:
        opened: it, as the daemon knows it.
        name: c10d's.
        timeout: of operations that are given none.
    """

    def __init__(self, opened: JoinedGroup, name: str, timeout: timedelta) -> None:
        super().__init__(opened.rank, opened.size)
        self._opened = opened
        self._inner = InnerGroup(opened, timeout.total_seconds())
        self._position = opened.rank
        self._recorded = opened.recorder.open_group(name, opened.ranks)
        self._store: Any = opened.store
        self.set_timeout(timeout)

    supports_splitting = False
    supports_coalescing = False

    def rank(self) -> int:
        """Returns this worker's position in the group."""
        return self._position

    def size(self) -> int:
        """Returns the number of members."""
        return self._opened.size

    getRank = rank
    getSize = size

    def is_of(self, here: Runtime) -> bool:
        """Tells whether the group belongs to a membership."""
        return self._opened.here is here

    def name(self) -> str:
        """Returns the name of the backend."""
        return "fusion"

    getBackendName = name
    _get_backend_name = name

    @property
    def group_name(self) -> str:
        """c10d's name of the group."""
        return self._recorded.name

    def getGroupName(self) -> str:
        """Returns c10d's name of the group."""
        return self._recorded.name

    def _set_group_name(self, name: str) -> None:
        self._recorded.name = name

    setGroupName = _set_group_name

    @property
    def group_desc(self) -> str:
        """Name that the script gave the group."""
        return self._recorded.description

    def getGroupDesc(self) -> str:
        """Returns what the script calls the group."""
        return self._recorded.description

    def _set_group_desc(self, description: str) -> None:
        self._recorded.description = description

    setGroupDesc = _set_group_desc

    @property
    def _device_types(self) -> list[torch.device]:
        # While torch 2.15 makes a group it attaches a recorder in C++ if there are any, and none fits one in Python.
        if self not in dist.distributed_c10d._world.pg_names:
            return []
        kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(kind) for kind in kinds]

    def _get_backend(self, device: torch.device) -> GroupIdentity:
        """Returns this group, which is its own backend on every device."""
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Returns whether `allocate_tensor` has other memory than torch: FSDP2 asks, if it is told to."""
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns a tensor of so many elements in the arena, which the daemon reads and writes where they lie."""
        if not size or not self.supports_tensor_alloc(device):
            return torch.empty(size, dtype=dtype, device=device)
        return Memory(self._opened.here, size * dtype.itemsize, small=False).tensor(dtype, (size,))

    def get_group_store(self) -> Any:
        """Returns the store in which the members met."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the time-out of operations that are given none."""
        self._seconds = self._recorded.seconds = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: the daemon counts the operations of a group."""

    def shutdown(self) -> None:
        """Ends the group; what is under way in it fails."""
        self._recorded.close()
        self._inner.close()
        self._opened.close()

    def abort(self) -> None:
        """Ends the group at once; what is under way in it fails. A flight record is written, where one is wanted."""
        self._inner.close(aborts=True)
        self._opened.abort()
        self._recorded.close()

    def __repr__(self) -> str:
        return f"FusionProcessGroup(name={self.group_name!r}, rank={self._position}, size={self._opened.size})"
