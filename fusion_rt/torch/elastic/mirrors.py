"""Mirrors of shards: the state of homes on one node at a commit is kept on another node, too.

The nodes that have workers are a ring, in the order of their numbers: each one's state is mirrored on the next. So the
loss of one node, or of several that are no neighbours, costs no optimizer's state.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping

import numpy as np
import torch

from fusion_rt.torch.core.runtime import runtime
from fusion_rt.torch.ops.alltoall import alltoall
from fusion_rt.torch.ops.objects import allgather_object
from fusion_rt.torch.sync import carried
from fusion_rt.torch.sync.carried import Arrays

_ROW = 4096  # bytes; an all-to-all counts rows in 31 bits


def exchange(homes: Mapping[str, Arrays]) -> dict[str, Arrays]:
    """Sends the state of this node's homes to the next node. An operation on all ranks, on two nodes or more.

    Args:
        homes: see `CarriedState`; empty on all workers but the first of each node.

    Returns:
        The state of the homes on the node before; on the first worker of a node.

    Raises:
        HorovodInternalError: a rank is gone.
    """
    here = runtime()
    splits = [0] * here.client.topology.size
    rows = torch.empty((0, _ROW), dtype=torch.uint8)
    if homes:
        firsts = _first_workers()
        rows = _as_rows(homes)
        splits[firsts[(firsts.index(here.rank) + 1) % len(firsts)]] = len(rows)
    received, _ = alltoall(rows, splits, "elastic.mirror")
    found: dict[str, Arrays] = pickle.loads(received.numpy().data) if len(received) else {}  # ends before its last row
    return found


def fill(homes: Mapping[str, Arrays], mirrored: Mapping[str, Arrays]) -> dict[str, Arrays]:
    """Returns the homes that there are, and, of tensors whose homes are gone, their mirrored state. An operation
    on all ranks.

    Args:
        homes: of all ranks, the same on all of them.
        mirrored: the state that this rank has.

    Raises:
        HorovodInternalError: a rank is gone.
    """
    lost = {name: pieces for name, pieces in mirrored.items() if name not in homes}
    return carried.united([homes, *allgather_object(lost, "elastic.mirrored")])


def are_possible() -> bool:
    """Tells whether there is another node; the same on all ranks."""
    return len(_first_workers()) > 1


def _first_workers() -> list[int]:
    """Returns the first rank of each node that has any."""
    return [ranks[0] for ranks in runtime().client.topology.ranks if ranks]


def _as_rows(homes: Mapping[str, Arrays]) -> torch.Tensor:
    """Returns the homes as bytes, in whole rows."""
    data = pickle.dumps(homes, protocol=pickle.HIGHEST_PROTOCOL)
    rows = np.zeros((-(-len(data) // _ROW), _ROW), np.uint8)
    rows.reshape(-1)[: len(data)] = np.frombuffer(data, np.uint8)
    return torch.from_numpy(rows)
