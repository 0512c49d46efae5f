"""`fusion-trace topology`: what it prints of a mixing graph, as text and as JSON, and how it draws one."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fusion_rt.core.mixing import parse
from fusion_trace.cli import app, main
from fusion_trace.report.mixing_page import drawing, fits, speed
from tests.for_each import for_each


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["topology", *arguments], catch_exceptions=False)


def document(*arguments: str) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.exit_code == 0
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def row_of(output: str, start: str) -> list[str]:
    """Words of the line that starts like this, without what a table draws."""
    lines = [line.strip("│ ") for line in output.splitlines()]
    return next(line for line in lines if line.startswith(start)).removeprefix(start).replace("│", " ").split()


def test_a_ring_is_shown_with_its_speed_and_beside_the_exponential_graph() -> None:
    output = run("ring", "--ranks", "8").stdout
    assert "ring of 8 ranks." in output
    assert row_of(output, "degree") == ["2"]
    assert row_of(output, "period") == ["1", "clock,", "it", "never", "changes"]
    assert row_of(output, "spectral gap") == ["0.195"]
    assert row_of(output, "symmetric") == ["yes"]
    assert row_of(output, "doubly stochastic") == ["yes"]
    assert row_of(output, "fits AD-PSGD") == ["yes"]
    assert row_of(output.partition("┃")[2], "ring ") == ["2", "1", "0.195", "10.6", "21.2"]
    assert row_of(output, "exponential") == ["3", "1", "0.5", "3.3", "10.0"]


def test_a_note_and_a_reason_are_shown() -> None:
    output = run("one-peer-exponential", "--ranks", "6").stdout
    assert "It never averages exactly, since 6 is no power of two" in output
    assert row_of(output, "period") == ["3", "clocks"]
    output = " ".join(run("hypercube", "--ranks", "8").stdout.split())
    assert "fits AD-PSGD no: AD-PSGD averages an odd with an even rank" in output


def test_json_has_everything_and_every_clock() -> None:
    found = document("one-peer-exponential", "--ranks", "4")
    assert (found["graph"], found["ranks"], found["period"]) == ("one-peer-exponential", 4, 2)
    assert found["degree"] == {"least": 1, "most": 1}
    assert (found["spectral_gap"], found["steps_to_a_tenth"], found["exact"]) == (1.0, 2, True)
    assert (found["symmetric"], found["doubly_stochastic"], found["bipartite"]) == (False, True, False)
    assert found["comparison"]["ring"]["spectral_gap"] == pytest.approx(2 / 3)
    assert found["algorithms"]["D-PSGD"] == {"fits": True, "why_not": None}
    assert [told["clock"] for told in found["clocks"]] == [0, 1]
    for told in found["clocks"]:
        weights = np.diag(told["own"])
        for receiver, sender, weight in told["edges"]:
            weights[receiver, sender] = weight
        np.testing.assert_array_equal(weights, parse("one-peer-exponential", 4).matrix(told["clock"]))


def test_json_of_one_clock_has_that_clock_only() -> None:
    found = document("one-peer-exponential", "--ranks", "4", "--clock", "5")
    assert [told["clock"] for told in found["clocks"]] == [5]
    assert found["clocks"][0]["edges"] == [[0, 2, 0.5], [1, 3, 0.5], [2, 0, 0.5], [3, 1, 0.5]]


def test_a_file_is_shown_like_any_graph(tmp_path: Path) -> None:
    (tmp_path / "w.txt").write_text("0.5 0.5\n0.25 0.75\n")
    text = f"file:{tmp_path / 'w.txt'}"
    found = document(text, "--ranks", "2")
    assert (found["row_stochastic"], found["column_stochastic"], found["doubly_stochastic"]) == (True, False, False)
    assert "sums to 0.75" in found["algorithms"]["D-PSGD"]["why_not"]
    assert row_of(run(text, "--ranks", "2").stdout, "column stochastic") == ["no"]


def test_brackets_in_a_path_are_shown_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a short path is not broken into lines
    Path("[red]w.txt").write_text("0.5 0.5\n0.5 0.5\n")
    output = run("file:[red]w.txt", "--ranks", "2").stdout
    assert "[red]w.txt of 2 ranks." in output
    assert output.count("[red]") == 2  # and in the table


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["rign", "--ranks", "4"], "there is no mixing graph 'rign'; did you mean 'ring'?"),
        (["torus", "--ranks", "7"], "since 7 is a prime number"),
        (["ring", "--ranks", "0"], "has from 1 to 1024 ranks, not 0"),
        (["file:/nowhere", "--ranks", "2"], "/nowhere cannot be read"),
    ],
)
@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_what_cannot_be_shown_is_one_sentence_and_a_status(
    arguments: list[str],
    complaint: str,
    as_json: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["fusion-trace", "topology", *arguments, *as_json])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("fusion-trace: ")
    assert complaint in shown.err
    assert shown.err.count("\n") == 1


def test_the_module_runs_as_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fusion_trace", "topology", "ring", "--ranks", "4", "--no-draw"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "ring of 4 ranks." in done.stdout
    assert "Who takes" not in done.stdout


@for_each("name", ["ring", "exponential", "torus", "bipartite"])
@for_each("ranks", [6, 9, 16])
def test_the_steps_told_are_what_mixing_needs(name: str, ranks: int) -> None:
    """The farthest start is at a tenth of its distance after so many steps, and not a step earlier."""
    mixing = parse(name, ranks)
    steps = speed(mixing).steps
    distance = [
        np.linalg.norm(np.linalg.matrix_power(mixing.matrix(0), n) - 1 / ranks, 2)
        for n in (math.floor(steps), math.ceil(steps))
    ]
    assert distance[0] >= 0.1 - 1e-9
    assert distance[1] <= 0.1 + 1e-9
    assert speed(mixing).vectors == pytest.approx(steps * speed(mixing).degree)


def test_graphs_that_average_exactly_are_told_so() -> None:
    assert (speed(parse("complete", 5)).steps, speed(parse("complete", 5)).exact) == (1, True)
    assert (speed(parse("one-peer-exponential", 16)).steps, speed(parse("one-peer-exponential", 16)).exact) == (4, True)
    assert not speed(parse("one-peer-exponential", 12)).exact
    assert (speed(parse("ring", 1)).steps, speed(parse("ring", 1)).vectors) == (0, 0)
    assert row_of(run("complete", "--ranks", "5").stdout, "complete  ")[-3:] == ["(then", "exact)", "4.0"]


def test_algorithms_that_fit_have_no_reason() -> None:
    assert fits(parse("ring", 6)) == {"D-PSGD": "", "SGP (push-sum)": "", "AD-PSGD": ""}
    assert "rank 2" in fits(parse("hypercube", 8))["AD-PSGD"]


@for_each("ranks", range(1, 25))
@for_each("name", ["ring", "complete", "one-peer-exponential"])
def test_all_ranks_stand_on_the_circle_once(name: str, ranks: int) -> None:
    lines = drawing(parse(name, ranks), None).splitlines()[1:]
    words = " ".join(lines).replace(".", " ").replace("o", " ").split()
    assert sorted(int(word) for word in words) == list(range(ranks))
    assert max(len(line) for line in lines) <= 80
    assert len(lines) <= 31


def test_a_drawing_has_a_line_for_each_edge() -> None:
    """Four ranks at the top, the right, the bottom and the left: in a ring the middle is empty."""

    def middle(name: str) -> str:
        lines = drawing(parse(name, 4), None).splitlines()[1:]
        return lines[len(lines) // 2].strip(" 13")

    assert middle("ring") == ""
    assert "." in middle("complete")


def test_an_edge_in_one_direction_has_an_o_where_it_ends() -> None:
    """At clock 1 rank 2 takes from 0 and 0 from 2, so both directions are there; at clock 0 only one is."""
    mixing = parse("one-peer-exponential", 4)
    assert drawing(mixing, 0).splitlines()[0] == "Who takes from whom at clock 0. 'o' is at the end of who takes."
    assert "".join(drawing(mixing, 0).splitlines()[1:]).count("o") == 4
    assert "o" not in "".join(drawing(mixing, 1).splitlines()[1:])
    assert drawing(mixing, None).startswith("Who takes from whom at any clock.")


def test_more_than_24_ranks_are_drawn_as_a_matrix() -> None:
    mixing = parse("exponential", 30)
    head, columns, *rows = drawing(mixing, None).splitlines()
    assert head == "Row: who takes; column: from whom."
    assert columns.split() == ["0", "10", "20"]
    assert len(rows) == 30
    for rank, line in enumerate(rows):
        number, cells = line.split()
        assert int(number) == rank
        assert {by for by, cell in enumerate(cells) if cell == "o"} == {by for by, _ in mixing.incoming(rank, 0)}
        assert cells[rank] == "\\"
    assert columns.index("10") == rows[0].index("\\") + 10


def test_a_thousand_ranks_are_not_drawn() -> None:
    assert drawing(parse("ring", 1000), None).startswith("1000 ranks are too many for a drawing")
