"""Operations as torch's profilers see them: each is an asynchronous event, like those of gloo and NCCL."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch.autograd import (  # type: ignore[attr-defined]
    _record_function_with_args_enter,
    _record_function_with_args_exit,
)

is_on = torch._C._autograd._profiler_enabled
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
            # What one thread begins and another one ends is what the profilers take for asynchronous.
            ending = threading.Thread(target=_record_function_with_args_exit, args=(record,))
            ending.start()
            ending.join()
