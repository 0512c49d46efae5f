"""A thread that submits what has been copied from a device as soon as that has been done.

Hooks of a backward pass run ahead of the device, and a script may wait for it between two of them (`loss.item()`), or
in front of `step()`. What has been copied meanwhile would be submitted after that, and nothing would be exchanged
beside the backward pass. The thread is there while something is copied, and for a while afterwards; it sleeps until the
device, or another rank of the node, has got so far. Tensors that lie in the host's memory need no copy, and no thread.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from fusion_rt.torch.core.device import Copying, as_here

_IDLE = 1.0  # seconds after which a thread without work ends
_SHORT, _LONG = 5e-5, 1e-3  # seconds between two looks at what nobody is woken up by
_posters: weakref.WeakSet[Poster] = weakref.WeakSet()


class Copied(Protocol):
    """Something that is submitted when it has been copied.

    Attributes:
        copying: to be waited for.
    """

    copying: Copying | None

    def post(self, wait: bool) -> bool:
        """Submits it if it has been copied, or after waiting. Returns whether it is submitted."""


class Poster:
    """Submits what has been copied, in order.

    Attributes:
        alone: to be held by whoever submits something else, or changes what the submitted depends on.
        used: something was added since the last `clear`; else there is nothing to finish, and nothing to clear.
        failure: why something could not be submitted; the rest is given up then.
    """

    def __init__(self) -> None:
        self._start_anew()
        _posters.add(self)

    def _start_anew(self) -> None:
        self.alone = threading.RLock()
        self.used = False
        self.failure: Exception | None = None
        self._changed = threading.Condition(self.alone)
        self._queue: deque[Copied] = deque()
        self._thread: threading.Thread | None = None

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, copied: Copied) -> None:
        """Has something submitted when it has been copied."""
        with self._changed:
            self.used = True
            self._queue.append(copied)
            if self._thread is None:
                run = partial(self._run, as_here())
                self._thread = threading.Thread(target=run, name="fusion_rt-poster", daemon=True)
                self._thread.start()
            else:
                self._changed.notify()

    def finish(self) -> None:
        """Waits for all copies, and submits what has been copied.

        Raises:
            HorovodInternalError: the job has failed.
            RuntimeError: the device has, or what is done with its results before they are submitted.
        """
        with self.alone:
            while self._queue:
                self._queue.popleft().post(wait=True)
            if self.failure is not None:
                raise self.failure

    def clear(self) -> None:
        """Forgets what has not been submitted, and what went wrong."""
        with self.alone:
            self._queue.clear()
            self.used, self.failure = False, None

    def _run(self, begin: Callable[[], None]) -> None:
        pause = _SHORT
        try:
            begin()
            while self._has_more():
                pause = _SHORT if self._try(pause) else min(1.25 * pause, _LONG)
        except RuntimeError:  # the device has failed: whoever calls `finish` is told
            with self.alone:
                self._thread = None

    def _has_more(self) -> bool:
        """Tells whether there is something to submit, maybe after waiting; if there has been nothing for long, the
        thread ends."""
        with self._changed:
            while not self._queue:
                if not self._changed.wait(_IDLE) and not self._queue:
                    self._thread = None
                    return False
            return True

    def _try(self, pause: float) -> bool:
        """Submits what is first, once it has been copied; or waits a while. Returns whether it is submitted."""
        with self.alone:
            head = self._queue[0] if self._queue else None
            copying = None if head is None else head.copying
        if copying is not None:
            copying.linger(pause)
        with self.alone:
            if head is None or not self._queue or self._queue[0] is not head:  # it has been submitted, or given up
                return True
            try:
                submitted = head.post(wait=False)
            except Exception as error:  # kept, since `post` may do nothing when it is called again
                self.failure = self.failure or error
                self._queue.clear()
                return True
            if submitted:
                self._queue.popleft()
            return submitted


def _after_fork() -> None:
    for poster in _posters:
        poster._start_anew()


os.register_at_fork(after_in_child=_after_fork)
