"""Training that survives changes, by a loop of the script's own instead of a function that is called again."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import torch.utils.data

from fusion_rt.core.errors import FusionError, HorovodInternalError
from fusion_rt.local import elastic
from fusion_rt.torch.core import process_sets
from fusion_rt.torch.elastic.loop import Passage, interruption_of
from fusion_rt.torch.elastic.sampler import ElasticSampler
from fusion_rt.torch.elastic.state import State
from fusion_rt.torch.sync.exchanges import exchanges


class _Fetched(NamedTuple):
    """A batch that no step has taken yet."""

    sampler: ElasticSampler
    samples: int


class ManagedStep:
    """A step of a `Manager`."""

    def __init__(self) -> None:
        self._dropped, self._taken = exchanges.dropped, exchanges.taken
        self._is_interrupted = False

    @property
    def counts(self) -> bool:
        """True so far; False, the same on all ranks, if the step's exchange was left out after a loss, or the
        step has failed: then there is nothing to log or to count of it. It can be asked in the step and after it."""
        is_left_out = exchanges.dropped > self._dropped and exchanges.taken == self._taken
        return not is_left_out and not self._is_interrupted


class Manager:
    """A context in which a plain loop over batches survives changes of its job, as `elastic.run`'s function does.

    ::

        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)
        with hvd.elastic.Manager(state, commit_every=10) as manager:
            while state.epoch < epochs:
                for batch in manager.batches(loader):
                    with manager.step():
                        ...                                  # forward, backward, optimizer.step()
                state.epoch += 1
                sampler.set_epoch(state.epoch)

    When it is entered all ranks get the same state, a newcomer that of the others. Every so many steps the state is
    committed, and newcomers are let in. Where ranks are lost, the others go on in their loops: with the same batch if
    the step under way was left out, and else with the batches that follow on the last commit. So each sample of an
    epoch counts once.

    Changes of the state, and operations on all ranks, belong into steps, or between two `batches` where nothing can
    fail: a failure of an operation outside of them is raised.

    Args:
        state: the same on all ranks; a sampler of the loaders is one of its values.
        commit_every: steps after which the state is committed.

    Raises:
        ValueError: `commit_every` is less than 1.
    """

    def __init__(self, state: State, commit_every: int = 10) -> None:
        if commit_every < 1:
            raise ValueError(f"commit_every={commit_every}: the state has to be committed every 1 or more steps")
        self.state = state
        self._commit_every = commit_every
        self._passage: Passage | None = None
        self._training = ExitStack()
        self._entered = 0  # how often
        self._begun = self._uncommitted = 0  # steps
        self._fetched: _Fetched | None = None

    def __enter__(self) -> Manager:
        agent = elastic.agent()
        self._passage = None if agent is None else Passage(agent, self.state)
        if self._passage is None:
            self.state.sync()
        else:
            self._enter(self._passage)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._training.__exit__(kind, error, trace)

    def batches(self, loader: torch.utils.data.DataLoader[Any]) -> Iterator[Any]:
        """Yields a loader's batches of the rest of its sampler's epoch, and records those that steps have taken.

        A batch comes again if its step was left out. After a return to a commit, or when newcomers come in, the loader
        begins anew, with the rest of the epoch.

        Args:
            loader: with batches of a fixed size, of the samples that an `ElasticSampler` in the state names.

        Raises:
            ValueError: it has none of these.
            FusionError: there was no step between two batches.
        """
        sampler, samples = loader.sampler, loader.batch_size
        if not isinstance(sampler, ElasticSampler) or sampler not in self.state._samplers() or samples is None:
            raise ValueError(
                "batches() needs a DataLoader(dataset, batch_size=..., sampler=...) whose sampler is an ElasticSampler "
                "and a value of the manager's state"
            )
        while True:
            entered = self._entered
            for batch in loader:
                self._fetched = _Fetched(sampler, samples)
                while self._fetched is not None and self._entered == entered:
                    begun = self._begun
                    yield batch
                    if self._begun == begun:
                        raise FusionError("a batch was not taken by a step; use it inside of `with manager.step():`")
                if self._entered != entered:
                    break
            else:
                if not sampler.deal_late():
                    return

    @contextmanager
    def step(self) -> Iterator[ManagedStep]:
        """Takes a step of the training, as a context. If a rank is lost and the others cannot go on in the middle of
        the step, nothing of it is left. Some steps end with a commit.

        Raises:
            HorovodInternalError: a rank is gone, in a job that is not elastic.
            SystemExit: there is no place for this worker any more.
            FusionError: the agent is gone; or, in an elastic job, a process set has no rule.
        """
        if self._passage is not None and (lacking := process_sets.without_rule()):
            raise FusionError(
                f"process set {list(lacking[0].ranks)} has no rule, by which a Manager could register it again when "
                "workers come or go; add it with one, hvd.add_process_set(lambda size: ...), or train in a function of "
                "hvd.elastic.run, which adds it again"
            )
        step = ManagedStep()
        self._begun += 1
        try:
            yield step
            if step.counts:
                self._record()
        except RuntimeError as error:
            self._interrupt(step, error)

    def _record(self) -> None:
        """Notes that a step was taken, and commits if it is time to."""
        if self._fetched is not None:
            self._fetched.sampler.record_batch(0, self._fetched.samples)
            self._fetched = None
        self._uncommitted += 1
        if self._uncommitted == self._commit_every:
            self._uncommitted = 0
            self.state.commit()

    def _interrupt(self, step: ManagedStep, error: RuntimeError) -> None:
        """Goes on in the next membership epoch, if an error in a step says that this one is over.

        Raises:
            The error: it is another one.
        """
        interruption = interruption_of(error)
        step._is_interrupted = isinstance(interruption, HorovodInternalError)
        # The error lives until this returns. Its frames refer to the data of the step, and to memory that
        # was shared with the daemon: they would be there beside those of the next epoch.
        traceback.clear_frames(error.__traceback__)
        self._training.__exit__(type(error), error, error.__traceback__)
        if self._passage is not None:
            lasting = process_sets.by_rule()
            self._passage.leave(interruption)
            self._enter(self._passage, lasting)
        elif isinstance(interruption, HorovodInternalError):
            raise interruption
        else:  # the script has said so itself
            self.state.on_reset()
            self.state.sync()
            self._entered += 1

    def _enter(self, passage: Passage, lasting: Sequence[process_sets.ProcessSet] = ()) -> None:
        """Enters a membership epoch. `lasting`: process sets of the script, which registers no sets again."""
        while True:
            for process_set in lasting:
                process_set.process_set_id = None
            try:
                passage.enter()
                for process_set in lasting:
                    if process_set.process_set_id is None:  # else a reset callback has
                        process_sets.add_process_set(process_set)
                break
            except HorovodInternalError as error:
                passage.leave(error)
        self._training.enter_context(passage.survival)
        self._entered += 1
        self._uncommitted = 0
