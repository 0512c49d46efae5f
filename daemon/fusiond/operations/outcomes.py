"""The outcomes of operations, and the failure of a job that cannot go on. No I/O."""

from __future__ import annotations

import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

from fusion_rt import wire
from fusion_rt.core.errors import FusionError
from fusion_rt.core.traceback_format import quoted
from fusion_rt.tracing.format import Kind
from fusion_rt.wire import OpKey
from fusiond.core.tracing import about_key
from fusiond.operations.context import Context
from fusiond.operations.operation import Operation

_HANDED_OVER = 256  # the latest of them that the coordinator of a new view is told
_REMEMBERED = 1024  # failed operations kept so that late submissions and chunks meet the same error
_COMPLETED = 4096  # completed ones that are kept, because other nodes may still wait for them and ask


class Outcomes:
    """The operations of one engine that are over, and what went wrong.

    Args:
        context: the engine's.
        on_job_failed: called with a sentence when the job cannot go on because of something noticed here.
        on_over: called with the key of an operation that is completed, and with None when one has failed.

    Attributes:
        failure: why the job cannot go on; empty if it can.
        on_job_failed: as above.
        count: how many are completed here; `nbytes`: of their contributions on this node.
    """

    def __init__(
        self, context: Context, on_job_failed: Callable[[str], None], on_over: Callable[[OpKey | None], None]
    ) -> None:
        self.failure = ""
        self.count = 0
        self.nbytes = 0
        self.on_job_failed = on_job_failed
        self._context = context
        self._on_over = on_over
        self._failed: OrderedDict[OpKey, str] = OrderedDict()
        # Completed here, maybe not yet elsewhere; None: the ranks here had joined, and submitted nothing.
        self._over: OrderedDict[OpKey, wire.Signature | None] = OrderedDict()

    def why(self, key: OpKey) -> str:
        """Returns why nothing may be submitted under this key; empty if it may."""
        return self.failure or self._failed.get(key, "")

    def is_over(self, key: OpKey) -> bool:
        """Returns whether an operation has failed or completed here, as far as that is remembered."""
        return key in self._failed or key in self._over

    def completed(self, operation: Operation) -> None:
        """The workers have their results."""
        operation.close()
        self.count += 1
        self.nbytes += sum([part.values.nbytes for part in operation.parts.values()])
        if len(operation.members.nodes) > 1:
            part = next(iter(operation.parts.values()), None)
            self._over[operation.key] = None if part is None else part.signature
            if len(self._over) > _COMPLETED:
                self._over.popitem(last=False)
        self._on_over(operation.key)

    def completed_as(self, key: OpKey) -> wire.Signature | None:
        """Returns the signature that ranks here submitted of an operation that completed here; None if they submitted
        none, or it is not known."""
        return self._over.get(key)

    def clocks(self) -> dict[int, dict[str, int]]:
        """Returns the clocks of the buckets that were completed last, as far as they are remembered, by plan."""
        found: dict[int, dict[str, int]] = {}
        for key in self._over:
            if key.plan:
                of_plan = found.setdefault(key.plan, {})
                of_plan[key.name] = max(key.clock, of_plan.get(key.name, 0))
        return found

    def latest(self) -> tuple[wire.OpFailed, ...]:
        """Returns the latest operations that have failed."""
        return tuple(wire.OpFailed(key, error) for key, error in list(self._failed.items())[-_HANDED_OVER:])

    def refuse(self, rank: int, handle: int, error: str) -> None:
        """Tells a worker that what it submitted has failed."""
        self._context.outside.to_worker(rank, wire.Failed(handle, error))

    def everywhere(self, key: OpKey, error: str, missing: Sequence[int] = ()) -> None:
        """An operation fails on all ranks; `missing`: those that had not submitted it when its time was up."""
        for node in self._context.participants.members(key.process_set).nodes:
            if node != self._context.node:
                self._context.outside.to_node(node, wire.OpFailed(key, error, tuple(missing)))
        self.here(key, error, missing)

    def here(self, key: OpKey, error: str, missing: Sequence[int] = ()) -> None:
        """An operation fails on this node's ranks, also on those that have not submitted it yet."""
        self._failed.setdefault(key, error)
        while len(self._failed) > _REMEMBERED:
            self._failed.popitem(last=False)
        what = about_key(key)
        self._context.trace.record(Kind.FAILED, what.name, 0, what.clock, what.plan)
        operation = self._context.operations.pop(key, None)
        for node in () if operation is None else operation.askers:
            self._context.outside.to_node(node, wire.CaughtUp(key))
        if operation is not None and not operation.working and operation.exchange is not None and operation.started:
            operation.exchange.abandon()
        if operation is not None and operation.working:  # threads still write into the workers' memory, and the codec's
            operation.failed = partial(self._fail, operation, error, missing)
        elif operation is not None:
            self._fail(operation, error, missing)
        self._on_over(None)

    def _fail(self, operation: Operation, error: str, missing: Sequence[int]) -> None:
        """Tells the workers of a failed operation, once none of its chunks lies in their memory any more: others may
        complete the operation with them."""
        borrows = operation.port is not None and operation.port.borrows
        operation.close()
        refuse = partial(self._refuse_all, operation, error, missing)
        if borrows:
            self._context.outside.when_received(refuse)
        else:
            refuse()

    def _refuse_all(self, operation: Operation, error: str, missing: Sequence[int]) -> None:
        for rank, part in operation.parts.items():
            if part.selected is not None and operation.exchange is None:
                part.selected.disown()
            self._context.outside.to_worker(rank, wire.Failed(part.handle, error, tuple(missing)))

    # --- exceptions ---------------------------------------------------------------------------------------------------

    def operation_failed(self, operation: Operation, error: BaseException) -> None:
        """An operation's jobs or its exchange raised this."""
        context = self._context
        if isinstance(error, FusionError):
            self.everywhere(
                operation.key, f"{operation.what} failed on node {context.node} (host {context.host}): {error}"
            )
        else:  # a bug: say where it is
            text = quoted("".join(traceback.format_exception(error)))
            self.on_job_failed(f"the daemon of host {context.host} failed: {text}")

    def home_failed(self, error: BaseException) -> None:
        """A home raised this."""
        text = str(error) if isinstance(error, FusionError) else quoted("".join(traceback.format_exception(error)))
        self.on_job_failed(f"a home on host {self._context.host} failed: {text}")

    def kernels_failed(self, what: str, error: BaseException) -> None:
        """The kernels cannot be had that something needs."""
        self.on_job_failed(f"the daemon of host {self._context.host} cannot use {what}: {error}")
