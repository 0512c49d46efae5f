"""The loop of `elastic.run` over membership epochs, in a job whose launcher starts, moves and ends workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusion_rt.core.errors import HorovodInternalError, HostsUpdatedInterrupt
from fusion_rt.local import elastic
from fusion_rt.torch import ops
from fusion_rt.torch.core.basics import init
from fusion_rt.torch.core.runtime import runtime, step_out
from fusion_rt.torch.elastic.state import State
from fusion_rt.torch.sync.synchroniser import enter_all


def train(func: Callable[..., Any], state: State, agent: elastic.AgentConnection, *args: Any, **kwargs: Any) -> Any:
    """Calls the training function, anew in each membership epoch, until it returns; returns its result.

    Exceptions of the function other than `HorovodInternalError` and `HostsUpdatedInterrupt` are not caught.

    Raises:
        SystemExit: there is no place for this worker any more.
        FusionError: the agent is gone.
    """
    # Why this worker has left an epoch; empty if only hosts have changed, or it is new and the others are in one.
    why: str | None = None if agent.expected is None else ""
    skip_sync = has_values = False
    while True:
        try:
            if why is not None:
                _move(agent, why)
                state.on_reset()
            all_skip, state._root = _agree(skip_sync, has_values)
            if all_skip:
                state._resume()
            else:
                state.sync()
            has_values = True
            return func(state, *args, **kwargs)
        except HorovodInternalError as error:
            why, skip_sync = str(error), False
            state.restore()
        except HostsUpdatedInterrupt as interrupt:
            why, skip_sync = "", interrupt.skip_sync
            try:
                state._hand_over()
            except HorovodInternalError as error:  # somebody was not so orderly
                why, skip_sync = str(error), False
                state.restore()


def _move(agent: elastic.AgentConnection, why: str) -> None:
    """Leaves this membership epoch, and joins the next one; over the same connection if its daemon is the same."""
    step_out()
    elastic.move(agent, why)
    init()
    enter_all(runtime())


def _agree(skip_sync: bool, has_values: bool) -> tuple[bool, int]:
    """Agrees on whether all ranks skip the sync, and on the rank that a sync is from.

    The latter is the first rank that has values which were synced before. The launcher gives workers of earlier epochs
    the lowest ranks, but these may have been interrupted before their first sync.
    """
    told = ops.allgather(torch.tensor([[skip_sync, has_values]], dtype=torch.uint8), name="elastic.sync").tolist()
    return all(skips for skips, _ in told), next((rank for rank, (_, has) in enumerate(told) if has), 0)
