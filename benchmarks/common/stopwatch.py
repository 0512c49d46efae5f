"""Profile of a step in the worker: stopwatches around the functions of fusion_rt that run in it."""

from __future__ import annotations

import functools
import time
from typing import Any


class Clock:
    """Exclusive times of functions that call each other: a function's time less that of the measured ones it calls.

    Attributes:
        seconds: by label, since the last `take`.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = [0.0]  # time spent in measured functions called by the one on top of the stack

    def measure(self, owner: Any, name: str, label: str, busy: str = "") -> None:
        """Puts a stopwatch around the function `name` of a class or module.

        With `busy`, the time for which this thread computed in it counts under that label, and only the rest under
        `label`. (Not everywhere: reading a thread's CPU time takes as long as a hook.)
        """
        function = getattr(owner, name)

        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            computed = time.thread_time() if busy else 0.0
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                elapsed = time.perf_counter() - began
                own = elapsed - self._inner.pop()
                if busy:
                    computed = min(time.thread_time() - computed, own)
                    self._add(busy, computed)
                self._add(label, own - computed)
                self._inner[-1] += elapsed

        setattr(owner, name, measured)

    def take(self) -> dict[str, float]:
        """Returns the seconds by label, and resets them."""
        taken, self.seconds = self.seconds, {}
        return taken

    def _add(self, label: str, seconds: float) -> None:
        self.seconds[label] = self.seconds.get(label, 0.0) + seconds


def measure_fusion() -> Clock:
    """Puts stopwatches around the functions of fusion_rt that run in a step."""
    import torch

    from fusion_rt.client.channel import Channel
    from fusion_rt.local import packets
    from fusion_rt.torch.sync import backward, in_backward, wrapped

    clock = Clock()
    clock.measure(in_backward.InBackward, "arriving", "python")
    clock.measure(in_backward.InBackward, "arrived", "python")
    clock.measure(backward.BackwardPass, "__call__", "python")
    clock.measure(wrapped.Wrapped, "step", "python")
    clock.measure(wrapped.Wrapped, "zero_grad", "python")
    clock.measure(torch, "_foreach_copy_", "copy")
    clock.measure(packets, "receive", "wait", busy="python")
    clock.measure(Channel, "ready", "wait", busy="python")
    torch.optim.SGD([torch.zeros(1)])  # torch wraps `step` of a class when the first is made: the script's own, too
    clock.measure(torch.optim.SGD, "step", "script")
    clock.measure(torch.optim.SGD, "zero_grad", "script")
    return clock
