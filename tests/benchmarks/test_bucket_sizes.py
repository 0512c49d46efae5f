"""What the benchmark of bucket sizes makes of its measurements."""

from __future__ import annotations

import pytest
from rich.console import Console

from benchmarks import bucket_sizes
from benchmarks.bucket_sizes import ALONE, MESSAGE, OURS, STEP
from benchmarks.common.peers import DDP
from benchmarks.common.results import Measure, Record


def record(size: float, seconds: float, buckets: int, rate: str = "200mbit") -> Record:
    samples = {ALONE: [0.2, 0.2, 0.2], OURS: [seconds / 2, seconds, 2 * seconds], DDP: [4.0, 4.0, 4.0]}
    return Record({"hosts": 4, "rate": rate, "MiB": size}, [Measure(STEP, "s", samples, DDP)],
                  details={"parameters": 10_700_000, "buckets": buckets})  # fmt: skip


RECORDS = [record(0.25, 2.5, 160), record(1, 8.7, 40), record(16, 2.0, 3), record(1, 1.0, 40, "1gbit")]


def test_a_size_may_cost_five_percent_and_its_messages() -> None:
    allowed = bucket_sizes.allowed(RECORDS[:3])
    further = (160 - 3) * 6 * 4  # in a ring of four, each bucket passes from each host to the next six times
    assert allowed == pytest.approx({0.25: 2.1 + further * MESSAGE, 1: 2.1 + 37 * 24 * MESSAGE, 16: 2.1})
    assert [(said, holds) for _, said, holds in bucket_sizes.goals(RECORDS)] == [
        (f"1 MiB: {8.7 / (2.1 + 37 * 24 * MESSAGE):.2f} of the limit", False),
        ("1 MiB: 0.95 of the limit", True),
    ]


def test_the_table_has_a_row_for_each_rate_and_size(capsys: pytest.CaptureFixture[str]) -> None:
    bucket_sizes.show(RECORDS, Console(width=140))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    (row,) = (row for row in rows if "8700" in row)
    assert row == ["200mbit", "1", "40", "8700", "2366", "200", "4000", "0.46"]
    assert sum(row[0] in ("200mbit", "1gbit") for row in rows if len(row) == 8) == 4
