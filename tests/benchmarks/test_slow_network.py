"""What the benchmark of slow networks makes of its measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import slow_network
from benchmarks.common.peers import DDP, FP16, POWERSGD
from benchmarks.slow_network import ALONE, OURS

SECONDS = {ALONE: 0.4, "fusion_rt dense": 5.0, "fusion_rt fp16": 3.0, OURS: 0.5, DDP: 6.0, FP16: 3.2, POWERSGD: 0.6}
MEASURED: dict[str, Any] = {
    "hosts": 4,
    "rate": "100mbit",
    "times": {
        "parameters": 10_800_000,
        "seconds": {name: [seconds / 2, seconds, 2 * seconds] for name, seconds in SECONDS.items()},
        "sent": dict.fromkeys(SECONDS, [1e6] * 3),
    },
    "training": {"loss": 2.5, "steps": {DDP: 100, OURS: 130, POWERSGD: 100, FP16: None}},
}


def test_time_to_the_loss_is_steps_times_their_time() -> None:
    found = slow_network.times_to_loss(MEASURED)
    assert found == pytest.approx({"fusion_rt dense": 500, OURS: 65, DDP: 600, POWERSGD: 60})
    assert [holds for *_, holds in slow_network.goals(MEASURED)] == [True, True, False]


@pytest.mark.parametrize("trained", [True, False])
def test_what_was_not_measured_is_left_open(trained: bool, capsys: pytest.CaptureFixture[str]) -> None:
    slow_network.show(MEASURED if trained else MEASURED | {"training": {}}, Console(width=140))
    (row,) = (line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "0.500" in line)
    assert [cell.strip() for cell in row] == [
        OURS,
        "0.500",
        "1.25",
        "12.00",
        "1.00",
        *(["130", "65"] * trained or ["", ""]),
    ]
    assert len(slow_network.goals(MEASURED)) == 3
    assert len(slow_network.goals(MEASURED | {"training": {}})) == 2
    assert slow_network.goals({"hosts": 4, "rate": "100mbit"}) == []


def test_parts_are_kept_beside_each_other(tmp_path: Path) -> None:
    path = tmp_path / "slow_network.json"
    slow_network.keep(path, {**MEASURED, "training": {}})
    again = slow_network.load(path, 4, "100mbit")
    slow_network.keep(path, {**again, "training": MEASURED["training"]})
    assert slow_network.load(path, 4, "100mbit") == MEASURED
    assert slow_network.load(path, 2, "100mbit") == {"hosts": 2, "rate": "100mbit"}
