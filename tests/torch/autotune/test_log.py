"""The log file of `--autotune`."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from fusion_rt.torch.autotune.log import Log
from fusion_rt.units import MIB
from tests.torch.autotune.fakes import DEFAULT

OF_HOROVOD = "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms,"


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
