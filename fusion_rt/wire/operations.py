"""The signature of an operation, the key of one run of it, and the place of its tensor."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import NamedTuple

import msgspec

from fusion_rt.wire.basics import CLOCKS_OF_AN_EPOCH, GROUPS, Count, Name, Op, Rank, Shape
from fusion_rt.wire.kinds import KINDS, Kind

_IDS = 1 << 48  # of process sets (`Count`)


def group_id(key: str) -> int:
    """Returns the id of the group with this key, the same wherever it is asked for."""
    number = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")
    return GROUPS + number % (_IDS - GROUPS)


def is_group(process_set: int) -> bool:
    """Tells whether a process set is a group: known to its members only, which negotiate nothing."""
    return process_set >= GROUPS


class Signature(msgspec.Struct, frozen=True, array_like=True):
    """The properties of an operation, apart from its name, on which ranks have to agree before it runs.

    Attributes:
        kind: the collective; `join` and those that add and remove a process set are barriers with an effect.
        dtype: name of an entry of `dtypes.DTYPES`; empty for an operation without data.
        shape: dimensions of this rank's tensor. Ranks may differ in the first one if the kind is `uneven`.
        op: how the elements of different ranks are combined, if the kind `reduces`.
        prescale, postscale: factors applied to each rank's elements before and to the result after combining.
        root: the rank whose tensor is broadcast, or which alone gets the result of a reduce; 0 otherwise.
        process_set: id of the set of ranks that take part.
        codec: spec of the codec between nodes.
        parts: shapes of the tensors that were fused into this one, which then is flat; empty when it is a single one.
            A first dimension in which ranks may differ is 0 there.
        ranks: members of the process set that is added or removed.
        rows: in a group, the first dimension of each member's part, by its position: of its tensor in an allgather, of
            its result in a reducescatter; empty: those of an allgather are equal, and a reducescatter's as equal as
            they can be.
    """

    kind: Kind
    dtype: Name = ""
    shape: Shape = ()
    op: Op = "sum"
    prescale: float = 1.0
    postscale: float = 1.0
    root: Rank = 0
    process_set: Count = 0
    codec: Name = "dense"
    parts: tuple[Shape, ...] = ()
    ranks: tuple[Rank, ...] = ()
    rows: tuple[Count, ...] = ()

    def common(self) -> Signature:
        """The part that must be equal on all ranks: without the first dimension where ranks may differ in it."""
        equal = self.kind == "allgather" and is_group(self.process_set) and not self.rows
        if KINDS[self.kind].uneven and self.shape and not equal:
            return msgspec.structs.replace(self, shape=(0, *self.shape[1:]))
        return self


@lru_cache(maxsize=4096)
def digest(signature: Signature) -> int:
    """Hashes a signature to 63 bits that identify it in data messages, so that no mismatch is reduced unnoticed."""
    packed = msgspec.msgpack.encode(signature.common())
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "big") >> 1


class OpKey(NamedTuple):
    """Identifies one run of one operation, the same on all nodes.

    Attributes:
        process_set: id of the process set, or group.
        plan: id of the plan for a planned bucket, 0 for any other operation.
        name: the tensor's name, the group's key, or the bucket's index in its plan.
        clock: how many operations of this name the worker had submitted before: in a group, all of them.
    """

    process_set: int
    plan: int
    name: str
    clock: int

    @property
    def in_words(self) -> str:
        """Describes the operation for people."""
        if is_group(self.process_set):
            return f"operation {self.clock % CLOCKS_OF_AN_EPOCH} of group {self.name!r}"
        return f"bucket {self.name} of plan {self.plan}" if self.plan else f"tensor {self.name!r}"


UNNAMED = ".noname"
"""End of the name that an operation without one gets, after its kind. In a process set they have one clock for all
kinds: two of them with the same clock are two ranks' submissions that should be of one operation."""


def in_its_place(key: OpKey) -> tuple[OpKey, ...]:
    """Returns the keys of operations of other kinds in the place of one without a name; none of any other one."""
    kind, dot, _ = key.name.rpartition(UNNAMED)
    if not dot or key.plan or is_group(key.process_set):
        return ()
    return tuple(key._replace(name=other + UNNAMED) for other in KINDS if other != kind)


@lru_cache(maxsize=4096)
def mark(key: OpKey) -> int:
    """Hashes the key of one run of an operation to 47 bits, the same on all nodes; never 0."""
    packed = msgspec.msgpack.encode(key)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=6).digest(), "big") >> 1 | 1


class Place(msgspec.Struct, tag="arena", frozen=True, array_like=True):
    """The place of a tensor in a worker's arena: segment id and offset in bytes."""

    segment: Count
    offset: Count


class Address(msgspec.Struct, tag="own", frozen=True, array_like=True):
    """The address of a tensor in a worker's own memory, which its daemon reads and writes (`Welcome.by_address`)."""

    address: Count
