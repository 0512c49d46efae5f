"""A thread, or whoever waits for all of it, submits copied buckets in order."""

from __future__ import annotations

import threading

import pytest
import torch

from fusion_rt.core.errors import HorovodInternalError
from fusion_rt.torch.core.device import Copying
from fusion_rt.torch.sync import on_device
from fusion_rt.torch.sync.on_device import Poster
from tests.torch.cuda_fake.tensors import fake_cuda


class Late(Copying):
    """Copies that end when they are told to."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()

    def done(self) -> bool:
        return self.ended.is_set()

    def wait(self) -> None:
        assert self.ended.wait(60)

    def linger(self, seconds: float) -> None:
        self.ended.wait(seconds)


class Copied:
    """Something that notes when it is submitted."""

    def __init__(self, submitted: list[Copied], error: Exception | None = None) -> None:
        self.late = Late()
        self.copying: Copying | None = self.late
        self.submitted = threading.Event()
        self._all, self._error = submitted, error

    def post(self, wait: bool) -> bool:
        if self.copying is None:
            return True
        if wait:
            self.late.wait()
        if not self.late.done():
            return False
        self.copying = None
        if self._error is not None:
            self.submitted.set()
            raise self._error
        self._all.append(self)
        self.submitted.set()
        return True


def test_a_thread_submits_in_order_what_has_been_copied() -> None:
    poster, submitted = Poster(), list[Copied]()
    first, second = Copied(submitted), Copied(submitted)
    for each in (first, second):
        poster.add(each)
    second.late.ended.set()
    assert not submitted
    first.late.ended.set()
    assert second.submitted.wait(60)
    assert submitted == [first, second]
    poster.finish()
    assert not poster


def test_the_thread_has_the_current_device_of_who_has_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or CUDA would make a context on the first device, when the thread comes back to it from another one's stream."""
    found: list[int] = []

    class Noted(Copied):
        def post(self, wait: bool) -> bool:
            found.append(torch.cuda.current_device())
            return super().post(wait)

    with fake_cuda(0, count=2) as gpus:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "set_device", lambda index: setattr(gpus._now, "device", index))
        poster, copied = Poster(), Noted([])
        with torch.cuda.device(1):
            poster.add(copied)
        copied.late.ended.set()
        assert copied.submitted.wait(60)
    assert found == [1]


def test_who_waits_submits_the_rest() -> None:
    poster, submitted = Poster(), list[Copied]()
    copied = Copied(submitted)
    with poster.alone:  # the thread can do nothing
        poster.add(copied)
        copied.late.ended.set()
        poster.finish()
        assert submitted == [copied]


def test_a_failure_is_raised_to_who_waits_and_the_rest_is_given_up() -> None:
    poster, submitted = Poster(), list[Copied]()
    fails, rest = Copied(submitted, HorovodInternalError("rank 1 died")), Copied(submitted)
    poster.add(fails)
    poster.add(rest)
    fails.late.ended.set()
    assert fails.submitted.wait(60)
    with pytest.raises(HorovodInternalError, match="rank 1 died"):
        poster.finish()
    assert not poster
    assert not submitted
    poster.clear()
    poster.finish()


def test_any_failure_is_raised_to_who_waits_and_what_is_added_next_is_submitted() -> None:
    """Something whose submission has failed in the thread does nothing when it is asked to submit again."""
    poster, submitted = Poster(), list[Copied]()
    fails, rest = Copied(submitted, RuntimeError("CUDA error")), Copied(submitted)
    poster.add(fails)
    fails.late.ended.set()
    assert fails.submitted.wait(60)
    with pytest.raises(RuntimeError, match="CUDA error"):
        poster.finish()
    poster.clear()
    rest.late.ended.set()
    poster.add(rest)
    poster.finish()
    assert submitted == [rest]


def test_the_thread_ends_when_there_is_nothing_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "_IDLE", 0.001)
    poster, submitted = Poster(), list[Copied]()
    for _ in range(3):
        copied = Copied(submitted)
        copied.late.ended.set()
        poster.add(copied)
        assert copied.submitted.wait(60)
        thread = poster._thread
        if thread is not None:
            thread.join(60)
            assert not thread.is_alive()
    assert len(submitted) == 3
