"""DDP with gradients exchanged by a codec, on two nodes, beside plain DDP and a simulation in one process."""

from __future__ import annotations

import io
import types
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import fusion_rt.torch as hvd
from fusion_rt.c10d import DDPGradients, compress, ddp_hook
from fusion_rt.codecs import CODECS
from fusion_rt.core.errors import HorovodInternalError
from tests.c10d.script import (
    SCALES,
    START,
    TOPK,
    ErrorFeedback,
    backward,
    bits,
    loss_of,
    make_model,
    process_group,
    train,
    train_scaled,
)
from tests.harness import Job, on_ranks

TEXTS = [
    TOPK,
    "topk(density=0.05, minimum=100, momentum=0.9)",
    "fp16",
    *(
        f"{name}(minimum=100)" if hasattr(codec, "minimum") else name
        for name, codec in sorted(CODECS.items())
        if codec().stateful and name != "topk"
    ),
]


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """Two ranks on two nodes, and small buckets; what is selected goes to everybody, as in the simulation."""
    with Job((1, 1), {**START, "HOROVOD_FUSION_THRESHOLD": "16KiB", "FUSION_SPARSE_ROUTE": "gather"}) as running:
        yield running


class Branches(torch.nn.Module):
    """Layers of which some are used on some ranks, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(40, 60)
        self.left, self.right = torch.nn.Linear(60, 50), torch.nn.Linear(60, 50)
        self.last = torch.nn.Linear(50, 4)

    def forward(self, inputs: torch.Tensor, left: bool = True) -> torch.Tensor:
        outputs: torch.Tensor = self.last((self.left if left else self.right)(self.first(inputs).tanh()))
        return outputs


@pytest.mark.parametrize("backend", ["fusion", "gloo"])
@on_ranks
def test_dense_is_plain_ddp_bit_by_bit(backend: str) -> None:
    with process_group(backend):
        plain = DistributedDataParallel(make_model(), bucket_cap_mb=0.01)
        hooked = DistributedDataParallel(make_model(), bucket_cap_mb=0.01)
        state = compress(hooked, "dense")
        assert train(hooked, range(6)) == train(plain, range(6))
        assert state.statistics().steps == 6
        assert state.statistics().buckets > 1
        assert state.state_dict() == {}


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str)
@on_ranks
def test_topk_is_error_feedback_by_parameter_though_buckets_are_rebuilt(options: dict[str, bool]) -> None:
    with process_group():
        model = DistributedDataParallel(make_model(), bucket_cap_mb=0.01, **options)  # type: ignore[arg-type]
        state = compress(model, TOPK)
        simulated = ErrorFeedback(make_model())
        for step, after in enumerate(train(model, range(6))):
            simulated.step(partial(loss_of, simulated.model, step))
            assert after == bits(simulated.model), step
        assert state.statistics().plans == 1
        assert model._get_ddp_logging_data()["has_rebuilt_buckets"]  # type: ignore[no-untyped-call]


@on_ranks
def test_unused_and_frozen_parameters() -> None:
    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        model = Branches()
        model.first.bias.requires_grad_(False)
        return model

    with process_group():
        model = DistributedDataParallel(make(), find_unused_parameters=True, bucket_cap_mb=0.01)
        compress(model, TOPK)
        simulated = ErrorFeedback(make())
        for step, after in enumerate(train(model, range(6), left=hvd.rank() == 0)):
            simulated.step(partial(_loss_of_branch, simulated.model, step))
            assert after == bits(simulated.model), step


def _loss_of_branch(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    return loss_of(model, step, rank, left=rank == 0)


def _loss_of_both(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    return loss_of(model, 10 + step, rank) + loss_of(model, step, rank)


@on_ranks
def test_accumulated_gradients_are_sent_once() -> None:
    with process_group():
        model = DistributedDataParallel(make_model(), bucket_cap_mb=0.01)
        state = compress(model, TOPK)
        simulated = ErrorFeedback(make_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            with model.no_sync():
                backward(loss_of(model, 10 + step))
            backward(loss_of(model, step))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            simulated.step(partial(_loss_of_both, simulated.model, step))
            for parameter, expected in zip(model.parameters(), simulated.model.parameters(), strict=True):
                torch.testing.assert_close(parameter, expected)
        assert state.statistics().steps == 4


@pytest.mark.parametrize("text", [*TEXTS[:2], *(pytest.param(text, marks=pytest.mark.long) for text in TEXTS[2:])])
@on_ranks
def test_a_restored_training_goes_on_bit_by_bit(text: str) -> None:
    with process_group():
        model = DistributedDataParallel(make_model(), bucket_cap_mb=0.01)
        state = compress(model, text)
        train(model, range(5))
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "hook": state.state_dict()}, file)
        expected = train(model, range(5, 10))
        file.seek(0)
        checkpoint = torch.load(file, weights_only=True)
        for steps in (0, 2):  # into one that is new, and into one that has a plan
            model = DistributedDataParallel(make_model(), bucket_cap_mb=0.01)
            state = compress(model, text)
            train(model, range(20, 20 + steps))
            model.load_state_dict(checkpoint["model"])
            state.load_state_dict(checkpoint["hook"])
            assert train(model, range(5, 10)) == expected
        assert len(set(hvd.allgather_object(expected[-1]))) == 1


@pytest.mark.parametrize("text", TEXTS)
@on_ranks
def test_a_loss_scale_that_changes_changes_no_bit(text: str) -> None:
    """Scales are powers of two. Without memory, a codec for halves rounds what is small otherwise."""
    with process_group():
        plain, scaled, said = (DistributedDataParallel(make_model(), bucket_cap_mb=0.01) for _ in range(3))
        compress(plain, text), compress(scaled, text)
        state = compress(said, text)
        expected = train_scaled(plain, [1.0] * len(SCALES))
        for found in (train_scaled(scaled, SCALES), train_scaled(said, SCALES, state)):
            for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
                if text == "fp16":
                    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
                else:
                    assert all(map(torch.equal, ours, theirs)), step


@pytest.mark.parametrize("text", ["fp16", TOPK])
@on_ranks
def test_one_overflow_of_a_gradient_scaler_skips_one_step_on_all_ranks(text: str) -> None:
    with process_group():
        model = DistributedDataParallel(make_model(), bucket_cap_mb=0.01)
        compress(model, text)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=100)
        after = [bits(model)]
        for step in range(6):
            optimizer.zero_grad()
            loss = loss_of(model, step) * (float("inf") if step == 2 and hvd.rank() == 1 else 1.0)
            backward(scaler.scale(loss))
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            after.append(bits(model))
        assert scaler.get_scale() == 128
        assert [old != new for old, new in pairwise(after)] == [step != 2 for step in range(6)]
        assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
        assert len(set(hvd.allgather_object(after[-1]))) == 1


@on_ranks
def test_several_modules_in_one_backward_pass() -> None:
    with process_group():
        after = []
        for hooked in (True, False):
            first = DistributedDataParallel(make_model(), bucket_cap_mb=0.01)
            second = DistributedDataParallel(torch.nn.Linear(4, 4), bucket_cap_mb=0.01)
            if hooked:
                compress(first, "dense"), compress(second, "dense")
            both = torch.nn.Sequential(first, second)
            after.append(train(both, range(4)))
        assert after[0] == after[1]


@on_ranks
def test_a_hook_without_names_and_the_wrappers_of_torch() -> None:
    with process_group():
        plain = DistributedDataParallel(make_model(), bucket_cap_mb=0.01)
        plain.register_comm_hook(None, default_hooks.fp16_compress_hook)
        wrapped = DistributedDataParallel(make_model(), bucket_cap_mb=0.01)
        state, hook = ddp_hook("dense")
        wrapped.register_comm_hook(state, default_hooks.fp16_compress_wrapper(hook))
        train(plain, range(4)), train(wrapped, range(4))
        for parameter, expected in zip(wrapped.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter, expected, rtol=1e-3, atol=1e-4)


class Mixed(torch.nn.Module):
    """Layers of several types, and of a memory format of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle = torch.nn.Linear(40, 60), torch.nn.Linear(60, 50).bfloat16()
        self.images = torch.nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.last = torch.nn.Linear(50, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.last(self.middle(self.first(inputs).bfloat16()).float())
        images: torch.Tensor = self.images(inputs[:, :32].reshape(-1, 2, 4, 4))
        return outputs + images.mean((2, 3))


@on_ranks
def test_types_and_memory_formats_of_parameters() -> None:
    with process_group():
        plain = DistributedDataParallel(Mixed(), bucket_cap_mb=0.005)
        hooked = DistributedDataParallel(Mixed(), bucket_cap_mb=0.005)
        compress(hooked, "dense")
        train(plain, range(4)), train(hooked, range(4))
        for parameter, expected in zip(hooked.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter, expected)


class Embedded(torch.nn.Module):
    """An embedding with sparse gradients before a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.last = torch.nn.Embedding(30, 60, sparse=True), torch.nn.Linear(60, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.last(self.rows(inputs[:, :3].abs().mul(10).long().clamp(max=29)).sum(1))
        return outputs


@pytest.mark.parametrize("backend", ["fusion", "gloo"])
@on_ranks
def test_sparse_gradients_are_reduced_by_rows(backend: str) -> None:
    with process_group(backend):
        after = []
        for hooked in (True, False):
            model = DistributedDataParallel(Embedded())
            if hooked:
                compress(model, "dense")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(4):
                optimizer.zero_grad()
                backward(loss_of(model, step))
                optimizer.step()
            after.append([parameter.detach().clone() for parameter in model.parameters()])
        torch.testing.assert_close(after[0], after[1])


@on_ranks
def test_a_compiled_module() -> None:
    with process_group("gloo"):
        plain = DistributedDataParallel(make_model(), bucket_cap_mb=2)
        hooked = DistributedDataParallel(make_model(), bucket_cap_mb=2)
        state = compress(hooked, "dense")
        train(plain, range(3)), train(torch.compile(hooked, backend="aot_eager"), range(3))
        for parameter, expected in zip(hooked.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter, expected)
        assert state.statistics().steps == 3


@on_ranks
def test_residuals_follow_the_learning_rate_of_an_optimizer() -> None:
    with process_group():
        totals = []
        for known in (True, False):
            model = DistributedDataParallel(make_model(), bucket_cap_mb=0.01)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            state = compress(model, TOPK, optimizer if known else None)
            backward(loss_of(model, 0))
            before = _norm(state)
            optimizer.param_groups[0]["lr"] = 0.05
            optimizer.zero_grad()
            backward(loss_of(model, 1) * 0)
            totals.append(_norm(state) / before)
        assert totals[1] < 1 < totals[0] < 2 + 1e-6, totals


def _norm(state: DDPGradients) -> float:
    residuals = [v for k, v in state.state_dict()["state"].items() if ":residual/" in k]
    return float(torch.cat([value.flatten() for value in residuals]).norm())


@on_ranks
def test_ranks_that_want_different_codecs_are_told() -> None:
    with process_group():
        model = DistributedDataParallel(make_model())
        compress(model, "fp16" if hvd.rank() else "bf16")
        with pytest.raises(HorovodInternalError, match=r"do not agree.*bf16.*fp16"):
            backward(loss_of(model, 0))


@on_ranks
def test_two_momenta_are_warned_of() -> None:
    with process_group():
        model = DistributedDataParallel(make_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with pytest.warns(UserWarning, match=r"codec topk has a momentum.*optimizer"):
            compress(model, "topk(momentum=0.9)", optimizer)


@on_ranks
def test_what_makes_no_sense_is_refused_by_a_sentence() -> None:
    with process_group():
        model = DistributedDataParallel(make_model())
        with pytest.raises(ValueError, match=r"compressor of the script's own.*codec"):
            compress(model, types.SimpleNamespace(compress=None, decompress=None))
        state = compress(model, TOPK)
        with pytest.raises(RuntimeError, match="in-place"):  # of torch
            backward(loss_of(model, 0), create_graph=True)
        single = DistributedDataParallel(torch.nn.Linear(4, 4, bias=False))
        compress(single, TOPK)
        with pytest.raises(ValueError, match=r"create_graph=True.*codec"):
            backward(single(torch.ones(2, 4)).square().sum(), create_graph=True)

        twice = DistributedDataParallel(make_model())
        hvd.DistributedOptimizer(optimizer := torch.optim.SGD(twice.parameters(), lr=0.1))
        wrapped = hvd.DistributedOptimizer(optimizer)
        compress(twice, TOPK)
        with pytest.raises(ValueError, match=r"reduced twice.*hvd.DistributedOptimizer"):
            backward(loss_of(twice, 0))
        del wrapped

        model = DistributedDataParallel(make_model())
        state, hook = ddp_hook(TOPK)
        model.register_comm_hook(state, lambda state, bucket: _waited_for(hook(state, bucket)))
        with pytest.raises(RuntimeError, match=r"then"):
            backward(loss_of(model, 0))


def _waited_for(future: Any) -> Any:
    future.wait()
    return future


@on_ranks
def test_a_hook_may_be_made_before_the_process_group() -> None:
    state, hook = ddp_hook("dense", (plain := make_model()).named_parameters())
    with pytest.raises(ValueError, match=r"init_process_group\(.fusion.\)"):
        _ = state.process_set
    with process_group():
        model = DistributedDataParallel(plain)
        model.register_comm_hook(state, hook)
        expected = DistributedDataParallel(make_model())
        assert train(model, range(2)) == train(expected, range(2))
