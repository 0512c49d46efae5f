"""`kernels.cuda.side`: whole steps in the simulator, on a device that is played by torch's CPU tensors; and, with
substitutes for what torch does on a GPU, which calls are made in which order."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

if os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
    pytest.skip("test_simulator runs this in a process of its own", allow_module_level=True)

import torch
from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

from fusion_rt import codecs
from fusion_rt.codecs import worker_selection
from fusion_rt.codecs.selecting import Selecting
from fusion_rt.codecs.worker_selection import Tray
from fusion_rt.core.dtypes import DTYPES
from fusion_rt.kernels.cuda import selection, side
from fusion_rt.kernels.cuda.selection import Found, words
from fusion_rt.kernels.cuda.side import SideSelector, TorchLayer
from fusion_rt.torch.sync.gpu_selection import BucketSelection
from tests.kernels import reference


class Event:
    """Which has happened once somebody has waited for it."""

    def __init__(self) -> None:
        self.happened = False

    def synchronize(self) -> None:
        self.happened = True

    def query(self) -> bool:
        return self.happened


CODE = selection.kernels(threads=4, warps=False)


class SimulatedLayer:
    """The memory of the host as the device; what is queued is done at once."""

    stream = 0

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.copied = 0  # elements

    def active(self) -> Any:
        return contextlib.nullcontext()

    def beside(self) -> Any:
        return contextlib.nullcontext()

    def wrap(self, tensor: torch.Tensor) -> Any:
        self.calls.append("wrap")
        return FakeCUDAArray(tensor.numpy())  # an array itself would be copied, there and back, for each argument it is

    def zeros(self, n: int, dtype: str) -> torch.Tensor:
        return torch.zeros(n, dtype=getattr(torch, dtype))

    def pin(self, array: Any) -> torch.Tensor:
        self.calls.append("pin")
        return torch.from_numpy(array)

    def unpin(self, pinned: torch.Tensor) -> None:
        self.calls.append("unpin")

    def follow(self) -> None:
        self.calls.append("follow")

    def lead(self, event: Any) -> None:
        self.calls.append("lead")

    def copy(self, source: torch.Tensor, pinned: torch.Tensor) -> None:
        self.calls.append("copy")
        self.copied += len(source)
        pinned.copy_(source)

    def mark(self, event: Any = None) -> Event:
        self.calls.append("mark")
        return Event()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.calls.append("capture")
        return work


def make(n: int, k: int, layer: Any, **options: Any) -> tuple[SideSelector, Any]:
    out = np.zeros(words(k), np.int32)
    found = Found([[(0, n)]], [k], CODE, parts=2)
    return SideSelector(layer, n, [[(0, n)]], out, found=found, **options), out


def test_only_what_a_step_selects_is_copied_and_not_all_that_there_is_room_for() -> None:
    """While a codec warms up it takes more, so there is room for that in all steps."""
    layer, generator = SimulatedLayer(), torch.Generator().manual_seed(1)
    selector, _ = make(40, 20, layer)
    for k in (20, 3, 1):
        layer.copied = 0
        residual, bucket = selector.residual.numpy().copy(), torch.randn(40, generator=generator)
        selector.start(bucket, [k])
        (taken,) = selector.finish()
        expected = residual + bucket.numpy()
        chosen = np.sort(np.argsort(-np.abs(expected), kind="stable")[:k])
        assert taken.indices.tolist() == chosen.tolist()
        assert taken.values.tolist() == expected[chosen].tolist()
        assert layer.copied in (words(k), 2 * words(k)), "again, if the threshold was far from what was expected"


def test_the_last_threshold_saves_a_pass_until_gradients_become_small() -> None:
    layer, generator = SimulatedLayer(), torch.Generator().manual_seed(2)
    selector, _ = make(200, 8, layer)
    survey, called, surveys = selection.survey, [0], []

    def watched(*arguments: Any) -> None:
        called[0] += 1
        survey(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "survey", watched)
        for scale in (1.0, 1.0, 1.0, 1e-9, 1e-9, 1e-9):
            before = called[0]
            selector.residual.zero_()
            bucket = scale * torch.randn(200, generator=generator)
            selector.start(bucket, [8])
            (taken,) = selector.finish()
            chosen = np.sort(np.argsort(-np.abs(bucket.numpy()), kind="stable")[:8])
            assert taken.indices.tolist() == chosen.tolist()
            surveys.append(called[0] > before)
    assert surveys[:4] == [True, False, False, False]
    assert surveys[4], "after a step that has found too few"
    assert not surveys[5]


def test_a_threshold_far_from_what_was_expected_is_found_in_the_end_and_at_once_in_the_steps_after() -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(200, generator=generator)
    for at_once in (False, True):
        layer = SimulatedLayer()
        selector, _ = make(200, 8, layer)
        for step, scale in enumerate((1e-6, 1e-6, 1.0, 1e3, 1e-3)):
            selector.residual.zero_()
            bucket = scale * values[torch.randperm(200, generator=generator)]
            layer.copied = 0
            selector.start(bucket, [8], at_once=at_once)
            (taken,) = selector.finish()
            chosen = np.sort(np.argsort(-np.abs(bucket.numpy()), kind="stable")[:8])
            assert taken.indices.tolist() == chosen.tolist()
            assert layer.copied == words(8) * (2 if step == 2 and not at_once else 1), step


def test_steps_select_what_the_reference_does_and_keep_the_rest() -> None:
    n, k = 40, 6
    layer = SimulatedLayer()
    selector, out = make(n, k, layer, momentum=0.9)
    residual, velocity = np.zeros(n, np.float32), np.zeros(n, np.float32)
    generator = torch.Generator().manual_seed(4)
    bucket = torch.empty(n)
    for step in range(3):
        bucket.copy_(torch.randn(n, generator=generator))
        selector.start(bucket, [k], 0.5, at_once=True)
        selector.after()
        assert not selector.ready()
        (taken,) = selector.finish()
        residual, moved = reference.added(residual, bucket.numpy(), velocity, 0.9, False, 0.5)
        assert moved is not None
        expected = reference.largest(residual, k)
        assert taken.indices.tolist() == expected.tolist(), step
        assert taken.values.tobytes() == residual[expected].tobytes()
        assert np.shares_memory(taken.values, out)
        residual[expected], velocity = 0, moved
        assert selector.residual.numpy().tobytes() == residual.tobytes()
        assert selector.velocity.numpy().tobytes() == velocity.tobytes()
    selector.close()
    step_calls = ["follow", "copy", "mark", "lead"]
    assert [call for call in layer.calls if call != "wrap"] == ["pin", *step_calls * 3, "unpin"]
    assert layer.calls.count("wrap") == 4  # residual, velocity and result; the gradient, once


def test_steps_in_the_wrong_order_or_of_the_wrong_size_are_refused() -> None:
    selector, _ = make(8, 2, SimulatedLayer())
    for act in (selector.finish, selector.after, selector.ready):
        with pytest.raises(RuntimeError, match="no selection is under way"):
            act()
    for k in (0, 3):
        with pytest.raises(ValueError, match=f"room for 1 to 2 elements, not for {k}"):
            selector.start(torch.ones(8), [k])
    for wrong in (torch.ones(7), torch.ones(8, dtype=torch.float64)):
        with pytest.raises(ValueError, match="has to be 8 float32, not"):
            selector.start(wrong, [1])
    selector.start(torch.ones(8), [2])
    with pytest.raises(RuntimeError, match="still under way"):
        selector.start(torch.ones(8), [2])
    selector.close()
    with pytest.raises(ValueError, match="contiguous array of int32, not of float32"):
        SideSelector(SimulatedLayer(), 8, [[(0, 8)]], np.zeros(8, np.float32))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"results of up to \[1, 2\] elements do not have 8 words"):
        SideSelector(SimulatedLayer(), 8, [[(0, 4)], [(4, 8)]], np.zeros(8, np.int32), [1, 2])


class Recorder:
    """Plays torch and `numba.cuda` on a machine with a GPU."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.pinning = 0
        self.torch = SimpleNamespace(
            device=lambda kind, index: f"{kind}:{index}",
            float32="float32", int32="int32", _C=SimpleNamespace(),
            zeros=lambda n, dtype, device: self.log(f"zeros {dtype}") or self.tensor(n),
            from_numpy=lambda array: self.tensor(len(array)),
            cuda=SimpleNamespace(
                Stream=lambda device: self.stream_of("side"),
                current_stream=lambda device: self.stream_of("current"),
                set_stream=lambda stream: self.log(f"on {stream.name}"),
                stream=self.inside,
                device=lambda device: self.log(f"as {device}") or contextlib.nullcontext(),
                Event=self.event,
                cudart=lambda: SimpleNamespace(
                    cudaHostRegister=lambda address, size, flags: self.log(f"register {size}") or self.pinning,
                    cudaHostUnregister=lambda address: self.log("unregister") or 0,
                ),
            ),
        )  # fmt: skip
        self.numba = SimpleNamespace(
            external_stream=lambda pointer: f"numba's {pointer}",
            gpus=[contextlib.nullcontext()],
            as_cuda_array=lambda tensor, sync: self.log(f"wrap, sync={sync}") or tensor,
        )

    def log(self, call: str) -> None:
        self.calls.append(call)

    @contextlib.contextmanager
    def inside(self, stream: Any) -> Any:
        self.log(f"enter {stream.name}")
        yield
        self.log(f"leave {stream.name}")

    def stream_of(self, name: str) -> Any:
        return SimpleNamespace(
            name=name,
            cuda_stream=name,
            wait_event=lambda event: self.log(f"{name} waits for the event"),
        )

    def event(self, blocking: bool = False) -> Any:
        return SimpleNamespace(
            record=lambda stream: self.log(f"event after {stream.name}"),
            synchronize=lambda: self.log("host waits for the event"),
            query=lambda: True,
        )

    def tensor(self, n: int, device: str = "cuda:0", contiguous: bool = True) -> Any:
        made = SimpleNamespace(
            device=device, dtype="torch.float32", numel=lambda: n, data_ptr=lambda: id(made),
            is_contiguous=lambda: contiguous, detach=lambda: made, view=lambda *shape: made,
            copy_=lambda source, non_blocking: self.log(f"copy, non_blocking={non_blocking}"),
        )  # fmt: skip
        return made


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(side, "cuda", recorder.numba)
    monkeypatch.setattr(selection, "take_largest", lambda *given: recorder.log(f"take_largest on {given[-1]}"))
    return recorder


def test_the_side_stream_comes_after_the_gradient_and_before_what_overwrites_it(recorder: Recorder) -> None:
    layer = TorchLayer(recorder.torch, 0)
    out = np.zeros(words(2), np.int32)
    selector = SideSelector(layer, 8, [[(0, 8)]], out, found=object())  # type: ignore[arg-type]
    filled = ["enter side", "zeros float32", "leave side", "enter side", "zeros int32", "leave side"]
    assert recorder.calls == [*filled, "wrap, sync=False", "wrap, sync=False", "as cuda:0", f"register {out.nbytes}"]
    recorder.calls.clear()
    selector.start(recorder.tensor(8), [2])
    selector.after()
    assert selector.ready()
    selector.finish()
    selector.close()
    assert recorder.calls == [
        "wrap, sync=False",
        "event after current",
        "side waits for the event",
        "take_largest on numba's side",
        "enter side",
        "copy, non_blocking=True",
        "leave side",
        "event after side",
        "current waits for the event",
        "host waits for the event",
        "as cuda:0",
        "unregister",
    ]


def steps_of(recorder: Recorder, selector: SideSelector, gradients: list[Any]) -> list[list[str]]:
    """Returns the calls of each step between the wait for its gradient and the event after it."""
    queued = []
    for gradient in gradients:
        recorder.calls.clear()
        selector.start(gradient, [2])
        first, end = recorder.calls.index("side waits for the event") + 1, recorder.calls.index("event after side")
        queued.append(recorder.calls[first:end])
        selector.finish()
    return queued


def test_what_is_queued_again_and_again_is_queued_by_one_call(recorder: Recorder) -> None:
    recorder.torch.cuda.CUDAGraph = lambda: SimpleNamespace(
        capture_begin=lambda capture_error_mode: recorder.log(f"capture {capture_error_mode}"),
        capture_end=lambda: recorder.log("captured"),
        replay=lambda: recorder.log("replay"),
    )
    out = np.zeros(words(2), np.int32)
    selector = SideSelector(TorchLayer(recorder.torch, 0), 8, [[(0, 8)]], out, found=object())  # type: ignore[arg-type]
    gradient, other = recorder.tensor(8), recorder.tensor(8)
    launched = ["take_largest on numba's side", "enter side", "copy, non_blocking=True", "leave side"]
    replayed = ["on side", "replay", "on current"]
    captured = ["enter side", "capture thread_local", *launched, "captured", "leave side"]
    queued = steps_of(recorder, selector, [gradient] * 5 + [other])
    assert queued == [launched, launched, [*captured, *replayed], replayed, replayed, launched]


def test_no_garbage_is_collected_in_the_midst_of_a_capture(recorder: Recorder) -> None:
    """Numba frees arrays of the device that are garbage, and CUDA lets a capture fail in which memory is freed."""

    class Array:
        def __init__(self) -> None:
            self.itself = self
            weakref.finalize(self, recorder.log, "freed")

    recorder.torch.cuda.CUDAGraph = lambda: SimpleNamespace(
        capture_begin=lambda capture_error_mode: recorder.log("begun"), capture_end=lambda: recorder.log("captured")
    )

    def work() -> None:
        Array()
        kept.extend([] for _ in range(100))  # each of which would be a reason to collect

    layer, before, kept = TorchLayer(recorder.torch, 0), gc.get_threshold(), list[Any]()
    gc.set_threshold(1)
    try:
        layer.capture(work)
        assert recorder.calls[:3] == ["enter side", "begun", "captured"]
        work()
        assert "freed" in recorder.calls
    finally:
        gc.set_threshold(*before)


def test_what_cannot_be_captured_is_launched_as_before_which_is_told_once(recorder: Recorder) -> None:
    def refuse(**_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    recorder.torch.cuda.CUDAGraph = lambda: SimpleNamespace(capture_begin=refuse)
    out = np.zeros(words(2), np.int32)
    selector = SideSelector(TorchLayer(recorder.torch, 0), 8, [[(0, 8)]], out, found=object())  # type: ignore[arg-type]
    gradient = recorder.tensor(8)
    launched = ["take_largest on numba's side", "enter side", "copy, non_blocking=True", "leave side"]
    with pytest.warns(UserWarning, match="kernel by kernel, since CUDA makes no graph of it: operation not") as told:
        queued = steps_of(recorder, selector, [gradient] * 5)
    assert queued == [launched, launched, ["enter side", *launched], launched, launched]
    assert len(told) == 1


def test_memory_that_kernels_cannot_use_is_refused(recorder: Recorder) -> None:
    layer = TorchLayer(recorder.torch, 0)
    for wrong in (recorder.tensor(8, device="cpu"), recorder.tensor(8, contiguous=False)):
        with pytest.raises(ValueError, match="contiguous tensors on cuda:0"):
            layer.wrap(wrong)
    recorder.pinning = 2
    with pytest.raises(RuntimeError, match="could not pin memory of the host"):
        layer.pin(np.zeros(4, np.int32))


def test_selectors_of_several_ranges_share_a_residual() -> None:
    n, layer = 24, SimulatedLayer()
    found = [Found([[r]], [k], CODE, parts=2) for r, k in (((2, 10), 2), ((12, 24), 3))]
    first = SideSelector(layer, n, [[(2, 10)]], np.zeros(words(2), np.int32), found=found[0])
    memory = first.residual, first.velocity
    second = SideSelector(layer, n, [[(12, 24)]], np.zeros(words(3), np.int32), found=found[1], memory=memory)
    bucket = torch.randn(n, generator=torch.Generator().manual_seed(1))
    expected = bucket.numpy().copy()
    for selector, (low, high), k in ((first, (2, 10), 2), (second, (12, 24), 3)):
        selector.start(bucket, [k])
        (taken,) = selector.finish()
        indices = low + reference.largest(bucket.numpy()[low:high], k)
        assert taken.indices.tolist() == indices.tolist()
        expected[indices] = 0
    expected[[0, 1, 10, 11]] = 0
    assert second.residual is first.residual
    assert first.residual.numpy().tobytes() == expected.tobytes()


class SimulatedSide:
    """What `gpu_selection` asks of a device, in the simulator."""

    def __init__(self) -> None:
        self._layer = SimulatedLayer()

    def beside(self) -> Any:
        return contextlib.nullcontext()

    def follow(self) -> None:
        self._layer.follow()

    def zeros(self, n: int) -> torch.Tensor:
        return self._layer.zeros(n, "float32")

    def selector(self, memory: Any, groups: Any, out: Any, rooms: Any, momentum: float, nesterov: bool) -> Any:
        found = Found(groups, rooms, CODE, parts=4)
        return SideSelector(self._layer, len(memory[0]), groups, out, rooms, momentum, nesterov, found, memory)


@pytest.mark.parametrize(
    "text",
    [
        "topk(density=0.1, minimum=10, scope='tensor')",
        "topk(density=0.15, minimum=10, momentum=0.9)",
        "topk(density=0.2, minimum=10, momentum=0.9, nesterov=True, scope='tensor', value='fp32', warmup=2)",
    ],
)
def test_a_worker_selects_what_the_daemons_codec_does(text: str) -> None:
    """Whole steps of `gpu_selection`, with these kernels, beside the codec: the same bits are sent, and kept, also
    where the gradient is not finite here, or on another node."""
    layout = codecs.Layout(
        DTYPES["float32"], 48, (codecs.Span("a", 0, 20), codecs.Span("bias", 20, 5), codecs.Span("b", 26, 22))
    )
    codec = codecs.parse(text)
    assert isinstance(codec, Selecting)
    shape = codec.tray(layout)
    assert worker_selection.HEADER == selection.HEADER
    tray = Tray(shape, np.zeros(shape.nbytes, np.uint8))
    worker = BucketSelection(SimulatedSide(), codec, layout, tray, 0, codec.clip / math.sqrt(2), torch.device("cpu"))
    daemons, plain = codec.open(layout), codec.open(layout)
    generator = torch.Generator().manual_seed(2)
    not_finite = {2: {30: math.nan, 31: math.inf, 22: -math.inf}, 4: {22: math.nan}, 5: {3: -math.inf}}
    for step in range(7):
        gradient = torch.randn(48, generator=generator)
        gradient[25] = 0
        for element, value in not_finite.get(step, {}).items():
            gradient[element] = value
        factors = (1.0, 2.0, 0.5) if step == 1 else ()
        worker.start(gradient, factors)
        assert not worker.done()
        worker.wait()
        sent = daemons.adopt(tray)
        if factors:
            plain.scale_residual(factors)
        expected = plain.accumulate_and_select(gradient.numpy())
        for name in ("indices", "values", "dense"):
            assert getattr(sent, name).tobytes() == getattr(expected, name).tobytes(), (step, name)
        assert daemons.spoiled == plain.spoiled == (step in not_finite)
        undone = step in (2, 3, 4, 5)
        if undone:
            daemons.undo(sent, gradient.numpy())
            plain.undo(expected, gradient.numpy())
        daemons.correct(tray, undone)
        worker.correct()
        state = plain.state_dict()
        found = worker.add_to(daemons.state_dict())
        assert all(np.array_equal(found[key], state[key]) and np.isfinite(found[key]).all() for key in found), step
        assert any(key.startswith("velocity/") for key in found) == ("momentum" in text)
