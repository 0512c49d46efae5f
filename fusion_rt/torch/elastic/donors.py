"""State for newcomers from the ranks that have it, each from one of these, which train on meanwhile.

Ranks that have left a membership epoch in good order have the same state. So only newcomers get it, in messages, and
only they wait for it to come; all others wait for the newcomers' first contributions.

Optimizers whose steps all-reduce gradients say that parameters are the same. Other values are the script's, which may
have set one on a single rank: ranks compare digests of these, and if they differ, all get one rank's state.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from cloudpickle import Pickler as _Pickler  # type: ignore[import-untyped]  # also takes classes of __main__
from cloudpickle import dumps as _dumps

from fusion_rt.client import Operation
from fusion_rt.client.channel import Completion
from fusion_rt.core.errors import HorovodInternalError
from fusion_rt.torch.core.runtime import Runtime, runtime
from fusion_rt.torch.core.tensors import Memory, contents, copy_in, copy_out
from fusion_rt.torch.sync.broadcasting import Item
from fusion_rt.wire import group_id

_KEY = "elastic.donors"
GROUP = group_id(_KEY)  # of all ranks of a membership epoch
_SIZES = struct.Struct("<QQ")  # bytes of values that are no tensors, and of all
_ALIGNMENT = 64  # bytes


class Donors(NamedTuple):
    """The ranks whose values count when a membership epoch begins outside of the function.

    Attributes:
        is_needed: a rank needs values of others.
        root: the first that has values which were synced before. The launcher gives workers of earlier epochs the
            lowest ranks, but these may have been interrupted before their first sync.
        by_taker: the rank from which each of those gets its values that lack the state of all others; None if all
            get them from the root.
    """

    is_needed: bool = True
    root: int = 0
    by_taker: Mapping[int, int] | None = None


def open_group(here: Runtime) -> None:
    """Opens the group in which newcomers get the state, on a rank that enters a membership epoch. Nobody uses it before
    all have told each other something.

    Raises:
        HorovodInternalError: the job has failed.
    """
    here.client.open_group(_KEY, range(here.size))


def digest(values: Any) -> str:
    """Returns the digest of what has to be the same on ranks with the same state; empty if it cannot be told. Ranks may
    have other digests of equal values, for example of sets of texts, which are in another order on each."""
    found = hashlib.blake2b(digest_size=16)
    pickler = _Comparing(SimpleNamespace(write=found.update), pickle.HIGHEST_PROTOCOL)
    pickler.fast = True  # else it tells which equal objects are one, which those that were received are not
    try:
        pickler.dump(values)
    except Exception:  # a script's own objects raise whatever they like
        return ""
    return found.hexdigest()


class _Comparing(_Pickler):  # type: ignore[misc]
    """Pickles tensors by their contents; torch's own way has their addresses."""

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return None
        return str(obj.dtype), tuple(obj.shape), hashlib.blake2b(contents(obj), digest_size=16).digest()


def by_taker(levels: Sequence[str]) -> dict[int, int] | None:
    """Returns the rank from which each newcomer gets the state; None if no rank has it, or ranks have different ones.

    Args:
        levels: the digest of each rank that has the state; empty of others.
    """
    level = [rank for rank, digest in enumerate(levels) if digest]
    takers = [rank for rank, digest in enumerate(levels) if not digest]
    if len(set(levels) - {""}) != 1:
        return None
    return {taker: level[place % len(level)] for place, taker in enumerate(takers)}


def pass_on(items: Sequence[Item], donors: Mapping[int, int]) -> list[Operation]:
    """Gives newcomers the state of several parts from others. On those that give it, or have nothing to do, this waits
    for nobody.

    Args:
        items: the same on all ranks.
        donors: by taker; see `Donors`.

    Returns:
        Messages under way from this rank.

    Raises:
        ValueError: this rank is a newcomer, and a value does not fit it.
        HorovodInternalError: a rank is gone.
    """
    here = runtime()
    if here.rank in donors:
        _take(here, items, donors[here.rank])
        return []
    takers = [taker for taker, donor in donors.items() if donor == here.rank]
    given = _give(here, items, takers) if takers else []
    for item in items:
        item.keep()
    return given


def await_given(given: Sequence[Operation]) -> None:
    """Returns when newcomers have the messages under way to them, or are gone: a rank that has trained to the end may
    not leave before.

    Args:
        given: the result of `pass_on`.
    """
    for operation in given:
        with suppress(HorovodInternalError):  # this rank has all that it wants
            runtime().client.wait(operation)


def _give(here: Runtime, items: Sequence[Item], takers: Sequence[int]) -> list[Operation]:
    told = [item.tell() for item in items]
    pairs = _pairs(items, told, is_donor=True)
    tensors = [tensor for _, tensor in pairs]
    head = _dumps((told, _described(pairs)))
    offsets, total = _offsets(len(head), tensors)
    memory = Memory(here, total, tensors=tensors, small=False)  # a copy: the next step changes the tensors
    memory.view[: len(head)] = head
    if tensors:
        copy_in(_places(memory, tensors, offsets), tensors)
    send, sizes = here.client.messages.send_to, _SIZES.pack(len(head), total)
    given = []
    for taker in takers:
        given.append(send(GROUP, taker, 0, inline=sizes))
        given.append(send(GROUP, taker, 0, place=memory.place, nbytes=total, completion=Completion(keeps=memory)))
    return given


def _take(here: Runtime, items: Sequence[Item], donor: int) -> None:
    client = here.client
    sizes = client.wait(client.messages.receive_from(GROUP, donor, 0, _SIZES.size)).inline
    assert sizes is not None
    length, total = _SIZES.unpack(sizes)
    memory = Memory(here, total, small=False)
    client.wait(
        client.messages.receive_from(GROUP, donor, 0, total, place=memory.place, completion=Completion(keeps=memory))
    )
    told, described = pickle.loads(memory.view[:length])
    pairs = _pairs(items, told, is_donor=False)
    _check(here, _described(pairs), described, donor)
    tensors = [tensor for _, tensor in pairs]
    if tensors:
        copy_out(tensors, _places(memory, tensors, _offsets(length, tensors)[0]))
    for item in items:
        item.take()


def _check(here: Runtime, own: Sequence[str], others: Sequence[str], donor: int) -> None:
    """Raises `ValueError` if a rank's state has other tensors than that of the rank from which it gets their values."""
    for mine, other in zip_longest(own, others, fillvalue="nothing more is"):
        if mine != other:
            raise ValueError(
                f"{mine} in the state of rank {here.rank}, and {other} in that of rank {donor}, from which it gets its "
                "values: make the same model and optimizer on all ranks"
            )


def _pairs(items: Sequence[Item], told: Sequence[Any], is_donor: bool) -> list[tuple[str | None, torch.Tensor]]:
    return [pair for item, one in zip(items, told, strict=True) for pair in item.tensors(one, is_donor)]


def _described(pairs: Sequence[tuple[str | None, torch.Tensor]]) -> list[str]:
    return [f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}" for name, tensor in pairs]


def _offsets(begin: int, tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Returns where each tensor begins behind so many bytes, and where all of them end."""
    offsets, end = [], begin
    for tensor in tensors:
        offsets.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        end = offsets[-1] + tensor.nbytes
    return offsets, end


def _places(memory: Memory, tensors: Sequence[torch.Tensor], offsets: Sequence[int]) -> list[torch.Tensor]:
    return [memory.tensor(tensor.dtype, tensor.shape, offset) for tensor, offset in zip(tensors, offsets, strict=True)]
