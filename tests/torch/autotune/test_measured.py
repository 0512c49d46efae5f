"""`--autotune`, with a clock that says how long a step takes."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusion_rt import wire
from fusion_rt.settings import Settings
from fusion_rt.torch.autotune.director import Circumstances, Director, Step
from fusion_rt.torch.autotune.measured import Log, Measured, default_setting
from fusion_rt.units import MIB
from tests.torch.autotune.fakes import DEFAULT, circumstances

Seconds = Callable[[wire.Tuning], float]
OF_HOROVOD = "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms,"


def settings(folder: Path, **changes: Any) -> Settings:
    values: dict[str, Any] = {
        "autotune": True, "autotune_steps_per_sample": 3, "autotune_max_samples": 30, "autotune_warmup_samples": 2,
        "autotune_directory": str(folder), **changes,
    }  # fmt: skip
    return Settings(**values)


def tuner_of(settings: Settings, where: Circumstances, log: str) -> Director:
    return Director(Measured(settings, where, log), settings.autotune_steps_per_sample)


def follow(tuner: Director, seconds: Seconds, most: int = 100) -> list[wire.Tuning]:
    """The plans, each with all of its steps, until the last one."""
    plans = [tuner.next()]
    while plans[-1].steps and len(plans) < most:
        for _ in range(plans[-1].steps):
            tuner.stepped(Step(seconds(plans[-1]), 0.0, 0.0))
        plans.append(tuner.next())
    return plans


def best_at_two_mib(tuning: wire.Tuning) -> float:
    assert tuning.threshold is not None
    return 0.1 + 0.01 * abs(tuning.threshold.bit_length() - (2 * MIB).bit_length())


def test_it_ends_with_the_best_and_keeps_it_for_the_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = circumstances()
    log = tmp_path / "log"
    plans = follow(tuner_of(settings(tmp_path), where, str(log)), best_at_two_mib)
    assert len(plans) == 31
    assert plans[0].threshold == where.threshold
    assert plans[-1].threshold == 2 * MIB
    assert plans[-1].steps == 0
    lines = log.read_text().splitlines()
    assert len(lines) == 32
    assert lines[-1].split(",")[5] == "2"
    score = 24 * MIB / 0.1 / 1e6  # bytes in a microsecond
    assert float(lines[-1].rsplit(",", 1)[1]) == pytest.approx(score, rel=1e-4)
    capsys.readouterr()
    again = follow(tuner_of(settings(tmp_path), where, ""), best_at_two_mib)
    assert len(again) == 1
    assert again[0].threshold == 2 * MIB
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert "begins with buckets of 2 MiB" in told[0]


def test_the_first_plan_lasts_for_the_samples_that_are_dropped_too(tmp_path: Path) -> None:
    plans = follow(tuner_of(settings(tmp_path), circumstances(), ""), best_at_two_mib)
    assert [plan.steps for plan in plans[:3]] == [2 + 2 * 3 + 3, 2 + 3, 2 + 3]


def test_the_default_stays_where_nothing_is_faster(tmp_path: Path) -> None:
    where = circumstances()
    plans = follow(tuner_of(settings(tmp_path), where, ""), lambda tuning: 0.1)
    default = default_setting(settings(tmp_path), where)
    assert plans[-1] == default.tuning(0, plans[-1].why)


def test_a_sample_that_a_join_cut_short_is_taken_again(tmp_path: Path) -> None:
    tuner = tuner_of(settings(tmp_path), circumstances(), "")
    first = tuner.next()
    tuner.stepped(Step(0.1, 0.0, 0.0))
    second = tuner.next()
    assert (second.threshold, second.chunk_bytes, second.exchange) == (
        first.threshold, first.chunk_bytes, first.exchange,
    )  # fmt: skip
    assert second.steps == 2 + 3


def test_with_the_order_kept_only_what_leaves_the_bits_alone_is_tried(tmp_path: Path) -> None:
    where = circumstances()
    plans = follow(tuner_of(settings(tmp_path, autotune_keep_order=True), where, ""), lambda tuning: 0.1)
    assert {plan.threshold for plan in plans} == {where.threshold}
    assert {plan.exchange for plan in plans} == {"auto"}
    assert len({plan.chunk_bytes for plan in plans}) > 1


def test_a_single_slow_step_says_nothing(tmp_path: Path) -> None:
    """Evaluation at the end of an epoch, say."""
    tuner = tuner_of(settings(tmp_path), circumstances(), str(tmp_path / "log"))
    plan = tuner.next()
    for number in range(plan.steps):
        tuner.stepped(Step(100.0 if number == plan.steps - 1 else 0.1, 0.0, 0.0))
    tuner.next()
    assert float((tmp_path / "log").read_text().splitlines()[1].rsplit(",", 1)[1]) > 100


def test_where_there_is_nothing_to_choose_nothing_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    alone = settings(tmp_path, autotune_keep_order=True, kernel_threads=1)
    plans = follow(tuner_of(alone, circumstances(slots=(2,), latency=0.0, seconds_per_byte=0.0), ""), best_at_two_mib)
    assert len(plans) == 1


def test_lines_begin_with_horovods_columns_and_end_with_the_score(tmp_path: Path) -> None:
    log = Log(str(tmp_path / "log.csv"))
    log.sample(DEFAULT, 439.25)
    log.sample(replace(DEFAULT, threshold=MIB // 2, exchange="ring"), 0.125)
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert lines[0].startswith(OF_HOROVOD + "tensor_fusion_threshold,")
    assert lines[0].endswith(",score")
    assert lines[1] == "0,0,0,1,0,16,256,16,2,auto,439.25"
    rows = list(csv.DictReader(lines))
    assert float(rows[1]["tensor_fusion_threshold"]) == 0.5
    assert rows[1]["dense_route"] == "ring"
    assert [float(row["score"]) for row in rows] == [439.25, 0.125]


def test_each_line_is_in_the_file_at_once(tmp_path: Path) -> None:
    log = Log(str(tmp_path / "log.csv"))
    log.sample(DEFAULT, 1.0)
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 2


def test_an_old_log_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("old\n")
    Log(str(tmp_path / "log.csv"))
    assert (tmp_path / "log.csv").read_text().startswith(OF_HOROVOD)


def test_without_a_path_nothing_is_written() -> None:
    log = Log("")
    log.sample(DEFAULT, 1.0)


def test_a_file_that_cannot_be_written_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="the log file of --autotune cannot be written: .*missing"):
        log = Log(str(tmp_path / "missing" / "log.csv"))
    log.sample(DEFAULT, 1.0)
