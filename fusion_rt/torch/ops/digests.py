"""Digests of tensors that are to be the same on all ranks, compared along the way.

A digest is the sum of a tensor's bits, read as integers, modulo 2^64: each change of one element changes it, and the
order in which a device adds does not count. It takes one pass over the memory. The digests of all tensors are gathered
from all ranks while the training goes on, and looked at when they are there; or at once, where an operation that
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
from fusion_rt.torch.ops.handles import poll, synchronize

_NAMED = 8  # ranks, at most
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Digests:
    """Digests of the parameters of one optimizer.

    Args:
        every: after how many exchanges they are compared; the first comparison is after the first exchange.
        process_set: the ranks that are to have the same.
        waits: they are looked at at once; else in a later step, as soon as all ranks' digests are there.
        what: an exchange, for people, with its article.

    Attributes:
        due: number of the exchange from which on `note` has something to do.
    """

    def __init__(self, every: int, process_set: ProcessSet, waits: bool, what: str) -> None:
        self._every, self._process_set, self._waits, self._what = every, process_set, waits, what
        self._here: Runtime | None = None
        self._joins = self._joins_before = 0  # of all ranks, in this membership; those before the first exchange
        self._next, self._last = 1, 0  # numbers of exchanges: of the next comparison, and the last
        self.due = 0
        self._asked: tuple[int, str, list[str]] | None = None  # a handle, between which exchanges, and names
        self._differs = False

    def count_anew(self) -> None:
        """Has the next exchange looked at: numbers of exchanges begin anew, in another membership or after a join."""
        self.due = 0

    def note(self, step: int, name: str, alike: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """Compares tensors, or looks at the others' digests, if that is due. Warns of ranks that differ, once.

        Args:
            step: how many exchanges there were in this membership, or since all ranks have joined (`hvd.join`); the
                same on all of them.
            name: pairs the ranks' operations.
            alike: returns the tensors by names, the same on all ranks, in any order; none if it is not yet time to.
        """
        self._compare(step, name, alike, runtime())
        self.due = self._next if self._asked is None else 0

    def _compare(self, step: int, name: str, alike: Callable[[], Mapping[str, torch.Tensor]], here: Runtime) -> None:
        """Does so in this membership."""
        joins = here.client.channel.clocks.joins
        if here is not self._here:
            self._here, self._asked, self._next, self._last = here, None, 1, 0
            self._joins = self._joins_before = joins
        elif joins != self._joins:  # ranks have taken different numbers of steps, and count anew
            if self._asked is not None:
                self._look()
            self._joins, self._next, self._last = joins, 1, 0
        if self._asked is not None and (step >= self._next or poll(self._asked[0])):
            self._look()
        if step < self._next or not (tensors := alike()):
            return
        self._next = (step // self._every + 1) * self._every
        if self._process_set.size() == 1:
            return
        made = [digest(tensors[name]) for name in sorted(tensors)]  # all are queued, before the first is waited for
        mine = torch.tensor([[here.rank, *(int(each) for each in made)]])
        try:
            handle = allgather_async(mine, f"{name}.digests", self._process_set)
        except HorovodInternalError:
            return  # as in `_look`
        counted = "since the last join" if joins != self._joins_before else "of this membership"
        since, self._last = f"{self._what} between {self._last} and {step} {counted}", step
        self._asked = handle, since, list(tensors)
        if self._waits:
            self._look()

    def _look(self) -> None:
        """Looks at the last gathered digests."""
        assert self._asked is not None
        (handle, since, names), self._asked = self._asked, None
        try:
            by_name = sorted(range(len(names)), key=names.__getitem__)  # the order of columns, the same on all ranks
            gathered = synchronize(handle)
            gathered[:, [1 + place for place in by_name]] = gathered[:, 1:].clone()
            different = differences(gathered, names)
        except HorovodInternalError:
            return  # nothing depends on it; the next exchange deals with a rank that is lost
        if different and not self._differs:
            warnings.warn(f"the ranks' parameters differ since {since}: {different} from most ranks; changes besides "
                          "the optimizer's steps have to be the same on all ranks, and hvd.broadcast_parameters "
                          "makes them equal at the beginning; hosts with different processors may round differently "
                          "(FUSION_CHECK_PARAMETERS=0 compares nothing)", stacklevel=5)  # fmt: skip
        self._differs = bool(different)


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the digest of a tensor of any dtype: int64, without dimensions, on the same device."""
    return words(tensor).sum(dtype=torch.int64)


def words(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bits of a tensor of any dtype as integers as wide as fit (words,); a view where that can be."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()  # a slice's elements are apart
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    size = flat.element_size()
    while size < 8 and flat.numel() * flat.element_size() % (2 * size) == 0:
        size *= 2
    if flat.storage_offset() * flat.element_size() % size:
        flat = flat.clone()  # words are read where they begin
    return flat.view(_WORDS[size])


def differences(digests: torch.Tensor, names: list[str]) -> str:
    """Returns which ranks differ from most of them (the first few), and in which tensor first; empty if none does.

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
    return ", ".join(found[:_NAMED]) + (f" and {len(found) - _NAMED} more" if len(found) > _NAMED else "")
