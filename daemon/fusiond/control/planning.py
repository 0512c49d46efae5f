"""The plan: which tensors share a bucket, in which order, where each lies, and the node of its home. Pure functions.

Buckets follow the order in which gradients arrived on the lowest rank, so that a bucket is full as early in the
backward pass as its last tensor allows; a bucket holds one dtype. Every tensor starts on a cache line, and so does
every bucket, so that views of the fusion buffer are as fast as tensors of their own.

Gradients that are summed while the backward pass goes on have at least a few buckets, however large these may be: with
all in one, nothing would be sent before the last of them is there. Those that arrive last, of the first layers, have a
small bucket to themselves: nothing of the backward pass is left to hide it behind, and the next forward pass needs it
first of all.

A tensor that is sparse on some rank is in no bucket: the ranks' rows of it are not the same.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from itertools import groupby

import msgspec
from msgspec.structs import replace

from fusion_rt import algorithms
from fusion_rt.core.dtypes import DTYPES
from fusion_rt.core.topology import Topology
from fusion_rt.host.arena import ALIGNMENT
from fusion_rt.units import MIB
from fusion_rt.wire import Bucket, Plan, PlannedTensor, Proposal, TensorSpec
from fusiond.core.participants import Participants

_PARTS_OF_A_SHARE = 4  # buckets that make up a share, when shares are not equal
_STAGES = 8  # buckets that a backward pass fills at least, so that sending begins early
_STAGE = MIB  # bytes; a bucket smaller than this costs more, as a message, than it hides
_TAIL = 8  # the last bucket has at most the threshold divided by this, or a stage
_PAGE = 4096  # bytes; buckets start on pages, so that two threads never write one page


def kind_of(proposal: Proposal) -> bytes:
    """Returns a digest of all that `disagreement` and `merge` look at: proposals with equal ones are of one kind, of
    which the plan needs the lowest rank's only. The order of tensors, which may differ, is not in it."""
    tensors = sorted((each.name, each.dtype, each.shape, each.sparse, each.group) for each in proposal.tensors)
    told = proposal.reduction, proposal.identity, tensors
    return hashlib.blake2b(msgspec.msgpack.encode(told), digest_size=16).digest()


def disagreement(proposals: Mapping[int, Proposal], topology: Topology) -> str:
    """Returns why the ranks' proposals do not fit together: a sentence with ranks and tensor, empty when they do.

    Their order, which of them are wanted together, and which are sparse may differ between ranks; everything else has
    to be equal.
    """
    first = min(proposals)
    reference = proposals[first]
    expected = {tensor.name: tensor for tensor in reference.tensors}
    for rank in sorted(proposals):
        proposal = proposals[rank]
        both = f"{topology.describe([first])} and {topology.describe([rank])}"
        if proposal.reduction != reference.reduction:
            return (
                f"{both} do not agree how the gradients of {reference.group!r} are combined: "
                f"{_reduction(reference)} on the first, {_reduction(proposal)} on the second"
            )
        found = {tensor.name: tensor for tensor in proposal.tensors}
        if len(found) != len(proposal.tensors):
            return f"{topology.describe([rank])} proposed two tensors of one name in {reference.group!r}"
        for name in expected.keys() ^ found.keys():
            has, lacks = (first, rank) if name in expected else (rank, first)
            where = f"{topology.describe([has])} but not on {topology.describe([lacks])}"
            return f"tensor {name!r} of {reference.group!r} is on {where}"
        for name, tensor in found.items():
            if (tensor.dtype, tensor.shape, tensor.group) != (
                expected[name].dtype,
                expected[name].shape,
                expected[name].group,
            ):
                return (
                    f"tensor {name!r} of {reference.group!r} differs between {both}: "
                    f"{_tensor(expected[name])} on the first, {_tensor(tensor)} on the second"
                )
    return ""


def misordered(proposals: Mapping[int, Proposal], topology: Topology) -> str:
    """Explains that ranks have made an optimizer, of the same parameters, in the place of another one."""
    places = [f"{proposals[rank].group!r} on {topology.describe([rank])}" for rank in sorted(proposals)]
    tensors = next(iter(proposals.values())).tensors
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    first = min(tensor.name for tensor in tensors)
    return (
        f"the ranks have made their optimizers in different orders: the one of {first!r}{more} is "
        f"{' and '.join(places)}; make optimizers in the same order on all ranks, and not in that of a set"
    )


def merge(proposals: Mapping[int, Proposal]) -> Proposal:
    """The lowest rank's proposal, in which those tensors are sparse that are so on any rank."""
    first = proposals[min(proposals)]
    sparse = {tensor.name: tensor.sparse for p in proposals.values() for tensor in p.tensors if tensor.sparse}
    if not sparse:
        return first
    return replace(first, tensors=tuple(replace(t, sparse=sparse.get(t.name, 0)) for t in first.tensors))


def make_plan(plan_id: int, proposal: Proposal, threshold: int, homes: Mapping[int, float] | None = None) -> Plan:
    """Fuses the proposed tensors, in their order, into buckets of at most `threshold` bytes.

    A tensor larger than that has a bucket of its own; a threshold of 0 gives every tensor one. Tensors that are wanted
    `together`, and follow each other in the proposal, have one whatever its size. By all-reduce, where buckets are sent
    while the backward pass goes on, none has more than an eighth of all bytes, unless that were less than 1 MiB; and
    the last one is smaller, unless its last tensor alone is too large for that.

    Args:
        proposal: its tuning, if it has one, goes before `threshold`.
        homes: nodes that are to have the buckets' homes, if they are to have any, with their shares of the bytes,
            relative to each other. The buckets are then small enough for each to have its share.

    Where an algorithm sends a model in fragments, buckets are small enough for each of these to have its share, too.
    """
    homes = homes or {}
    tuning, reduction = proposal.tuning, proposal.reduction
    if tuning is not None:
        threshold = threshold if tuning.threshold is None else tuning.threshold
        reduction = replace(reduction, codec=tuning.codec or reduction.codec)
    spec = algorithms.parse(proposal.reduction.algorithm)
    sparse = tuple(tensor for tensor in proposal.tensors if tensor.sparse)
    dense = [tensor for tensor in proposal.tensors if not tensor.sparse]
    nbytes = sum(math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize for tensor in dense)
    if homes or spec.pieces > 1:
        parts = len(homes) if len(set(homes.values())) <= 1 else _PARTS_OF_A_SHARE * len(homes)
        threshold = min(threshold, -(-nbytes // max(parts, spec.pieces)))
    tail = 0
    if spec.sums_gradients:
        least = min(threshold // _TAIL, _STAGE)
        threshold = min(threshold, max(_STAGE, -(-nbytes // _STAGES)))
        tail = _tail(dense, max(threshold // _TAIL, least))
    buckets: list[Bucket] = []
    offset = 0
    for index, tensors in enumerate(_fused(dense, threshold, tail)):
        bucket = _bucket(index, tensors, offset)
        buckets.append(bucket)
        offset += -(-bucket.numel * DTYPES[bucket.dtype].itemsize // _PAGE) * _PAGE
    return Plan(
        plan_id,
        proposal.group,
        proposal.process_set,
        reduction,
        tuple(buckets),
        offset,
        sparse,
        place_homes(buckets, homes),
        tuning,
    )


def home_shares(
    proposal: Proposal, participants: Participants, hosts: str, seconds_per_byte: Mapping[int, float]
) -> dict[int, float]:
    """The nodes that are to have homes of the proposal's buckets, and their shares; none if these have no homes of
    their own. Collaborating workers may be anywhere, so there a node's share is by the rate of its link.

    Args:
        hosts: those whose nodes have homes, as the setting `shard_hosts` says; empty: all nodes of the process set.
        seconds_per_byte: of the links to other nodes, as far as they have been measured.
    """
    spec = algorithms.parse(proposal.reduction.algorithm)
    if not spec.at_shards:
        return {}
    nodes = participants.members(proposal.process_set).nodes
    if hosts:
        nodes = tuple(node for node in participants.topology.homes(hosts) if node not in participants.lost_nodes)
    times = seconds_per_byte
    if not spec.anywhere or not all(time > 0 for time in times.values()) or not times:
        return dict.fromkeys(nodes, 1.0)
    fastest = min(times.values())  # of the first node itself, which was not measured, we know no better
    return {node: fastest / times.get(node, fastest) for node in nodes}


def place_homes(buckets: Sequence[Bucket], shares: Mapping[int, float]) -> tuple[int, ...]:
    """A node for the home of each bucket, so that the nodes have about their shares of the bytes: the largest bucket
    first, each to the node that has least of its share then."""
    if not shares:
        return ()
    load = dict.fromkeys(shares, 0)
    placed: dict[int, int] = {}
    sizes = {bucket.index: bucket.numel * DTYPES[bucket.dtype].itemsize for bucket in buckets}
    for index, nbytes in sorted(sizes.items(), key=lambda item: -item[1]):
        node = min(shares, key=lambda n: (load[n] + nbytes) / shares[n])
        placed[index] = node
        load[node] += nbytes
    return tuple(placed[bucket.index] for bucket in buckets)


def _tail(tensors: Sequence[TensorSpec], most: int) -> int:
    """Returns how many tensors at the end the last bucket is to have: of one dtype, and at most so many bytes."""
    count = nbytes = 0
    for tensor in reversed(tensors):
        nbytes += _nbytes(tensor)
        if tensor.together or tensor.dtype != tensors[-1].dtype or nbytes > most:
            break
        count += 1
    return count


def _fused(tensors: Sequence[TensorSpec], threshold: int, tail: int) -> list[list[TensorSpec]]:
    """The tensors of each bucket, in the order in which the buckets are complete; the last one has the last `tail`."""
    open_buckets: dict[str, list[TensorSpec]] = {}  # by dtype: tensors of the bucket being filled
    filled: dict[str, int] = {}
    closed: list[list[TensorSpec]] = []
    before = tensors[: len(tensors) - tail]
    for (dtype, together), run in groupby(before, lambda tensor: (tensor.dtype, tensor.together)):
        if together:
            closed.append(list(run))
            continue
        for tensor in run:
            nbytes = _nbytes(tensor)
            if dtype in open_buckets and filled[dtype] + nbytes > threshold:
                closed.append(open_buckets.pop(dtype))
            if dtype not in open_buckets:
                open_buckets[dtype] = []
                filled[dtype] = 0
            open_buckets[dtype].append(tensor)
            filled[dtype] += nbytes
    closed.extend(open_buckets.values())
    if tail:
        closed.append(list(tensors[len(before) :]))
    return closed


def _bucket(index: int, tensors: Sequence[TensorSpec], offset: int) -> Bucket:
    dtype = tensors[0].dtype
    start = 0
    places: list[PlannedTensor] = []
    for tensor in tensors:
        numel = math.prod(tensor.shape)
        places.append(PlannedTensor(tensor.name, start, numel, tensor.shape, tensor.group))
        start += _padded(numel, dtype)
    return Bucket(index, dtype, start, offset, tuple(places))


def _nbytes(tensor: TensorSpec) -> int:
    """Bytes that a tensor takes up in a bucket."""
    return _padded(math.prod(tensor.shape), tensor.dtype) * DTYPES[tensor.dtype].itemsize


def _padded(numel: int, dtype: str) -> int:
    """Elements that a tensor takes up, so that the next one starts on a cache line."""
    line = ALIGNMENT // DTYPES[dtype].itemsize
    return -(-numel // line) * line


def _reduction(proposal: Proposal) -> str:
    r = proposal.reduction
    packages = f" ({', '.join(r.packages)})" if r.packages else ""
    return f"{r.op} (prescale {r.prescale:g}, postscale {r.postscale:g}) with {r.codec} by {r.algorithm}{packages}"


def _tensor(tensor: TensorSpec) -> str:
    group = f" in parameter group {tensor.group}" if tensor.group else ""
    return f"{tensor.dtype} {list(tensor.shape)}{group}"
