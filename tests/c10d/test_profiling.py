"""Operations in the events of torch's profilers."""

from __future__ import annotations

import pytest
import torch

from fusion_rt.c10d import work

pytestmark = pytest.mark.filterwarnings("ignore")  # of the profilers, about what they will call things


def test_an_operation_is_an_asynchronous_event_with_the_shapes_of_what_is_given() -> None:
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        operation = work.ProfiledOperation("all_reduce", [torch.ones(2, 3), torch.ones(4)])
        operation.end()
        operation.end()
    (event,) = [each for each in profile.function_events if each.name == "fusion:all_reduce"]
    assert event.is_async
    assert event.count == 1
    assert event.input_shapes == [[2, 3], [4]]


def test_it_is_known_whether_a_profiler_records() -> None:
    assert not work.is_profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert work.is_profiling()
    assert not work.is_profiling()
