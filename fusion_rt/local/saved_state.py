"""The form in which a daemon saves the state of a group of tensors, and in which it is given back: named arrays.

| key | state |
| --- | --- |
| `BUCKET:ENTRY` | of the codec by which nodes all-reduce a bucket |
| `home:BUCKET:RANK:ENTRY` | of the home of a bucket: a shard (RANK -1), or the replica of the rank at that position |
| `mirror:BUCKET:-1:ENTRY` | of a shard of another node, as its mirror has it |
| `sender:BUCKET:RANK:ENTRY` | of what a local rank contributes to homes |

Entries of codecs are `KIND/TENSOR`, or a name without a slash; a sender has them below `codec/`, and `counts`. A home
has `value`, `version`, `done`, `aux/NAME`, `optimizer/INDEX/NAME`, and its codecs below `codec/` and `answers/`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from fusion_rt import wire
from fusion_rt.core.errors import WireError

Array: TypeAlias = npt.NDArray[Any]
State: TypeAlias = dict[str, Array]
Kind: TypeAlias = Literal["codec", "home", "mirror", "sender"]

_KEY = re.compile(r"(?:(\d{1,9})|(home|mirror|sender):(\d{1,9}):(-1|\d{1,9})):(.+)", re.ASCII | re.DOTALL)


class StateOwner(NamedTuple):
    """The owner of a part of a state.

    Attributes:
        bucket: its index.
        rank: of a sender its rank; of a replica's home the rank's position; else `wire.SHARD`.
    """

    kind: Kind
    bucket: int
    rank: int = wire.SHARD

    def key(self, entry: str) -> str:
        """Returns the key of an entry."""
        start = f"{self.bucket}" if self.kind == "codec" else f"{self.kind}:{self.bucket}:{self.rank}"
        return f"{start}:{entry}"

    def keyed(self, entries: Mapping[str, Array]) -> State:
        """Returns entries by their keys."""
        return {self.key(entry): value for entry, value in entries.items()}


def by_owner(state: Mapping[str, Array]) -> dict[StateOwner, State]:
    """Returns the entries of a saved state by their owners. Raises `WireError` if a key is none."""
    found: dict[StateOwner, State] = {}
    for key, value in state.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise WireError(f"{key[:200]!r} cannot be in a saved state; it is damaged, or of another program")
        bucket, kind, index, rank, entry = match.groups()
        owner = StateOwner("codec", int(bucket)) if bucket else StateOwner(cast(Kind, kind), int(index), int(rank))
        found.setdefault(owner, {})[entry] = value
    return found


def counts(saved: Array | None, how_many: int, of: str) -> list[int]:
    """Returns so many saved numbers, from 0 to 2**48 - 1. Raises `WireError` if they are something else."""
    if saved is None or saved.shape != (how_many,) or saved.dtype != np.int64:
        raise WireError(f"the saved state does not have the {how_many} counts of {of}")
    if not all(0 <= count < 2**48 for count in saved.tolist()):
        raise WireError(f"the saved state has the counts {saved.tolist()} of {of}, which cannot be")
    return [int(count) for count in saved]
