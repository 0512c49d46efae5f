"""Operations of a part of the ranks: on four ranks, disjoint, overlapping and removed sets."""

from __future__ import annotations

import os

import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.core.errors import HorovodInternalError
from fusion_rt.torch.core.process_sets import by_rule, ranks_by_rule
from tests.harness import Job, on_ranks
from tests.torch.ops.reference import combined, mine, rows_of, tensor_of


@pytest.fixture
def job(job_of_four: Job) -> Job:
    return job_of_four


def test_a_process_set_is_known_before_init() -> None:
    some = hvd.ProcessSet(range(3, 0, -1))
    assert some.ranks == [1, 2, 3]
    assert (some.process_set_id, some.size(), some.rank(), some.included()) == (None, None, None, None)
    assert str(some) == "ProcessSet(process_set_id=None, ranks=[1, 2, 3], mpi_comm=None)"
    assert hvd.global_process_set.process_set_id == 0
    assert hvd.global_process_set.size() is None
    for nonsense in (3, ["a"], object()):
        with pytest.raises(ValueError, match="should be initialized with a list of process ranks"):
            hvd.ProcessSet(nonsense)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"hvd\.init\(\)"):
        hvd.add_process_set([0])


@on_ranks
def test_the_global_set_is_all_ranks() -> None:
    everyone = hvd.global_process_set
    assert everyone.ranks == [0, 1, 2, 3]
    assert (everyone.size(), everyone.rank(), everyone.included()) == (4, hvd.rank(), True)
    assert hvd.remove_process_set(everyone) is False


@on_ranks
def test_sets_are_added_and_removed() -> None:
    even, odd = hvd.add_process_set([2, 0]), hvd.add_process_set(hvd.ProcessSet([1, 3]))
    own, other = (even, odd) if hvd.rank() % 2 == 0 else (odd, even)
    assert hvd.get_process_set_ids_and_ranks()[even.process_set_id or 0] == [0, 2]
    assert (own.size(), own.rank(), own.included(), other.included()) == (2, hvd.rank() // 2, True, False)
    assert other.size() == 2
    with pytest.raises(ValueError, match="Process is not part of provided process set"):
        other.rank()
    with pytest.raises(ValueError, match="Attempted to add a duplicate process set"):
        hvd.add_process_set([0, 2])
    with pytest.raises(ValueError, match="Attempted to add a duplicate process set"):
        hvd.add_process_set(range(4))
    for ranks in ([], [0, 4], [-1], [1, 1]):
        with pytest.raises(ValueError, match="of 0 to 3"):
            hvd.add_process_set(ranks)
    clone = hvd.ProcessSet([0, 2])
    clone.process_set_id = even.process_set_id
    assert hvd.remove_process_set(even)
    assert even.process_set_id is None
    assert not hvd.remove_process_set(even)
    assert not hvd.remove_process_set(clone), "it is gone already"
    clone.process_set_id = 77
    with pytest.raises(ValueError, match="does not exist or has not been registered"):
        clone.size()
    for unknown in (even, clone):
        with pytest.raises(
            ValueError, match="Allreduce: Process set provided does not exist, or has not been registered"
        ):
            hvd.allreduce(torch.ones(2), process_set=unknown)
    assert hvd.remove_process_set(odd)
    assert list(hvd.get_process_set_ids_and_ranks()) == [0]


@on_ranks
def test_a_set_may_have_a_rule_that_gives_its_ranks() -> None:
    even = hvd.ProcessSet(lambda size: range(0, size, 2))
    assert even.included() == (hvd.rank() in (0, 2)), "before it is registered"
    last = hvd.add_process_set(lambda size: [size - 1])
    hvd.add_process_set(even)
    assert (last.ranks, even.ranks, even.size()) == ([3], [0, 2], 2)
    assert by_rule() == [last, even]
    if even.included():
        assert hvd.allgather_object(hvd.rank(), process_set=even) == [0, 2]
    for rule in (lambda size: range(size), lambda size: range(0, size, 2), lambda size: [], lambda size: [size], str):
        with pytest.raises(ValueError, match=r"duplicate|of 0 to 3|should be initialized with a list"):
            hvd.add_process_set(rule)
    hvd.remove_process_set(last)
    assert by_rule() == [even]
    hvd.remove_process_set(even)


@on_ranks
def test_sets_with_rules_can_be_registered_anew_only_if_all_rules_give_sets_that_are_new() -> None:
    sets = [hvd.ProcessSet(lambda size: range(0, size, 2)), hvd.ProcessSet(lambda size: [size - 1])]
    assert ranks_by_rule(sets) == ((0, 2), (3,))
    assert ranks_by_rule([*sets, hvd.ProcessSet(lambda size: range(4, size))]) is None, "empty"
    assert ranks_by_rule([*sets, hvd.ProcessSet(lambda size: [0, size // 2])]) is None, "twice"
    assert ranks_by_rule([*sets, hvd.ProcessSet(lambda size: range(4))]) is None, "all ranks"
    assert ranks_by_rule(sets[:0]) == ()


@on_ranks
def test_every_operation_within_disjoint_sets_at_once() -> None:
    sets = [hvd.add_process_set([0, 2]), hvd.add_process_set([1, 3])]
    own = sets[hvd.rank() % 2]
    members = own.ranks
    for numel in (8, 6000):
        parts = [tensor_of(rank, numel) for rank in members]
        mean, total = combined(hvd.Average, parts), combined(hvd.Sum, parts)
        rows = rows_of(members.index(hvd.rank()), numel, 2)
        assert torch.equal(hvd.allreduce(mine(numel), process_set=own), mean), "the average is over the set"
        assert torch.equal(hvd.allreduce_(mine(numel), op=hvd.Sum, process_set=own, name="same name"), total)
        assert torch.equal(hvd.grouped_allreduce([mine(numel)], process_set=own)[0], mean)
        assert torch.equal(hvd.allgather(mine(numel), process_set=own), torch.cat(parts))
        assert torch.equal(hvd.grouped_allgather([mine(numel)], process_set=own)[0], torch.cat(parts))
        assert torch.equal(hvd.broadcast(mine(numel), members[1], process_set=own), parts[1])
        dealt, received = hvd.alltoall(mine(numel), splits=[numel // 2] * 2, process_set=own)
        assert torch.equal(dealt, torch.cat([part[rows] for part in parts]))
        assert received.tolist() == [numel // 2] * 2
        assert torch.equal(hvd.reducescatter(mine(numel), process_set=own), mean[rows])
        assert torch.equal(hvd.grouped_reducescatter([mine(numel)], op=hvd.Sum, process_set=own)[0], total[rows])
        sparse = hvd.sparse_allreduce_async(mine(numel).to_sparse(), "sparse", hvd.Average, own)()
        assert torch.equal(sparse.to_dense(), mean)
    assert hvd.broadcast_object(hvd.rank(), members[1], process_set=own) == members[1]
    assert hvd.allgather_object(hvd.rank(), process_set=own) == members
    hvd.barrier(process_set=own)
    for one in sets:
        hvd.remove_process_set(one)


@on_ranks
def test_gradients_within_a_set() -> None:
    sets = [hvd.add_process_set([0, 2]), hvd.add_process_set([1, 3])]
    own = sets[hvd.rank() % 2]
    weights = [tensor_of(rank, 8, seed=1) for rank in own.ranks]
    mean = combined(hvd.Average, weights)

    def gradient(operation: str, rows: int, **arguments: object) -> torch.Tensor:
        x = torch.ones(rows, requires_grad=True)
        result = getattr(hvd, operation)(x, process_set=own, **arguments)
        (result * mine(8, seed=1)[: len(result)]).sum().backward()
        assert x.grad is not None
        return x.grad

    position = own.rank() or 0
    assert torch.equal(gradient("allreduce", 8), mean)
    assert torch.equal(gradient("allgather", 4), mean[4 * position :][:4])
    assert torch.equal(gradient("broadcast", 8, root_rank=own.ranks[1]), mean if position == 1 else torch.zeros(8))
    assert torch.equal(gradient("alltoall", 8), torch.cat([weight[4 * position :][:4] for weight in weights]))
    assert torch.equal(gradient("reducescatter", 8, op=hvd.Sum), torch.cat([weight[:4] for weight in weights]) * 2)
    for one in sets:
        hvd.remove_process_set(one)


@on_ranks
def test_overlapping_sets_run_concurrently() -> None:
    sets = [hvd.add_process_set(ranks) for ranks in ([0, 1, 2], [1, 2, 3], [2])]
    started = [
        (members, numel, hvd.allreduce_async(mine(numel), op=hvd.Sum, name=f"x{numel}", process_set=members))
        for members in (*sets, hvd.global_process_set)
        for numel in (5, 6000)
        if members.included()
    ]
    for members, numel, handle in started if hvd.rank() % 2 else reversed(started):
        expected = combined(hvd.Sum, [tensor_of(rank, numel) for rank in members.ranks])
        assert torch.equal(hvd.synchronize(handle), expected)
    for one in sets:
        hvd.remove_process_set(one)


@on_ranks
def test_a_rank_outside_of_a_set_is_refused_and_the_set_goes_on() -> None:
    some = hvd.add_process_set([1, 2])
    if some.included():
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=some).tolist() == [2.0, 2.0]
        with pytest.raises(ValueError, match=r"invalid root rank 0 for provided process set, whose ranks are \[1, 2\]"):
            hvd.broadcast(torch.ones(2), 0, process_set=some)
    else:
        for kind, operation in (
            ("Allreduce", lambda: hvd.allreduce(torch.ones(2), process_set=some)),
            ("Allreduce", lambda: hvd.grouped_allreduce([torch.ones(2)], process_set=some)),
            ("Allgather", lambda: hvd.allgather(torch.ones(2), process_set=some)),
            ("Broadcast", lambda: hvd.broadcast(torch.ones(2), 1, process_set=some)),
            ("Alltoall", lambda: hvd.alltoall(torch.ones(2), process_set=some)),
            ("Reducescatter", lambda: hvd.reducescatter(torch.ones(2), process_set=some)),
            ("Barrier", lambda: hvd.barrier(process_set=some)),
        ):
            with pytest.raises(
                ValueError, match=f"{kind}: Rank {hvd.rank()} is not a member of the provided process set"
            ):
                operation()
    hvd.remove_process_set(some)


@on_ranks
def test_ranks_have_to_agree_about_a_set() -> None:
    with pytest.raises(HorovodInternalError, match=r"(?s)rank 3 \(host.*ranks \[0, 3\]"):
        hvd.add_process_set([0, 3] if hvd.rank() == 3 else [0, 1])
    assert list(hvd.get_process_set_ids_and_ranks()) == [0]
    added = hvd.add_process_set([0, 1])
    assert hvd.allreduce(torch.ones(1)).item() == 1.0
    hvd.remove_process_set(added)


def init_with_sets() -> None:
    own = [hvd.ProcessSet([0]), hvd.ProcessSet([1])]
    hvd.init(comm=[1, 0], process_sets=own)
    assert [(one.process_set_id is not None, one.ranks, one.size()) for one in own] == [(True, [0], 1), (True, [1], 1)]
    assert hvd.allreduce(torch.tensor(float(hvd.rank())), process_set=own[hvd.rank()]).item() == hvd.rank()
    again = hvd.ProcessSet([1])
    hvd.init(process_sets=[again])
    hvd.init(process_sets="dynamic")
    assert os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] == "1"
    assert again.process_set_id == own[1].process_set_id


def init_wrongly() -> None:
    for arguments, text in (
        ({"comm": [0]}, r"init\(comm=\[0\]\) asks for a job of a part of the 2 ranks"),
        ({"comm": 3}, "Invalid type of argument comm"),
        ({"process_sets": "static"}, '"dynamic", not'),
        ({"process_sets": [[0]]}, "entry number 0 is no ProcessSet"),
        ({"process_sets": [hvd.ProcessSet([0]), hvd.ProcessSet([0])]}, "entry number 1 is a duplicate"),
    ):
        with pytest.raises(ValueError, match=text):
            hvd.init(**arguments)  # type: ignore[arg-type]
        assert not hvd.is_initialized()


@pytest.mark.multiprocess
def test_init_registers_sets() -> None:
    with Job((2,), init=False) as running:
        running.run(init_with_sets)


@pytest.mark.multiprocess
def test_init_refuses_what_it_cannot_do() -> None:
    with Job((2,), init=False) as running:
        running.run(init_wrongly)
