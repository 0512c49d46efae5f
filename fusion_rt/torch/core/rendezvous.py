"""Key-value stores of `torch.distributed`, in which the workers of a job leave word for each other: that of torchrun's
agent, and any that a script has opened."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from fusion_rt.core.errors import WireError
from fusion_rt.launchers import kvstore, rendezvous
from fusion_rt.launchers.meeting import Meeting

_REQUEST = timedelta(seconds=10)


def open_store(meeting: Meeting, rank: int, size: int) -> kvstore.Store:
    """Opens the store at which the workers of a job meet.

    Raises:
        FusionError: this is rank 0, and cannot serve it.
    """
    if meeting.kind == "torchrun":
        return AgentStore(*meeting.addresses[0])
    return rendezvous.open_store(meeting, rank, size)


class TorchStore:
    """A store of `torch.distributed` that its owner keeps open. It tells nobody apart, and does not limit what others
    may store; values are looked at only up to the limit of all stores.

    Args:
        store: it.
        hosts: that serve it, as far as known.
        where: its address, for people.
    """

    def __init__(self, store: Store | None, hosts: Sequence[str], where: str) -> None:
        self._store = store
        self._hosts = hosts
        self._where = where

    @property
    def where(self) -> str:
        return self._where

    @property
    def hosts(self) -> Sequence[str]:
        return self._hosts

    def get(self, key: str) -> bytes | None:
        try:
            store = self._connected()
            value: bytes | None = store.get(key) if store.check([key]) else None
        except RuntimeError as error:  # of which torch's own are subclasses
            raise self._failed(error) from None
        if value is not None and len(value) > kvstore.MAX_VALUE:
            raise WireError(f"{key} has {len(value)} bytes, more than {kvstore.MAX_VALUE}")
        return value

    def put(self, key: str, value: bytes) -> None:
        try:
            store = self._connected()
            store.set(key, value.decode())  # which torch does not wait for
            store.check([key])
        except RuntimeError as error:
            raise self._failed(error) from None

    def remove(self, key: str) -> None:
        try:
            self._connected().delete_key(key)
        except RuntimeError as error:
            raise self._failed(error) from None

    def close(self) -> None:
        """Leaves the store open, which is its owner's."""

    def _connected(self) -> Store:
        assert self._store is not None
        return self._store

    def _failed(self, error: RuntimeError) -> OSError:
        return OSError(str(error).partition("\n")[0])


class AgentStore(TorchStore):
    """A `torch.distributed.TCPStore` that an agent of torchrun serves."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(None, [host], f"{host}:{port}")
        self._place = host, port

    def close(self) -> None:
        self._store = None

    def _connected(self) -> Store:
        if self._store is None:
            host, port = self._place
            self._store = TCPStore(host, port, is_master=False, timeout=_REQUEST)
        return self._store

    def _failed(self, error: RuntimeError) -> OSError:
        self._store = None
        return super()._failed(error)
