"""Digests of tensors that are to be the same on all ranks, compared along the way.

A digest is the sum of a tensor's bits, read as integers, modulo 2^64: each change of one element changes it, and the
order in which a device adds does not count. It takes one pass over the memory. The digests of all tensors are gathered
from all ranks while the training goes on, and looked at when the next ones are due; or at once, where an operation that
is under way would change the training: shards do not wait for a rank that waits for others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import torch

from fusion_rt.core.errors import HorovodInternalError
from fusion_rt.torch.core.process_sets import ProcessSet
from fusion_rt.torch.core.runtime import Runtime, runtime
from fusion_rt.torch.ops.gather import allgather_async
from fusion_rt.torch.ops.handles import synchronize

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Digests:
    """Digests of the parameters of one optimizer.

    Args:
        every: after how many exchanges they are compared.
        process_set: the ranks that are to have the same.
        waits: they are looked at at once.
        what: an exchange, for people, with its article.
    """

    def __init__(self, every: int, process_set: ProcessSet, waits: bool, what: str) -> None:
        self._every, self._process_set, self._waits, self._what = every, process_set, waits, what
        self._here: Runtime | None = None
        self._compared = 0
        self._asked: tuple[int, int, list[str]] | None = None  # a handle, the step, and names
        self._differs = False

    def note(self, step: int, name: str, alike: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """Compares tensors, if that is due. Warns of ranks that differ, once.

        Args:
            step: how many exchanges there were in this membership, the same on all ranks.
            name: pairs the ranks' operations.
            alike: returns the tensors by names, the same on all ranks; none if it is not yet time to.
        """
        here = runtime()
        if here is not self._here:
            self._here, self._asked, self._compared = here, None, 0
        if step // self._every == self._compared or not (tensors := alike()):
            return
        self._compared = step // self._every
        try:
            self._look()
            mine = torch.stack([torch.tensor(here.rank), *(digest(tensor).cpu() for tensor in tensors.values())])
            handle = allgather_async(mine.unsqueeze(0), f"{name}.digests", self._process_set)
            self._asked = handle, step, list(tensors)
            if self._waits:
                self._look()
        except HorovodInternalError:
            self._asked = None
            if here.client.channel.failure is None:
                raise  # else the next exchange says so, and knows what to do

    def _look(self) -> None:
        """Looks at what was gathered last."""
        if self._asked is None:
            return
        (handle, step, names), self._asked = self._asked, None
        different = differences(synchronize(handle), names)
        if different and not self._differs:
            since = f"{self._what} between {step - self._every} and {step} of this membership"
            warnings.warn(f"the ranks' parameters differ since {since}: "
                          f"{different} from most ranks; what ranks do to them beside the optimizer's steps has to be "
                          "the same on all, and hvd.broadcast_parameters makes them equal at the beginning",
                          stacklevel=5)  # fmt: skip
        self._differs = bool(different)


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the digest of a tensor of any dtype: int64, without dimensions, on the same device."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    size = flat.element_size()
    while size < 8 and flat.numel() * flat.element_size() % (2 * size) == 0:
        size *= 2
    if flat.storage_offset() * flat.element_size() % size:
        flat = flat.clone()  # words are read where they begin
    return flat.view(_WORDS[size]).sum(dtype=torch.int64)


def differences(digests: torch.Tensor, names: list[str]) -> str:
    """Returns which ranks differ from most of them, and in which tensor first; empty if none does.

    Args:
        digests: int64 of shape (ranks, 1 + tensors): each row begins with the rank that it is of.
        names: of the tensors.
    """
    rows = {row[0]: tuple(row[1:]) for row in digests.tolist()}  # without those of ranks that have joined
    usual = max(rows.values(), key=list(rows.values()).count)
    found = []
    for rank, row in rows.items():
        if row != usual:
            first = next(name for name, mine, other in zip(names, row, usual, strict=True) if mine != other)
            found.append(f"rank {rank} (in {first!r})")
    return ", ".join(found)
