"""Messages that the ranks of a job leave for each other in a store while it comes up: typed, limited, and sealed.

An entry carries a digest that is keyed with a secret of the job's processes and covers its name, so that nobody else
can make one or move it. Without a secret the digest only keeps jobs apart.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from typing import Annotated, TypeVar

import msgspec

from fusion_rt.core.errors import FusionError, WireError
from fusion_rt.core.topology import Topology
from fusion_rt.host.bootstrap import Job, PeerTable, decode_line, encode_line

_NAMED = 16  # ranks that a message names at most
_Name = Annotated[str, msgspec.Meta(max_length=255)]
_T = TypeVar("_T")


class Arrival(msgspec.Struct, frozen=True):
    """One rank's message about itself.

    Attributes:
        size: number of ranks that it was told.
        local_rank: on its node; -1 if it was not told.
        node: the same for the ranks of one node, and for no others.
        host: name of its host, for people.
        visit: random; another one each time that it comes.
    """

    size: int
    local_rank: int
    node: _Name
    host: _Name
    visit: _Name


class Assignment(msgspec.Struct, frozen=True, tag="assignment"):
    """The job as rank 0 has put it together. `visits`: of the ranks it is made of, in their order."""

    job: Job
    topology: Topology
    visits: tuple[_Name, ...]


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """Rank 0's message that there will be no job of these visits, and why."""

    error: str
    visits: tuple[_Name, ...]


class Word(msgspec.Struct, frozen=True):
    """A rank confirms the assignment of a job; or rank 0 says that all have."""

    job: Job


class Introduction(msgspec.Struct, frozen=True, tag="introduction"):
    """All daemons' endpoints."""

    table: PeerTable


def assemble(arrivals: Mapping[int, Arrival]) -> Topology:
    """The topology that all ranks' words add up to.

    Nodes are in the order of their lowest ranks; the ranks of a node in that of their local ranks, if these are known.

    Raises:
        FusionError: two ranks of a node have the same local rank, or one was told another size than there are.
    """
    for rank, arrival in sorted(arrivals.items()):
        if arrival.size != len(arrivals):
            raise FusionError(f"rank {rank} was started as one of {arrival.size}, and others as one of {len(arrivals)}")
    nodes: dict[str, list[int]] = {}
    for rank in sorted(arrivals):
        nodes.setdefault(arrivals[rank].node, []).append(rank)
    for node, ranks in nodes.items():
        places = [arrivals[rank].local_rank for rank in ranks]
        if -1 in places:
            continue
        if len(set(places)) != len(places):
            raise FusionError(f"{name_ranks(ranks)} came from one node (host {arrivals[ranks[0]].host}) with the local "
                              f"{name_ranks(places)}")  # fmt: skip
        nodes[node] = [rank for _, rank in sorted(zip(places, ranks, strict=True))]
    hosts = tuple(arrivals[ranks[0]].host for ranks in nodes.values())
    return Topology(hosts, tuple(tuple(ranks) for ranks in nodes.values()))


def digest(secret: bytes, text: bytes) -> bytes:
    """Keyed digest of a text, in hexadecimal digits."""
    key = hashlib.blake2b(secret).digest()
    return hashlib.blake2b(text, digest_size=16, key=key, person=b"fusion_rt").hexdigest().encode()


def seal(secret: bytes, name: str, message: msgspec.Struct) -> bytes:
    """A message as it is stored under a name."""
    line = encode_line(message)
    return digest(secret, name.encode() + b"\0" + line) + b" " + line


def unseal(secret: bytes, name: str, value: bytes, kind: type[_T]) -> _T:
    """The message in a stored value.

    Raises:
        WireError: it was not stored under that name with the secret, or it is no such message.
    """
    if not is_sealed(secret, name, value):
        raise WireError(f"{name} was stored by another process, or with another secret (FUSION_JOB_SECRET_FILE)")
    return decode_line(value.partition(b" ")[2], kind)


def is_sealed(secret: bytes, name: str, value: bytes) -> bool:
    """Tells whether a value was made for that name with the secret."""
    found, _, line = value.partition(b" ")
    return hmac.compare_digest(found, digest(secret, name.encode() + b"\0" + line))


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1`; no more than a few of many."""
    names = ", ".join(map(str, ranks[:_NAMED]))
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {names}{more}"
