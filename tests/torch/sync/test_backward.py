"""When `backward()` returns, gradients are reduced: scripts that work on them before `step()`, as written for DDP.

The reference is one process on everybody's batches.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fusion_rt.torch as hvd
from fusion_rt.torch.core import basics
from fusion_rt.torch.sync.step_schedule import Outcome
from tests.harness import Job, on_ranks
from tests.torch.training import (
    MakeOptimizer,
    assert_equal_on_all_ranks,
    assert_same,
    batch_of,
    everybodys_batch,
    in_arena,
    loss_of,
    make_model,
    my_batch,
    train,
    train_reference,
)

sgd: MakeOptimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3)


def distributed(model: torch.nn.Module, make: MakeOptimizer = sgd, **options: Any) -> Any:
    return hvd.DistributedOptimizer(make(model.parameters()), named_parameters=model.named_parameters(), **options)


def assert_gradients(model: torch.nn.Module, reference: torch.nn.Module, factor: float = 1.0) -> None:
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, factor * expected.grad, msg=lambda text, n=name: f"{n}: {text}")


@on_ranks
def test_gradients_are_reduced_when_backward_returns() -> None:
    model, reference = make_model(), make_model()
    optimizer = distributed(model)
    for step in range(3):
        optimizer.zero_grad()
        reference.zero_grad()
        loss_of(model, my_batch(step)).backward()
        loss_of(reference, everybodys_batch(step)).backward()
        assert_gradients(model, reference)
        assert all(in_arena(parameter.grad) for parameter in model.parameters())
    assert optimizer.statistics().steps == 3


@pytest.mark.parametrize("norm", [0.3, 1e-3])
@on_ranks
def test_clipping_before_step_is_that_of_one_process(norm: float) -> None:
    model, reference = make_model(), make_model()
    optimizer, plain = distributed(model), sgd(reference.parameters())
    for step in range(20):
        for net, chosen, batch in ((model, optimizer, my_batch(step)), (reference, plain, everybodys_batch(step))):
            chosen.zero_grad()
            loss_of(net, batch).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), norm)
            chosen.step()
        assert_same(model, reference)


@on_ranks
def test_a_scaler_skips_a_step_on_all_ranks_if_one_overflows() -> None:
    """As a script for DDP has it: unscaled and clipped, without a word to the distributed optimizer."""
    model, reference = make_model(), make_model()
    optimizer, plain = distributed(model), sgd(reference.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales = []
    for step in range(6):
        optimizer.zero_grad()
        loss = loss_of(model, my_batch(step))
        if step in (0, 3) and hvd.rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if step not in (0, 3):
            plain.zero_grad()
            loss_of(reference, everybodys_batch(step)).backward()
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.3)
            plain.step()
        assert_same(model, reference)
    assert scales == [512.0, 512.0, 1024.0, 512.0, 512.0, 1024.0]
    assert optimizer.statistics().steps == 6


@on_ranks
def test_reading_parameter_groups_says_nothing_to_anybody() -> None:
    model, reference = make_model(), make_model()
    optimizer, plain = distributed(model, backward_passes_per_step=2), sgd(reference.parameters())
    sent = basics.runtime().client.channel.send
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, my_batch(2 * step)).backward()
        basics.runtime().client.channel.send = None  # type: ignore[assignment]  # whoever would send fails
        if hvd.rank() == 0:
            assert [group["lr"] for group in optimizer.param_groups] == [0.1]
        basics.runtime().client.channel.send = sent  # type: ignore[method-assign]
        loss_of(model, my_batch(2 * step + 1)).backward()
        if hvd.rank() == 0:
            assert optimizer.param_groups[0]["lr"] == 0.1
        hvd.barrier()  # where the others are meanwhile
        optimizer.step()
        plain.zero_grad()
        for part in (2 * step, 2 * step + 1):
            loss_of(reference, everybodys_batch(part)).backward()
        plain.step()
        assert_same(model, reference)


# --- several backward passes ------------------------------------------------------------------------------------------


class Doubling:
    """A script's own compressor, of which the result is seen to have been made once for each pass."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.double().view(-1) * 2, tensor.shape

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return (tensor / 2).view(ctx)


class Heads(torch.nn.Module):
    """Two heads on a common body."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body, self.heads = torch.nn.Linear(16, 24), torch.nn.ModuleList(torch.nn.Linear(24, 4) for _ in range(2))
        self.double()

    def loss(self, batch: tuple[torch.Tensor, torch.Tensor], head: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.heads[head](torch.tanh(self.body(batch[0]))), batch[1])


ZEROING: dict[str, Callable[[torch.nn.Module, Any], None]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer, in place": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "model, in place": lambda model, optimizer: model.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("zeroing", ZEROING)
@on_ranks
def test_reduced_gradients_of_several_passes_add_up(zeroing: str) -> None:
    """Of losses that share parameters and do not, after a first step with one; with something that looks at them."""
    for options, factor in (
        ({}, 1),
        ({"op": hvd.Sum}, hvd.size()),
        ({"gradient_predivide_factor": 2.0}, 1),
        ({"compression": Doubling}, 1),
    ):
        model, reference = Heads(), Heads()
        optimizer, plain = distributed(model, **options), sgd(reference.parameters())
        for step in range(5):
            ZEROING[zeroing](model, optimizer)
            plain.zero_grad()
            for head in [0] if step == 0 else [1, 0, 1]:
                model.loss(my_batch(step), head).backward()
                if step == 3:
                    optimizer.synchronize()
                (factor * reference.loss(everybodys_batch(step), head)).backward()
            for parameter in reference.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            assert_gradients(model, reference)
            optimizer.step()
            plain.step()
            assert_same(model, reference)
        assert optimizer.statistics().steps == 1 + 4 * 3


@on_ranks
def test_the_greatest_gradients_of_several_passes_add_up() -> None:
    model, ranks = make_model(), [make_model() for _ in range(hvd.size())]
    optimizer = distributed(model, op=hvd.Max)
    expected = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for step in range(3):
        loss_of(model, my_batch(step)).backward()
        for rank, net in enumerate(ranks):
            net.zero_grad()
            loss_of(net, batch_of(rank, step)).backward()
        for total, *each in zip(expected, *(net.parameters() for net in ranks), strict=True):
            total += torch.stack([parameter.grad for parameter in each]).amax(0)
        for parameter, total in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, total)
    optimizer.step()
    assert_equal_on_all_ranks(model)


@on_ranks
def test_sparse_gradients_of_several_passes_add_up() -> None:
    for options in ({}, {"sparse_as_dense": True}):
        torch.manual_seed(0)
        model = torch.nn.Embedding(10, 3, sparse=True, dtype=torch.float64)
        reference = copy.deepcopy(model)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)
        for _ in range(2):
            optimizer.zero_grad()
            reference.zero_grad()
            for part in range(2):
                model(torch.tensor([hvd.rank(), 5 + part])).sum().backward()
                words = torch.tensor([[rank, 5 + part] for rank in range(hvd.size())])
                (reference(words).sum() / hvd.size()).backward()
            torch.testing.assert_close(model.weight.grad.to_dense(), reference.weight.grad.to_dense())
            optimizer.step()


@on_ranks
def test_accumulation_without_saying_so_is_right_too() -> None:
    model, reference = make_model(), make_model()
    optimizer, plain = distributed(model), sgd(reference.parameters())
    for step in range(3):
        optimizer.zero_grad()
        plain.zero_grad()
        for part in range(3):
            loss_of(model, my_batch(3 * step + part)).backward()
            loss_of(reference, everybodys_batch(3 * step + part)).backward()
        optimizer.step()
        plain.step()
        assert_same(model, reference)


def uneven() -> str:
    """One rank makes two backward passes in the third step, and another one. What each is told."""
    model = make_model()
    optimizer = distributed(model)
    try:
        for step in range(5):
            optimizer.zero_grad()
            for _ in range(2 if (step, hvd.rank()) == (2, 0) else 1):
                loss_of(model, my_batch(step)).backward()
            optimizer.step()
    except hvd.HorovodInternalError as error:
        return str(error)
    return ""


@pytest.mark.multiprocess
@pytest.mark.parametrize("nodes", [(2,), (1, 1)])
def test_ranks_that_make_different_numbers_of_passes_are_told_so(nodes: tuple[int, ...]) -> None:
    with Job(nodes, {"HOROVOD_START_TIMEOUT": "120", "HOROVOD_FUSION_THRESHOLD": "4KiB"}) as job:
        for told in job.run(uneven):
            assert "rank 0 (host node0)" in told
            assert "rank 1 (host node" in told
            assert "pass 2" in told
            assert "pass 1" in told
            assert "all ranks have to make as many backward passes" in told


# --- graphs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
@on_ranks
def test_checkpointed_models_whose_parts_are_used_twice(reentrant: bool) -> None:
    def loss(net: torch.nn.Sequential, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = batch[0].requires_grad_()
        for part in (net[:2], net[2:4], net[2:4], net[4:]):
            x = checkpoint(part, x, use_reentrant=reentrant)
        return torch.nn.functional.cross_entropy(x, batch[1])

    model, reference = make_model(), make_model()
    optimizer, plain = distributed(model), sgd(reference.parameters())
    for step in range(3):
        for net, chosen, batch in ((model, optimizer, my_batch(step)), (reference, plain, everybodys_batch(step))):
            chosen.zero_grad()
            loss(net, batch).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.3)
            chosen.step()
        assert_same(model, reference)
    assert optimizer.statistics().steps == 3


@on_ranks
def test_a_part_that_comes_when_the_first_has_been_sent_is_refused() -> None:
    model = make_model()
    optimizer = distributed(model)
    train(model, optimizer, range(1))
    x = my_batch(1)[0].requires_grad_()
    x = checkpoint(model[:4], x, use_reentrant=True)
    x = checkpoint(model[4:], x, use_reentrant=True)
    x = checkpoint(model, torch.cat([x] * 4, dim=1), use_reentrant=True)
    with pytest.raises(RuntimeError, match=r"'4\.bias' gets its gradient in several parts.*use_reentrant=False"):
        x.sum().backward()
    optimizer.zero_grad()
    train(model, optimizer, [1])
    assert_equal_on_all_ranks(model)


@on_ranks
def test_parts_of_a_gradient_are_waited_for_also_where_they_come_after_all_others_of_the_bucket() -> None:
    """In a step after that of the plan. The first two parts come while others are missing, and the last one when all
    others are there."""
    first, twice, between = (torch.nn.Linear(4, 4) for _ in range(3))
    plain = copy.deepcopy([first, twice, between])

    def loss(first: torch.nn.Module, twice: torch.nn.Module, between: torch.nn.Module, again: bool) -> torch.Tensor:
        x = between(checkpoint(twice, first(torch.ones(2, 4)), use_reentrant=True))
        for _ in range(2 if again else 0):
            x = checkpoint(twice, x, use_reentrant=True)
        return x.square().sum()

    parameters = [[*first.parameters()], [*twice.parameters(), *between.parameters()]]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p for group in parameters for p in group], lr=0.0), groups=parameters
    )
    for again in (False, True, True):
        optimizer.zero_grad()
        loss(first, twice, between, again).backward()
        optimizer.step()
    assert len(optimizer._sync.plan.buckets) == 2
    loss(*plain, again=True).backward()  # the same on all ranks, so that it is the mean
    for mine, other in zip((first, twice, between), plain, strict=True):
        assert_gradients(mine, other)


@on_ranks
def test_graphs_of_every_kind() -> None:
    """Several roots, a graph that is kept, gradients of gradients, of some parameters only, and without `p.grad`."""

    def several(net: torch.nn.Module, batch: Any) -> None:
        torch.autograd.backward([loss_of(net, batch), 2 * loss_of(net, batch)])

    def kept(net: torch.nn.Module, batch: Any) -> None:
        loss = loss_of(net, batch)
        loss.backward(retain_graph=True)
        loss.backward()

    def some(net: Any, batch: Any) -> None:
        loss_of(net, batch).backward(inputs=[net[0].weight])
        loss_of(net, batch).backward(inputs=[net[4].weight])

    def outside(net: Any, batch: Any) -> None:
        torch.autograd.grad(loss_of(net, batch), list(net.parameters()))
        loss_of(net, batch).backward()
        torch.autograd.grad(loss_of(net, batch), list(net.parameters()))

    for backward in (several, kept, some, outside):
        model, reference = make_model(), make_model()
        optimizer, plain = distributed(model), sgd(reference.parameters())
        for step in range(3):
            optimizer.zero_grad()
            plain.zero_grad()
            backward(model, my_batch(step))
            backward(reference, everybodys_batch(step))
            for parameter in reference.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            optimizer.step()
            plain.step()
        assert_same(model, reference)


@on_ranks
def test_gradients_of_gradients() -> None:
    """A penalty is not linear in the batch: the reference has the ranks' losses one by one."""

    def loss(net: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs = batch[0].clone().requires_grad_()
        plain = loss_of(net, (inputs, batch[1]))
        (slope,) = torch.autograd.grad(plain, inputs, create_graph=True)
        return plain + slope.square().sum()

    model, reference = make_model(), make_model()
    optimizer, plain = distributed(model), sgd(reference.parameters())
    for step in range(3):
        optimizer.zero_grad()
        plain.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of cycles
            loss(model, my_batch(step)).backward(create_graph=step == 1)
        for rank in range(hvd.size()):
            (loss(reference, batch_of(rank, step)) / hvd.size()).backward()
        optimizer.step()
        plain.step()
    assert_same(model, reference)


@on_ranks
def test_ranks_may_meet_optimizers_in_different_orders() -> None:
    """In one backward pass, with parameters that only some ranks use, so that no bucket is complete on all of them."""
    nets = [torch.nn.ModuleDict({"used": make_model(1), "not": make_model(2)}) for _ in range(2)]
    optimizers = [hvd.DistributedOptimizer(sgd(net.parameters()), net.named_parameters()) for net in nets]
    for step in range(3):
        order = nets if hvd.rank() % 2 else nets[::-1]
        outputs = my_batch(step)[0]
        for net in order:
            part = net["used"] if step != 2 or net is nets[hvd.rank() % 2] else net["not"]
            outputs = torch.cat([part(outputs)] * 4, dim=1)
        for optimizer in optimizers:
            optimizer.zero_grad()
        outputs.sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    for net in nets:
        assert_equal_on_all_ranks(net)


@on_ranks
def test_a_rank_without_a_backward_pass_takes_part_in_step() -> None:
    model, reference = make_model(), make_model()
    optimizer, plain = distributed(model), sgd(reference.parameters())
    for step in range(4):
        optimizer.zero_grad()
        plain.zero_grad()
        if step % 2 or hvd.rank() == 1:
            loss_of(model, my_batch(step)).backward()
        optimizer.step()
        for rank in range(hvd.size()):
            if step % 2 or rank == 1:
                (loss_of(reference, batch_of(rank, step)) / hvd.size()).backward()
        plain.step()
        assert_same(model, reference)


# --- backward passes that fail ----------------------------------------------------------------------------------------


class Broken(Exception):
    """What a layer's backward pass raises."""


def failing(model: torch.nn.Sequential, layer: int, batch: Any) -> None:
    """A backward pass that raises when it comes to the output of a layer."""

    def fail(gradient: torch.Tensor) -> None:
        raise Broken("out of memory, say")

    def hook(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    handle = model[layer].register_forward_hook(hook)
    try:
        loss_of(model, batch).backward()
    finally:
        handle.remove()


@pytest.mark.parametrize("options", [{}, {"overlap": "forward"}, {"compression": hvd.Compression.fp16}], ids=str)
@pytest.mark.parametrize("how", ["replaced", "in place", "after passes", "forgotten"])
@on_ranks
def test_gradients_that_the_script_sets_are_reduced_in_every_step(how: str, options: dict[str, Any]) -> None:
    """As with weights of double precision beside the model's, or `torch.func`; nobody calls `optimizer.zero_grad()`."""
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), **options)
    plain = sgd(reference.parameters())
    if how == "after passes":
        train(model, optimizer, range(2))
        train_reference(reference, plain, range(2))
    for step in range(2, 6):
        found = torch.autograd.grad(loss_of(model, my_batch(step)), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), found, strict=True):
            if how == "in place" and parameter.grad is not None:
                parameter.grad.data.copy_(gradient)
            else:
                parameter.grad = gradient
        optimizer.step()
        if how == "forgotten":
            model.zero_grad()
        train_reference(reference, plain, [step])
    hvd.synchronize_parameters()
    tolerance = 1e-3 if "compression" in options else 1e-9
    assert_same(model, reference, rtol=tolerance, atol=tolerance)


@on_ranks
def test_gradients_that_the_script_sets_can_be_clipped_with_overlap() -> None:
    """The forward pass is that of another model, as with copies of the weights in lower precision."""
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), overlap="forward")
    plain = sgd(reference.parameters())
    for step in range(4):
        copied = copy.deepcopy(model)
        found = torch.autograd.grad(loss_of(copied, my_batch(step)), list(copied.parameters()))
        for parameter, gradient in zip(model.parameters(), found, strict=True):
            parameter.grad = gradient
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        plain.zero_grad()
        loss_of(reference, everybodys_batch(step)).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        plain.step()
        optimizer.synchronize_parameters()
    assert_same(model, reference)


@pytest.mark.parametrize("overlap", ["none", "forward", "stale"])
@pytest.mark.parametrize("layer", [0, 2, 4])
@on_ranks
def test_a_batch_whose_backward_pass_fails_on_a_rank_is_skipped_by_all(layer: int, overlap: str) -> None:
    """Before any gradient has come and when some have been sent, in the first step and in others. What remains is that
    of a job without these batches, to the bit."""
    model, reference = make_model(), make_model()
    optimizer, plain = distributed(model, overlap=overlap), distributed(reference, overlap=overlap)
    told = ["", ""]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(7):
            failed = step in (0, 3, 4)
            optimizer.zero_grad()
            try:
                if failed and hvd.rank() == 1:
                    failing(model, layer, my_batch(step))
                loss_of(model, my_batch(step)).backward()
            except (Broken, RuntimeError) as error:
                told.append(str(error))
                optimizer.zero_grad()
                assert all(parameter.grad is None for parameter in model.parameters())
                continue
            optimizer.step()
            if not failed:
                train(reference, plain, [step])
    hvd.synchronize_parameters()
    told += [str(warning.message) for warning in warned]
    if hvd.rank() == 0:
        said = [text for text in told if "rank 1" in text]
        assert len(said) == 3
        assert all("gave this step up: its backward pass raised Broken: out of memory, say" in text for text in said)
        assert all("all ranks have to skip this batch" in text for text in said)
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        if overlap == "stale":  # a gradient is of weights that lack the update before, whichever that is
            torch.testing.assert_close(mine, other, atol=1e-1, rtol=0)
        else:
            assert torch.equal(mine, other)
    assert_equal_on_all_ranks(model)


@on_ranks
def test_a_step_after_a_failed_pass_is_given_up() -> None:
    """Without `zero_grad()`: by `step()`, and by the next backward pass."""
    model = make_model()
    optimizer = distributed(model)
    train(model, optimizer, range(2))
    for way in ("step", "backward"):
        optimizer.zero_grad()
        if hvd.rank() == 0:
            with pytest.raises(Broken):
                failing(model, 0, my_batch(2))
            if way == "step":
                with pytest.raises(hvd.HorovodInternalError, match="this rank gave this step up"):
                    optimizer.step()
        else:
            with pytest.raises(hvd.HorovodInternalError, match=r"rank 0 .*gave this step up"):
                loss_of(model, my_batch(2)).backward()
            optimizer.zero_grad()
        loss_of(model, my_batch(3)).backward()
        optimizer.step()
        assert_equal_on_all_ranks(model)


@on_ranks
def test_optimizers_of_which_ranks_use_different_ones_in_the_first_step() -> None:
    """One backward pass reaches both on rank 0, and only the second on rank 1."""
    models, references = [make_model(), make_model()], [make_model(), make_model()]
    optimizers = [distributed(model) for model in models]
    plains = [sgd(reference.parameters()) for reference in references]
    for step in range(3):
        used = slice(0, 2) if hvd.rank() == 0 else slice(1, 2)
        torch.stack([loss_of(model, my_batch(step)) for model in models[used]]).sum().backward()
        for rank in range(hvd.size()):
            for reference in references[slice(0, 2) if rank == 0 else slice(1, 2)]:
                (loss_of(reference, batch_of(rank, step)) / hvd.size()).backward()
        for chosen in (*optimizers, *plains):
            chosen.step()
            chosen.zero_grad()
        for model, reference in zip(models, references, strict=True):
            assert_same(model, reference)


@on_ranks
def test_a_failed_pass_of_several_is_left_out() -> None:
    model = make_model()
    optimizer = distributed(model, backward_passes_per_step=2)
    train(model, optimizer, range(0))
    for step in range(3):
        optimizer.zero_grad()
        if step == 1 and hvd.rank() == 0:
            with pytest.raises(Broken):
                failing(model, 0, my_batch(step))
            optimizer.zero_grad()  # nothing was to be sent, and nobody is told
        else:
            loss_of(model, my_batch(step)).backward()
        loss_of(model, my_batch(step)).backward()
        optimizer.step()
        assert_equal_on_all_ranks(model)


# --- after a loss -----------------------------------------------------------------------------------------------------


@on_ranks
def test_a_rank_that_hears_of_the_others_results_goes_on_with_them_to_the_next_pass() -> None:
    """It has no results itself: a process that died has made them unknown to it. A further backward pass before
    `step()` is the second for all ranks."""
    model = make_model()
    optimizer = distributed(model)
    train(model, optimizer, range(1))
    loss_of(model, my_batch(1)).backward()
    if hvd.rank() == 0:
        optimizer._schedule.note_known(Outcome.REFUSED)
        for parameter in model.parameters():
            assert parameter.grad.isinf().all()
            assert not parameter.grad.requires_grad
            parameter.grad = None
    loss_of(model, my_batch(2)).backward()
    assert optimizer._schedule.reduced == 2
    optimizer.step()
