"""The small GPT: its text, its parts, and a short run on two workers."""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.harness import run_scripts

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "char_gpt.py"


@pytest.fixture(scope="module")
def char_gpt() -> ModuleType:
    spec = importlib.util.spec_from_file_location("char_gpt", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_text_is_that_of_the_standard_library(char_gpt: ModuleType) -> None:
    train, held_out = char_gpt.load()
    assert len(train) + len(held_out) <= char_gpt.MAX_TEXT
    assert len(train) > 1_000_000
    assert int(train.min()) >= 0
    assert int(train.max()) < char_gpt.VOCABULARY
    assert "def " in bytes(held_out.tolist()).decode("ascii")


def test_the_targets_are_the_next_characters(char_gpt: ModuleType) -> None:
    text = torch.arange(100)
    inputs, targets = char_gpt.draw(text, 5, 8, torch.Generator().manual_seed(0))
    assert inputs.shape == targets.shape == (5, 8)
    assert torch.equal(targets, inputs + 1)
    assert len(set(inputs[:, 0].tolist())) > 1


def test_a_character_is_guessed_from_those_before_it_only(char_gpt: ModuleType) -> None:
    torch.manual_seed(0)
    model = char_gpt.Gpt(context=8, width=16, layers=2, heads=4)
    text = torch.randint(char_gpt.VOCABULARY, (2, 8))
    changed = text.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % char_gpt.VOCABULARY
    before, after = model(text), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_the_learning_rate_rises_and_falls(char_gpt: ModuleType) -> None:
    factors = [char_gpt.schedule(step, 100) for step in range(100)]
    assert factors[0] == 0.1
    assert factors[9] == max(factors) == 1.0
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[-1] == pytest.approx(0.1, abs=0.01)


@pytest.mark.multiprocess
def test_two_workers_learn_something_and_write_something() -> None:
    options = ["--steps", "60", "--width", "32", "--layers", "1", "--context", "32", "--lr", "1e-2"]
    printed, nothing = run_scripts(ROOT, SCRIPT, *options)
    assert nothing == "", "only rank 0 prints"
    lines = printed.splitlines()
    losses = [float(found[1]) for line in lines if (found := re.search(r"step +\d+ of 60 ━+ +loss ([\d.]+)", line))]
    assert len(losses) == 3
    assert math.log(128) > losses[0] > losses[1] > losses[2]
    held_out = re.search(r"^held out +loss ([\d.]+)", "\n".join(lines), re.MULTILINE)
    assert held_out is not None
    assert float(held_out[1]) < losses[0]
    assert any(line.startswith("communication") for line in lines)
    assert lines[lines.index("sample") + 1].startswith("def ")
