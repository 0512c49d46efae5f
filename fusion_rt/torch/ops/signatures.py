"""The name and signature of an operation, on which ranks have to agree, made from checked arguments."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import torch

from fusion_rt import codecs, wire
from fusion_rt.core.dtypes import DTYPES
from fusion_rt.core.topology import GLOBAL_SET
from fusion_rt.torch.core.process_sets import ProcessSet
from fusion_rt.torch.core.runtime import Runtime
from fusion_rt.torch.core.tensors import dtype_name

Average: Final = "average"
Sum: Final = "sum"
Adasum: Final = "adasum"
Min: Final = "min"
Max: Final = "max"
Product: Final = "product"
_OPS = (Average, Sum, Adasum, Min, Max, Product)
_MAX_NAME = wire.MAX_NAME - 64  # characters; the kind of operation and a part's number are added


class How(NamedTuple):
    """Options of the combination of the ranks' tensors.

    Attributes:
        op: elementwise combination.
        prescale, postscale: factors before and after it.
        process_set: the ranks that take part.
        codec: compression between nodes; element types to which it does not apply travel as they are.
    """

    op: wire.Op
    prescale: float
    postscale: float
    process_set: ProcessSet
    codec: str = "dense"


def resolve(op: wire.Op | None, average: bool | None = None) -> wire.Op:
    """Returns the op that Horovod's two arguments for it mean.

    The function that the script calls has to call it directly, for the place of a warning.

    Raises:
        ValueError: both are given, or there is no such op.
    """
    if op is None:
        if average is None:
            return Average
        warnings.warn(
            "Parameter `average` has been replaced with `op` and will be removed in v1.0",
            DeprecationWarning,
            stacklevel=3,
        )
        return Average if average else Sum
    if average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    if op not in _OPS:
        raise ValueError(f"{op!r} is not an op; use one of hvd.Average, Sum, Adasum, Min, Max and Product")
    return op


def tensor_name(kind: str, name: str | None) -> str | None:
    """Returns the name that pairs the ranks' operations, with the kind, since kinds have names of their own.

    Raises:
        ValueError: the name is too long.
    """
    if not name:
        return None
    if len(name) > _MAX_NAME:
        raise ValueError(f"the name of a tensor may have {_MAX_NAME} characters, but {name[:40]!r}... has {len(name)}")
    return f"{kind}.{name}"


def id_of(here: Runtime, process_set: ProcessSet, kind: str) -> int:
    """Returns the id of the process set in which this rank does an operation.

    Raises:
        ValueError: this rank is not in it, or it is not registered.
    """
    process_set_id = process_set.process_set_id
    if process_set_id == GLOBAL_SET:
        return GLOBAL_SET
    registered = None if process_set_id is None else here.client.process_sets.get(process_set_id)
    if process_set_id is None or registered is None:
        raise ValueError(f"{kind.capitalize()}: Process set provided does not exist, or has not been registered: "
                         f"{process_set}; see add_process_set")  # fmt: skip
    if here.rank not in registered.ranks:
        raise ValueError(f"{kind.capitalize()}: Rank {here.rank} is not a member of the provided process set, whose "
                         f"ranks are {list(registered.ranks)}")  # fmt: skip
    return process_set_id


def check_tensor(value: object, kind: str) -> None:
    """Raises `ValueError`, with the remedy, for values that are no tensors."""
    if isinstance(value, torch.Tensor):
        return
    what = type(value).__name__
    remedy = "a function for Python objects, such as hvd.allgather_object"
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, torch.Tensor) for item in value):
        remedy = f"hvd.grouped_{kind} for several tensors"
    elif isinstance(value, (bool, int, float, complex, list, tuple)):
        remedy = "torch.tensor(...) of it"
    elif hasattr(value, "__array_interface__"):
        remedy = "torch.from_numpy(...) of it"
    raise ValueError(f"{kind} takes a torch.Tensor, not a value of type {what}; use {remedy}")


def listed(tensors: Iterable[torch.Tensor], kind: str) -> list[torch.Tensor]:
    """Returns the tensors of a grouped operation. Raises `ValueError` if there are none, or something else."""
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Iterable):
        raise ValueError(f"grouped_{kind} takes a list of tensors, not a value of type {type(tensors).__name__}")
    found = list(tensors)
    if not found:
        raise ValueError("a grouped operation needs at least one tensor")
    for tensor in found:
        check_tensor(tensor, kind)
    return found


def as_real(tensor: torch.Tensor, kind: wire.Kind, op: wire.Op = Sum) -> torch.Tensor:
    """Returns the tensor itself, or of a complex one a view of its real and imaginary parts, in a last dimension of 2.

    The view shares the tensor's memory, unless that is a conjugate view.

    Raises:
        ValueError: it is no tensor, or a complex one that the operation cannot take.
    """
    check_tensor(tensor, kind)
    if not tensor.is_complex():
        return tensor
    if op not in (Average, Sum):
        raise ValueError(f"complex tensors travel as pairs of numbers, which {op} cannot combine; use Average or Sum")
    if wire.KINDS[kind].verb and not tensor.shape:
        raise _scalar(kind)
    return torch.view_as_real(tensor.detach().resolve_conj())


def _scalar(kind: wire.Kind) -> ValueError:
    verb = wire.KINDS[kind].verb
    return ValueError(f"{kind} {verb} along the first dimension, which a scalar has not; use tensor.view(1)")


@lru_cache(maxsize=4096)
def signature_of(
    kind: wire.Kind,
    dtype: torch.dtype,
    shape: Sequence[int],
    op: wire.Op = Sum,
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = 0,
    process_set: int = GLOBAL_SET,
    codec: str = "dense",
    parts: tuple[Sequence[int], ...] = (),
) -> wire.Signature:
    """Makes the signature of an operation, and checks the arguments that are in it.

    Args:
        shape: of the tensor, a hashable sequence.
        parts: shapes of the tensors that were packed into a flat one.

    Raises:
        ValueError: the operation cannot take such tensors.
    """
    name = dtype_name(dtype)
    if not shape and wire.KINDS[kind].verb:
        raise _scalar(kind)
    if op == Average and dtype == torch.bool:
        raise ValueError("bool tensors have no average; use op=Sum (or), Product (and), Min or Max, or another dtype")
    if op == Adasum and not dtype.is_floating_point:
        raise ValueError(f"Adasum combines floating-point tensors, not {dtype}; use another op, or convert them")
    chosen = codecs.parse(codec)
    chosen.check_use(op, DTYPES[name], kind)
    return wire.Signature(
        kind,
        name,
        tuple(shape),
        op,
        float(prescale),
        float(postscale),
        root,
        process_set,
        codec if chosen.applies_to(DTYPES[name]) else "dense",
        tuple(map(tuple, parts)),
    )
