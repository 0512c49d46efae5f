"""Submissions of workers: checked on arrival, and turned into exchanges once every rank's sizes are known."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fusion_rt import algorithms, codecs, wire
from fusion_rt.core.dtypes import DTYPES, DType
from fusion_rt.core.topology import GLOBAL_SET, Topology
from fusiond.collectives.base import Array, Exchange, Port, Reducer
from fusiond.collectives.blocks import Block, Blocks
from fusiond.collectives.broadcast import Broadcast
from fusiond.collectives.doubling import Doubling
from fusiond.collectives.one_node import OneNode
from fusiond.collectives.scatter import ReduceScatter, rows_of_members
from fusiond.core.contribution import Contribution
from fusiond.core.errors import RequestError
from fusiond.core.participants import EMPTY_KINDS, Members

_BYTE = DTYPES["uint8"]
_MAX_PLAN = 2**46  # bytes


def contributions_of(local: Sequence[Contribution]) -> tuple[list[Contribution], bool]:
    """Returns the local parts that have anything in them, and whether that is the node's contribution already.

    Raises:
        RequestError: ranks do not agree about who submits their contributions.
    """
    shares = [part.share for part in local]
    if not any(shares):
        return list(local), False
    if all(share == wire.ELSEWHERE for share in shares):
        raise RequestError(f"of {len(local)} ranks of a node, none has what they could not combine among themselves")
    if shares.count(wire.OF_NODE) != 1 or wire.OWN in shares:
        raise RequestError(
            f"of {len(local)} ranks of a node, {shares.count(wire.OWN)} submit their own contribution, "
            f"{shares.count(wire.OF_NODE)} those of all, and {shares.count(wire.ELSEWHERE)} rely on another rank"
        )
    return [part for part in local if part.share == wire.OF_NODE], True


def outputs_of(local: Sequence[Contribution]) -> tuple[list[Array], Array | None]:
    """Returns where an operation with one result for all writes it, for its local parts.

    Returns: the distinct arrays, the places in the arena first; and the one that serves all inline parts, if any.
    """
    outputs = [part.place for part in local if part.place is not None]
    if len(outputs) == len(local):
        return outputs, None
    shared = np.empty_like(local[0].values)
    return [*outputs, shared], shared


@dataclass(frozen=True, slots=True)
class Recipe:
    """The common properties of all operations of one signature, worked out once.

    Attributes:
        layout: dtype and number of elements of one rank's tensor.
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

    def part(self, rank: int, submit: wire.Submit, memory: Array | None) -> Contribution:
        """Returns the contribution that a submission of this signature describes.

        Args:
            memory: the tensor's bytes (uint8) in the arena, or None when they are in the message.

        Raises:
            RequestError: it makes no sense, whatever the other ranks submit.
        """
        if rank not in self.members.local:
            members = self.members.set
            raise RequestError(f"rank {rank} is not in process set {members.id}, whose ranks are {list(members.ranks)}")
        storage = self.layout.dtype.storage
        if memory is None:
            data = submit.inline or b""
            if len(data) != self.nbytes:
                raise self._wrong_length(len(data))
            values: Array = np.frombuffer(data, storage)
            place = None
        else:
            if len(memory) != self.nbytes:
                raise self._wrong_length(len(memory))
            values = place = memory.view(storage)
        if self.signature.kind == "alltoall":
            self._check_splits(submit.splits)
        position = self.members.set.ranks.index(rank)
        return Contribution(position, values, submit.handle, place, signature=submit.signature, splits=submit.splits)

    def _wrong_length(self, nbytes: int) -> RequestError:
        shape = list(self.signature.shape)
        return RequestError(f"{self.layout.dtype} {shape} takes {self.nbytes} bytes, but {nbytes} were given")

    def _check_splits(self, splits: tuple[int, ...]) -> None:
        members, rows = len(self.members.set.ranks), self.signature.shape[0]
        if len(splits) != members or sum(splits) != rows:
            raise RequestError(f"alltoall needs {members} splits that add up to {rows} rows, not {list(splits)}")


def make_recipe(signature: wire.Signature, members: Members) -> Recipe:
    """Works out what operations of this signature need.

    Raises:
        FusionError: no rank can submit this.
    """
    if signature.kind in EMPTY_KINDS:
        dtype, elements = _BYTE, 0
        _check_ranks(signature, members)
    else:
        dtype, elements = DType.named(signature.dtype), math.prod(signature.shape)
    if signature.kind in ("allgather", "alltoall", "reducescatter") and not signature.shape:
        raise RequestError(f"{signature.kind} needs a tensor of at least one dimension")
    if signature.kind == "broadcast" and signature.root not in members.set.ranks:
        raise RequestError(f"the root rank {signature.root} is not in process set {members.set.id}")
    check_scales(signature)
    codec = codecs.parse(signature.codec)
    codec.check_use(signature.op, dtype, signature.kind)
    if signature.op == "adasum" and not (dtype.is_floating and signature.kind == "allreduce"):
        raise RequestError(f"Adasum is an all-reduce of floating-point elements, not a {signature.kind} of {dtype}")
    if signature.kind == "allreduce" and signature.parts and sum(map(math.prod, signature.parts)) != elements:
        raise RequestError(f"the {len(signature.parts)} tensors of the group do not have {elements} elements together")
    scaled = signature.op == "average" or (signature.prescale, signature.postscale) != (1.0, 1.0)
    if signature.kind in ("allreduce", "reducescatter") and dtype.name == "bool" and scaled:
        raise RequestError("bool elements can be neither averaged nor scaled; use sum (or), product (and), min or max")
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
        reducer_of(signature, dtype, len(members.set.ranks)),
        codec,
        codecs.Layout(dtype, elements, spans),
        parts,
        nbytes,
        nbytes * len(members.local),
    )


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
    reduction = proposal.reduction
    algorithm = algorithms.parse(reduction.algorithm)
    algorithms.check_use(algorithm, codecs.parse(reduction.codec), reduction.op, ranks)
    if algorithm.at_homes:
        odd = next((tensor for tensor in proposal.tensors if tensor.dtype not in ("float32", "float64")), None)
        if odd is not None:
            raise RequestError(
                f"{algorithm} is for float32 and float64, and {odd.name!r} is {odd.dtype}; use allreduce"
            )
        groups = 0 if reduction.optimizer is None else len(reduction.optimizer.groups)
        if groups and any(tensor.group >= groups for tensor in proposal.tensors):
            raise RequestError(f"tensors are in parameter groups that the optimizer, with {groups}, does not have")
    nbytes = sum(math.prod(tensor.shape) * DType.named(tensor.dtype).itemsize for tensor in proposal.tensors)
    if nbytes > _MAX_PLAN:
        raise RequestError(f"its tensors take {nbytes} bytes, more than the {_MAX_PLAN} that a plan may have")
    check_scales(proposal.reduction)
    codecs.parse(proposal.reduction.codec).check_use(proposal.reduction.op)
    if proposal.tuning is not None:
        if not algorithm.sums_gradients or reduction.op == "adasum":
            raise RequestError(f"{algorithm} with {reduction.op} cannot be tuned; only all-reduces can, without Adasum")
        if proposal.tuning.codec:
            codecs.parse(proposal.tuning.codec).check_use(reduction.op)


def check_scales(how: wire.Reduction | wire.Signature) -> None:
    """Raises `RequestError` unless the factors are numbers; NaN would not even be equal on all ranks."""
    if not (math.isfinite(how.prescale) and math.isfinite(how.postscale)):
        raise RequestError(f"the scale factors {how.prescale:g} and {how.postscale:g} have to be finite")


def reducer_of(how: wire.Reduction | wire.Signature, dtype: DType, ranks: int) -> Reducer:
    """Returns the kernel's parameters: an average is a sum with the number of ranks as divisor."""
    op, divisor = ("sum", ranks) if how.op == "average" else (how.op, 1)
    return Reducer(op, dtype, how.prescale, how.postscale, divisor)


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
        outputs: where they want a broadcast tensor, from `outputs_of`.
        rows: first dimension of every member's tensor.
        splits: for alltoall, every member's splits.

    Raises:
        RequestError: the members' sizes do not fit together.
    """
    signature, members = recipe.signature, recipe.members
    if signature.kind in EMPTY_KINDS:
        nothing = [part.values for part in local[:1]]
        if port.nodes == 1:
            return OneNode(port, recipe.reducer, nothing, outputs)
        return Doubling(port, recipe.reducer, recipe.codec.open(recipe.layout), nothing, outputs)
    homes = [members.nodes.index(topology.node_of(rank)) for rank in members.set.ranks]
    here = [members.set.ranks.index(rank) for rank in members.local]
    if signature.kind == "broadcast":
        root = members.set.ranks.index(signature.root)
        source = local[here.index(root)].values.view(np.uint8) if root in here else None
        return Broadcast(port, homes[root], source, [output.view(np.uint8) for output in outputs])
    row_elements = math.prod(signature.shape[1:])
    row_nbytes = row_elements * recipe.layout.dtype.itemsize
    if signature.kind == "allgather":
        return _allgather(port, homes, here, local, [r * row_nbytes for r in rows], tuple(rows))
    if signature.kind == "alltoall":
        return _alltoall(port, homes, here, local, splits, row_nbytes)
    ranges = [(a * row_elements, b * row_elements) for a, b in rows_of_members(signature.shape[0], len(homes))]
    sources = [part.values for part in local]
    return ReduceScatter(port, recipe.reducer, recipe.codec.open(recipe.layout), sources, ranges, homes, here)


def _allgather(
    port: Port,
    homes: Sequence[int],
    here: Sequence[int],
    local: Sequence[Contribution],
    nbytes: Sequence[int],
    rows: tuple[int, ...],
) -> Blocks:
    """Makes the exchange of every member's block with every other node; the local members share one result."""
    members, nodes, position = len(homes), port.nodes, port.position
    offsets = [sum(nbytes[:m]) for m in range(members)]
    data = {m: part.values.view(np.uint8) for m, part in zip(here, local, strict=True)}
    blocks = []
    for m in range(members):
        for target in range(nodes):
            if target != homes[m] and position in (homes[m], target):
                blocks.append(Block(m * nodes + target, homes[m], target, nbytes[m]))
    return Blocks(
        port,
        blocks,
        {b.part: data[b.part // nodes] for b in blocks if b.source == position},
        [(sum(nbytes), rows)],
        [(0, offsets[m], data[m]) for m in here],
        {b.part: (0, offsets[b.part // nodes]) for b in blocks if b.target == position},
    )


def _alltoall(
    port: Port,
    homes: Sequence[int],
    here: Sequence[int],
    local: Sequence[Contribution],
    splits: Sequence[Sequence[int]],
    row_nbytes: int,
) -> Blocks:
    """Makes the exchange of rows `splits[i][j]` from member i to member j; each member has a result of its own."""
    members = len(homes)
    nbytes = [[rows * row_nbytes for rows in splits[m]] for m in range(members)]
    blocks = []
    outgoing: dict[int, Array] = {}
    incoming: dict[int, tuple[int, int]] = {}
    copies: list[tuple[int, int, Array]] = []
    data = {m: part.values.view(np.uint8) for m, part in zip(here, local, strict=True)}
    for i in range(members):
        for j in range(members):
            part = i * members + j
            start = sum(nbytes[i][:j])
            place = (here.index(j), sum(nbytes[m][j] for m in range(i))) if j in here else None
            if i in here and place is not None:
                copies.append((*place, data[i][start : start + nbytes[i][j]]))
            elif i in here:
                outgoing[part] = data[i][start : start + nbytes[i][j]]
            elif place is not None:
                incoming[part] = place
            if (i in here) != (j in here):
                blocks.append(Block(part, homes[i], homes[j], nbytes[i][j]))
    received = [tuple(splits[i][j] for i in range(members)) for j in here]
    sizes = [(sum(nbytes[i][j] for i in range(members)), received[k]) for k, j in enumerate(here)]
    return Blocks(port, blocks, outgoing, sizes, copies, incoming)
