"""What `--advise` says: arithmetic by hand, and sentences that fit it."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest

from fusion_rt.choice.advice import WAYS, HostMemory, advise, conditions_of, tell
from fusion_rt.core.errors import SettingError
from fusion_rt.runner.command.advise import parse, words_of
from fusion_rt.units import MIB
from tests.for_each import for_each

MBIT = 1e6 / 8  # bytes a second
COMPUTING, MODEL = 0.25, 100e6
NAMES = [way.name for way in WAYS]
HOSTS = [HostMemory("a", 2, 64 * 10**9), HostMemory("b", 2, 32 * 10**9)]


def advised(mbit: float, nodes: int = 2, computing: float = COMPUTING, model: float = MODEL):
    link = (2e-4, 1 / (mbit * MBIT))
    conditions = conditions_of([2] * nodes, link, None, model, computing, 2 * MIB)
    return conditions, advise(conditions, 16 * MIB)


@pytest.mark.parametrize("nodes", [2, 4])
def test_on_a_slow_link_each_way_takes_as_long_as_its_bytes(nodes: int) -> None:
    """A ring sends 2 (N - 1) / N of what is not compressed; little of that hides behind the backward pass."""
    _, advice = advised(10.0, nodes)
    around = 2 * (nodes - 1) / nodes * MODEL / (10 * MBIT)
    steps = dict(zip(NAMES, (one.step for one in advice.predictions), strict=True))
    assert steps["dense"] == pytest.approx(around, rel=0.05)
    assert steps["fp16"] == pytest.approx(around / 2, rel=0.05)
    assert steps["local_sgd"] == pytest.approx(COMPUTING + around / 16, rel=0.05)
    assert steps["diloco(steps=100)"] == pytest.approx(COMPUTING + around / 100, rel=0.05)
    assert steps["topk(density=0.01)"] == pytest.approx(COMPUTING + around / 100, rel=0.35), "and its own work"
    dense = advice.predictions[0]
    assert advice.speed(dense) == pytest.approx(nodes * COMPUTING / dense.step)


@for_each(
    ("mbit", "computing", "chosen"),
    [
        (40_000, 0.25, "dense"),
        (1_000, 8.0, "dense"),
        (1_000, 4.0, "dense"),
        (100, 8.0, "fp16"),
        (100, 4.0, "topk(density=0.01)"),
        (1_000, 0.25, "local_sgd"),
        (50, 0.25, "diloco(steps=100)"),
    ],
)
def test_the_way_that_changes_least_is_taken_where_it_hardly_waits(mbit: float, computing: float, chosen: str) -> None:
    _, advice = advised(mbit, computing=computing)
    assert advice.way.name == chosen
    shares = [one.exposed / one.step for one in advice.predictions]
    place = NAMES.index(chosen)
    assert all(share > 0.2 for share in shares[:place])
    assert shares[place] <= 0.2 or advice.chosen.step == min(one.step for one in advice.predictions)


def test_a_larger_model_never_takes_less_time() -> None:
    """Codecs send small tensors whole; that must not make a model of many of them look slower than a larger one."""
    sizes = [0.6e6 * 1.25**place for place in range(24)]
    for place, name in enumerate(NAMES):
        steps = [advised(25.0, computing=0.03, model=size)[1].predictions[place].step for size in sizes]
        assert all(more >= 0.9 * less for less, more in pairwise(steps)), (name, steps)


@for_each("mbit", [10.0, 100.0])
@for_each("computing", [0.002, 0.01])
def test_a_tensor_that_is_just_large_enough_to_be_compressed_makes_no_step_shorter(
    mbit: float, computing: float
) -> None:
    """Between 0.33 and 0.34 MB the second tensor reaches top-k's minimum of 64 KB, and half of the bytes are gone."""
    place = NAMES.index("topk(density=0.01)")
    sizes = [0.1e6 * 1.01**number for number in range(400)]
    steps = [advised(mbit, computing=computing, model=size)[1].predictions[place].step for size in sizes]
    longest = accumulate(steps, max)  # of a model of this size, and of all smaller ones
    assert all(step >= 0.95 * longer for step, longer in zip(steps, longest, strict=True)), steps


def test_what_is_told_where_dense_gradients_do_not_pay_off() -> None:
    conditions, advice = advised(50.0)
    text = tell(conditions, advice, HOSTS, "-np 4 -H a:2,b:2", "python train.py")
    assert "The slowest link between the 2 hosts carries 50 Mbit/s, with a latency of 0.2 ms." in text
    assert "A step that computes for 250 ms and has 100 MB of gradients" in text
    assert "2 hosts pay off with diloco(steps=100)" in text
    assert "Dense gradients do not pay off (0.03 x)" in text
    assert "every 100 steps" in text
    assert text.endswith("fusionrun -np 4 -H a:2,b:2 --algorithm 'diloco(steps=100)' python train.py")
    for way, one in zip(WAYS, advice.predictions, strict=True):
        assert f"  {way.name}" in text
        assert f"{advice.speed(one):.2f} x the speed" in text


def test_the_memory_of_a_host_is_told_and_what_the_host_with_least_room_has() -> None:
    conditions, advice = advised(50.0)
    # Of two workers: parameters, gradients, arena, the start and the momentum of the outer step, 100 MB each.
    nbytes = 2 * 5 * conditions.nbytes + (2 * 256 + 256 + 150) * 2**20
    assert (
        f"With diloco(steps=100) a host of 2 workers needs at most {nbytes / 1e9:.1f} GB for parameters, gradients and "
        "their exchange, besides activations and the state of the script's optimizer. Host b has 32.0 GB left.\n"
    ) in tell(conditions, advice, HOSTS, "-np 4 -H a:2,b:2", "python train.py")


def test_a_host_that_may_have_too_little_memory_is_named() -> None:
    conditions, advice = advised(50.0)
    one = 5 * conditions.nbytes + (256 + 256 + 150) * 2**20  # what a host of one worker needs
    small = HostMemory("a", 1, round(1.2 * one))
    text = tell(conditions, advice, [small, HostMemory("b", 2, 2 * small.nbytes)], "", "")
    assert f"Host a has {small.nbytes / 1e9:.1f} GB left." in text
    text = tell(conditions, advice, [small, HostMemory("b", 2, small.nbytes, "/sys/fs/cgroup/job")], "", "")
    assert (
        f"Host b has {small.nbytes / 1e9:.1f} GB left within the limit of the control group /sys/fs/cgroup/job, which "
        "may be too little: run fewer workers there"
    ) in text


def test_hosts_that_do_not_pay_off_are_not_advised() -> None:
    conditions, advice = advised(0.1, computing=0.01)
    assert max(map(advice.speed, advice.predictions)) < 1
    text = tell(conditions, advice, HOSTS, "-np 4", "python train.py")
    assert "More hosts do not pay off on this network" in text
    assert "Start it" not in text


def test_fast_hosts_pay_off_without_any_option() -> None:
    conditions, advice = advised(40_000)
    text = tell(conditions, advice, HOSTS, "-np 4 -H a:2,b:2", "python train.py")
    assert "2 hosts pay off as they are" in text
    assert text.endswith("fusionrun -np 4 -H a:2,b:2 python train.py")


def test_numbers_of_the_flag() -> None:
    assert parse("100 250") == (100e6, 0.25)
    for text, complaint in (("100", "two numbers"), ("a 1", "two numbers"), ("0 1", "above 0"), ("1 -1", "above 0")):
        with pytest.raises(SettingError, match=complaint):
            parse(text)


def test_the_other_flags_are_kept_word_by_word() -> None:
    line = ["--advise", "100", "250", "-np", "4", "-H", "a:2,b:2", "--", "python", "train.py"]
    assert words_of(line, ["python", "train.py"]) == ["-np", "4", "-H", "a:2,b:2"]
    assert words_of(["-np", "2", "--adv", "1", "2"], []) == ["-np", "2"]
