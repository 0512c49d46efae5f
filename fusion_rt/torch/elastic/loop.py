"""The loop of `elastic.run` over membership epochs, in a job whose launcher starts, moves and ends workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusion_rt.core.errors import HorovodInternalError, HostsUpdatedInterrupt
from fusion_rt.local import elastic
from fusion_rt.torch.elastic.state import State
from fusion_rt.torch.elastic.survival import Survival, move


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
    survival = Survival(agent, state)
    while True:
        try:
            if why is not None:
                if survival.agreed is None:
                    move(agent, why)
                state.on_reset()
            all_skip, state._root = survival.join(skip_sync, has_values)
            if all_skip:
                state._resume()
            else:
                state.sync()
            has_values = True
            with survival:
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
