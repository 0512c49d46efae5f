"""State of an optimizer that a node carries from one membership epoch to the next, which has other nodes, buckets and
homes.

The daemon saves it by bucket and rank (`fusion_rt.local.saved_state`). Here it is taken apart by tensor, and put
together for the buckets of another plan:

- *residuals* (and velocities, of codecs with momentum correction), whether of a node's part of an all-reduce or of
  what its workers send to homes: gradients that have not been sent. Anybody may send them, so all that counts is that
  each is in one place. Those of several workers are added up.
- the state that is the same on all nodes (`common`), such as a codec's number of steps.
- *homes* of shards: the value, the algorithm's memory by element, and the optimizer's state. Versions and clocks
  begin anew, and state of single ranks, which have other numbers then, is left behind.

Replicas are their workers' own, and begin anew with the workers' parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeAlias

import numpy as np

from fusion_rt import wire
from fusion_rt.local.saved_state import Array, Kind, StateOwner, by_owner
from fusion_rt.torch.sync.scales.conversion import Meant

Arrays: TypeAlias = dict[str, Array]

# Of homes: state of single ranks, of their clocks, or of codecs that have other buckets then.
_LEFT_BEHIND = ("aux/w_bak/", "aux/arrivals", "version", "done", "codec/", "answers/")


@dataclass(frozen=True)
class CarriedState:
    """State that one worker carries for its node.

    Attributes:
        residuals, velocities: by tensor; float32, 1-D.
        common: `BUCKET:KEY`, as the daemon saves it.
        buckets: of codecs' tensors, whose state has to be given back bucket by bucket.
        homes: of each tensor, by entry: `value` and `aux/NAME` (1-D), `optimizer/NAME`.
        meant: the units of residuals and velocities.
        total: the sums of all nodes' residuals and velocities, if they were handed over before some nodes left; then
            those of single nodes do not count.
    """

    residuals: Arrays = field(default_factory=dict)
    velocities: Arrays = field(default_factory=dict)
    common: Arrays = field(default_factory=dict)
    buckets: dict[str, int] = field(default_factory=dict)
    homes: dict[str, Arrays] = field(default_factory=dict)
    meant: Meant = field(default_factory=Meant)
    total: tuple[Arrays, Arrays] | None = None


def collect(
    state: Mapping[str, Array], plan: wire.Plan | None, meant: Meant | None = None, shards: Kind = "home"
) -> CarriedState:
    """Takes the saved state of a node's daemon for a plan apart.

    Args:
        plan: the active one; None if there was none yet.
        meant: see `CarriedState`.
        shards: whether the shards of this node are wanted, or, of others, the mirrors.
    """
    found = CarriedState(meant=meant or Meant())
    homes: dict[int, Arrays] = {}
    for owner, entries in by_owner(state).items():
        if owner.kind == shards and owner.rank == wire.SHARD:
            homes[owner.bucket] = entries
        elif owner.kind == "sender":
            for entry, value in entries.items():
                _remember(found, entry.removeprefix("codec/"), value)
        elif owner.kind == "codec":
            for entry, value in entries.items():
                if tensor := _remember(found, entry, value):
                    found.buckets[tensor] = owner.bucket
                elif entry != "bounds":  # ranges of the nodes that there were
                    found.common[owner.key(entry)] = value
    for bucket in plan.buckets if plan is not None else ():
        if bucket.index in homes:
            found.homes.update(_pieces(bucket, homes[bucket.index]))
    return found


def _remember(found: CarriedState, name: str, value: Array) -> str:
    """Adds a residual or velocity. Returns its tensor's name; empty if it is something else."""
    kind, _, tensor = name.partition("/")
    memory = {"residual": found.residuals, "velocity": found.velocities}.get(kind)
    if memory is None:
        return ""
    memory[tensor] = memory[tensor] + value if tensor in memory else value
    return tensor


def add(first: Mapping[str, Array], second: Mapping[str, Array]) -> Arrays:
    """Returns the sums, tensor by tensor."""
    return {**first, **{name: first[name] + value if name in first else value for name, value in second.items()}}


def scaled(arrays: Mapping[str, Array], factor: float) -> Arrays:
    """Returns the arrays multiplied by a factor."""
    return dict(arrays) if factor == 1.0 else {name: value * np.float32(factor) for name, value in arrays.items()}


def united(homes: Iterable[Mapping[str, Arrays]]) -> dict[str, Arrays]:
    """Merges the homes' tensors of several nodes; of a tensor that several have, the first counts."""
    found: dict[str, Arrays] = {}
    for each in homes:
        found = {**each, **found}
    return found


# --- for the buckets of another plan ----------------------------------------------------------------------------------


def codec_state(common: CarriedState, residuals: Arrays, velocities: Arrays, sizes: Mapping[str, int]) -> Arrays:
    """Returns the state that a node's daemon loads for an all-reduce, with or without a plan.

    Args:
        common: the state that all nodes start from.
        residuals, velocities: this node's. Where it has none they are zero, so that all nodes' states are of one form.
        sizes: elements of each tensor; state of no tensor, or of another size, is left out.
    """
    state = dict(common.common)
    for tensor, bucket in common.buckets.items():
        if tensor not in sizes:
            continue
        owner = StateOwner("codec", bucket)
        state[owner.key(f"residual/{tensor}")] = _of_size(residuals, tensor, sizes[tensor])
        if tensor in common.velocities:
            state[owner.key(f"velocity/{tensor}")] = _of_size(velocities, tensor, sizes[tensor])
    return state


def sender_state(bucket: wire.Bucket, rank: int, residuals: Arrays, velocities: Arrays) -> Arrays:
    """Returns the state for a worker's sender to the home of a bucket on another node; empty if there is none."""
    state: Arrays = {}
    for tensor in bucket.tensors:
        for kind, memory in (("residual", residuals), ("velocity", velocities)):
            if tensor.name in memory and memory[tensor.name].size == tensor.numel:
                state[f"codec/{kind}/{tensor.name}"] = memory[tensor.name]
    if state:
        state |= {"counts": np.zeros(2, np.int64), "moved": np.ones(1, np.int64)}
    return StateOwner("sender", bucket.index, rank).keyed(state)


def home_state(bucket: wire.Bucket, ranks: int, homes: Mapping[str, Arrays], values: Mapping[str, Array]) -> Arrays:
    """Returns the state that the home of a bucket loads; empty if no rank has any of its tensors.

    Args:
        ranks: how many take part.
        homes: see `CarriedState`.
        values: initial values of tensors without a home; 1-D, as they lie in the bucket.
    """
    known = {t.name: homes[t.name] for t in bucket.tensors if _fits(homes.get(t.name, {}), t)}
    if not known:
        return {}
    dtype = next(iter(known.values()))["value"].dtype
    state: Arrays = {"version": np.zeros(1, np.int64), "done": np.zeros(ranks, np.int64)}
    value = state["value"] = np.zeros(bucket.numel, dtype)
    for tensor in bucket.tensors:
        given = known[tensor.name]["value"] if tensor.name in known else values[tensor.name]
        value[tensor.start : tensor.start + tensor.numel] = given
    for entry in sorted({name for piece in known.values() for name in piece if name.startswith("aux/")}):
        state[entry] = _joined(bucket, entry, known)
    for index, tensor in enumerate(_in_groups(bucket)):
        for entry, array in known.get(tensor.name, {}).items():
            kind, _, name = entry.partition("/")
            if kind == "optimizer":
                state[f"optimizer/{index}/{name}"] = array
    return StateOwner("home", bucket.index).keyed(state)


def _pieces(bucket: wire.Bucket, entries: Mapping[str, Array]) -> dict[str, Arrays]:
    """Splits a home's state by tensor; tensors without a value are left out."""
    found: dict[str, Arrays] = {tensor.name: {} for tensor in bucket.tensors}
    ordered = _in_groups(bucket)
    for entry, array in entries.items():
        if entry.startswith(_LEFT_BEHIND):
            continue
        if entry.startswith("optimizer/"):
            _, index, name = entry.split("/", 2)
            found[ordered[int(index)].name][f"optimizer/{name}"] = array
            continue
        for tensor in bucket.tensors:
            whole = array.shape == (bucket.numel,)
            found[tensor.name][entry] = array[tensor.start : tensor.start + tensor.numel] if whole else array
    return {name: piece for name, piece in found.items() if "value" in piece}


def _joined(bucket: wire.Bucket, entry: str, known: Mapping[str, Arrays]) -> Array:
    """Joins an algorithm's state of a bucket: element by element, or, if it is a number, the largest."""
    pieces = [(t, known[t.name][entry]) for t in bucket.tensors if entry in known.get(t.name, {})]
    if any(array.size != tensor.numel for tensor, array in pieces):
        return max((array for _, array in pieces), key=np.sum)
    joined = np.zeros(bucket.numel, pieces[0][1].dtype)
    for tensor, array in pieces:
        joined[tensor.start : tensor.start + tensor.numel] = array
    return joined


def _in_groups(bucket: wire.Bucket) -> list[wire.PlannedTensor]:
    """Returns the tensors of a bucket in the order in which its home's optimizer numbers them."""
    return sorted(bucket.tensors, key=attrgetter("group"))


def _fits(piece: Mapping[str, Array], tensor: wire.PlannedTensor) -> bool:
    return "value" in piece and piece["value"].size == tensor.numel


def _of_size(memory: Mapping[str, Array], tensor: str, size: int) -> Array:
    found = memory.get(tensor)
    return found if found is not None and found.size == size else np.zeros(size, np.float32)
