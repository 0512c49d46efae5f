"""Arguments of c10d's operations: checked, and put into the daemon's order of members.

Every error begins with the operation's name, as c10d's own errors do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fusion_rt import wire
from fusion_rt.c10d.monitored import TAGS

_OPS: dict[int, wire.Op] = {
    hash(dist.ReduceOp.SUM): "sum",
    hash(dist.ReduceOp.AVG): "average",
    hash(dist.ReduceOp.PRODUCT): "product",
    hash(dist.ReduceOp.MIN): "min",
    hash(dist.ReduceOp.MAX): "max",
    hash(dist.ReduceOp.BAND): "band",
    hash(dist.ReduceOp.BOR): "bor",
    hash(dist.ReduceOp.BXOR): "bxor",
    hash(dist.ReduceOp.PREMUL_SUM): "sum",
}
"""By their hashes, which are their numbers: to look one up as such takes 3 µs, most of which its comparison does."""
_PREMUL_SUM = hash(dist.ReduceOp.PREMUL_SUM)
_T = TypeVar("_T")


class Members:
    """The members of a group: by position as c10d counts them, and in the daemon's order, by ranks of the job.

    Args:
        ranks: of the job, by position in the group.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.count = len(ranks)
        order = sorted(range(self.count), key=ranks.__getitem__)
        self._order = None if order == list(range(self.count)) else order

    def in_order(self, by_position: Sequence[_T]) -> Sequence[_T]:
        """Returns the members' values in the daemon's order."""
        return by_position if self._order is None else [by_position[position] for position in self._order]

    def by_member(self, tensor: torch.Tensor, rows: Sequence[int] | None = None) -> Sequence[torch.Tensor]:
        """Returns the members' parts of a tensor, equal or of so many rows, in the daemon's order: itself if it is."""
        if self._order is None:
            return [tensor]
        if rows is None:
            return self.in_order(tensor.detach().view(self.count, -1).unbind())
        return self.in_order(torch.split(tensor.detach(), list(rows)))

    def rows(self, tensor: torch.Tensor, sizes: Sequence[int] | None, what: str) -> Sequence[int]:
        """Returns the number of rows of a tensor that are for, or from, each member, by position.

        Raises:
            ValueError: it cannot be dealt out so.
        """
        if not tensor.is_contiguous():
            raise ValueError(f"all_to_all_single: the {what} tensor must be contiguous")
        rows = tensor.shape[0] if tensor.dim() else 0
        if not sizes:
            if rows % self.count:
                raise ValueError(
                    f"all_to_all_single: Tensor's dim 0 does not divide equally across group size: the {what} has "
                    f"{rows} rows for {self.count} members"
                )
            return [rows // self.count] * self.count
        if len(sizes) != self.count:
            raise ValueError(
                f"all_to_all_single: Number of tensor splits not equal to group size: {len(sizes)} for the {what}, and "
                f"{self.count} members"
            )
        if sum(sizes) != rows:
            raise ValueError(
                f"all_to_all_single: Split sizes doesn't match total dim 0 size: {sum(sizes)} for the {what}, which "
                f"has {rows} rows"
            )
        return sizes

    def root(self, opts: Any, root: int, operation: str) -> tuple[Any, int]:
        """Returns the options of a call, None for none, and the root, which may be given in their place."""
        if isinstance(opts, int):
            opts, root = None, opts
        elif opts is not None:
            root = opts.rootRank
        if not 0 <= root < self.count:
            raise ValueError(f"{operation}: invalid root rank: {root}; the group has ranks 0 to {self.count - 1}")
        return opts, root

    def check_count(self, given: Sequence[Any], operation: str, what: str) -> None:
        if len(given) != self.count:
            raise ValueError(
                f"{operation}: invalid {what} tensor list: its length must be the size of the group, {self.count}, "
                f"not {len(given)}"
            )

    def check_whole(self, whole: torch.Tensor, part: torch.Tensor, operation: str, of: str, each: str) -> None:
        if whole.numel() != part.numel() * self.count:
            raise ValueError(
                f"{operation}: the {of} tensor must have the {each} tensor's size times the size of the group, "
                f"{part.numel()} x {self.count} elements, not {whole.numel()}"
            )
        if whole.dtype != part.dtype:
            raise ValueError(
                f"{operation}: the {of} tensor is of type {whole.dtype}, the {each} tensor of {part.dtype}"
            )

    def peer(self, rank: int, what: str) -> int:
        if not 0 <= rank < self.count:
            raise ValueError(f"invalid {what} rank: {rank}; the group has ranks 0 to {self.count - 1}")
        return rank


def combination(chosen: Any) -> tuple[wire.Op, float]:
    """Returns how a `ReduceOp` combines elements, and the factor before.

    Raises:
        RuntimeError: the daemon has no such operation.
    """
    number = hash(chosen)
    known = _OPS.get(number)
    if known is None:
        raise RuntimeError(f"Cannot use {chosen} with the backend fusion, which knows no such ReduceOp")
    return known, float(chosen.factor) if number == _PREMUL_SUM else 1.0


def only(tensors: Any, operation: str, what: str) -> torch.Tensor:
    """Returns the only tensor of a list, or a tensor itself."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"{operation}: requires a single-element {what} list, not one of {len(tensors)}")
    only: torch.Tensor = tensors[0]
    return only


def only_list(lists: Sequence[Any], operation: str, what: str) -> Sequence[torch.Tensor]:
    if len(lists) != 1:
        raise ValueError(f"{operation}: requires a single-element {what} list, not one of {len(lists)}")
    only: Sequence[torch.Tensor] = lists[0]
    return only


def checked_tag(tag: int) -> int:
    if not 0 <= tag < TAGS:
        raise ValueError(f"invalid tag: {tag}; use one from 0 to {TAGS - 1}")
    return tag


def some(tensors: Any, operation: str, what: str) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    if not tensors:
        raise ValueError(f"{operation}: requires a non-empty {what}")
    return list(tensors)


def check_alike(tensors: Sequence[torch.Tensor], operation: str) -> None:
    """Raises `ValueError` unless all tensors have the first one's type and number of elements."""
    first = tensors[0]
    for tensor in tensors[1:]:
        if tensor.dtype != first.dtype:
            raise ValueError(f"{operation}: invalid tensor type: expected {first.dtype}, not {tensor.dtype}")
        if tensor.numel() != first.numel():
            raise ValueError(
                f"{operation}: invalid tensor size: expected {tuple(first.shape)}, not {tuple(tensor.shape)}"
            )


def pairs(tensor: torch.Tensor, op: wire.Op) -> torch.Tensor:
    """Returns the real and imaginary parts of a complex tensor, as a view of it."""
    if op not in ("sum", "average"):
        raise ValueError(f"complex tensors have no {op}; use ReduceOp.SUM or ReduceOp.AVG")
    return torch.view_as_real(tensor.detach())
