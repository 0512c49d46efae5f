"""Training that survives changes: `run` calls a training function with a `State`, and again when it was interrupted.

::

    @hvd.elastic.run
    def train(state):
        while state.epoch < epochs:
            ...                                  # train; state.commit() now and then
            state.epoch += 1

    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)
    train(state)

`Manager` does the same for a loop that is not in a function of its own.

Names and meaning are those of `horovod.torch.elastic`. Workers come and go where `fusionrun` has started the job with
`--min-np` or a host discovery script (docs/elastic.md). Anywhere else the membership of a job is fixed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from fusion_rt.core.errors import FusionError, HorovodInternalError, HostsUpdatedInterrupt
from fusion_rt.local import elastic as membership
from fusion_rt.torch.core.basics import init, shutdown
from fusion_rt.torch.elastic.loop import train
from fusion_rt.torch.elastic.manager import Manager
from fusion_rt.torch.elastic.sampler import ElasticSampler
from fusion_rt.torch.elastic.state import HostUpdateResult, ObjectState, State, TorchState

__all__ = [
    "ElasticSampler",
    "HostUpdateResult",
    "HostsUpdatedInterrupt",
    "Manager",
    "ObjectState",
    "State",
    "TorchState",
    "run",
    "run_fn",
]

StateT = TypeVar("StateT", bound=State)
Params = ParamSpec("Params")
Result = TypeVar("Result")


def run(
    func: Callable[Concatenate[StateT, Params], Result],
) -> Callable[Concatenate[StateT, Params], Result]:
    """Wraps a training function: its state is synced to all ranks first, and it is called again after interruptions.

    The function takes the state as its first argument. The state is synced, and the function called. Then:

    - it returns: so does the call, with its result;
    - it raises `HostsUpdatedInterrupt`: this worker goes on to the next membership epoch, reset callbacks run, the
      state is synced as it is, and the function is called. The sync is left out (`skip_sync`) if hosts were only lost;
    - it raises `HorovodInternalError`: the same, after the state was restored to its last commit (or sync).

    In an elastic job the launcher decides whether there is a next epoch, and which workers are in it; a worker that is
    not ends here, with `SystemExit`. Where membership is fixed, "the next epoch" means that this worker leaves the job
    and joins it again after an error, and nothing otherwise. That can succeed only if every rank of the job does the
    same. Where one is gone, or its daemon is, the job cannot go on, and the error is raised. It is also raised if it
    comes back before anything was committed, since it would come back forever.

    Operations on all ranks (`allreduce`, ...) belong inside the function: a new worker begins with it, while the others
    are in the middle of it.
    """

    def reset() -> None:
        shutdown()
        init()

    fixed = run_fn(func, reset)

    @functools.wraps(func)
    def wrapper(state: StateT, /, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        agent = membership.agent()
        if agent is None:
            return fixed(state, *args, **kwargs)
        result: Result = train(func, state, agent, *args, **kwargs)
        return result

    return wrapper


def run_fn(
    func: Callable[Concatenate[StateT, Params], Result], reset: Callable[[], None]
) -> Callable[Concatenate[StateT, Params], Result]:
    """Wraps a training function as `run` does for fixed membership, with `reset` to leave the job and join it again.

    `reset` raises `FusionError` if it cannot.
    """

    @functools.wraps(func)
    def wrapper(state: StateT, /, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        skip_sync = False
        commits_at_error = -1
        while True:
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                if state._commit_count == commits_at_error:
                    raise
                commits_at_error = state._commit_count
                state.restore()
                try:
                    reset()
                except FusionError as failure:
                    raise error from failure
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            state.on_reset()

    return wrapper
