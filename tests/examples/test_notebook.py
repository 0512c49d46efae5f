"""The notebook, cell by cell, as its kernel would run it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook.ipynb"


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.usefixtures("runtime_dir")
def test_the_cells_train_on_two_workers(capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    here = {"__name__": "__main__"}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), here)
    said = capsys.readouterr().out.split()
    assert float(said[1]) > 5 * float(said[-4])
