"""What the benchmark of networks makes of its measurements."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import networks
from benchmarks.networks import ADPSGD, CENTRAL, METHODS, NETWORKS, NONE, RING
from fusion_rt import algorithms, codecs

TIMES = {NONE: [0.1, 0.1, 0.2], CENTRAL: [2.0, 2.2, 2.1], RING: [0.7], "D-PSGD ring": [0.5], ADPSGD: [0.1]}
MEASURED: dict[str, Any] = {
    "parameters": 1_100_000,
    "loss": 2.6,
    "counts": {RING: 100, "D-PSGD ring": 120, "SGP one-peer": None},
    "times": {"100mbit": TIMES},
    "sent": {"100mbit": dict.fromkeys(TIMES, 2e6)},
    "free": {"100mbit": {ADPSGD: {"seconds": 42, "steps": [400] * 4, "curve": [[42, 2.59]]}}},
}


def test_seconds_to_the_loss_are_steps_times_their_time_but_of_a_free_method_as_measured() -> None:
    found = {name: networks.seconds_to_loss(MEASURED, "100mbit", name) for name in METHODS}
    assert {name: value for name, value in found.items() if not math.isnan(value)} == pytest.approx(
        {CENTRAL: 210, RING: 70, "D-PSGD ring": 60, ADPSGD: 42}
    ), "the central server computes what the ring does"
    assert math.isnan(networks.seconds_to_loss(MEASURED, "1gbit", RING))


def test_gossip_is_judged_by_the_central_server_with_the_ring_beside_it() -> None:
    judged = {goal.split(" at ")[0]: (measured, holds) for goal, measured, holds in networks.goals(MEASURED)}
    assert judged == {
        "100mbit: D-PSGD ring": ("3.50 (ring / this: 1.17)", False),
        "100mbit: AD-PSGD ring": ("5.00 (ring / this: 1.67)", True),
    }
    assert networks.goals({"loss": 2.6}) == []


def test_the_table_leaves_open_what_was_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    networks.show({**MEASURED, "free": {}}, Console(width=200))
    lines = capsys.readouterr().out.splitlines()
    rows = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]] for line in lines if "│" in line
    }
    assert rows[CENTRAL] == ["2.100 (2.000-2.200)", "21.00", "1.00", "0.33", "2.00", "100", "210", "1.00", "0.33"]
    assert rows[ADPSGD] == ["0.100 (0.100-0.100)", "1.00", "21.00", "7.00", "2.00", *[""] * 4]
    assert "shards" not in rows


def test_methods_can_be_used_and_say_truly_whom_they_are_like() -> None:
    for name, method in METHODS.items():
        if method.algorithm:
            spec, codec = algorithms.parse(method.algorithm), codecs.parse(method.codec)
            algorithms.check_use(spec, codec, "average", networks.HOSTS)
            assert spec.period <= method.turn, name
            assert not method.like or (spec.synchronous and codec.lossless), name
    assert {method.like for method in METHODS.values()} <= {"", *METHODS}


def test_jobs_are_for_a_central_server_or_not_and_what_is_the_same_is_trained_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[tuple[str, bool, list[str]]] = []

    def on_hosts(network: networks.Network, central: bool, arguments: list[str]) -> dict[str, Any]:
        part, names = (arguments[arguments.index(flag) + 1] for flag in ("--worker", "--methods"))
        jobs.append((part, central, names.split(";")))
        if part == "times":
            times = {name: [1.0] for name in jobs[-1][2]}
            return {"parameters": 7, "times": times, "sent": dict.fromkeys(times, 5)}
        return {"counts": dict.fromkeys(jobs[-1][2], 8)} if part == "counts" else {"free": {ADPSGD: {"seconds": 3}}}

    monkeypatch.setattr(networks, "on_hosts", on_hosts)
    out = tmp_path / "results" / "networks.json"
    methods = ["none", CENTRAL, "shards", ADPSGD]
    networks.main(["--networks", "1gbit", "--methods", ";".join(methods), "--out", str(out)])
    assert jobs == [
        ("times", True, [CENTRAL]),
        ("times", False, ["none", "shards", ADPSGD]),
        ("free", False, [ADPSGD]),
        ("counts", False, [RING]),
    ]
    measured = networks.load(out)
    assert set(measured["times"]["1gbit"]) == set(methods)
    assert networks.seconds_to_loss(measured, "1gbit", "shards") == 8
    networks.main(["--networks", "1gbit", "--methods", CENTRAL, "--only-times", "--loss", "2", "--out", str(out)])
    assert "counts" not in networks.load(out), "they were to another loss"


def test_quick_takes_one_turn_and_trains_nothing() -> None:
    arguments, names, chosen = networks.parse(["--quick"])
    assert (arguments.rounds, arguments.only_times, names, chosen) == (1, True, list(METHODS), ["unshaped", "100mbit"])
    assert networks.parse([])[2] == list(NETWORKS)


@pytest.mark.parametrize(("argv", "said"), [(["--methods", "none;rings"], "method 'rings'"),
                                            (["--networks", "10gbit"], "network '10gbit'")])  # fmt: skip
def test_a_wrong_command_line_exits_with_2(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        networks.main(argv)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
