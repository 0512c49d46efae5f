"""The plan: every tensor in one place, buckets of one dtype and a bounded size, and who disagrees about what."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_rt.core.dtypes import DTYPES
from fusion_rt.core.topology import Topology
from fusion_rt.host.arena import ALIGNMENT
from fusion_rt.wire import Plan, Proposal, Reduction, TensorSpec
from fusiond.control.planning import disagreement, make_plan, merge
from tests.for_each import for_each

TOPOLOGY = Topology(("a", "b"), ((0, 1), (2,)))
TENSORS = (TensorSpec("w", "float32", (4, 2)), TensorSpec("b", "float32", (2,)))
PROPOSAL = Proposal("opt", 0, 0, Reduction(), TENSORS)

proposals = st.lists(
    st.tuples(
        st.sampled_from(["float32", "float16", "int64", "bool"]),
        st.lists(st.integers(0, 40), max_size=3).map(tuple),
    ),
    max_size=40,
).map(
    lambda drawn: Proposal("opt", 0, 0, Reduction(), tuple(TensorSpec(f"t{i}", *spec) for i, spec in enumerate(drawn)))
)
thresholds = st.sampled_from([0, 1, 64, 1000, 4096, 1 << 20])


def nbytes(plan: Plan, bucket: int) -> int:
    return plan.buckets[bucket].numel * DTYPES[plan.buckets[bucket].dtype].itemsize


@given(proposal=proposals, threshold=thresholds)
def test_every_tensor_is_in_exactly_one_bucket_of_its_dtype(proposal: Proposal, threshold: int) -> None:
    plan = make_plan(3, proposal, threshold)
    planned = {tensor.name: (bucket.dtype, tensor.numel) for bucket in plan.buckets for tensor in bucket.tensors}
    assert planned == {t.name: (t.dtype, math.prod(t.shape)) for t in proposal.tensors}
    assert sum(len(bucket.tensors) for bucket in plan.buckets) == len(proposal.tensors)
    assert [bucket.index for bucket in plan.buckets] == list(range(len(plan.buckets)))
    assert (plan.id, plan.group, plan.reduction) == (3, proposal.group, proposal.reduction)


@given(proposal=proposals, threshold=thresholds)
def test_nothing_overlaps_and_everything_is_aligned(proposal: Proposal, threshold: int) -> None:
    plan = make_plan(1, proposal, threshold)
    end = 0
    for bucket in plan.buckets:
        assert bucket.offset >= end
        assert bucket.offset % 4096 == 0
        end = bucket.offset + nbytes(plan, bucket.index)
        filled = 0
        for tensor in bucket.tensors:
            assert tensor.start >= filled
            assert tensor.start * DTYPES[bucket.dtype].itemsize % ALIGNMENT == 0
            filled = tensor.start + tensor.numel
        assert bucket.numel >= filled
    assert plan.nbytes >= end
    assert plan.nbytes < end + 4096 or not plan.buckets


@given(proposal=proposals, threshold=thresholds)
def test_a_bucket_is_not_larger_than_the_threshold_unless_it_is_one_tensor(proposal: Proposal, threshold: int) -> None:
    plan = make_plan(1, proposal, threshold)
    for bucket in plan.buckets:
        filled = [tensor for tensor in bucket.tensors if tensor.numel]
        assert nbytes(plan, bucket.index) <= threshold or len(filled) == 1


@given(proposal=proposals, threshold=thresholds)
def test_tensors_keep_the_order_in_which_gradients_arrived(proposal: Proposal, threshold: int) -> None:
    plan = make_plan(1, proposal, threshold)
    order = {tensor.name: position for position, tensor in enumerate(proposal.tensors)}
    for dtype in DTYPES:
        found = [order[t.name] for bucket in plan.buckets if bucket.dtype == dtype for t in bucket.tensors]
        assert found == sorted(found)


def test_buckets_are_filled_up_to_the_threshold() -> None:
    proposal = Proposal("opt", 0, 0, Reduction(), tuple(TensorSpec(f"t{i}", "float32", (256,)) for i in range(7)))
    plan = make_plan(1, proposal, 3 * 1024)
    assert [len(bucket.tensors) for bucket in plan.buckets] == [3, 3, 1]


def test_the_last_bucket_is_small_so_that_little_is_left_when_the_backward_pass_ends() -> None:
    sizes = [256] * 20 + [16, 256, 16, 64, 16]  # kilobytes of float32, in order of arrival
    tensors = tuple(TensorSpec(f"t{i}", "float32", (256 * size,)) for i, size in enumerate(sizes))
    plan = make_plan(1, Proposal("opt", 0, 0, Reduction(), tensors), 1 << 20)
    assert [tensor.name for tensor in plan.buckets[-1].tensors] == ["t22", "t23", "t24"]
    assert nbytes(plan, plan.buckets[-1].index) <= (1 << 20) // 8
    assert [len(bucket.tensors) for bucket in plan.buckets] == [4, 4, 4, 4, 4, 2, 3]


def test_a_backward_pass_fills_several_buckets_however_large_they_may_be() -> None:
    tensors = tuple(TensorSpec(f"t{i}", "float32", (1 << 18,)) for i in range(32))  # 1 MiB each
    for algorithm, sizes in (("allreduce", [4] * 7 + [3, 1]), ("local_sgd", [32])):
        plan = make_plan(1, Proposal("opt", 0, 0, Reduction(algorithm=algorithm), tensors), 64 << 20)
        assert [len(bucket.tensors) for bucket in plan.buckets] == sizes
    few = make_plan(1, Proposal("opt", 0, 0, Reduction(), tensors[:4]), 64 << 20)
    assert [len(bucket.tensors) for bucket in few.buckets] == [1, 1, 1, 1]  # smaller ones cost more than they hide


def test_a_last_tensor_that_is_too_large_for_a_small_bucket_is_fused_as_all_others() -> None:
    tensors = tuple(TensorSpec(f"t{i}", "float32", (256,)) for i in range(6))
    plan = make_plan(1, Proposal("opt", 0, 0, Reduction(), tensors), 3 * 1024)
    assert [len(bucket.tensors) for bucket in plan.buckets] == [3, 3]


def test_a_model_that_is_smaller_than_the_last_bucket_may_be_has_one() -> None:
    assert len(make_plan(1, PROPOSAL, 16 << 20).buckets) == 1


def test_where_all_buckets_are_sent_at_once_the_last_one_is_as_large_as_the_others() -> None:
    tensors = tuple(TensorSpec(f"t{i}", "float32", (25,)) for i in range(60))
    for algorithm, sizes in (("allreduce", [24, 24, 9, 3]), ("local_sgd", [24, 24, 12])):
        plan = make_plan(1, Proposal("opt", 0, 0, Reduction(algorithm=algorithm), tensors), 3 * 1024)
        assert [len(bucket.tensors) for bucket in plan.buckets] == sizes


def test_tensors_that_are_wanted_together_have_a_bucket_of_their_own() -> None:
    sizes = [(256, 0), (512, 1), (256, 1), (256, 0), (8, 2), (512, 0)]
    tensors = tuple(TensorSpec(f"t{i}", "float32", (n,), together) for i, (n, together) in enumerate(sizes))
    plan = make_plan(1, Proposal("opt", 0, 0, Reduction(), tensors), 2 * 1024)
    found = [[tensor.name for tensor in bucket.tensors] for bucket in plan.buckets]
    assert sorted(found) == [["t0", "t3"], ["t1", "t2"], ["t4"], ["t5"]]
    assert found.index(["t1", "t2"]) < found.index(["t4"])


def test_what_is_sparse_on_any_rank_is_in_no_bucket() -> None:
    sparse = (TENSORS[0], TensorSpec("b", "float32", (2,), sparse=1))
    proposals = {3: PROPOSAL, 1: differing(tensors=TENSORS[::-1]), 2: differing(tensors=sparse)}
    assert disagreement(proposals, Topology(("a",), ((0, 1, 2, 3),))) == ""
    plan = make_plan(1, merge(proposals), 4096)
    assert [[tensor.name for tensor in bucket.tensors] for bucket in plan.buckets] == [["w"]]
    assert plan.sparse == (TensorSpec("b", "float32", (2,), sparse=1),)
    assert merge({0: PROPOSAL, 1: differing(tensors=TENSORS[::-1])}) == PROPOSAL


def test_equal_proposals_agree_whatever_their_order() -> None:
    other = Proposal("opt", 0, 0, Reduction(), TENSORS[::-1])
    assert disagreement({0: PROPOSAL, 1: other, 2: PROPOSAL}, TOPOLOGY) == ""


def differing(**fields: object) -> Proposal:
    values = {"group": "opt", "process_set": 0, "clock": 0, "reduction": Reduction(), "tensors": TENSORS}
    return Proposal(**{**values, **fields})  # type: ignore[arg-type]


SENTENCES = {
    "shape": (
        differing(tensors=(TensorSpec("w", "float32", (4, 3)), TENSORS[1])),
        "tensor 'w' of 'opt' differs between rank 0 (host a) and rank 2 (host b): float32 [4, 2] on the first, "
        "float32 [4, 3] on the second",
    ),
    "dtype": (
        differing(tensors=(TENSORS[0], TensorSpec("b", "float16", (2,)))),
        "tensor 'b' of 'opt' differs between rank 0 (host a) and rank 2 (host b): float32 [2] on the first, "
        "float16 [2] on the second",
    ),
    "one too few": (
        differing(tensors=TENSORS[:1]),
        "tensor 'b' of 'opt' is on rank 0 (host a) but not on rank 2 (host b)",
    ),
    "one too many": (
        differing(tensors=(*TENSORS, TensorSpec("c", "float32", ()))),
        "tensor 'c' of 'opt' is on rank 2 (host b) but not on rank 0 (host a)",
    ),
    "twice": (
        differing(tensors=(*TENSORS, TENSORS[0])),
        "rank 2 (host b) proposed two tensors of one name in 'opt'",
    ),
    "op": (
        differing(reduction=Reduction(op="sum")),
        "rank 0 (host a) and rank 2 (host b) do not agree how the gradients of 'opt' are combined: average (prescale "
        "1, postscale 1) with dense by allreduce on the first, sum (prescale 1, postscale 1) with dense by allreduce "
        "on the second",
    ),
}


@for_each(("proposal", "sentence"), SENTENCES.values())
def test_a_disagreement_names_ranks_hosts_and_tensor(proposal: Proposal, sentence: str) -> None:
    assert disagreement({0: PROPOSAL, 1: PROPOSAL, 2: proposal}, TOPOLOGY) == sentence


MANY = Proposal("opt", 0, 0, Reduction(), tuple(TensorSpec(f"t{i}", "float32", (1000 + i,)) for i in range(64)))


def load(plan: Plan) -> dict[int, float]:
    """Each node's share of the bytes."""
    total = sum(nbytes(plan, index) for index in range(len(plan.buckets)))
    return {
        node: sum(nbytes(plan, index) for index, home in enumerate(plan.homes) if home == node) / total
        for node in sorted(set(plan.homes))
    }


def test_buckets_have_no_homes_unless_nodes_are_named() -> None:
    assert make_plan(1, MANY, 1 << 20).homes == ()


@given(proposal=proposals, nodes=st.sets(st.integers(0, 9), min_size=1, max_size=4))
def test_each_bucket_has_its_home_on_one_of_the_nodes(proposal: Proposal, nodes: set[int]) -> None:
    plan = make_plan(1, proposal, 1 << 20, dict.fromkeys(nodes, 1.0))
    assert len(plan.homes) == len(plan.buckets)
    assert set(plan.homes) <= nodes


def test_homes_are_balanced_by_bytes() -> None:
    assert load(make_plan(1, MANY, 1 << 30, {0: 1.0, 1: 1.0, 3: 1.0})) == pytest.approx(
        {0: 1 / 3, 1: 1 / 3, 3: 1 / 3}, abs=0.03
    )


def test_homes_are_balanced_by_shares_where_these_differ() -> None:
    assert load(make_plan(1, MANY, 1 << 30, {0: 1.0, 2: 0.25})) == pytest.approx({0: 0.8, 2: 0.2}, abs=0.06)
