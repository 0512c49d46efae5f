"""The example that compares algorithms: a short run of two ways on two workers, and the picture of their curves."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import compare
from examples.compare import median, plot
from tests.harness import run_scripts

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "compare.py"


@pytest.mark.multiprocess
def test_a_job_leaves_the_curve_of_the_model_that_all_ranks_agree_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSION_ALGORITHM", "adpsgd")
    printed, nothing = run_scripts(ROOT, SCRIPT, "--seconds", "2", "--slow", "0.001", "--out", str(tmp_path))
    assert nothing == "", "only rank 0 prints"
    assert printed.startswith("adpsgd dense: ")
    (file,) = tmp_path.glob("*.json")
    found = json.loads(file.read_text())
    assert found["curve"][0]["step"] == 0
    seconds = [point["seconds"] for point in found["curve"]]
    assert seconds == sorted(seconds)
    assert found["curve"][-1]["loss"] < 0.9 * found["curve"][0]["loss"]


OWN = """
import torch

def net():
    return torch.nn.Sequential(torch.nn.Embedding(5, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 5))

def samples():  # of each token the next one
    texts = torch.arange(320).reshape(40, 8) % 5
    return texts, (texts + 1) % 5
"""


@pytest.mark.multiprocess
def test_a_model_and_data_of_ones_own_are_named_by_their_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.setenv("FUSION_ALGORITHM", "diloco(steps=2)")
    own = ("--model", "mine:net", "--data", "mine:samples", "--batch", "4", "--seconds", "2", "--lr", "0.3")
    printed, _ = run_scripts(tmp_path, SCRIPT, *own, "--out", "curves")
    assert "diloco(steps=2) dense: " in printed
    (file,) = (tmp_path / "curves").glob("*.json")
    curve = json.loads(file.read_text())["curve"]
    assert curve[0]["loss"] > 1
    assert curve[-1]["loss"] < 0.1, "of the model of all ranks, without dropout"
    assert curve[-1]["accuracy"] == 1


@pytest.mark.parametrize("name", ["nowhere:net", "json", "json:nothing"])
def test_a_name_of_no_function_is_refused_with_the_form_that_it_needs(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        compare.make_parser().parse_args(["--model", name])
    assert f"argument --model: {name!r} names no function: " in capsys.readouterr().err


def test_a_loss_over_texts_is_the_mean_over_their_tokens() -> None:
    guess, classes = (
        torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1)),
        torch.arange(12).reshape(3, 4) % 5,
    )
    expected = -sum(guess[i, j].log_softmax(0)[classes[i, j]] for i in range(3) for j in range(4)) / 12
    assert torch.allclose(compare.cross_entropy(guess, classes), expected)


def test_without_matplotlib_a_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--plot", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        compare.main()
    assert ended.value.code == "compare.py: --plot needs matplotlib, which is not installed: pip install '.[examples]'"


def test_a_median_is_of_points_that_were_taken_at_the_same_time() -> None:
    curves = [[{"seconds": s, "loss": loss} for s, loss in enumerate(losses)] for losses in ([3, 9, 1], [5, 2], [4, 4])]
    assert median(curves) == [{"seconds": 0, "loss": 4}, {"seconds": 1, "loss": 4}]


def write_curves(folder: Path, sent: float) -> None:
    for way in ("allreduce dense", "adpsgd dense"):
        for seed in (0, 1, 2):
            curve = [
                {"step": s, "seconds": s / 50, "bytes": sent * s, "loss": (2.3 + seed) / (1 + s)} for s in (0, 20, 40)
            ]
            (folder / f"{way}-{seed}.json").write_text(json.dumps({"way": way, "curve": curve}))


@pytest.fixture
def figure() -> Callable[[Path], Any]:
    """Draws the curves of a folder, and returns the figure."""
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="needs matplotlib: pip install '.[examples]'")

    def draw(folder: Path) -> Any:
        assert plot(folder).read_bytes().startswith(b"\x89PNG")
        return pyplot.gcf()

    return draw


def test_each_seed_has_a_line_and_a_mark_and_each_way_a_median(tmp_path: Path, figure: Callable[[Path], Any]) -> None:
    write_curves(tmp_path, 1e5)
    drawn = figure(tmp_path)
    for axis, scale in zip(drawn.axes, (1 / 50, 0.1), strict=True):
        lines = [[list(value) for value in line.get_data()] for line in axis.get_lines() if len(line.get_xdata())]
        for way in range(2):
            of_way = lines[7 * way : 7 * way + 7]
            for seed in range(3):
                assert of_way[2 * seed] == [[0, 20 * scale], [2.3 + seed, pytest.approx((2.3 + seed) / 21)]]
                assert of_way[2 * seed + 1] == [[pytest.approx(40 * scale)], [pytest.approx((2.3 + seed) / 41)]]
            assert of_way[6] == of_way[2], "the median of three seeds is the second one"
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == [
        "adpsgd dense", "allreduce dense", "model of all ranks, at the end",
    ]  # fmt: skip
    assert (drawn.axes[1].get_xscale(), drawn.axes[1].get_xlim()) == ("log", (1.0, 8.0))


def test_bytes_of_a_job_on_one_host_which_sends_none_are_drawn(tmp_path: Path, figure: Callable[[Path], Any]) -> None:
    write_curves(tmp_path, 0)
    assert figure(tmp_path).axes[1].get_xscale() == "linear"
