"""Operations of a process group under way, as c10d knows them.

A work costs no thread: `wait` reads the channel to the daemon itself. Only for who asks for a future, as DDP's reducer
does, somebody else has to (`completion.py`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.autograd import (  # type: ignore[attr-defined]
    _record_function_with_args_enter,
    _record_function_with_args_exit,
)

from fusion_rt.c10d.completion import Completer
from fusion_rt.c10d.failing import CollectiveError, explained
from fusion_rt.c10d.flight_record import RecordedOperation
from fusion_rt.c10d.submission import Submission

is_profiling = torch._C._autograd._profiler_enabled
"""Tells whether a profiler of torch's records; it costs a tenth of a microsecond."""


class ProfiledOperation:
    """An operation that a profiler records from now on.

    Args:
        title: of the operation; its event is called `fusion:` and that.
        tensors: those that this rank gives, whose shapes the event has.
    """

    def __init__(self, title: str, tensors: Sequence[torch.Tensor]) -> None:
        self._lock = threading.Lock()
        self._record: torch.Tensor | None = _record_function_with_args_enter(f"fusion:{title}", *tensors)

    def end(self) -> None:
        """Ends the event; further calls do nothing."""
        with self._lock:
            record, self._record = self._record, None
        if record is not None:
            # Profilers take an event that one thread begins and another ends for asynchronous.
            ending = threading.Thread(target=_record_function_with_args_exit, args=(record,))
            ending.start()
            ending.join()


class FusionWork(dist.Work):
    """An operation of a process group under way: one or more submissions to the daemon.

    Args:
        completer: completes its future, if there is one.
        title: of the operation, for messages to people and for profilers.
        parts: the works that it consists of.
        results: the tensors that have the result.
        source: returns the rank in the group that sent the received data; None: nothing is received from one rank.
        given: the tensors that this rank gives; None: `results`.
        recorded: it, in the record of the last operations.
    """

    def __init__(
        self,
        completer: Completer,
        title: str,
        parts: Sequence[Submission],
        results: list[Any],
        source: Callable[[], int] | None = None,
        given: Sequence[torch.Tensor] | None = None,
        recorded: RecordedOperation | None = None,
    ) -> None:
        super().__init__()
        self._completer = completer
        self._title = title
        self._parts = parts
        self._results = results
        self._source = source
        self._recorded = recorded
        self._future: LazyFuture | None = None
        self._profiled = None
        if is_profiling():
            self._profiled = ProfiledOperation(title, results if given is None else given)
        # Some of torch's C++ keeps only its own half of a work, and would wait for that forever if this one were gone:
        # the reducer to which DDP's Join leaves its count of ranks, and before torch 2.7 all that asks for a work.
        completer.keep(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until the operation has ended.

        Args:
            timeout: at most so long; None or nothing: as long as its own time-out lets it.

        Raises:
            CollectiveError: it failed, or has not ended in time.
        """
        self._let_go()
        seconds = timeout.total_seconds() if timeout else None
        channel = self._completer.channel
        for part in self._parts:
            if not part.done and not channel.read_until(part, seconds, part.about):
                raise self._not_yet(seconds)
        self.settle()
        self._raise()
        return True

    def is_completed(self) -> bool:
        """Tells whether the operation has ended, well or not."""
        for part in self._parts:
            if not part.done:
                self._completer.channel.read_available()
                if not part.done:
                    return False
        self.settle()
        return True

    def is_success(self) -> bool:
        """Tells whether the operation has ended well."""
        return self.is_completed() and self._error() is None

    def exception(self) -> CollectiveError | None:
        """Returns why the operation has failed; None if it has not."""
        error = self._error() if self.is_completed() else None
        return None if error is None else CollectiveError(error)

    def synchronize(self) -> None:
        """Waits until the operation has ended. Raises as `wait`."""
        self.wait()

    def result(self) -> list[Any]:
        """Waits, and returns the tensors that have the result. Raises as `wait`."""
        self.wait()
        return self._results

    def source_rank(self) -> int:
        """Returns the rank in the group that sent the received data. Raises as `wait`, and `RuntimeError` where nothing
        was received from one rank."""
        if self._source is None:
            raise RuntimeError(f"sourceRank() may only be called on a receive from any source, not on {self._title}")
        self.wait()
        return self._source()

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns a future with the tensors that have the result, which is completed without a waiting thread."""
        future = self._future
        if future is None:
            self._let_go()
            future = self._future = LazyFuture(self, devices_of(self._results))
            self._completer.complete(self)
            self._completer.reducer_waits.expect(self._parts)
        return future

    # --- for the completer --------------------------------------------------------------------------------------------

    @property
    def parts(self) -> Sequence[Submission]:
        """The submissions that it consists of."""
        return self._parts

    @property
    def calls_back(self) -> bool:
        """True if the completion of its future runs functions of a script."""
        return self._future is not None and self._future.calls_back

    def settle(self) -> None:
        """Completes its future, if there is one, with the outcome that all its parts have had."""
        recorded, self._recorded = self._recorded, None
        if recorded is not None:
            failed = self._error() is not None
            recorded.end(failed, None if failed or self._source is None else self._source())
        if self._profiled is not None:
            self._profiled.end()
        if self._future is not None:
            self._future.settle(self._results, self._error())

    def _let_go(self) -> None:
        """Leaves its life to whoever has it. DDP's reducer asks for the future of a count after it has waited: so what
        has one element, which costs no memory, is kept."""
        if len(self._results) != 1 or not isinstance(self._results[0], torch.Tensor) or self._results[0].numel() != 1:
            self._completer.release(self)

    def _not_yet(self, seconds: float | None) -> CollectiveError:
        return CollectiveError(
            f"{self._title} has not ended within {seconds:g} s, for which wait() was asked to wait; it is still under "
            "way, and its tensors must not be used"
        )

    def _error(self) -> str | None:
        for part in self._parts:
            if part.error is not None:
                return explained(self._completer.channel, part.error)
        return None

    def _raise(self) -> None:
        if (error := self._error()) is not None:
            raise CollectiveError(error)


class _Failure:
    """The value of a future whose operation has failed.

    A future made in Python cannot hold an error: with `set_exception` it has an exception as its value. DDP's reducer
    looks for the tensors in a value by pickling it, and would take the first of none: so pickling this raises.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def __reduce__(self) -> NoReturn:
        raise CollectiveError(self.text)


def _raise_failure(value: Any) -> NoReturn:
    raise CollectiveError(value.text)


def devices_of(results: Sequence[Any]) -> list[torch.device]:
    """Returns the devices of the tensors among results and lists of them: a future has to know those that it will have
    tensors of, besides the host."""
    tensors = [each for result in results for each in (result if isinstance(result, list | tuple) else [result])]
    return sorted({each.device for each in tensors if not each.is_cpu}, key=str)


class LazyFuture(torch.futures.Future[Any]):
    """The future of a work. Who waits for it in Python reads the channel itself, so that a function that was called
    back may wait for another operation.

    Attributes:
        calls_back: its completion runs functions of a script.
    """

    def __init__(self, work: FusionWork, devices: list[torch.device]) -> None:
        super().__init__(devices=devices)  # type: ignore[arg-type]
        self.calls_back = False
        self._work: FusionWork | None = work
        self._lock = threading.Lock()

    def settle(self, results: list[Any], error: str | None) -> None:
        """Completes it, unless that has been done or is being done."""
        with self._lock:
            work, self._work = self._work, None
        if work is None:
            return
        if error is None:
            self.set_result(results)
        else:
            self._set_unwrap_func(_raise_failure)
            self.set_result(_Failure(error))

    def done(self) -> bool:
        work = self._work
        if work is not None:
            work.is_completed()
        return super().done()

    def wait(self) -> Any:
        work = self._work
        if work is not None:
            with contextlib.suppress(CollectiveError):  # which is the future's own, below
                work.wait()
        return super().wait()

    def then(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> torch.futures.Future[Any]:
        self.calls_back = True
        return super().then(callback)

    def add_done_callback(self, callback: Callable[[torch.futures.Future[Any]], None]) -> None:
        self.calls_back = True
        super().add_done_callback(callback)
