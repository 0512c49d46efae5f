"""`kernels.cuda.selection` in the simulator against `reference`, which is plain numpy."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

if os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
    pytest.skip("test_simulator runs this in a process of its own", allow_module_level=True)

from fusion_rt.kernels.cuda import _words, selection
from fusion_rt.kernels.cuda.selection import Found, Memory, Range, Taken, words
from fusion_rt.kernels.cuda.shim import cuda
from tests.kernels import reference
from tests.kernels.test_selection import addable

Array = npt.NDArray[Any]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy says so when a sum is not finite

CODE = selection.kernels(threads=4, warps=False)
SPECIALS = np.array(
    [0.0, -0.0, 1.0, -1.0, 1.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, -1e-45, 1e-40, 3.4e38, -3.4e38], np.float32
)
ONE, INFINITY = 0x3F800000, 0x7F800000


def numbers(n: int, seed: int, special: float) -> Array:
    """Any bits at all, a share of them ordinary special values, so that many are equal."""
    rng = np.random.default_rng(seed)
    values = np.frombuffer(rng.bytes(4 * n), np.float32).copy()
    chosen = rng.random(n) < special
    values[chosen] = rng.choice(SPECIALS, int(chosen.sum()))
    return values


def same(actual: Array, expected: Array) -> None:
    """Equal bit by bit, but any NaN will do for a NaN."""
    both_nan = np.isnan(actual) & np.isnan(expected)
    assert ((actual.view(np.uint32) == expected.view(np.uint32)) | both_nan).all()


def device(array: Array | None) -> Any:
    return None if array is None else cuda.to_device(array)


def select(
    residual: Array, k: int, gradient: Array | None = None, velocity: Array | None = None, *, nesterov: bool = False,
    factor: float = 1.0, ranges: list[Range] | None = None, floor: int = 0, room: int | None = None, parts: int = 2,
    found: Found | None = None, digits: bool = False,
) -> tuple[Taken, Array, Found]:  # fmt: skip
    """Selects, and checks the result and everything that has changed against the reference.

    Args:
        digits: thresholds that are not nearly known are found at once.
    """
    ranges = ranges or [(0, len(residual))]
    inside = np.zeros(len(residual), bool)
    for low, high in ranges:
        inside[low:high] = True
    memory = Memory(device(residual), device(gradient), device(velocity), 0.9, nesterov, factor)
    found = found or Found([ranges], [k + 1], CODE, room, parts)
    out = cuda.to_device(np.full(words(found.rooms[0]), -7, np.int32))
    selection.take_largest(memory, found, [k], out, [floor], digits=digits)
    if Taken(out.copy_to_host()).open:
        assert not digits
        selection.take_open(memory.residual, found, out)
    taken, left = Taken(out.copy_to_host()), memory.residual.copy_to_host()

    total, moved, rule = residual.copy(), velocity, "nesterov" if nesterov else "momentum"
    assert taken.spoiled == (
        gradient is not None and not addable(residual, gradient, velocity, rule, factor)[inside].all()
    )
    if gradient is not None:
        added, moved = reference.added(residual, gradient, velocity, 0.9, nesterov, factor)
        total[inside] = added[inside]
        moved = None if moved is None or velocity is None else np.where(inside, moved, velocity)
    whole = left.copy()
    whole[taken.indices] = taken.values
    same(whole, total)
    eligible = np.where(inside, whole, np.float32(0))
    expected = reference.largest(eligible, k)
    assert taken.indices.tolist() == expected.tolist()
    assert taken.values.tobytes() == whole[expected].tobytes()
    assert (left[expected].view(np.int32) == 0).all()
    if moved is not None:
        same(memory.velocity.copy_to_host(), moved.astype(np.float32))
    if taken.count == k:
        assert taken.threshold <= reference.magnitudes(taken.values).min()
    return taken, left, found


@pytest.mark.parametrize("digits", [True, False])
@pytest.mark.parametrize(
    ("rule", "special", "k"), [("plain", 0.0, 7), ("momentum", 0.5, 20), ("nesterov", 0.3, 3), ("none", 1.0, 33)]
)
def test_the_largest_are_those_of_the_reference(rule: str, special: float, k: int, digits: bool) -> None:
    n = 53
    residual, gradient, velocity = (numbers(n, k + i, special) for i in range(3))
    select(
        residual, k, None if rule == "none" else gradient, velocity if rule in ("momentum", "nesterov") else None,
        nesterov=rule == "nesterov", factor=0.3, digits=digits,
    )  # fmt: skip


@pytest.mark.parametrize("digits", [True, False])
@pytest.mark.parametrize("floor", [0, ONE - 1, ONE])
def test_of_equal_ones_the_first_are_taken_across_parts_and_ranges(floor: int, digits: bool) -> None:
    values = np.where(np.arange(60) % 2, np.float32(1), np.float32(-1)).astype(np.float32)
    values[[5, 40]] = 2
    taken, _, _ = select(values, 14, ranges=[(3, 20), (30, 31), (35, 60)], parts=4, floor=floor, digits=digits)
    assert taken.indices.tolist() == [*range(3, 16), 40]
    assert taken.threshold == ONE


def test_many_that_differ_in_the_last_digit_only_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the list of them, which is as long as it is; where it is too short, by another pass."""
    rng = np.random.default_rng(3)
    values = (ONE + rng.integers(0, 60, 90)).astype(np.int32).view(np.float32) * rng.choice([-1, 1], 90)
    for most in (2048, 89, 90):
        monkeypatch.setattr(_words, "LIST", most)
        for k in (1, 30, 31, 89):
            select(values.astype(np.float32), k, parts=7, floor=ONE - 5)


@pytest.mark.parametrize("room", [1, 64])
def test_the_room_for_what_is_put_aside_changes_nothing(room: int) -> None:
    select(numbers(40, 11, 0.4), 12, numbers(40, 12, 0.4), room=room)


@pytest.mark.parametrize("floor", [ONE - 1, INFINITY])
def test_a_wrong_guess_of_the_threshold_changes_nothing(floor: int) -> None:
    values = np.random.default_rng(8).standard_normal(40).astype(np.float32)
    select(values, 9, np.zeros(40, np.float32), floor=floor)


@pytest.mark.parametrize("value", [0.0, -0.0])
def test_zeros_are_never_taken_and_the_smallest_numbers_are(value: float) -> None:
    values = np.full(20, value, np.float32)
    values[[7, 13]] = 1e-45, -1e-40
    taken, _, _ = select(values, 10)
    assert taken.indices.tolist() == [7, 13]
    assert select(np.full(9, value, np.float32), 5)[0].count == 0


def test_what_is_not_finite_is_taken_first() -> None:
    values = np.array([1, np.nan, 3.4e38, -np.inf, np.inf, -np.nan, 2], np.float32)
    assert select(values, 2)[0].indices.tolist() == [1, 5]
    assert select(values, 3)[0].indices.tolist() == [1, 3, 5]


@pytest.mark.parametrize("rule", ["plain", "momentum", "nesterov"])
@pytest.mark.parametrize("floor", [0, 1])
def test_a_gradient_that_is_not_finite_is_left_out_and_told_of_once(rule: str, floor: int) -> None:
    rng = np.random.default_rng(5)
    residual, gradient, velocity = rng.standard_normal((3, 40), np.float32)
    bad = gradient.copy()
    bad[[3, 20, 39]] = np.nan, np.inf, -np.inf
    bad[7] = residual[7] = 3e38  # neither of them is infinite
    moving = None if rule == "plain" else velocity
    how: dict[str, Any] = {"nesterov": rule == "nesterov", "floor": floor}
    taken, left, found = select(residual, 9, bad, moving, **how)
    assert taken.spoiled
    assert np.isfinite(left).all()
    taken, _, _ = select(left, 9, gradient, moving, found=found, **how)
    assert not taken.spoiled


@pytest.mark.parametrize(("n", "k"), [(0, 1), (1, 1), (1, 5), (6, 6), (6, 99)])
def test_there_may_be_fewer_than_are_wanted(n: int, k: int) -> None:
    taken, left, _ = select(np.arange(1, n + 1, dtype=np.float32), k, np.ones(n, np.float32))
    assert taken.count == min(n, k)
    assert (left == 0).all()


def test_one_set_of_buffers_serves_any_number_of_selections() -> None:
    rng = np.random.default_rng(2)
    _, left, found = select(rng.standard_normal(30).astype(np.float32), 8)
    for k in (5, 2, 9):
        _, left, _ = select(left, k, rng.standard_normal(30).astype(np.float32), found=found)


GROUPS: list[list[Range]] = [[(0, 9), (12, 20)], [(20, 23)], [(30, 61)], [(61, 62)]]


@pytest.mark.parametrize("seed", range(1))
def test_several_groups_are_selected_from_as_each_of_them_is_alone(seed: int) -> None:
    """With the same bits, step after step: some with thresholds that are expected, some without, some wrong."""
    ks, n = [5, 2, 4, 1], 64
    residual, velocity = numbers(n, seed, 0.4), np.zeros(n, np.float32)
    together = Memory(device(residual), None, device(velocity), 0.9)
    alone = [Memory(device(residual), None, device(velocity), 0.9) for _ in GROUPS]
    found = Found(GROUPS, [5, 3, 6, 1], CODE, parts=5)
    each = [Found([ranges], [room], CODE, parts=2) for ranges, room in zip(GROUPS, found.rooms, strict=True)]
    finished_later = 0
    for step in range(5):
        gradient = device(numbers(n, 10 * seed + step, 0.3) * np.float32(1e-6 if step == 3 else 1))
        out = cuda.to_device(np.full(found.offsets[-1], -7, np.int32))
        together.gradient = gradient
        thresholds = {0: [0, ONE, 0, INFINITY], 4: [ONE, 1, INFINITY + 1, 5]}.get(step)
        selection.take_largest(together, found, ks, out, thresholds, digits=False)
        ends = zip(found.offsets, found.offsets[1:], strict=False)
        if any(Taken(out.copy_to_host()[first:end]).open for first, end in ends):
            finished_later += 1
            selection.take_open(together.residual, found, out)
        for group, memory in enumerate(alone):
            own = cuda.to_device(np.full(words(found.rooms[group]), -7, np.int32))
            memory.gradient = gradient
            selection.take_largest(memory, each[group], [ks[group]], own, [0])
            mine = out.copy_to_host()[found.offsets[group] : found.offsets[group + 1]]
            taken, expected = Taken(mine), Taken(own.copy_to_host())
            assert taken.indices.tolist() == expected.indices.tolist(), (step, group)
            assert taken.values.tobytes() == expected.values.tobytes(), (step, group)
            assert (taken.threshold, taken.spoiled) == (expected.threshold, expected.spoiled), (step, group)
            for low, high in GROUPS[group]:
                for here, there in ((together.residual, memory.residual), (together.velocity, memory.velocity)):
                    same(here.copy_to_host()[low:high], there.copy_to_host()[low:high])
    assert finished_later, "or this has not been tried"


def test_the_next_threshold_is_expected_the_nearer_to_the_last_the_more_was_collected() -> None:
    """Residuals that wait have many elements little below the threshold: a tenth below it can be 25 times as many."""
    n, k = 2000, 20
    crowded = np.linspace(0.9, 1.0, n, dtype=np.float32)  # that is also what it is after each step
    found, slacks = Found([[(0, n)]], [k], CODE, parts=4), []
    for step in range(7):
        taken, _, _ = select(crowded if step < 5 else crowded * np.float32(0.5), k, found=found, floor=1)
        state = found.state.copy_to_host()[0]
        assert state[_words.EXPECTED] == taken.expected
        slacks.append(int(state[_words.SLACK]))
        if step < 5:
            assert taken.expected == taken.threshold - slacks[-1]
    most = slacks[0]
    assert most == pytest.approx(0.152 * 2**23, abs=1)
    assert slacks[1:5] == [most // 2, most // 4, most // 8, most // 16], "until it is a hundred and sixtieth"
    assert slacks[5:] == [most // 16] * 2


def test_nothing_is_expected_after_a_step_with_too_few_or_an_infinite_one() -> None:
    values = np.random.default_rng(8).standard_normal(40).astype(np.float32)
    taken, _, found = select(values, 9, floor=INFINITY - 1)
    assert taken.expected == 0
    taken, _, _ = select(values, 9, found=found, floor=1)
    assert taken.expected > 0
    values[:9] = np.inf
    assert select(values, 9, found=found, floor=1)[0].expected == 0


@pytest.mark.parametrize("scale", [1.0, 1.3, 1000.0])
def test_a_threshold_that_all_exceed_by_far_changes_nothing(scale: float) -> None:
    values = np.float32(scale) * np.random.default_rng(9).uniform(1, 1.4, 300).astype(np.float32)
    for k in (1, 40, 300):
        select(values, k, floor=ONE)


def test_parts_cover_the_ranges_in_order() -> None:
    parts = selection.divide([(0, 7), (10, 10), (12, 30)], 7, 4)
    covered = [i for low, high in parts for i in range(low, high)]
    assert covered == [*range(7), *range(12, 30)]
    assert (parts[:, 1] - parts[:, 0]).max() == 7
    assert len(parts) % 4 == 0
    assert [selection.part_length(*given) for given in ((100, 50, 40), (100, 3, 1), (0, 3, 1))] == [40, 34, 1]
    assert selection.part_length(25_600_000, 8448, 1024, 32) == 3040  # 3,031 would leave each part's lines cut in two
    assert not (selection.divide([(0, 100), (130, 400)], 64)[1:, 0] % 64)[[0, 2, 3, 4, 5]].any()
    assert selection.divide([], 4, 2).tolist() == [[0, 0]] * 2


def test_what_cannot_be_done_is_refused() -> None:
    memory, found = Memory(device(np.ones(4, np.float32))), Found([[(0, 4)]], [2], CODE)
    out = cuda.to_device(np.zeros(words(2), np.int32))
    for k in (0, 3):
        with pytest.raises(ValueError, match=f"room for 1 to 2 elements, not for {k}"):
            selection.take_largest(memory, found, [k], out)
    with pytest.raises(ValueError, match="no instructions of warps"):
        selection.kernels(64, warps=True)
    with pytest.raises(ValueError, match="at most 1024"):
        selection.kernels(2048, warps=False)
