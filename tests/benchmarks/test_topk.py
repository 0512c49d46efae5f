"""The benchmark of selection runs, and says what it measured."""

from __future__ import annotations

import pytest

from benchmarks import topk


def test_a_small_run_prints_a_row_for_each_density(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["topk", "--elements", "200000", "--rounds", "1", "--densities", "0.01,0.1"])
    topk.main()
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split()[0] for row in rows] == ["1.000%", "10.000%"]
    assert all(2.5 < float(row.split()[-1]) < 3.2 for row in rows)


def test_without_a_gpu_it_says_so_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["topk", "--device", "cuda"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^torch finds no GPU on this machine, so nothing was measured\.$"):
        topk.main()
