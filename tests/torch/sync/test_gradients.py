"""Which gradients are reduced together, which are sparse, and among which ranks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable
from typing import Any

import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.torch.core import device
from fusion_rt.tracing.format import Kind
from fusion_rt.tracing.recorder import NullRecorder
from tests.harness import on_ranks
from tests.torch.training import (
    assert_equal_on_all_ranks,
    assert_same,
    batch_of,
    in_arena,
    loss_of,
    make_model,
    my_batch,
    train,
    train_reference,
)


def sgd(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def buckets_of(optimizer: Any) -> list[set[str]]:
    return [{slot.name for slot in bucket.slots} for bucket in optimizer._sync.plan.buckets]


# --- groups -----------------------------------------------------------------------------------------------------------


@on_ranks
def test_parameters_of_a_group_share_a_bucket() -> None:
    def listed(model: torch.nn.Sequential) -> list[list[torch.Tensor]]:
        return [[model[0].bias, model[4].bias, model[2].weight], [model[4].weight]]

    for make, expected in (
        (lambda _: 2, [{"0.weight", "0.bias", "2.weight"}, {"2.bias", "4.weight", "4.bias"}]),
        (lambda _: 1, [{"4.bias", "4.weight", "2.bias", "2.weight", "0.bias", "0.weight"}]),
        (lambda _: 100, [{name} for name in ("4.bias", "4.weight", "2.bias", "2.weight", "0.bias", "0.weight")]),
        (listed, [{"4.weight"}, {"4.bias", "2.weight", "0.bias"}, {"0.weight", "2.bias"}]),
    ):
        model, reference = make_model(), make_model()
        optimizer = hvd.DistributedOptimizer(
            sgd(model.parameters()), named_parameters=model.named_parameters(), groups=make(model)
        )
        train(model, optimizer, range(3))
        train_reference(reference, sgd(reference.parameters()), range(3))
        assert_same(model, reference)
        found = buckets_of(optimizer)
        assert sorted(map(sorted, found)) == sorted(map(sorted, expected))
        assert optimizer.statistics().buckets == len(expected)
        everybodys = hvd.allgather_object([sorted(names) for names in found])
        assert all(names == everybodys[0] for names in everybodys)


@on_ranks
def test_a_group_of_several_dtypes_has_a_bucket_for_each() -> None:
    parameters = [torch.nn.Parameter(torch.ones(3, dtype=d)) for d in (torch.float32, torch.float64, torch.float32)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), groups=[parameters])
    sum((p.double() * (hvd.rank() + 1)).sum() for p in parameters).backward()
    optimizer.synchronize()
    assert all((p.grad == (hvd.size() + 1) / 2).all() for p in parameters)
    name = "allreduce.noname.0"
    assert sorted(map(sorted, buckets_of(optimizer))) == [[f"{name}.0", f"{name}.2"], [f"{name}.1"]]


@on_ranks
def test_the_old_spelling_of_groups_warns() -> None:
    model = make_model()
    with pytest.warns(DeprecationWarning, match="`num_groups` has been replaced by `groups`"):
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), num_groups=3)
    train(model, optimizer, range(1))
    assert optimizer.statistics().buckets == 3


# --- sparse gradients -------------------------------------------------------------------------------------------------


class Words(torch.nn.Module):
    """An embedding with sparse gradients, which a step may leave out, and a dense layer."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = torch.nn.Embedding(40, 5, sparse=sparse, dtype=torch.float64)
        self.dense = torch.nn.Linear(5, 2, dtype=torch.float64)

    def forward(self, words: torch.Tensor | None) -> torch.Tensor:
        vectors = torch.ones(3, 5, dtype=torch.float64) if words is None else self.embedding(words)
        return self.dense(vectors).square().sum()


def words_of(rank: int, step: int, skips: Iterable[tuple[int, int]]) -> torch.Tensor | None:
    if (rank, step) in skips:
        return None
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, 40, (4 + 3 * rank,), generator=generator)


ROUTES = {
    "sparse": ({}, {(1, 0), (0, 2), (0, 3), (1, 3)}),  # who has no words in which step
    "as dense": ({"sparse_as_dense": True}, {(1, 0), (0, 2), (0, 3), (1, 3)}),
    "sparse later": ({}, {(rank, 0) for rank in range(8)}),  # so that the plan knows of no sparse gradient
}


@pytest.mark.parametrize("route", ROUTES)
@on_ranks
def test_sparse_gradients_are_reduced(route: str) -> None:
    options, skips = ROUTES[route]
    model, reference = Words(), Words()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), **options
    )
    for step in range(5):
        optimizer.zero_grad()
        plain.zero_grad()
        mine = words_of(hvd.rank(), step, skips)
        model(mine).backward()
        optimizer.step()
        if mine is not None:
            assert model.embedding.weight.grad.is_sparse, "not what an optimizer for sparse gradients takes"
        losses = [reference(words_of(rank, step, skips)) for rank in range(hvd.size())]
        (torch.stack(losses).sum() / hvd.size()).backward()
        plain.step()
        assert_same(model, reference)
    assert optimizer.statistics().plans == 1


@pytest.mark.parametrize("as_dense", [False, True])
@on_ranks
def test_an_optimizer_for_sparse_gradients(as_dense: bool) -> None:
    def make(model: Words) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(list(model.embedding.parameters()), lr=0.1)

    model, reference = Words(), Words()
    plain = make(reference)
    optimizer = hvd.DistributedOptimizer(make(model), sparse_as_dense=as_dense, backward_passes_per_step=2)
    for step in range(0, 6, 2):
        optimizer.zero_grad()
        plain.zero_grad()
        for part in (step, step + 1):
            model(words_of(hvd.rank(), part, ())).backward()
            for rank in range(hvd.size()):
                (reference(words_of(rank, part, ())) / hvd.size()).backward()
        optimizer.step()
        # SparseAdam changes the rows that have a gradient, also where that is zero, which only the sparse way knows.
        plain.step()
        assert_same(model, reference)


@on_ranks
def test_sparse_gradients_in_every_other_way() -> None:
    model, rows = Words(), torch.tensor([1, 1 + hvd.rank()])
    weight = model.embedding.weight
    for options, expected in (({"op": hvd.Sum}, 1.0), ({"gradient_predivide_factor": 4.0}, 1 / hvd.size())):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.embedding.parameters(), lr=0.1), **options)
        optimizer.zero_grad()
        model.embedding(rows).sum().backward()
        optimizer.synchronize()
        dense = torch.zeros(40, dtype=torch.float64)
        for rank in range(hvd.size()):
            dense.index_add_(0, torch.tensor([1, 1 + rank]), torch.full((2,), expected, dtype=torch.float64))
        torch.testing.assert_close(weight.grad.to_dense()[:, 0], dense)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.embedding.parameters(), lr=0.1), op=hvd.Max)
    optimizer.zero_grad()
    with pytest.raises(ValueError, match=r"'allreduce\.noname\.0\.0' is sparse, and sparse gradients have no max"):
        model.embedding(rows).sum().backward()


# --- process sets -----------------------------------------------------------------------------------------------------


def train_on(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ranks: Iterable[int], steps: range) -> None:
    """In this process, on the batches of these ranks."""
    for step in steps:
        optimizer.zero_grad()
        inputs, labels = zip(*(batch_of(rank, step) for rank in ranks), strict=True)
        loss_of(model, (torch.cat(inputs), torch.cat(labels))).backward()
        optimizer.step()


@on_ranks
def test_an_optimizer_over_a_part_of_the_ranks() -> None:
    last = hvd.size() - 1
    some = hvd.add_process_set(range(last))  # a single rank, if there are two
    model, everybody = make_model(), make_model(1)
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), process_set=some)
    of_all = hvd.DistributedOptimizer(sgd(everybody.parameters()))
    for step in range(3):  # the sets overlap, and the operations of both are under way at once
        for net, chosen in ((model, optimizer), (everybody, of_all)):
            chosen.zero_grad()
            loss_of(net, my_batch(step)).backward()
        of_all.step()
        optimizer.step()
    reference, reference_of_all = make_model(), make_model(1)
    train_on(reference, sgd(reference.parameters()), some.ranks if some.included() else [last], range(3))
    train_reference(reference_of_all, sgd(reference_of_all.parameters()), range(3))
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected)
    assert_same(everybody, reference_of_all)
    assert optimizer.process_set is some
    hvd.remove_process_set(some)


@on_ranks
def test_a_worker_that_is_alone_is_left_to_itself() -> None:
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), process_set=sets[hvd.rank()])
    loss_of(model, my_batch(0)).backward()
    optimizer.zero_grad()  # no race, since there is nobody to race with
    train(model, optimizer, range(2))
    assert not any(in_arena(p.grad) for p in model.parameters())
    reference = make_model()
    train_on(reference, sgd(reference.parameters()), [hvd.rank()], range(2))
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter, expected)
    for process_set in sets:
        hvd.remove_process_set(process_set)


@on_ranks
def test_an_unknown_process_set_is_refused() -> None:
    with pytest.raises(ValueError, match="does not exist, or has not been registered"):
        hvd.DistributedOptimizer(sgd(make_model().parameters()), process_set=hvd.ProcessSet([0, 1]))


# --- ranks with more data than others ---------------------------------------------------------------------------------


@on_ranks
def test_ranks_without_data_join() -> None:
    def gradients(net: torch.nn.Module, step: int, counts: list[int]) -> None:
        """Of everybody that still has data; whoever has none counts as zeros."""
        losses = [loss_of(net, batch_of(rank, step)) for rank, count in enumerate(counts) if step < count]
        (torch.stack(losses).sum() / hvd.size()).backward()

    model, reference = make_model(), make_model()
    optimizer, plain = hvd.DistributedOptimizer(sgd(model.parameters())), sgd(reference.parameters())
    for epoch in range(3):
        counts = [(2 + 2 * rank + 3 * epoch) % 5 for rank in range(hvd.size())]  # in the second, rank 0 has none
        train(model, optimizer, range(counts[hvd.rank()]))
        last = hvd.join()
        assert counts[last] == max(counts)
        for parameter in model.parameters():  # who left early has missed what came later
            parameter.grad = None
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
        for step in range(max(counts)):
            plain.zero_grad()
            gradients(reference, step, counts)
            plain.step()
        assert_same(model, reference)


@on_ranks
def test_a_rank_that_joins_before_its_first_step_gets_the_plan() -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    train(model, optimizer, range(0 if hvd.rank() == 0 else 3))
    hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    optimizer.zero_grad()
    train(model, optimizer, range(2))
    assert_equal_on_all_ranks(model)
    model[0].requires_grad_(False)  # a new plan, for which all ranks are there
    optimizer.zero_grad()
    train(model, optimizer, range(2))
    assert_equal_on_all_ranks(model)


# --- models that change, and copies -----------------------------------------------------------------------------------


@on_ranks
def test_two_optimizers_whose_models_take_turns() -> None:
    generator, critic = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
    optimizers = [hvd.DistributedOptimizer(sgd(net.parameters())) for net in (generator, critic)]
    inputs = torch.full((2, 3), hvd.rank() + 1.0)
    for step in range(6):
        trained = step % 2
        for number, net in enumerate((generator, critic)):
            net.requires_grad_(number == trained)
            optimizers[number].zero_grad()
        critic(generator(inputs)).sum().backward()
        optimizers[trained].step()
        idle = (generator, critic)[1 - trained]
        assert all(parameter.grad is None for parameter in idle.parameters())
    assert [optimizer.statistics().plans for optimizer in optimizers] == [1, 1]


@on_ranks
def test_copies_are_of_the_plain_optimizer() -> None:
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=model.named_parameters())
    plain = sgd(reference.parameters())
    train(model, optimizer, range(2))
    train_reference(reference, plain, range(2))
    both = copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))
    train_reference(reference, plain, range(2, 4))
    for net, copied in both:
        assert type(copied) is torch.optim.SGD
        train_reference(net, copied, range(2, 4))
        assert_same(net, reference)
    train(model, optimizer, range(2, 4))
    assert_same(model, reference)


@on_ranks
def test_what_scripts_read_of_the_optimizer() -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=0.1),
        backward_passes_per_step=2,
    )
    assert optimizer._parameter_names == {
        model[0].weight: "allreduce.noname.0.0",
        model[0].bias: "allreduce.noname.0.1",
        model[2].weight: "allreduce.noname.1.0",
        model[2].bias: "allreduce.noname.1.1",
    }
    assert optimizer.backward_passes_per_step == 2
    assert (optimizer.op, optimizer.gradient_predivide_factor, optimizer.sparse_as_dense) == (hvd.Average, 1.0, False)
    assert type(optimizer).__module__ == hvd.DistributedOptimizer.__module__


# --- gradients on a device --------------------------------------------------------------------------------------------


class _Later(device.Copying):
    """A copy that is made when somebody has asked a few times, or waits."""

    def __init__(self, to: Iterable[torch.Tensor], source: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._pairs = list(zip(to, source, strict=True))
        self._asked = 0

    def done(self) -> bool:
        self._asked += 1
        if self._asked > 2:
            self.wait()
        return not self._pairs

    def wait(self) -> None:
        for destination, source in self._pairs:
            destination.copy_(source)
        self._pairs.clear()


class FakeLayer(device.Layer):
    """A device whose tensors are all that do not lie in the arena, and which copies to the host when it likes."""

    pinned = 0

    def is_host(self, tensor: torch.Tensor) -> bool:
        return in_arena(tensor)

    def pin(self, segment: Any, tensors: Any) -> None:
        self.pinned += 1

    def start(self, to: Any, source: Any) -> Any:
        assert all(in_arena(one) != in_arena(other) for one, other in zip(to, source, strict=True))
        copying = _Later(to, source)
        if not in_arena(to[0]):  # on the device's stream, before whatever the script does there
            copying.wait()
        return copying


def not_compared(optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    """Returns an optimizer that sends nothing but gradients: digests of parameters would be on the device, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSION_CHECK_PARAMETERS", "0")
        return hvd.DistributedOptimizer(optimizer, **options)


@on_ranks
def test_gradients_on_a_device_go_through_the_arena() -> None:
    model, reference, embedding = make_model(), make_model(), Words()
    previous, device.layer = device.layer, FakeLayer()
    try:
        optimizer = not_compared(sgd(model.parameters()))
        for step in range(4):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss_of(model, my_batch(step)).backward()
            own = {parameter: parameter.grad for parameter in model.parameters()}
            optimizer.synchronize()
            assert all(parameter.grad.data_ptr() == own[parameter].data_ptr() for parameter in own)
            with optimizer.skip_synchronize():
                optimizer.step()
        assert device.layer.pinned == 1  # type: ignore[attr-defined]
        sparse = not_compared(torch.optim.SGD(embedding.parameters(), lr=0.1), sparse_as_dense=True)
        embedding(words_of(hvd.rank(), 0, ())).backward()
        sparse.step()
    finally:
        device.layer = previous
    train_reference(reference, sgd(reference.parameters()), range(4))
    assert_same(model, reference)
    assert not any(in_arena(parameter.grad) for parameter in model.parameters())
    assert embedding.embedding.weight.grad.is_sparse
    assert_equal_on_all_ranks(embedding)


@on_ranks
@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_that_have_a_graph_leave_it_behind() -> None:
    """Autograd is on in the hooks then, and copies would become part of the graph."""
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, my_batch(step)).backward(create_graph=True)
        optimizer.step()
        assert not any(parameter.grad.requires_grad for parameter in model.parameters())
    train_reference(reference, sgd(reference.parameters()), range(3))
    assert_same(model, reference)


@on_ranks
def test_a_slot_says_what_does_not_fit() -> None:
    class Growing:
        calls = 0

        @classmethod
        def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
            cls.calls += 1
            return torch.zeros(cls.calls), None

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
            raise AssertionError("the first")

    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), compression=Growing)
    with pytest.raises(AssertionError, match="the first"):
        weight.sum().backward()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match=r"torch.float32 \[2\] of the gradient of 'allreduce.noname.0.0'"):
        weight.sum().backward()


@on_ranks
def test_a_join_with_sparse_gradients_says_what_to_do() -> None:
    torch.manual_seed(0)
    rows = torch.nn.Embedding(10, 3, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(rows.parameters(), lr=0.1), rows.named_parameters())
    for step in range(2):
        if step == 1 and hvd.rank() == 1:
            break
        optimizer.zero_grad()
        if step == 0:
            rows(torch.tensor([1, 2])).sum().backward()
            optimizer.step()
        else:
            with pytest.raises(hvd.HorovodInternalError, match=r"allgather is not possible.*sparse_as_dense=True"):
                rows(torch.tensor([1, 2])).sum().backward()
            optimizer.zero_grad()
    hvd.join()


# --- what is recorded -------------------------------------------------------------------------------------------------


@on_ranks
def test_each_bucket_is_recorded_once_a_step_when_its_last_gradient_has_come() -> None:
    """`fusion-trace` measures from there on. Rows of sparse gradients travel otherwise, and have no such moment."""

    class Noted(NullRecorder):
        def __init__(self) -> None:
            self.seen: list[tuple[int, str]] = []

        def record(self, kind: int, name: str, *others: int) -> None:  # type: ignore[override]
            self.seen.append((kind, name))

    rows, model = torch.nn.Embedding(10, 3, sparse=True), make_model()
    parameters = [*rows.named_parameters("rows"), *model.named_parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in parameters], lr=0.1), parameters, groups=2)

    def step() -> None:
        optimizer.zero_grad()
        (rows(torch.tensor([hvd.rank()])).sum() + loss_of(model, my_batch(0))).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    step()
    noted, buckets = Noted(), optimizer._sync.plan.buckets
    for bucket in buckets:
        bucket._trace = noted
    step()
    dense = [bucket._label for bucket in buckets if not bucket.sparse]
    assert len(dense) == 2 < len(buckets)
    assert sorted(name for kind, name in noted.seen if kind == Kind.FULL) == sorted(dense)
