"""Selection by workers, with a GPU that is made up: gradients that the layer says are not in the host's memory, and a
side that selects as `tests.kernels.reference` does. Compared with daemons that select, bit by bit."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.codecs.base import Array
from fusion_rt.codecs.worker_selection import HEADER
from fusion_rt.kernels.selection import Range
from fusion_rt.torch.core import basics, device
from fusion_rt.torch.core.sides import Selector
from tests.harness import Job, on_ranks
from tests.kernels import reference
from tests.torch.training import selecting_buckets

CODEC = "topk(density=0.05, minimum=100)"
CODECS = [
    CODEC,
    "topk(density=0.02, minimum=100, value='fp32', scope='tensor')",
    "topk(density=0.01, minimum=100, value='int8', momentum=0.9, warmup=5)",
    "topk(density=0.1, minimum=100, momentum=0.9, nesterov=True, masking=False)",
    "topk(density=0.05, minimum=100, feedback=False)",
]
ENVIRONMENT = {
    "FUSION_GPU_SELECTION": "auto",
    "HOROVOD_FUSION_THRESHOLD": "16KiB",
    "HOROVOD_START_TIMEOUT": "120",
    "FUSION_SPARSE_ROUTE": "owners",
    "FUSION_NODE_REDUCTION": "gloo",
}


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """A node with two ranks, whose gradients the first one gets in all steps but that of the plan, and a node with one;
    small buckets."""
    with Job((2, 1), ENVIRONMENT) as running:
        yield running


class HostSelector:
    """As `kernels.cuda.side.SideSelector`, by the plain functions; what is started is done when it is waited for, or
    asked for a third time."""

    def __init__(
        self, memory: tuple[torch.Tensor, torch.Tensor | None], groups: Sequence[Sequence[Range]], out: Array,
        rooms: Sequence[int], momentum: float, nesterov: bool,
    ) -> None:  # fmt: skip
        self._residual = memory[0].numpy()
        self._velocity = None if memory[1] is None else memory[1].numpy()
        self._groups = [np.concatenate([np.arange(*r, dtype=np.int32) for r in ranges]) for ranges in groups]
        self._out, self._rooms, self._how = out, rooms, (momentum, nesterov)
        self._under_way = False
        self._asked = 0

    def start(self, gradient: torch.Tensor, ks: Sequence[int], *, at_once: bool = False) -> None:
        assert not self._under_way
        assert gradient.dtype == torch.float32
        self._under_way, self._asked = True, 0
        first = 0
        for inside, room, k in zip(self._groups, self._rooms, ks, strict=True):
            self._select(gradient, inside, k, room, self._out[first : first + HEADER + 2 * room])
            first += HEADER + 2 * room

    def _select(self, gradient: torch.Tensor, inside: Array, k: int, room: int, out: Array) -> None:
        velocity = None if self._velocity is None else self._velocity[inside]
        residual, velocity = reference.added(
            self._residual[inside], gradient.numpy()[inside], velocity, *self._how, factor=1.0
        )
        taken = reference.largest(residual, k)
        out[0] = len(taken)
        out[3] = not bool(gradient.isfinite().all())
        out[HEADER : HEADER + len(taken)] = inside[taken]
        out[HEADER + room : HEADER + room + len(taken)] = residual[taken].view(np.int32)
        residual[taken] = 0
        self._residual[inside] = residual
        if velocity is not None:
            assert self._velocity is not None
            self._velocity[inside] = velocity

    def ready(self) -> bool:
        assert self._under_way
        self._asked += 1
        return self._asked > 2

    def finish(self) -> None:
        assert self._under_way
        self._under_way = False


class HostSide:
    def beside(self) -> Any:
        return contextlib.nullcontext()

    def follow(self) -> None:
        return

    def zeros(self, n: int) -> torch.Tensor:
        return torch.zeros(n)

    def selector(self, *arguments: Any) -> Selector:
        return HostSelector(*arguments)


class HostLayer(device.Layer):
    """Says that no tensor is in the host's memory."""

    def is_host(self, tensor: torch.Tensor) -> bool:
        return False

    def side(self, tensor: torch.Tensor) -> HostSide:
        return HostSide()


@contextlib.contextmanager
def on_a_gpu(really: bool = True) -> Iterator[None]:
    real = device.layer
    if really:
        device.layer = HostLayer()
    try:
        yield
    finally:
        device.layer = real


def make(text: str = CODEC, dtype: torch.dtype = torch.float32, **how: Any) -> tuple[torch.nn.Sequential, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 50), torch.nn.Linear(50, 4)
    ).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=text, **how)


def train(model: torch.nn.Module, optimizer: Any, steps: range, decay: float = 0.95) -> list[bytes]:
    """The parameters after each step. The learning rate falls, so that residuals are rescaled."""
    after = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + hvd.rank())
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * decay**step
        loss = torch.nn.functional.cross_entropy(
            model(torch.randn(8, 40, generator=generator)), torch.randint(0, 4, (8,), generator=generator)
        )
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        after.append(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    return after


def has_the_residual() -> bool:
    """Whether this rank selects for its node."""
    return hvd.local_rank() == 0


def residuals(optimizer: Any) -> dict[str, torch.Tensor]:
    state = optimizer.state_dict()["fusion_rt"]["state"]
    return {key: value for key, value in state.items() if ":residual/" in key or ":velocity/" in key}


@pytest.mark.parametrize("text", CODECS)
@on_ranks
def test_training_is_the_same_bit_by_bit_whoever_selects(text: str) -> None:
    """Also where one node's worker selects and the other node's daemon does."""
    model, optimizer = make(text)
    expected = train(model, optimizer, range(12))
    assert not any(selecting_buckets(optimizer))
    waiting, carried = residuals(optimizer), optimizer._sync.checkpoint.carry()
    for really in (True, hvd.cross_rank() == 0, hvd.cross_rank() == 1):
        with on_a_gpu(really):
            model, optimizer = make(text)
            assert train(model, optimizer, range(12)) == expected
            assert selecting_buckets(optimizer) == [really and has_the_residual()] * len(selecting_buckets(optimizer))
            found, carries = residuals(optimizer), optimizer._sync.checkpoint.carry()
        if not has_the_residual():
            continue
        for kept, expected_there in ((carries.residuals, carried.residuals), (carries.velocities, carried.velocities)):
            assert all(np.array_equal(kept[name], expected_there[name]) for name in expected_there)
        assert found.keys() == waiting.keys()
        assert all(torch.equal(found[key], waiting[key]) for key in found)
    assert any(value.any() for value in waiting.values()) == ("feedback" not in text)


@pytest.mark.parametrize("name", ["thresholdk", "gaussiank"])
@on_ranks
def test_for_codecs_that_select_about_as_many_workers_select_exactly(name: str) -> None:
    """So what is sent is what `topk` sends, bit by bit."""
    model, optimizer = make()
    expected = train(model, optimizer, range(12))
    waiting = residuals(optimizer)
    with on_a_gpu():
        model, optimizer = make(CODEC.replace("topk", name))
        assert train(model, optimizer, range(12)) == expected
        assert selecting_buckets(optimizer) == [has_the_residual()] * len(selecting_buckets(optimizer))
        found = residuals(optimizer)
    assert not has_the_residual() or all(torch.equal(found[key], waiting[key]) for key in waiting)


@pytest.mark.parametrize(
    ("dtype", "text"), [(torch.bfloat16, CODECS[0]), (torch.float16, CODECS[1]), (torch.bfloat16, CODECS[2])]
)
@on_ranks
def test_halves_are_selected_from_as_daemons_do(dtype: torch.dtype, text: str) -> None:
    """With gradients of which no sum has to be rounded, as a daemon does before it selects. One backward pass has them
    all: in a second one `p.grad` would be a result and a gradient, rounded together."""
    after = []
    for really in (False, True):
        with on_a_gpu(really):
            model, optimizer = make(text, dtype, gradient_predivide_factor=2.0)
            for step in range(8):
                generator = torch.Generator().manual_seed(100 * step + hvd.rank())
                optimizer.zero_grad()
                gradients = [torch.randint(-20, 21, p.shape, generator=generator) for p in model.parameters()]
                torch.autograd.backward(list(model.parameters()), [gradient.to(dtype) for gradient in gradients])
                optimizer.step()
            assert selecting_buckets(optimizer) == [really and has_the_residual()] * len(selecting_buckets(optimizer))
            after.append([parameter.detach().clone() for parameter in model.parameters()])
    for here, there in zip(*after, strict=True):
        assert torch.equal(here, there)


@pytest.mark.parametrize("text", CODECS)
@on_ranks
def test_a_gradient_that_is_not_finite_spoils_one_step_and_no_memory(text: str) -> None:
    """Where one node's worker selects and the other node's daemon does, whoever of them has it."""
    for bad in (0, 2):
        with on_a_gpu(hvd.cross_rank() == 0):
            model, optimizer = make(text)
            train(model, optimizer, range(4))
            before = residuals(optimizer)
            optimizer.zero_grad()
            loss = model(torch.ones(2, 40)).sum()
            (loss * (float("inf") if hvd.rank() == bad else 1.0)).backward()
            optimizer.synchronize()
            assert all(bool(p.grad.isnan().all()) for p in model.parameters())
            after = residuals(optimizer)
            for key in before:
                torch.testing.assert_close(after[key], before[key], rtol=0, atol=1e-4)
            optimizer.zero_grad()
            parameters = train(model, optimizer, range(5, 8))
            assert all(bool(p.isfinite().all()) for p in model.parameters())
            assert len(set(hvd.allgather_object(parameters[-1]))) == 1


@pytest.mark.parametrize("text", [CODECS[0], CODECS[2], CODECS[3]])
@on_ranks
def test_a_reduction_that_fails_while_it_is_selected_from_spoils_one_step_and_no_memory(text: str) -> None:
    """Where the other node's daemon selects. From then on this node's does, too."""
    with on_a_gpu(hvd.cross_rank() == 0):
        model, optimizer = make(text)
        train(model, optimizer, range(4))
        before = residuals(optimizer)
        if hvd.rank() == 0:

            def fail() -> bool:
                optimizer._sync.plan.node.failed(RuntimeError("a reduction was lost"))
                return False

            for selection in optimizer._sync.selections.buckets.values():
                selection.done = fail
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # who notices it says so
            with pytest.raises(hvd.HorovodInternalError, match="could not"):
                train(model, optimizer, range(3, 4))  # at the last step's rate: residuals are not rescaled
        after = residuals(optimizer)
        for key in before if has_the_residual() else ():  # others are told what is in the daemon by then
            torch.testing.assert_close(after[key], before[key], rtol=0, atol=1e-4)
        optimizer.zero_grad()
        parameters = train(model, optimizer, range(5, 8))
        assert len(set(hvd.allgather_object(parameters[-1]))) == 1


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("text", [CODECS[0], CODECS[2]])
@on_ranks
def test_a_restored_training_goes_on_bit_by_bit(text: str) -> None:
    """From a checkpoint of workers that select, where they select and where their daemons do; and the other way."""
    for written_on_gpu in (True, False):
        with on_a_gpu(written_on_gpu):
            model, optimizer = make(text)
            train(model, optimizer, range(5))
            state = optimizer.state_dict()
            state = hvd.allgather_object(state)[0 if hvd.cross_rank() == 0 else -1]  # as docs/compression.md says
            checkpoint = through_a_file({"model": model.state_dict(), "optimizer": state})
            expected = train(model, optimizer, range(5, 12))
        for read_on_gpu in (True, False):
            for trained in range(2):  # into one that is new, and into one that has a plan
                with on_a_gpu(read_on_gpu):
                    model, optimizer = make(text)
                    train(model, optimizer, range(20, 20 + 2 * trained))
                    model.load_state_dict(checkpoint["model"])
                    optimizer.load_state_dict(checkpoint["optimizer"])
                    assert train(model, optimizer, range(5, 12)) == expected


@on_ranks
def test_residuals_stay_where_another_node_goes_on_from_the_root() -> None:
    """What is broadcast has no residuals: who is in the root's step keeps its own, wherever they are."""
    with on_a_gpu():
        model, optimizer = make()
        train(model, optimizer, range(3))
        before = residuals(optimizer)
        hvd.broadcast_optimizer_state(optimizer, 0)
        after = residuals(optimizer)
        if has_the_residual():  # what others of its node are told depends on how far it has come
            assert all(torch.equal(after[key], before[key]) for key in before)
        train(model, optimizer, range(3, 5))


@pytest.mark.parametrize("name", ["topk", "thresholdk"])
@on_ranks
def test_nothing_is_lost(name: str) -> None:
    """What was given = what all got + what waits in residuals, on all nodes together; steps of size 1 from zero."""
    slopes = torch.linspace(-1, 1, 4000)
    with on_a_gpu():
        parameter, bias = torch.nn.Parameter(torch.zeros(4000)), torch.nn.Parameter(torch.zeros(10))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([parameter, bias], lr=1.0), [("w", parameter), ("bias", bias)], op=hvd.Sum,
            compression=f"{name}(density=0.01, minimum=100)",
        )  # fmt: skip
        given = torch.zeros(4010, dtype=torch.float64)
        for step in range(6):
            optimizer.zero_grad()
            mine = slopes.roll(700 * step * (1 + hvd.rank())) * (1 + step)
            loss = (parameter * mine).sum() + (bias * (0.1 + hvd.rank())).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            given += torch.cat([mine, torch.full((10,), 0.1 + hvd.rank())])
            optimizer.step()
        found = residuals(optimizer)
        waiting = torch.cat([found[key].double() for key in sorted(found, key=lambda key: key.endswith("bias"))])
        assert waiting.any() or not has_the_residual()
    waiting *= has_the_residual()
    applied = -torch.cat([parameter, bias]).detach().double()
    everything = applied + hvd.allreduce(waiting, op=hvd.Sum)
    torch.testing.assert_close(everything, hvd.allreduce(given, op=hvd.Sum), atol=1e-4, rtol=0)


@on_ranks
def test_only_what_is_selected_goes_into_the_arena() -> None:
    """The bucket's own place is as the last result has left it when the bucket is sent, in one message."""
    with on_a_gpu():
        model, optimizer = make()
        train(model, optimizer, range(2))
        buckets = optimizer._sync.plan.buckets
        seen: list[torch.Tensor] = []
        channel = basics.runtime().client.channel
        ready = channel.ready

        def spy(*arguments: Any) -> Any:
            seen.append(torch.cat([slot.view.flatten() for slot in buckets[arguments[2]].slots]).clone())
            return ready(*arguments)

        before = [torch.cat([slot.view.flatten() for slot in bucket.slots]).clone() for bucket in buckets]
        channel.ready = spy  # type: ignore[assignment, method-assign]
        try:
            train(model, optimizer, range(2, 3))
        finally:
            del channel.ready
        assert len(seen) == len(buckets)
        assert all(any(torch.equal(place, was) for was in before) for place in seen)
        stats = hvd.compression_stats()[optimizer._sync.name]
        assert stats["selected"] == stats["asked"] > 0


@on_ranks
def test_a_new_plan_takes_the_residuals_over() -> None:
    after = []
    for really in (False, True):
        with on_a_gpu(really):
            model, optimizer = make()
            train(model, optimizer, range(4))
            model[0].weight.requires_grad_(False)
            after.append(train(model, optimizer, range(4, 8)))
            assert optimizer.statistics().plans == 2
    assert after[0] == after[1]


@pytest.mark.parametrize("overlap", ["forward", "stale"])
@on_ranks
def test_updates_that_are_applied_later(overlap: str) -> None:
    after = []
    for really in (False, True):
        with on_a_gpu(really):
            model, optimizer = make(overlap=overlap)
            train(model, optimizer, range(10))
            after.append((train(model, optimizer, range(10, 12))[-1], residuals(optimizer)))
    assert after[0][0] == after[1][0]
    assert all(torch.equal(after[0][1][key], after[1][1][key]) for key in after[0][1] if has_the_residual())


@on_ranks
def test_parameters_without_gradient_and_gradients_that_are_forgotten() -> None:
    after = []
    for really in (False, True):
        with on_a_gpu(really):
            model, optimizer = make()
            train(model, optimizer, range(3))
            model(torch.ones(1, 40)).sum().backward()  # reduced, and then forgotten
            optimizer.state_dict()
            optimizer.zero_grad()
            model[0](torch.ones(1, 40)).sum().backward()  # nothing of the other layers
            optimizer.step()
            after.append(train(model, optimizer, range(3, 6)))
    assert after[0] == after[1]


@on_ranks
def test_what_workers_do_not_select() -> None:
    """Other codecs, double precision, buckets of which all is always sent, a compressor of the script's own, and
    gradients in the host's memory go their usual way."""

    class Own(hvd.Compression.none):  # type: ignore[misc, valid-type]
        pass

    def kinds(dtype: torch.dtype = torch.float32, **how: Any) -> list[bool]:
        model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Linear(20, 3)).to(dtype)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **how)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 30, dtype=dtype)).sum().backward()
            optimizer.step()
        return selecting_buckets(optimizer)

    with on_a_gpu():
        assert all(kinds(compression=hvd.Compression.topk(0.1, minimum=10))) == has_the_residual()
        for how in (
            {"compression": hvd.Compression.topk(0.1, minimum=10), "dtype": torch.float64},
            {"compression": hvd.Compression.topk(0.1)},
            {"compression": hvd.Compression.randomk(0.1, minimum=10)},
            {"compression": hvd.Compression.topk(0.1, minimum=10, chunk=50)},
            {"compression": hvd.Compression.gaussiank(0.1, minimum=10, decay=0.9)},
            {"compression": hvd.Compression.int8()},
            {"compression": hvd.Compression.fp16},
            {"compression": Own},
            {"compression": hvd.Compression.topk(0.1, minimum=10), "algorithm": "bsp"},
        ):
            assert not any(kinds(**how)), how
    assert not any(kinds(compression=hvd.Compression.topk(0.1, minimum=10))), "the gradients are in the host's memory"


@on_ranks
def test_a_selection_that_is_none_fails_on_all_ranks_with_its_place() -> None:
    with on_a_gpu():
        model, optimizer = make()
        train(model, optimizer, range(2))
        selection = optimizer._sync.selections.buckets.get(0)

        def harm() -> None:
            type(selection).wait(selection)
            selection._tray.groups[0][HEADER] = -5

        if hvd.rank() == 2:
            selection.done, selection.wait = (lambda: False), harm
        why = (
            r"bucket 0 of plan \d+ on rank 2 was selected wrongly by its worker: the \d+ indices of group 0 are not "
            r"ascending elements of it"
        )
        with pytest.raises(hvd.HorovodInternalError, match=why):
            train(model, optimizer, range(2, 3))
