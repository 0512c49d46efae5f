"""The service that answers workers about codecs: kernels, saved state, and statistics."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial

from fusion_rt import wire
from fusion_rt.codecs import Codec, Layout
from fusion_rt.core.dtypes import DTYPES
from fusion_rt.core.errors import FusionError
from fusion_rt.kernels import cpu
from fusion_rt.local import array_codec
from fusiond.buckets.codec_state import State
from fusiond.buckets.plans import Plans
from fusiond.collectives.base import Array, Job
from fusiond.core.dispatch import Handlers
from fusiond.core.result import Result
from fusiond.operations.operation import NodeOperations
from fusiond.shards import ParameterService


class CodecService:
    """The codec service of one engine.

    Args:
        operations: the engine's.
        plans: the active ones, with their codecs.
        homes: of their buckets, on this node.
    """

    def __init__(self, operations: NodeOperations, plans: Plans, homes: ParameterService) -> None:
        self._operations, self._plans, self._homes = operations, plans, homes
        self._outside = operations.context.outside
        self._prepared: set[tuple[Codec, str]] = set()  # codecs whose kernels for an element type are there

    def worker_handlers(self) -> Handlers:
        """Returns the handlers of workers' messages about codecs."""
        return {
            wire.SaveState: lambda worker, asked: self.save_state(worker.rank, asked),
            wire.LoadState: lambda worker, given: self.load_state(
                worker.rank, given, worker.at(given.place, given.nbytes)
            ),
            wire.RecallShards: lambda worker, asked: self.recall(worker.rank, asked),
        }

    def save_state(self, rank: int, asked: wire.SaveState) -> None:
        """A worker asks for the memory of the codecs of a plan."""
        if not self._may_touch_state(rank, asked):
            return
        plan = self._plans.plan_of(asked.process_set, asked.group)
        of_homes: State = {}

        def collect() -> State:
            return self._plans.save(asked.process_set, asked.group, asked.common) | of_homes

        def saved(error: BaseException | None) -> None:
            if error is None:
                self._answer(rank, asked, collect)
            else:
                self._not_saved(rank, asked, error)

        if asked.common:
            self._homes.when_quiet(plan, partial(saved, None))
        else:
            self._homes.save(plan, of_homes, saved)

    def recall(self, rank: int, asked: wire.RecallShards) -> None:
        """A worker asks for the state of shards at the end of the formation before."""
        self._homes.recall(asked, partial(self._answer, rank, asked))

    def _answer(self, rank: int, asked: wire.SaveState | wire.RecallShards, get: Callable[[], State]) -> None:
        """Answers with a state, which a thread gets."""
        result: list[Result] = []

        def collect() -> None:
            state = get()
            result.append(Result.allocate(array_codec.nbytes_of(state)))
            array_codec.write(state, result[0].array)

        def answer(error: BaseException | None) -> None:
            if error is not None:
                self._not_saved(rank, asked, error)
                return
            segment = result[0].segment
            inline = result[0].array.tobytes() if segment is None else None
            nbytes = 0 if segment is None else segment.nbytes
            self._outside.to_worker(rank, wire.Done(asked.handle, inline, (), nbytes), result[0])
            if segment is not None:
                segment.close()

        # Nothing of the plan begins here before the rank that waits for the answer is ready for it.
        self._outside.run_jobs([collect], answer)

    def _not_saved(self, rank: int, asked: wire.SaveState | wire.RecallShards, error: BaseException) -> None:
        self._refuse(rank, asked.handle, f"the state of {asked.group!r} cannot be saved: {error}")

    def load_state(self, rank: int, given: wire.LoadState, data: Array) -> None:
        """A worker gives that back (uint8). With nothing in it, all that codecs have not sent is forgotten."""
        if not self._may_touch_state(rank, given):
            return
        try:
            state = array_codec.read(data)
        except FusionError as error:
            self._not_loaded(rank, given, error)
            return
        of_homes = {key: value for key, value in state.items() if key.startswith(("home:", "sender:"))}
        of_codecs = {key: value for key, value in state.items() if key not in of_homes}

        def load() -> None:
            self._plans.load(given.process_set, given.group, of_codecs, given.common)

        def loaded(error: BaseException | None) -> None:
            try:
                if error is not None:
                    raise error
                if of_homes and not given.common:
                    self._homes.load(given.process_set, given.group, of_homes, answer)
                    return
                if not state and not given.common:
                    self._homes.forget_unsent(given.process_set, given.group)
            except FusionError as why:
                answer(why)
            else:
                answer(None)

        def answer(why: BaseException | None) -> None:
            if why is None:
                self._outside.to_worker(rank, wire.Done(given.handle))
            else:
                self._not_loaded(rank, given, why)

        # The worker waits for the answer, so no step of the plan begins here before.
        self._operations.work.do(0, [load], len(data), loaded)

    def _not_loaded(self, rank: int, given: wire.LoadState, error: BaseException) -> None:
        self._refuse(rank, given.handle, f"the state of {given.group!r} cannot be loaded on rank {rank}: {error}")

    def statistics(self, rank: int, handle: int) -> None:
        """A worker asks for the savings and costs of compression."""

        def answer() -> None:
            self._outside.to_worker(rank, wire.Done(handle, json.dumps(self._plans.compression()).encode()))

        self.measure(answer)

    def measure(self, then: Callable[[], None]) -> None:
        """Measures residuals, if there are any, on a thread, and calls `then`."""
        if not any(codec.codec.stateful for plan in self._plans for codec in plan.codecs):
            then()
            return

        def measured(error: BaseException | None) -> None:
            if error is not None:
                raise error
            then()

        self._outside.run_jobs([self._plans.measure()], measured)

    def _may_touch_state(self, rank: int, message: wire.SaveState | wire.LoadState) -> bool:
        """Says whether a plan's state is at rest; if not, says so."""
        why = self._operations.failure
        plan = self._plans.plan_of(message.process_set, message.group)
        if plan and any(
            operation.key.plan == plan and operation.has_begun for operation in self._operations.under_way.values()
        ):
            why = (
                f"gradients of {message.group!r} are being exchanged; save or load the state of an optimizer between "
                "step() and the next backward()"
            )
        if why:
            self._refuse(rank, message.handle, why)
        return not why

    def kernels_of(self, codec: Codec, dtypes: Iterable[str], then: Callable[[], None]) -> bool:
        """Says whether a codec's kernels for these element types are there. If not, they are loaded or compiled beside
        the event loop, which may take seconds the first time on a host, and `then` is called."""
        missing = [
            name
            for name in dtypes
            if not codec.lossless and codec.applies_to(DTYPES[name]) and (codec, name) not in self._prepared
        ]

        def prepare() -> None:
            for name in missing:
                codec.open(Layout(DTYPES[name], 1))

        def prepared() -> None:
            self._prepared.update((codec, name) for name in missing)
            then()

        return not missing or self.prepare(prepare, f"the codec {codec}", prepared)

    def reductions_of(self, dtypes: Iterable[str], then: Callable[[], None]) -> bool:
        """Says whether the kernels that reduce these element types are there. If not, as `kernels_of`."""
        missing = [DTYPES[name] for name in dtypes if not self._outside.has_kernels(DTYPES[name], ())]
        return not missing or self.prepare(lambda: cpu.prepare(missing), f"elements of {missing[0]}", then)

    def prepare(self, prepare: Job, what: str, then: Callable[[], None]) -> bool:
        """Prepares something beside the event loop, and calls `then`. Returns False: it is not there yet.

        Args:
            what: words for it, should that fail.
        """

        def prepared(error: BaseException | None) -> None:
            if error is not None:
                self._operations.kernels_failed(what, error)
            else:
                then()

        self._outside.run_jobs([prepare], prepared)
        return False

    def _refuse(self, rank: int, handle: int, error: str) -> None:
        self._outside.to_worker(rank, wire.Failed(handle, error))
