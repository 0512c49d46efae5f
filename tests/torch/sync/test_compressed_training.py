"""Training with codecs that remember what they have not sent, on two nodes."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.codecs import CODECS, CodecError
from fusion_rt.torch.core import basics
from tests.harness import Job, on_ranks, run_workers

CODEC = "topk(density=0.05, value='fp16', minimum=100)"
STATEFUL = sorted(name for name, codec in CODECS.items() if codec().stateful)
SMALL = {name: f"{name}(minimum=100)" if hasattr(CODECS[name], "minimum") else name for name in STATEFUL}
TEXTS = [CODEC, *(text for name, text in SMALL.items() if name != "topk")]


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """Three ranks on two nodes, and small buckets."""
    with Job((2, 1), {"HOROVOD_FUSION_THRESHOLD": "16KiB", "HOROVOD_START_TIMEOUT": "120"}) as running:
        yield running


def make(text: str, lr: float = 0.1) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 50), torch.nn.Linear(50, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=text)


def train(model: torch.nn.Module, optimizer: Any, steps: range, decay: float = 1.0) -> list[bytes]:
    """The parameters after each step."""
    after = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + hvd.rank())
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * decay**step
        torch.nn.functional.cross_entropy(
            model(torch.randn(8, 40, generator=generator)), torch.randint(0, 4, (8,), generator=generator)
        ).backward()
        optimizer.step()
        after.append(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    return after


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("text", TEXTS)
@on_ranks
def test_a_restored_training_goes_on_bit_by_bit(text: str) -> None:
    model, optimizer = make(text)
    train(model, optimizer, range(5), 0.9)
    checkpoint = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    expected = train(model, optimizer, range(5, 12), 0.9)
    for _ in range(2):  # into one that is new, and into one that has a plan
        model, optimizer = make(text)
        train(model, optimizer, range(20, 20 + 2 * _))
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        assert train(model, optimizer, range(5, 12), 0.9) == expected
    assert len(set(hvd.allgather_object(expected[-1]))) == 1


@pytest.mark.parametrize("text", [*TEXTS, "topk(density=0.05, minimum=100, momentum=0.9)"])
@on_ranks
def test_one_overflow_of_a_gradient_scaler_skips_one_step_and_the_scale_recovers(text: str) -> None:
    model, optimizer = make(text)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    after = [torch.cat([p.detach().flatten() for p in model.parameters()])]
    scales = []
    for step in range(9):
        generator = torch.Generator().manual_seed(100 * step + hvd.rank())
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(
            model(torch.randn(8, 40, generator=generator)), torch.randint(0, 4, (8,), generator=generator)
        )
        if step == 3 and hvd.rank() == 2:
            loss = loss * float("inf")
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        after.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        scales.append(scaler.get_scale())
    assert scales == [1024] * 3 + [512] * 4 + [1024] * 2
    moved = [not torch.equal(old, new) for old, new in pairwise(after)]
    assert moved == [step != 3 for step in range(9)]
    assert bool(after[-1].isfinite().all())
    assert len(set(hvd.allgather_object(after[-1].numpy().tobytes()))) == 1


@on_ranks
def test_a_checkpoint_of_one_node_loaded_on_all() -> None:
    model, optimizer = make(CODEC)
    train(model, optimizer, range(3))
    state = hvd.broadcast_object(optimizer.state_dict(), 0)
    other, restored = make(CODEC)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        restored.load_state_dict(state)
    told = [str(warning.message) for warning in caught]
    assert len(told) == (hvd.rank() == 2)
    assert all("save optimizer.state_dict() on one rank of each node" in text for text in told)
    found = restored.state_dict()["fusion_rt"]["state"]
    residuals = [value for key, value in found.items() if ":residual/" in key]
    assert any(value.any() for value in residuals) == (hvd.rank() != 2)
    assert {int(value) for key, value in found.items() if key.endswith(":step")} == {3}
    train(other, restored, range(3, 6))


@on_ranks
def test_a_checkpoint_loaded_at_the_root_and_broadcast() -> None:
    model, optimizer = make(CODEC)
    train(model, optimizer, range(3))
    state = optimizer.state_dict()
    other, restored = make(CODEC)
    if hvd.rank() == 0:
        restored.load_state_dict(state)
    hvd.broadcast_optimizer_state(restored, 0)
    train(other, restored, range(3, 6))  # would fail where nodes are not in the same step
    hvd.broadcast_optimizer_state(restored, 0)
    residuals = [value for key, value in restored.state_dict()["fusion_rt"]["state"].items() if ":residual/" in key]
    assert any(value.any() for value in residuals), "who is in the root's step keeps what it has"


@on_ranks
def test_the_plain_optimizer_takes_such_a_checkpoint() -> None:
    model, optimizer = make(CODEC)
    train(model, optimizer, range(2))
    plain = torch.optim.SGD(model.parameters(), lr=7.0)
    plain.load_state_dict(optimizer.state_dict())
    assert plain.param_groups[0]["lr"] == 0.1
    dense = hvd.DistributedOptimizer(plain, model.named_parameters())
    dense.load_state_dict(optimizer.state_dict())
    assert "fusion_rt" not in dense.state_dict()


def residual_of(optimizer: Any) -> torch.Tensor:
    state = optimizer.state_dict()["fusion_rt"]["state"]
    return torch.cat([value for key, value in sorted(state.items()) if ":residual/2.weight" in key])


@on_ranks
def test_a_residual_is_rescaled_when_the_learning_rate_changes() -> None:
    """With a gradient of zero and nothing sent of a tensor, all that happens to the residual is the factor."""
    parameter = torch.nn.Parameter(torch.zeros(4000))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=0.1), [("2.weight", parameter)],
        compression=hvd.Compression.topk(1 / 4000, minimum=0, value="fp32"),
    )  # fmt: skip
    slopes = torch.linspace(0.1, 1, 4000) * (1 + hvd.cross_rank())

    def step(lr: float, scale: float) -> torch.Tensor:
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = lr
        (parameter * slopes * scale).sum().backward()
        optimizer.step()
        return residual_of(optimizer)

    before = step(0.1, 1.0)
    for lr, factor in ((0.05, 2.0), (0.05, 1.0), (0.0, 1.0), (0.2, 0.25)):
        after = step(lr, 0.0)
        untouched = after != 0
        torch.testing.assert_close(after[untouched], before[untouched] * factor)
        assert untouched.sum() >= 3980
        before = after


@on_ranks
def test_a_new_plan_takes_the_residuals_over() -> None:
    model, optimizer = make(CODEC)
    train(model, optimizer, range(3))
    before = residual_of(optimizer)
    statistics = hvd.compression_stats()
    model[0].weight.requires_grad_(False)
    train(model, optimizer, range(3, 4))
    assert optimizer.statistics().plans == 2
    after = residual_of(optimizer)
    assert before.any()
    assert torch.linalg.vector_norm(after) > 0.5 * torch.linalg.vector_norm(before)
    group = optimizer._sync.name
    assert hvd.compression_stats()[group]["asked"] > statistics[group]["asked"]
    assert {int(v) for k, v in optimizer.state_dict()["fusion_rt"]["state"].items() if k.endswith(":step")} == {4}


@on_ranks
def test_a_state_of_other_parameters_is_refused() -> None:
    model, optimizer = make(CODEC)
    train(model, optimizer, range(2))
    state = optimizer.state_dict()
    named = [(f"other.{name}", parameter) for name, parameter in model.named_parameters()]
    other = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named, compression=CODEC)
    with pytest.raises(ValueError, match=r"state of a parameter '.*', which this optimizer does not train"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="is no state of a distributed optimizer"):
        other.load_state_dict({**state, "fusion_rt": {"node": 0}})


@on_ranks
def test_gradients_that_are_under_way_are_reduced_before_a_state_is_saved() -> None:
    model, optimizer = make(CODEC)
    train(model, optimizer, range(1))
    model(torch.ones(1, 40)).sum().backward()
    state = optimizer.state_dict()["fusion_rt"]["state"]
    assert {int(value) for key, value in state.items() if key.endswith(":step")} == {2}
    optimizer.step()


@pytest.mark.parametrize("text", TEXTS)
@on_ranks
def test_statistics(text: str) -> None:
    before = hvd.compression_stats()["total"]
    model, optimizer = make(text)
    train(model, optimizer, range(3))
    stats = hvd.compression_stats()
    group = stats[optimizer._sync.name]
    assert 0 < group["bytes_packed"] < group["bytes_dense"]
    assert group["saved"] == pytest.approx(1 - group["bytes_packed"] / group["bytes_dense"])
    assert group["seconds"] > 0
    assert group["residual_norm"] > 0
    assert stats["total"]["bytes_dense"] == before["bytes_dense"] + group["bytes_dense"]
    if text == CODEC:
        assert group["selected"] == group["asked"] == 3 * sum(round(0.05 * n) for n in buckets_of(optimizer))


EVERYWHERE = ["fp16", "topk(minimum=100)", "int8(minimum=100)", "powersgd(minimum=100)"]


@pytest.mark.parametrize("algorithm", ["allreduce", "bsp", "choco", "diloco(steps=1, outer_rate=1.0)"])
@pytest.mark.parametrize("text", EVERYWHERE)
@on_ranks
def test_every_algorithm_counts_the_elements_that_a_codec_has_encoded(text: str, algorithm: str) -> None:
    before = hvd.compression_stats()["total"]
    model = make("dense")[0]
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        optimizer: Any = hvd.DistributedOptimizer(
            inner, model.named_parameters(), compression=text, algorithm=algorithm
        )
    except ValueError:
        return  # they do not go together, which other tests check
    train(model, optimizer, range(3))
    hvd.consensus(optimizer)
    told = {key: value - before[key] for key, value in hvd.compression_stats()["total"].items()}
    large = sum(p.numel() for p in model.parameters() if p.numel() > 200)
    share = 1.0 if text in ("fp16", "bf16") else large / sum(p.numel() for p in model.parameters())
    assert told["elements"] > 0
    if text.startswith("powersgd"):  # the widest layers only
        assert 0 < told["encoded"] < told["elements"]
    else:
        assert told["encoded"] / told["elements"] == pytest.approx(share, abs=0.1)  # by buckets, not all of which leave
    assert 0 < told["bytes_packed"] < told["bytes_dense"]


@on_ranks
def test_a_node_counts_what_it_has_sent_and_received() -> None:
    hvd.barrier()
    before = hvd.network_stats()
    hvd.allreduce(torch.ones(50_000), name="counted")
    hvd.barrier()
    now = hvd.network_stats()
    sent, received = (now[way] - before[way] for way in ("sent", "received"))
    several = hvd.size() > hvd.local_size()
    # Between nodes each sends at least half of the tensor, and no more than twice all of it.
    assert sent >= 100_000 * several
    assert received >= 100_000 * several
    assert max(sent, received) <= 500_000 * several


def buckets_of(optimizer: Any) -> list[int]:
    """Elements that are selected from, for each bucket."""
    return [
        sum(slot.parameter.numel() for slot in bucket.slots if "bias" not in slot.name)
        for bucket in optimizer._sync.plan.buckets
    ]


@on_ranks
def test_an_allreduce_by_hand_is_compressed_when_asked() -> None:
    values = torch.zeros(20_000)
    values[7000 + hvd.rank()] = 3.0
    values[50] = 1e-3
    reduced = hvd.allreduce(values, op=hvd.Sum, compression=hvd.Compression.topk(1e-4, value="fp32"))
    assert {50, 7000, 7001, 7002}.issuperset(reduced.nonzero().view(-1).tolist())
    assert reduced.max() == 3
    assert reduced[50] < 2e-3, "the first node has not sent it"
    assert torch.equal(hvd.allreduce(values, op=hvd.Sum, name="d")[50], torch.tensor(3e-3))
    for name in STATEFUL:
        hvd.allreduce(torch.randn(2000), compression=getattr(hvd.Compression, name)())
    grouped = hvd.grouped_allreduce([torch.ones(5), torch.ones(70)], compression=hvd.Compression.int8())
    assert all(torch.equal(tensor, torch.ones_like(tensor)) for tensor in grouped)


@on_ranks
def test_what_makes_no_sense_is_refused() -> None:
    topk = hvd.Compression.topk(0.1)
    with pytest.raises(ValueError, match="topk is for floating-point elements, not for int64"):
        hvd.allreduce(torch.arange(9), op=hvd.Sum, compression=topk)
    with pytest.raises(ValueError, match="topk is for all-reduces, not for reducescatter"):
        hvd.reducescatter(torch.ones(9), compression=topk)
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        with pytest.raises(ValueError, match=f"sums, which cannot be combined by {op}"):
            hvd.allreduce(torch.ones(9), op=op, compression=topk)
        parameter = torch.nn.Parameter(torch.ones(3))
        with pytest.raises(CodecError, match=f"sums, which cannot be combined by {op}"):
            hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1), op=op, compression=topk)
    with pytest.warns(UserWarning, match="the optimizer another"):
        hvd.DistributedOptimizer(
            torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1, momentum=0.9),
            compression=hvd.Compression.topk(0.1, momentum=0.9),
        )


def _steps_of_an_unmodified_script() -> tuple[bool, float]:
    parameter = torch.nn.Parameter(torch.zeros(30_000))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
    (parameter * torch.linspace(0, 1, 30_000)).sum().backward()
    optimizer.step()
    by_hand = hvd.allreduce(torch.linspace(0, 1, 30_000))
    return torch.equal(by_hand, torch.linspace(0, 1, 30_000)), float((parameter != 0).sum())


def test_the_setting_compresses_the_optimizers_only() -> None:
    environment = {"FUSION_COMPRESSION": "topk(density=0.01)", "HOROVOD_START_TIMEOUT": "120"}
    exact, sent = zip(
        *run_workers(_steps_of_an_unmodified_script, ranks=2, nodes=2, environment=environment), strict=True
    )
    assert exact == (True, True)
    assert sent == (300, 300)


@on_ranks
def test_one_message_a_bucket_with_a_codec_too() -> None:
    model, optimizer = make(CODEC)
    train(model, optimizer, range(2))
    channel = basics.runtime().client.channel
    sent: list[Any] = []
    channel.send = lambda message, send=channel.send: (sent.append(message), send(message))  # type: ignore[method-assign]
    try:
        train(model, optimizer, range(2, 5))
    finally:
        del channel.send
    assert len(sent) == 3 * optimizer.statistics().buckets
