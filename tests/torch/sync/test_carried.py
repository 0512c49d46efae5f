"""What a daemon remembers, taken apart by tensor and put together for the buckets of another plan."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_rt import wire
from fusion_rt.local.saved_state import Array
from fusion_rt.torch.sync import carried
from fusion_rt.torch.sync.carried import Arrays, CarriedState
from fusion_rt.torch.sync.scales.conversion import Meant
from fusiond.control.planning import make_plan

SIZES = {"a": 5, "b": 40, "c": 7, "d": 120}


def plan_of(threshold: int, nodes: int, order: str = "abcd") -> wire.Plan:
    """A plan of these tensors, in parameter groups 0 and 1, on so many nodes."""
    tensors = tuple(wire.TensorSpec(name, "float32", (SIZES[name],), group=index % 2)
                    for index, name in enumerate(order))  # fmt: skip
    reduction = wire.Reduction(algorithm="bsp")
    proposal = wire.Proposal("optimizer.1", 0, 0, reduction, tensors)
    return make_plan(1, proposal, threshold, dict.fromkeys(range(nodes), 1.0))


def values(name: str, salt: int) -> Array:
    return np.random.default_rng(ord(name) * 100 + salt).normal(size=SIZES[name]).astype(np.float32)


def saved_by(plan: wire.Plan, node: int) -> Arrays:
    """What the daemon of a node saves: its homes, with momentum and a mean square, and a count."""
    state: Arrays = {}
    for bucket, home in zip(plan.buckets, plan.homes, strict=True):
        if home != node:
            continue
        prefix = f"home:{bucket.index}:-1"
        whole = {kind: np.zeros(bucket.numel, np.float32) for kind in ("value", "aux/square", "aux/w_bak/0")}
        for salt, array in enumerate(whole.values()):
            for tensor in bucket.tensors:
                array[tensor.start : tensor.start + tensor.numel] = values(tensor.name, salt)
        state |= {f"{prefix}:{key}": array for key, array in whole.items()}
        state[f"{prefix}:version"], state[f"{prefix}:done"] = np.array([9]), np.array([4, 5])
        state[f"{prefix}:aux/count"], state[f"{prefix}:aux/arrivals"] = np.array([bucket.index + 1]), np.zeros(3)
        state[f"{prefix}:answers/1/whole/step"] = np.array(4)
        for index, tensor in enumerate(sorted(bucket.tensors, key=lambda tensor: tensor.group)):
            state[f"{prefix}:optimizer/{index}/momentum_buffer"] = values(tensor.name, 7)
            state[f"{prefix}:optimizer/{index}/step"] = np.array(3.0, np.float32)
    return state


def loaded_by(plan: wire.Plan, homes: dict[str, Arrays], ranks: int) -> Arrays:
    defaults = {name: np.full(size, 0.5, np.float32) for name, size in SIZES.items()}
    return {k: v for b in plan.buckets for k, v in carried.home_state(b, ranks, homes, defaults).items()}


plans = st.builds(plan_of, st.sampled_from([0, 64, 256, 4096]), st.integers(1, 4), st.permutations("abcd").map("".join))


@given(plans, plans)
def test_homes_are_the_same_tensor_by_tensor_in_any_other_plan(old: wire.Plan, new: wire.Plan) -> None:
    nodes = [carried.collect(saved_by(old, node), old) for node in sorted(set(old.homes))]
    homes = carried.united(node.homes for node in nodes)
    assert set(homes) == set(SIZES)
    assert not any("answers" in entry for piece in homes.values() for entry in piece)
    state = loaded_by(new, homes, 3)
    for bucket in new.buckets:
        prefix = f"home:{bucket.index}:-1"
        assert state[f"{prefix}:version"].tolist() == [0]
        assert state[f"{prefix}:done"].tolist() == [0, 0, 0]
        assert not any("w_bak" in key or "arrivals" in key for key in state)
        for index, tensor in enumerate(sorted(bucket.tensors, key=lambda tensor: tensor.group)):
            place = slice(tensor.start, tensor.start + tensor.numel)
            np.testing.assert_array_equal(state[f"{prefix}:value"][place], values(tensor.name, 0))
            np.testing.assert_array_equal(state[f"{prefix}:aux/square"][place], values(tensor.name, 1))
            np.testing.assert_array_equal(state[f"{prefix}:optimizer/{index}/momentum_buffer"], values(tensor.name, 7))
            assert state[f"{prefix}:optimizer/{index}/step"] == 3.0
    counts = {key: value for key, value in state.items() if key.endswith("count")}
    assert all(value.shape == (1,) for value in counts.values())
    again = carried.collect(state, new)
    for name, piece in homes.items():
        for entry in ("value", "aux/square", "optimizer/momentum_buffer"):
            np.testing.assert_array_equal(again.homes[name][entry], piece[entry])


def test_of_tensors_without_a_home_only_the_value_is_known() -> None:
    old, new = plan_of(0, 4), plan_of(4096, 0)
    homes = {name: piece for name, piece in carried.united(
        carried.collect(saved_by(old, node), old).homes for node in range(4)).items() if name in "ac"}  # fmt: skip
    state = loaded_by(new, homes, 1)
    (bucket,) = new.buckets
    places = {tensor.name: slice(tensor.start, tensor.start + tensor.numel) for tensor in bucket.tensors}
    value, square = state["home:0:-1:value"], state["home:0:-1:aux/square"]
    np.testing.assert_array_equal(value[places["a"]], values("a", 0))
    np.testing.assert_array_equal(value[places["b"]], np.full(40, 0.5))
    assert not square[places["d"]].any()
    ordered = sorted(bucket.tensors, key=lambda tensor: tensor.group)
    known = {int(key.split("/")[1]) for key in state if "momentum" in key}
    assert {ordered[index].name for index in known} == {"a", "c"}
    assert loaded_by(new, {}, 1) == {}  # the home is seeded


def test_a_home_of_another_size_is_left_out() -> None:
    (bucket,) = plan_of(4096, 0).buckets
    wrong = {"a": {"value": np.zeros(3, np.float32)}}
    assert carried.home_state(bucket, 1, wrong, {}) == {}


def residual(*numbers: float) -> Array:
    return np.array(numbers, np.float32)


def test_residuals_of_a_node_and_of_its_workers_are_told_by_tensor() -> None:
    state = {
        "1:residual/a": residual(1, 2),
        "1:velocity/a": residual(3, 4),
        "1:step": np.array(8),
        "1:layout": np.array([5]),
        "1:bounds": np.array([0, 9]),
        "sender:0:2:counts": np.array([4, 4]),
        "sender:0:2:codec/residual/b": residual(1, 0),
        "sender:0:3:codec/residual/b": residual(2, 8),
        "sender:0:3:codec/step": np.array(4),
        "home:0:1:value": residual(6),  # a replica
    }
    found = carried.collect(state, None, Meant({"a": 0.1}, {"a": 0.2}, 0.5))
    assert {name: value.tolist() for name, value in found.residuals.items()} == {"a": [1, 2], "b": [3, 8]}
    assert found.velocities["a"].tolist() == [3, 4]
    assert set(found.common) == {"1:step", "1:layout"}  # the nodes' ranges are others now
    assert found.buckets == {"a": 1}
    assert found.meant == Meant({"a": 0.1}, {"a": 0.2}, 0.5)
    assert not found.homes


def test_all_nodes_load_the_same_but_for_their_own_residuals() -> None:
    common = CarriedState(common={"1:step": np.array(8)}, buckets={"a": 1, "b": 0, "gone": 0},
                     velocities={"a": residual()})  # fmt: skip
    sizes = {"a": 2, "b": 2}
    old = carried.codec_state(common, {"a": residual(1, 2), "b": residual(3)}, {}, sizes)
    new = carried.codec_state(common, {}, {}, sizes)
    assert old.keys() == new.keys() == {"1:step", "1:residual/a", "1:velocity/a", "0:residual/b"}
    assert old["1:residual/a"].tolist() == [1, 2]
    assert old["0:residual/b"].tolist() == [0, 0]  # of another size
    assert not new["1:residual/a"].any()


@pytest.mark.parametrize("known", [True, False])
def test_a_sender_gets_what_there_is_of_its_bucket(known: bool) -> None:
    (bucket,) = plan_of(4096, 0).buckets
    memory = {"a": values("a", 0)} if known else {"x": residual(1)}
    state = carried.sender_state(bucket, 6, memory, {})
    expected = {"sender:0:6:codec/residual/a", "sender:0:6:counts", "sender:0:6:moved"} if known else set()
    assert state.keys() == expected


def test_sums_are_taken_tensor_by_tensor() -> None:
    found = carried.add({"a": residual(1), "b": residual(2)}, {"b": residual(3), "c": residual(4)})
    assert {name: value.tolist() for name, value in found.items()} == {"a": [1], "b": [5], "c": [4]}
