"""The loop of `elastic.run` over membership epochs, in a job whose launcher starts, moves and ends workers."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from fusion_rt.core.errors import HorovodInternalError, HostsUpdatedInterrupt
from fusion_rt.core.wording import go_on
from fusion_rt.host.system_memory import return_freed_memory
from fusion_rt.local import elastic
from fusion_rt.torch.core.runtime import runtime
from fusion_rt.torch.elastic.donors import Donors
from fusion_rt.torch.elastic.state import State
from fusion_rt.torch.elastic.survival import Survival, move
from fusion_rt.torch.sync.step_schedule import everyone

_log = logging.getLogger("fusion_rt.elastic")
_CARRIED = re.compile(r"\b(?:CollectiveError|HorovodInternalError): (.*)", re.DOTALL)


class Passage:
    """This rank's way from one membership epoch to the next, outside of its training.

    Args:
        agent: the connection to the launcher's agent.
        state: of the training.

    Attributes:
        survival: the context of the training in an epoch.
    """

    def __init__(self, agent: elastic.AgentConnection, state: State) -> None:
        self._agent, self._state = agent, state
        # Why this worker has left an epoch; empty if only hosts have changed, or it is new and the others are in one.
        self._why: str | None = None if agent.expected is None else ""
        self._skip_sync = self._has_values = self._is_orderly = False
        self.survival = Survival(agent, state)

    def enter(self) -> None:
        """Enters an epoch, the next one if this rank has left one; the state is the same on all ranks then.

        Raises:
            HorovodInternalError: a rank is gone; to be told to `leave`, as all interruptions are.
            SystemExit: there is no place for this worker any more.
            FusionError: the agent is gone.
        """
        state = self._state
        if not self._agent.trains:
            self._agent.trains = True
            runtime().client.watch = None
        if self._why is not None:
            if self.survival.agreed is None:
                move(self._agent, self._why)
            state.on_reset()
            while unfit := state._why_unfit():  # on all ranks; the launcher waits for others
                self.survival.agreed = None
                move(self._agent, unfit, is_unfit=True)
                state.on_reset()
        level = state._level() if self._is_orderly else ""
        state._donors = self.survival.join(self._skip_sync, self._has_values, level)
        if state._donors.is_needed:
            state.sync()
        else:
            state._resume()
        state._donors = Donors()
        self._has_values = True
        self.survival.plan_ahead()
        return_freed_memory()
        if self._why and runtime().rank == 0:
            _log.warning("%s from the last commit, since %s", go_on(runtime().size), self._why.splitlines()[0])

    def leave(self, interruption: HorovodInternalError | HostsUpdatedInterrupt) -> None:
        """Notes why this rank leaves the epoch, and the state that it takes with it: after an error its last commit."""
        self._why, self._skip_sync, self._is_orderly = str(interruption), False, False
        if isinstance(interruption, HostsUpdatedInterrupt):
            try:
                self._state._hand_over()
                self._why, self._skip_sync, self._is_orderly = "", interruption.skip_sync, True
                return
            except HorovodInternalError as error:  # another rank was not so orderly
                self._why = str(error)
        self._state.restore()


def interruption_of(error: RuntimeError) -> HorovodInternalError | HostsUpdatedInterrupt:
    """Returns why the training is interrupted, if an error says that: itself, or the one that its text tells of. Where
    C++ has called an operation, as DDP's reducer does, torch keeps nothing of the operation's error but the text.

    Raises:
        The error: it is another one.
    """
    if isinstance(error, (HorovodInternalError, HostsUpdatedInterrupt)):
        return error
    if found := _CARRIED.search(str(error)):
        return HorovodInternalError(found[1].partition("\n\nAt:\n")[0])  # where pybind11 has put the traceback
    raise error


def train(func: Callable[..., Any], state: State, agent: elastic.AgentConnection, *args: Any, **kwargs: Any) -> Any:
    """Calls the training function, anew in each membership epoch, until it returns; returns its result.

    Exceptions of the function other than `HorovodInternalError` and `HostsUpdatedInterrupt`, or what torch has made of
    these (`interruption_of`), are not caught.

    Raises:
        SystemExit: there is no place for this worker any more.
        FusionError: the agent is gone.
    """
    passage = Passage(agent, state)
    while True:
        known = everyone()
        try:
            passage.enter()
            with passage.survival:
                return func(state, *args, **kwargs)
        except RuntimeError as error:
            interruption = interruption_of(error)
            for schedule in everyone():
                if schedule not in known:  # the next call makes its own, as the first one of a newcomer does
                    schedule.sync.plan.unname()
            passage.leave(interruption)
