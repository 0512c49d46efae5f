"""Submissions of workers: checked on arrival, and turned into exchanges once every rank's sizes are known."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from fusion_rt import algorithms, codecs, wire
from fusion_rt.codecs import averages
from fusion_rt.core.dtypes import DTYPES, DType
from fusion_rt.core.topology import GLOBAL_SET, Topology
from fusion_rt.kernels.ordinary import Operand
from fusiond.collectives.agreed import Agreed
from fusiond.collectives.base import BITWISE, Array, Exchange, Port, Reducer
from fusiond.collectives.by_kind import MAKERS
from fusiond.collectives.scatter import rows_of_members
from fusiond.core.contribution import Contribution
from fusiond.core.errors import RequestError
from fusiond.core.participants import Members

_BYTE = DTYPES["uint8"]
_MAX_PLAN = _MAX_RESULT = 2**46  # bytes


@dataclass(frozen=True, slots=True)
class Recipe:
    """The common properties of all operations of one signature, worked out once.

    Attributes:
        layout: dtype and number of elements of one rank's tensor.
        direct: it is an operation in a group, of which every member knows the sizes that concern it.
        parts: first element and number of elements of each tensor that was fused into it; of itself, if it is one.
        nbytes: of one rank's tensor; `local_nbytes`: of all local members' together.
    """

    signature: wire.Signature
    members: Members
    reducer: Reducer
    codec: codecs.Codec
    layout: codecs.Layout
    parts: tuple[tuple[int, int], ...]
    nbytes: int
    local_nbytes: int
    direct: bool

    def part(
        self, rank: int, submit: wire.Submit, memory: Operand | None, into: Callable[[int], Operand] | None = None
    ) -> Contribution:
        """Returns the contribution that a submission of this signature describes.

        Args:
            memory: the tensor's bytes (uint8), or None when they are in the message.
            into: returns so many bytes (uint8) of where the result goes, if that is somewhere else.

        Raises:
            RequestError: it makes no sense, whatever the other ranks submit.
        """
        if rank not in self.members.local:
            members = self.members.set
            raise RequestError(f"rank {rank} is not in process set {members.id}, whose ranks are {list(members.ranks)}")
        signature, storage = self.signature, self.layout.dtype.storage
        position = self.members.set.ranks.index(rank)
        if signature.kind == "alltoall":
            self._check_splits(submit.splits)
        if self.direct:
            self._check_sizes(position, submit)
        elif into is not None:
            raise RequestError("only in a group a result goes where it is wanted")
        values: Array
        place: Array | None = None
        if memory is not None:
            if len(memory) != self.nbytes:
                raise self._wrong_length(len(memory))
            values = cast(Array, memory.view(storage))  # see `Contribution.values`
            place = None if wire.KINDS[signature.kind].verb else values
        elif submit.inline is None and self.direct and signature.kind == "broadcast" and rank != signature.root:
            if into is None and self.nbytes > wire.MAX_INLINE:
                raise RequestError(f"{self.nbytes} bytes are received nowhere, and are too many for a message")
            values = np.empty(self.layout.elements if into is None else 0, storage)
        else:
            data = submit.inline or b""
            if len(data) != self.nbytes:
                raise self._wrong_length(len(data))
            values = np.frombuffer(data, storage)
        if into is not None:
            place = cast(Array, into(self._result_nbytes(position, submit)).view(storage))
        return Contribution(
            position,
            values,
            submit.handle,
            place,
            signature=submit.signature,
            splits=submit.splits,
            receives=submit.receives,
        )

    def _result_nbytes(self, position: int, submit: wire.Submit) -> int:
        """Bytes of the result of the member at a position."""
        signature = self.signature
        if signature.kind == "reduce" and self.members.set.ranks[position] != signature.root:
            return 0
        if not wire.KINDS[signature.kind].verb:
            return self.nbytes
        row = math.prod(signature.shape[1:]) * self.layout.dtype.itemsize
        if signature.kind == "alltoall":
            return sum(submit.receives) * row
        rows = self.rows()
        return (sum(rows) if signature.kind == "allgather" else rows[position]) * row

    def rows(self) -> Sequence[int]:
        """Returns the first dimension of each member's part of an allgather or reducescatter in a group."""
        signature, members = self.signature, len(self.members.set.ranks)
        if signature.rows:
            return signature.rows
        if signature.kind == "allgather":
            return [signature.shape[0]] * members
        return [high - low for low, high in rows_of_members(signature.shape[0], members)]

    def _check_sizes(self, position: int, submit: wire.Submit) -> None:
        """Raises `RequestError` unless the sizes that a member of a group gives fit its tensor."""
        shape, rows, members = submit.signature.shape, submit.signature.rows, len(self.members.set.ranks)
        kind = submit.signature.kind
        if kind == "alltoall" and len(submit.receives) != members:
            raise RequestError(f"alltoall in a group needs rows from each of {members}, not {list(submit.receives)}")
        if kind in ("allgather", "reducescatter") and rows:
            whole = rows[position] if kind == "allgather" and len(rows) == members else sum(rows)
            if len(rows) != members or whole != shape[0]:
                raise RequestError(
                    f"the rows {list(rows)} of {members} members do not fit its tensor of {shape[0]} rows"
                )
        if (nbytes := self._result_nbytes(position, submit)) > _MAX_RESULT:
            raise RequestError(f"its result takes {nbytes} bytes, more than the {_MAX_RESULT} that there may be")

    def _wrong_length(self, nbytes: int) -> RequestError:
        shape = list(self.signature.shape)
        return RequestError(f"{self.layout.dtype} {shape} takes {self.nbytes} bytes, but {nbytes} were given")

    def _check_splits(self, splits: tuple[int, ...]) -> None:
        members, rows = len(self.members.set.ranks), self.signature.shape[0]
        if len(splits) != members or sum(splits) != rows:
            raise RequestError(f"alltoall needs {members} splits that add up to {rows} rows, not {list(splits)}")


def make_recipe(signature: wire.Signature, members: Members) -> Recipe:
    """Works out the needs of operations of this signature.

    Raises:
        FusionError: no rank can submit this.
    """
    traits = wire.KINDS[signature.kind]
    if traits.carries:
        dtype, elements = DType.named(signature.dtype), math.prod(signature.shape)
    else:
        dtype, elements = _BYTE, 0
        _check_ranks(signature, members)
    if traits.verb and not signature.shape:
        raise RequestError(f"{signature.kind} needs a tensor of at least one dimension")
    if not wire.is_group(members.set.id) and (not traits.negotiated or signature.rows):
        raise RequestError("to reduce to one rank, and rows of each member, are possible in groups only")
    if traits.root and signature.root not in members.set.ranks:
        raise RequestError(f"the root rank {signature.root} is not in process set {members.set.id}")
    check_scales(signature)
    codec = codecs.parse(signature.codec)
    codec.check_use(signature.op, dtype, signature.kind)
    if signature.op == "adasum" and not (dtype.is_floating and signature.kind == "allreduce"):
        raise RequestError(f"Adasum is an all-reduce of floating-point elements, not a {signature.kind} of {dtype}")
    if signature.kind == "allreduce" and signature.parts and sum(map(math.prod, signature.parts)) != elements:
        raise RequestError(f"the {len(signature.parts)} tensors of the group do not have {elements} elements together")
    if traits.reduces:
        _check_op(signature, dtype)
    nbytes = elements * dtype.itemsize
    shapes = signature.parts or (signature.shape,)
    parts = tuple(_parts([math.prod(shape) for shape in shapes])) if elements else ()
    spans: tuple[codecs.Span, ...] = ()
    if codec.stateful:
        places = enumerate(zip(parts, shapes, strict=False))
        spans = tuple(codecs.Span(str(i), start, numel, shape) for i, ((start, numel), shape) in places)
    return Recipe(
        signature,
        members,
        reducer_of(signature, dtype, len(members.set.ranks), len(members.local)),
        codec,
        codecs.Layout(dtype, elements, spans),
        parts,
        nbytes,
        nbytes * len(members.local),
        wire.is_group(signature.process_set),
    )


def _check_op(how: wire.Reduction | wire.Signature, dtype: DType) -> None:
    """Raises `RequestError` unless elements of this type can be combined so."""
    scaled = how.op == "average" or (how.prescale, how.postscale) != (1.0, 1.0)
    if dtype.name == "bool" and scaled:
        raise RequestError("bool elements can be neither averaged nor scaled; use sum (or), product (and), min or max")
    if how.op in BITWISE and (scaled or dtype.is_floating):
        raise RequestError(f"{how.op} is for integers and bool, and they cannot be scaled; this is {dtype}")


def _parts(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First element and number of elements of tensors that lie one after the other."""
    return zip(itertools.accumulate(lengths, initial=0), lengths, strict=False)


def _check_ranks(signature: wire.Signature, members: Members) -> None:
    """Raises `RequestError` unless an operation that concerns all ranks is submitted for all, about ranks there are."""
    everyone = members.set.ranks
    if signature.kind != "barrier" and members.set.id != GLOBAL_SET:
        raise RequestError(f"{signature.kind} concerns all ranks and cannot be done in process set {members.set.id}")
    if signature.kind in ("add_process_set", "remove_process_set"):
        ranks = signature.ranks
        if not ranks or list(ranks) != sorted(set(ranks)) or not set(ranks).issubset(everyone):
            raise RequestError(f"a process set has different ranks of 0 to {len(everyone) - 1}, not {list(ranks)}")


def check_proposal(proposal: wire.Proposal, ranks: int) -> None:
    """Raises `FusionError` when so many ranks can make no plan of this."""
    if wire.is_group(proposal.process_set):
        raise RequestError("a plan is negotiated, and in a group nothing is; use a process set that all ranks know")
    reduction = proposal.reduction
    algorithm = algorithms.parse(reduction.algorithm)
    algorithms.check_use(algorithm, codecs.parse(reduction.codec), reduction.op, ranks)
    if not algorithm.sums_gradients:
        odd = next((tensor for tensor in proposal.tensors if tensor.dtype not in ("float32", "float64")), None)
        if odd is not None:
            raise RequestError(
                f"{algorithm} is for float32 and float64, and {odd.name!r} is {odd.dtype}, which rounds small steps "
                "away; keep parameters in float32 (with torch.autocast, for example), or use allreduce"
            )
    if algorithm.at_homes:
        groups = 0 if reduction.optimizer is None else len(reduction.optimizer.groups)
        if groups and any(tensor.group >= groups for tensor in proposal.tensors):
            raise RequestError(f"tensors are in parameter groups that the optimizer, with {groups}, does not have")
    nbytes = sum(math.prod(tensor.shape) * DType.named(tensor.dtype).itemsize for tensor in proposal.tensors)
    if nbytes > _MAX_PLAN:
        raise RequestError(f"its tensors take {nbytes} bytes, more than the {_MAX_PLAN} that a plan may have")
    check_scales(proposal.reduction)
    if reduction.op in BITWISE:
        raise RequestError(f"{reduction.op} combines no gradients; use Average or Sum")
    codecs.parse(proposal.reduction.codec).check_use(proposal.reduction.op)
    if proposal.tuning is not None:
        if algorithm.at_homes or reduction.op == "adasum":
            raise RequestError(f"{algorithm} with {reduction.op} cannot be tuned; only all-reduces can, without Adasum")
        if proposal.tuning.then and algorithms.parse(proposal.tuning.then).at_homes:
            raise RequestError(f"{proposal.tuning.then} has homes, which a job cannot come to while it runs")
        if proposal.tuning.codec:
            codec = codecs.parse(proposal.tuning.codec)
            codec.check_use(reduction.op)
            algorithms.check_use(algorithm, codec, reduction.op, ranks)


def check_scales(how: wire.Reduction | wire.Signature) -> None:
    """Raises `RequestError` unless the factors are numbers; NaN would not even be equal on all ranks."""
    if not (math.isfinite(how.prescale) and math.isfinite(how.postscale)):
        raise RequestError(f"the scale factors {how.prescale:g} and {how.postscale:g} have to be finite")


def reducer_of(how: wire.Reduction | wire.Signature, dtype: DType, ranks: int, local: int) -> Reducer:
    """Returns the kernel's parameters: an average is a sum that is divided, before or afterwards.

    Args:
        ranks: how many are combined.
        local: how many of them are this node's.
    """
    prescale, divisor = averages.scaling(how, dtype, ranks)
    room = averages.headroom(how, dtype, local)
    op = "sum" if how.op == "average" else how.op
    return Reducer(op, dtype, prescale / room, how.postscale * room, divisor, room)


def collective_exchange(
    port: Port,
    recipe: Recipe,
    topology: Topology,
    local: Sequence[Contribution],
    outputs: Sequence[Array],
    rows: Sequence[int],
    splits: Sequence[Sequence[int]],
) -> Exchange:
    """Makes the exchange of an operation other than all-reduce, on which all ranks agree.

    Args:
        local: parts of the local members, in rank order.
        outputs: where they want a broadcast tensor, from `operations.executor.outputs_of`.
        rows: first dimension of every member's tensor.
        splits: for alltoall, every member's splits. In a group, those that concern it are known here.

    Raises:
        RequestError: the members' sizes do not fit together.
    """
    signature = recipe.signature
    traits = wire.KINDS[signature.kind]
    if traits.verb and (recipe.direct or not traits.uneven):
        rows = recipe.rows()
    make = MAKERS[signature.kind]
    return make(
        Agreed(
            port,
            signature,
            recipe.reducer,
            recipe.codec,
            recipe.layout,
            recipe.members,
            topology,
            local,
            outputs,
            rows,
            splits,
        )
    )
