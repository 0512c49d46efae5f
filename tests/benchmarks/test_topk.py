"""The benchmark of selection runs, and says what it measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import topk
from benchmarks.common import results


def test_a_small_run_shows_and_keeps_a_row_for_each_density(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "topk.json"
    argv = ["topk", "--elements", "200000", "--rounds", "2", "--densities", "0.01,0.1", "--out", str(out)]
    monkeypatch.setattr("sys.argv", argv)
    topk.main()
    rows = [line.strip("│").split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [row[0].strip() for row in rows] == ["1.000%", "10.000%"]
    assert all(2.5 < float(row[-1]) < 3.2 for row in rows)
    (record,) = results.load(out, "topk").records
    assert [(each.name, each.peer) for each in record.measures] == [("0.01", topk.TORCH), ("0.1", topk.TORCH)]
    assert {len(samples) for each in record.measures for samples in each.samples.values()} == {2}


def test_without_a_gpu_it_says_so_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["topk", "--device", "cuda"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^torch finds no GPU on this machine, so nothing was measured\.$"):
        topk.main()
