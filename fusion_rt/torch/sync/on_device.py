"""The stage of buckets whose values lie on a device: copies to the arena, and of results back; and the thread that
submits buckets as soon as they have been copied.

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
from collections.abc import Callable, Sequence
from functools import partial

import torch

from fusion_rt.torch.core import device
from fusion_rt.torch.core.device import as_here
from fusion_rt.torch.node.reduction import BucketStaging, stage
from fusion_rt.torch.sync.buckets import Bucket, Stage
from fusion_rt.torch.sync.slots import Slot, follow_streams

_IDLE = 1.0  # seconds after which a thread without work ends
_SHORT, _LONG = 5e-5, 1e-3  # seconds between two looks at work that wakes no thread
_posters: weakref.WeakSet[Poster] = weakref.WeakSet()


class OnDevice(Stage):
    """Copies of a bucket's values between their device and the arena. The copies to the arena go beside the backward
    pass; those of results are queued on the current stream, and come before whatever the script does with them.

    Where all values are on one device they are packed: put together there, so that one copy brings them to the arena,
    and one the result back, in place of one a tensor.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._packs = bucket.io.compressor is None and _are_together([slot.parameter for slot in bucket.slots])
        self._packed: BucketStaging | None = None
        self._landed: device.Copying | None = None  # the last results, on their way to the device

    def start(self, bucket: Bucket) -> device.Copying | None:
        self.follow_gradients(bucket)
        if self._packs:
            return self._pack(bucket)
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for slot in bucket.slots:
            value, view = bucket.outgoing(slot), slot.view
            assert view is not None
            if value is None:
                if self._landed is not None:  # the last results may not have been copied from there yet
                    self._landed.wait()
                view.zero_()
            elif value is not view:
                pairs.append((view, value))
        return device.layer.copy(*zip(*pairs, strict=True)) if pairs else None

    def follow_gradients(self, bucket: Bucket) -> None:
        """Has what is queued from now on come after the gradients, and after the last results have been copied from the
        arena, where what is sent goes."""
        if self._landed is not None:
            self._landed.precede()
        follow_streams(bucket.slots)

    def _pack(self, bucket: Bucket) -> device.Copying:
        if self._packed is None:
            self._packed = stage(bucket.flat, [slot.view for slot in bucket.slots], bucket.slots[0].parameter)  # type: ignore[misc]
        elif self._packed.gaps:
            torch._foreach_zero_(self._packed.gaps)
        bucket.put(self._packed.places)
        return device.layer.copy([bucket.flat], [self._packed.values])

    def results(self, bucket: Bucket, slots: Sequence[Slot]) -> list[torch.Tensor]:
        if self._packed is None:
            return self.bring(bucket, slots)
        device.layer.copy([self._packed.values], [bucket.flat])
        return self.bring(bucket, slots, self._packed.places)

    def bring(self, bucket: Bucket, slots: Sequence[Slot], places: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        """Has the results of slots come to the device, on the current stream. Returns where.

        Args:
            places: where they are on the device; by default they are in the arena.
        """
        landings = [self._landing(bucket, slot) for slot in slots]
        if places:
            torch._foreach_copy_(landings, list(places))
            self._landed = device.layer.mark(*places)
        elif elsewhere := [(to, slot.view) for slot, to in zip(slots, landings, strict=True) if to is not slot.view]:
            self._landed = device.layer.copy(*zip(*elsewhere, strict=True))
        return landings

    def _landing(self, bucket: Bucket, slot: Slot) -> torch.Tensor:
        """Returns the tensor to which a result is copied from a slot's view; the view if none is needed."""
        assert slot.view is not None
        if bucket.io.compressor is not None:
            return torch.empty_like(slot.view, device=slot.parameter.device)
        if device.layer.is_host(slot.parameter):
            return slot.view
        gradient = slot.parameter.grad
        if not bucket.io.rule.to_gradients or gradient is None or gradient.is_sparse:
            return torch.empty_like(slot.parameter)
        return gradient.detach()


def _are_together(tensors: Sequence[torch.Tensor]) -> bool:
    """Tells whether these are several, on one device that has memory of its own."""
    return len(tensors) > 1 and len({t.device for t in tensors}) == 1 and not any(map(device.layer.is_host, tensors))


class Poster:
    """Submits copied buckets, in order.

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
        self._queue: deque[Bucket] = deque()
        self._thread: threading.Thread | None = None

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, copied: Bucket) -> None:
        """Has a bucket submitted when it has been copied."""
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
        """Waits for all copies, and submits their buckets.

        Raises:
            HorovodInternalError: the job has failed.
            RuntimeError: the device has failed, or the work on its results before they are submitted.
        """
        with self.alone:
            while self._queue:
                self._queue.popleft().post(wait=True)
            if self.failure is not None:
                raise self.failure

    def clear(self) -> None:
        """Forgets buckets that have not been submitted, and errors."""
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
        """Submits the first bucket, once it has been copied; or waits a while. Returns whether it is submitted."""
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
