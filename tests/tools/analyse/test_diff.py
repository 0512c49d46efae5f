"""Comparing jobs: what has changed is found, in typical steps and in spikes, and noise is not."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fusion_trace.analyse import diff
from fusion_trace.analyse.diff import MEASURES, Diff, Samples, compare, verdict
from fusion_trace.analyse.distributions import Comparison
from fusion_trace.cli import app
from fusion_trace.read import job as jobs
from fusion_trace.read.choice import ChoiceError, StepRange
from fusion_trace.read.job import JobTrace
from tests.diagnosis.generator import MS as EXACT_MS
from tests.diagnosis.generator import Fault, Shape, make
from tests.for_each import for_each
from tests.tools.synthetic import MS, Job, S, simulate

HALF = 24


def traced(directory: Path, job: Job) -> JobTrace:
    directory.mkdir()
    simulate(job).write(directory)
    return jobs.load([str(directory)], "/nowhere")


def of(found: Diff) -> dict[str, Comparison]:
    """All rows of steps and parts, by measure."""
    return {row.measure: row for row in (*found.step, *found.parts)}


def test_two_halves_of_a_job_show_no_change(tmp_path: Path) -> None:
    trace = traced(tmp_path / "a", Job(steps=2 * HALF + 1, jitter=0.05, seed=5))
    before, after = (diff.samples(trace, StepRange(first, first + HALF)) for first in (1, HALF + 1))
    found = compare(before, after)
    assert verdict(found) == "no change"
    assert not any(row.changed for row in of(found).values())
    assert diff.changed_ranks(found) == []


@pytest.mark.parametrize("seed", range(5))
def test_five_percent_more_is_found(tmp_path: Path, seed: int) -> None:
    def job(factor: float, seed: int) -> Job:
        plain = Job()
        return Job(
            steps=HALF + 1,
            jitter=0.05,
            seed=seed,
            forward=round(plain.forward * factor),
            backward=round(plain.backward * factor),
            between=round(plain.between * factor),
            update=round(plain.update * factor),
            bandwidth=plain.bandwidth / factor,
            latency=round(plain.latency * factor),
        )

    before, after = traced(tmp_path / "a", job(1.0, seed)), traced(tmp_path / "b", job(1.05, seed + 100))
    there, back = compare(diff.samples(before), diff.samples(after)), compare(diff.samples(after), diff.samples(before))
    step = of(there)["mean"]
    assert step.changed
    assert 0.03 < (step.relative(step.difference) or 0) < 0.07
    assert step.low < (step.difference or 0) < step.high
    assert "slower by " in verdict(there)
    assert "faster by " in verdict(back)


def test_what_has_changed_is_told_apart(tmp_path: Path) -> None:
    before = traced(tmp_path / "a", Job(steps=HALF, seed=1))
    after = traced(tmp_path / "b", Job(steps=HALF, seed=2, update=8 * MS))
    found = of(compare(diff.samples(before), diff.samples(after)))
    assert found["step()"].changed
    assert found["median"].changed
    assert not found["forward"].changed
    assert not found["backward"].changed


def test_noise_is_seldom_taken_for_a_change() -> None:
    """Steps that resemble their neighbours, with a slow first one: at most one comparison in twenty may be wrong."""
    generator = np.random.default_rng(7)

    def steps() -> Samples:
        noise = generator.normal(0, 0.03, 30)
        for place in range(1, 30):
            noise[place] += 0.3 * noise[place - 1]
        noise[0] = 1.0
        its = {name: 1e8 * (1 + (noise if name == "step" else generator.normal(0, 0.05, 30))) for name in MEASURES}
        return Samples("noise", its, {})

    wrong = sum(any(row.changed for row in of(compare(steps(), steps(), seed=seed)).values()) for seed in range(40))
    assert wrong <= 5  # 2 are expected; 6 or more would come by chance in 1 of 70 such tests


def test_the_same_seed_gives_the_same_intervals(tmp_path: Path) -> None:
    its = diff.samples(traced(tmp_path / "a", Job(steps=HALF)))
    assert compare(its, its, seed=3) == compare(its, its, seed=3)
    assert compare(its, its, seed=3) != compare(its, its, seed=4)


def test_too_few_steps_are_said(tmp_path: Path) -> None:
    trace = traced(tmp_path / "a", Job(steps=5))
    with pytest.raises(ChoiceError, match="job synthetic has 4 whole steps, and a comparison needs 8"):
        compare(diff.samples(trace), diff.samples(trace))


def test_the_page_and_the_document(tmp_path: Path) -> None:
    traced(tmp_path / "a", Job(steps=HALF))
    traced(tmp_path / "b", Job(steps=HALF, forward=12 * MS, name="slower"))
    paths = [str(tmp_path / name) for name in "ab"]
    document = json.loads(CliRunner().invoke(app, ["diff", *paths, "--json"]).stdout)
    assert document["jobs"] == ["synthetic", "slower"]
    assert document["verdict"].startswith("steps are slower by")
    assert {row["measure"] for row in document["step"] if row["changed"]} >= {"median", "mean"}
    assert "forward" in {row["measure"] for row in document["parts"] if row["changed"]}
    assert set(document["ranks"]) == {"0", "1"}
    page = CliRunner().invoke(app, ["diff", *paths]).stdout
    assert document["verdict"] in page
    page = CliRunner().invoke(app, ["diff", paths[0], paths[0], "--steps", "1:12", "--after-steps", "12:24"]).stdout
    assert "no change" in page.splitlines()[0]


def test_without_a_word_the_newest_job_is_compared_with_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSION_TRACE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    traced(tmp_path / "b", Job(steps=HALF, name="older"))
    with pytest.raises(ChoiceError, match="a comparison needs two jobs"):
        CliRunner().invoke(app, ["diff"], catch_exceptions=False)
    traced(tmp_path / "a", Job(steps=HALF, name="newer"))
    for path in (tmp_path / "a").iterdir():
        data = bytearray(path.read_bytes())
        data[32:40] = (int.from_bytes(data[32:40], "little") + S).to_bytes(8, "little")  # made a second later
        path.write_bytes(data)
    for named in ([], ["older"]):
        found = json.loads(CliRunner().invoke(app, ["diff", *named, "--json"]).stdout)
        assert found["jobs"] == ["older", "newer"]


# --- who, and spikes --------------------------------------------------------------------------------------------------

SHAPE = Shape(nodes=2, steps=160, forward=30 * EXACT_MS, backward=60 * EXACT_MS, noise=0.02, common=0.02)


def spiky(seed: int, more: float, faster: float = 1.0, steps: int = 99) -> Samples:
    """A job of which rank 1 takes `more` ns longer in every twelfth step."""
    when = tuple(float(step % 12 == 5) for step in range(steps))
    shape = replace(SHAPE, steps=steps, seed=seed, forward=SHAPE.forward * faster, backward=SHAPE.backward * faster)
    return diff.samples(make(shape, Fault("forward", when, frozenset({1}), more=more)).trace)


@pytest.mark.parametrize("seed", range(2))
def test_a_spike_in_every_twelfth_step_that_became_longer_by_a_third_is_not_hidden_by_faster_steps(seed: int) -> None:
    """Typical steps are faster by 7 %, so that the mean is what it was; spikes take some 249 ms instead of 183."""
    before, after = spiky(seed, 86 * EXACT_MS), spiky(seed + 100, 158 * EXACT_MS, 0.93)
    found = compare(before, after)
    rows = of(found)
    assert 175e6 < (rows["spikes"].before or 0) < 190e6
    assert 240e6 < (rows["spikes"].after or 0) < 255e6
    assert rows["spikes"].changed
    assert rows["spikes"].relative(rows["spikes"].difference) == pytest.approx(0.36, abs=0.03)
    assert not rows["spikes, share"].changed
    assert (rows["median"].relative(rows["median"].difference) or 0) == pytest.approx(-0.07, abs=0.02)
    told = diff.gate(found, 0.05)
    assert told.slower
    assert told.what.startswith("slower by more than 5.0%: spikes +3")
    assert "spikes are longer by 3" in verdict(found)


def test_spikes_of_one_rank_that_are_lost_in_those_of_all_are_told() -> None:
    """As on a busy machine: all steps have spikes of many lengths, and rank 2's own are as regular as they are long."""

    def job(seed: int, own: float) -> Samples:
        draw = np.random.default_rng(seed)
        steps, mine = (at * 1e6 * (1 + draw.normal(0, 0.01, 119)) for at in (116, 72))
        steps[::12] += draw.uniform(40, 160, 10) * 1e6
        mine[::12] += own * 1e6
        return Samples("job", dict.fromkeys(MEASURES, steps), {1: steps / 2, 2: mine})

    found = compare(job(1, 95), job(2, 160))
    assert not any(row.changed for row in found.step)
    told = verdict(found)
    assert told.startswith("steps have not changed, as far as they tell; of the own work of rank 2, ")
    assert "spikes are longer by" in told
    gate = diff.gate(found, 0.05)
    assert gate.slower
    assert "spikes of the own work of rank 2, +3" in gate.what
    assert gate.what.endswith("% of a step")
    assert not diff.gate(compare(job(3, 95), job(4, 95)), 0.05).slower


def test_spikes_that_come_more_often_are_told_as_such() -> None:
    generator = np.random.default_rng(3)

    def job(every: int) -> Samples:
        steps = 1e8 * (1 + generator.normal(0, 0.03, 400))
        steps[::every] += 6e7
        return Samples("job", dict.fromkeys(MEASURES, steps), {})

    found = compare(job(40), job(8))
    rows = of(found)
    assert (rows["spikes, share"].before, rows["spikes, share"].after) == (0.025, 0.125)
    assert rows["spikes, share"].changed
    assert not rows["spikes"].changed
    assert not rows["median"].changed
    assert verdict(found).startswith("typical ") or "their mean" in verdict(found)
    assert "spikes are more frequent (2.5% of steps, then 12.5%)" in verdict(found)


def test_the_rank_that_takes_longer_itself_is_the_one_that_is_told() -> None:
    always = Fault("backward", (1.0,) * 160, frozenset({1}), more=12 * EXACT_MS)
    before, after = (
        diff.samples(make(replace(SHAPE, seed=seed), fault).trace) for seed, fault in ((1, None), (2, always))
    )
    found = compare(before, after)
    assert diff.changed_ranks(found) == [1]
    median = found.ranks[1][0]
    assert median.measure == "median"
    assert median.difference == pytest.approx(12e6, rel=0.15)
    assert found.step[0].changed


def test_what_so_few_steps_cannot_tell_is_left_open() -> None:
    generator = np.random.default_rng(5)
    few, many = (Samples("job", dict.fromkeys(MEASURES, generator.normal(1e8, 2e6, n)), {}) for n in (40, 400))
    assert not of(compare(few, few))["95 %"].known
    assert of(compare(many, many))["95 %"].known
    assert of(compare(many, many))["spikes"].before is None


# --- a gate for regressions -------------------------------------------------------------------------------------------


def noisy(seed: int, number: int, spike: float = 0.0) -> Samples:
    """Steps of 100 ms with noise of 3 %; every twelfth has `spike` ns more."""
    steps = 1e8 * (1 + np.random.default_rng(seed).normal(0, 0.03, number))
    steps[::12] += spike
    return Samples("job", dict.fromkeys(MEASURES, steps), {})


def test_slow_steps_that_are_rare_are_found_in_the_mean() -> None:
    before, after = noisy(1, 200), noisy(2, 200, 8e8)
    found = compare(before, after)
    mean = np.mean(after.measures["step"]) - np.mean(before.measures["step"])
    assert of(found)["mean"].difference == pytest.approx(mean)
    assert of(found)["mean"].low > 0
    assert not of(found)["median"].changed
    told = diff.gate(found, 0.05)
    assert told.slower
    assert f"mean {mean / np.mean(before.measures['step']):+.1%}" in told.what


@for_each("shape", [{}, {"hiccups": 0.05, "hiccup": 40 * EXACT_MS}, {"common": 0.1, "noise": 0.1}])
def test_runs_of_equal_distribution_pass(shape: dict[str, float]) -> None:
    runs = [diff.samples(make(replace(SHAPE, **shape, seed=seed)).trace) for seed in range(9)]  # type: ignore[arg-type]
    told = [diff.gate(compare(*pair), 0.05) for pair in pairwise(runs)]
    assert [each.what for each in told if each.slower] == []


def test_the_gate_lets_the_same_and_faster_steps_pass_and_says_what_it_cannot_exclude() -> None:
    assert diff.gate(compare(noisy(3, 300), noisy(4, 300)), 0.05) == diff.Gate(False, "not slower by more than 5.0%")
    assert not diff.gate(compare(noisy(3, 200, 2e8), noisy(4, 200)), 0.05).slower
    unsure = diff.gate(compare(noisy(5, 12, 2e8), noisy(6, 12, 2e8)), 0.01)
    assert not unsure.slower
    assert unsure.undecided
    assert "cannot be excluded" in unsure.what
    assert unsure.what.endswith("more steps would tell")
    rare = diff.gate(
        compare(noisy(3, 60), noisy(4, 60)), 0.05
    )  # says nothing of the slowest twentieth, and enough else
    assert "95 % (too few steps)" in rare.what
    assert not rare.undecided


def test_the_command_fails_above_the_limit_and_only_then(tmp_path: Path) -> None:
    traced(tmp_path / "a", Job(steps=HALF))
    traced(tmp_path / "b", Job(steps=HALF, forward=30 * MS))
    paths = [str(tmp_path / name) for name in "ab"]
    assert CliRunner().invoke(app, ["diff", *paths, "--fail-above", "5%"]).exit_code == 3
    assert CliRunner().invoke(app, ["diff", *paths, "--fail-above", "900%"]).exit_code == 0
    assert CliRunner().invoke(app, ["diff", *reversed(paths), "--fail-above", "5%"]).exit_code == 0
    traced(tmp_path / "c", Job(steps=10, jitter=0.4))
    traced(tmp_path / "d", Job(steps=10, jitter=0.4, seed=1))
    undecided = CliRunner().invoke(app, ["diff", str(tmp_path / "c"), str(tmp_path / "d"), "--fail-above", "1%"])
    assert undecided.exit_code == 5, undecided.output
    for wrong in ("5", "0.05", "-5%", "%", "five"):
        with pytest.raises(ChoiceError, match="is not a percentage such as 5%"):
            diff.parse_share(wrong)
