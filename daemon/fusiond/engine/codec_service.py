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
from fusiond.collectives.base import Array, Job
from fusiond.core.dispatch import Handlers
from fusiond.core.result import Result
from fusiond.engine.keeper import Get, Keeper
from fusiond.operations.operation import NodeOperations


class CodecService:
    """The codec service of one engine.

    Args:
        operations: the engine's.
        keeper: of the state of the active plans.
    """

    def __init__(self, operations: NodeOperations, keeper: Keeper) -> None:
        self._operations, self._keeper, self._plans = operations, keeper, keeper.plans
        self._outside = operations.context.outside
        self._prepared: set[tuple[Codec, str]] = set()  # codecs whose kernels for an element type are there

    def worker_handlers(self) -> Handlers:
        """Returns the handlers of workers' messages about codecs."""
        return {
            wire.SaveState: lambda worker, asked: self.save_state(worker.rank, asked),
            wire.LoadState: lambda worker, given: self.load_state(
                worker.rank, given, worker.at(given.place, given.nbytes)
            ),
        }

    def save_state(self, rank: int, asked: wire.SaveState) -> None:
        """A worker asks for the state of a group, as it is, or as the formation before has left it."""
        group = asked.process_set, asked.group
        if asked.ended is not None:
            self._answer(rank, asked, None, partial(self._keeper.recall, group, asked.ended))
        elif self._may_touch_state(rank, asked):
            self._keeper.save(group, asked.common, partial(self._answer, rank, asked))

    def _answer(self, rank: int, asked: wire.SaveState, error: BaseException | None, get: Get) -> None:
        """Answers with a state, which a thread gets."""
        result: list[Result] = []

        def collect() -> None:
            state = get()
            result.append(Result.allocate(array_codec.nbytes_of(state)))
            array_codec.write(state, result[0].array)

        def answer(error: BaseException | None) -> None:
            if error is not None:
                self._refuse(rank, asked.handle, f"the state of {asked.group!r} cannot be saved: {error}")
                return
            segment = result[0].segment
            inline = result[0].array.tobytes() if segment is None else None
            nbytes = 0 if segment is None else segment.nbytes
            self._outside.to_worker(rank, wire.Done(asked.handle, inline, (), nbytes), result[0])
            if segment is not None:
                segment.close()

        if error is not None:
            answer(error)
        else:  # nothing of the plan begins here before the rank that waits for the answer is ready for it
            self._outside.run_jobs([collect], answer)

    def load_state(self, rank: int, given: wire.LoadState, data: Array) -> None:
        """A worker gives that back (uint8). With nothing in it, all that codecs have not sent is forgotten."""
        if not self._may_touch_state(rank, given):
            return

        def answer(error: BaseException | None) -> None:
            if error is None:
                self._outside.to_worker(rank, wire.Done(given.handle))
            elif isinstance(error, FusionError):
                self._not_loaded(rank, given, error)
            else:
                raise error

        try:
            # The worker waits for the answer, so no step of the plan begins here before.
            self._keeper.load((given.process_set, given.group), array_codec.read(data), given.common, answer)
        except FusionError as error:
            self._not_loaded(rank, given, error)

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
        plan = self._plans.of_group((message.process_set, message.group))
        if plan is not None and any(
            operation.key.plan == plan.plan.id and operation.has_begun
            for operation in self._operations.under_way.values()
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
