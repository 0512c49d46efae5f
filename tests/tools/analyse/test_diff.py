"""Comparing jobs: what has changed is found, and noise is not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fusion_trace.analyse import diff
from fusion_trace.analyse.diff import MEASURES, changes, verdict
from fusion_trace.cli import app
from fusion_trace.read import job as jobs
from fusion_trace.read.choice import ChoiceError, StepRange
from fusion_trace.read.job import JobTrace
from tests.tools.synthetic import MS, Job, S, simulate

HALF = 24


def traced(directory: Path, job: Job) -> JobTrace:
    directory.mkdir()
    simulate(job).write(directory)
    return jobs.load([str(directory)], "/nowhere")


def test_two_halves_of_a_job_show_no_change(tmp_path: Path) -> None:
    trace = traced(tmp_path / "a", Job(steps=2 * HALF + 1, jitter=0.05, seed=5))
    before, after = (diff.samples(trace, StepRange(first, first + HALF)) for first in (1, HALF + 1))
    found = changes(before, after)
    assert verdict(found) == "no change"
    assert not any(change.changed for change in found)


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
    step = diff.compare(before, after)[0]
    assert step.changed
    assert 0.03 < (step.relative(step.difference) or 0) < 0.07
    assert step.low < step.difference < step.high
    assert verdict(diff.compare(before, after)).startswith("steps are slower by ")
    assert verdict(diff.compare(after, before)).startswith("steps are faster by ")


def test_what_has_changed_is_told_apart(tmp_path: Path) -> None:
    before = traced(tmp_path / "a", Job(steps=HALF, seed=1))
    after = traced(tmp_path / "b", Job(steps=HALF, seed=2, update=8 * MS))
    found = {change.measure: change for change in diff.compare(before, after)}
    assert found["step()"].changed
    assert found["step"].changed
    assert not found["forward"].changed
    assert not found["backward"].changed


def test_noise_is_seldom_taken_for_a_change() -> None:
    """Steps that resemble their neighbours, with a slow first one: at most one comparison in twenty may be wrong."""
    generator = np.random.default_rng(7)

    def steps() -> dict[str, np.ndarray]:
        noise = generator.normal(0, 0.03, 30)
        for place in range(1, 30):
            noise[place] += 0.3 * noise[place - 1]
        noise[0] = 1.0
        return {name: 1e8 * (1 + (noise if name == "step" else generator.normal(0, 0.05, 30))) for name in MEASURES}

    wrong = sum(any(change.changed for change in changes(steps(), steps(), seed=seed)) for seed in range(20))
    assert wrong <= 3  # 1 is expected; 4 or more would come by chance in 1 of 60 such tests


def test_the_same_seed_gives_the_same_intervals(tmp_path: Path) -> None:
    trace = traced(tmp_path / "a", Job(steps=HALF))
    assert diff.compare(trace, trace, seed=3) == diff.compare(trace, trace, seed=3)
    assert diff.compare(trace, trace, seed=3) != diff.compare(trace, trace, seed=4)


def test_too_few_steps_are_said(tmp_path: Path) -> None:
    trace = traced(tmp_path / "a", Job(steps=5))
    with pytest.raises(ChoiceError, match="job synthetic has 4 whole steps, and a comparison needs 8"):
        diff.compare(trace, trace)


def test_the_page_and_the_document(tmp_path: Path) -> None:
    traced(tmp_path / "a", Job(steps=HALF))
    traced(tmp_path / "b", Job(steps=HALF, forward=12 * MS, name="slower"))
    paths = [str(tmp_path / name) for name in "ab"]
    document = json.loads(CliRunner().invoke(app, ["diff", *paths, "--json"]).stdout)
    assert document["jobs"] == ["synthetic", "slower"]
    assert document["verdict"].startswith("steps are slower by")
    assert {row["measure"] for row in document["measures"] if row["changed"]} >= {"step", "forward"}
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


# --- a gate for regressions -------------------------------------------------------------------------------------------


def noisy(seed: int, number: int, spike: float = 0.0) -> dict[str, np.ndarray]:
    """Steps of 100 ms with noise of 3 %; every twelfth has `spike` ns more."""
    steps = 1e8 * (1 + np.random.default_rng(seed).normal(0, 0.03, number))
    steps[::12] += spike
    return {name: steps for name in MEASURES}


def test_slow_steps_that_are_rare_are_found_in_the_mean_where_trimming_hides_them() -> None:
    before, after = noisy(1, 200), noisy(2, 200, 8e8)
    found = {change.measure: change for change in changes(before, after)}
    mean = np.mean(after["step"]) - np.mean(before["step"])
    assert found[diff.MEAN].difference == pytest.approx(mean)
    assert found[diff.MEAN].low > 0
    assert not found["step"].changed
    told = diff.gate(list(found.values()), 0.05)
    assert told.slower
    assert told.what == f"slower by more than 5.0%: step, mean {mean / np.mean(before['step']):+.1%}"


def test_the_gate_lets_the_same_and_faster_steps_pass_and_says_what_it_cannot_exclude() -> None:
    assert diff.gate(changes(noisy(3, 200), noisy(4, 200)), 0.05) == diff.Gate(False, "not slower by more than 5.0%")
    assert not diff.gate(changes(noisy(3, 200, 2e8), noisy(4, 200)), 0.05).slower
    unsure = diff.gate(changes(noisy(5, 12, 2e8), noisy(6, 12, 2e8)), 0.01)
    assert not unsure.slower
    assert "cannot be excluded" in unsure.what


def test_the_command_fails_above_the_limit_and_only_then(tmp_path: Path) -> None:
    traced(tmp_path / "a", Job(steps=HALF))
    traced(tmp_path / "b", Job(steps=HALF, forward=30 * MS))
    paths = [str(tmp_path / name) for name in "ab"]
    assert CliRunner().invoke(app, ["diff", *paths, "--fail-above", "5%"]).exit_code == 3
    assert CliRunner().invoke(app, ["diff", *paths, "--fail-above", "900%"]).exit_code == 0
    assert CliRunner().invoke(app, ["diff", *reversed(paths), "--fail-above", "5%"]).exit_code == 0
    for wrong in ("5", "0.05", "-5%", "%", "five"):
        with pytest.raises(ChoiceError, match="is not a percentage such as 5%"):
            diff.parse_share(wrong)
