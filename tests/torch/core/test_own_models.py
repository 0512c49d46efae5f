"""The warning of models that each rank has trained alone."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest

from fusion_rt.algorithms import parse
from fusion_rt.torch.core import own_models
from fusion_rt.torch.core.own_models import OwnModel
from tests import forks

SCRIPT = """
import torch, fusion_rt.torch as hvd

def train(algorithm):
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), algorithm=algorithm)
    for _ in range(3):
        optimizer.step()
    return optimizer

def main():
    hvd.init()
    hvd.consensus(train("local_sgd(steps=5)"))
    train("local_sgd(steps=4)")

main()
"""


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[OwnModel]:
    """The records, of which there are none yet; on rank 0."""
    found: list[OwnModel] = []
    monkeypatch.setattr(OwnModel, "all", found)
    monkeypatch.setattr(own_models, "runtime", lambda: type("Here", (), {"rank": 0}))
    return found


def test_an_optimizer_that_never_exchanged_is_warned_of_once(records: list[OwnModel]) -> None:
    OwnModel.of(parse("diloco(steps=100)")).steps = 88
    with pytest.warns(UserWarning, match="^diloco.steps=100. exchanges every 100 steps, and has .* in the 88 that"):
        own_models.warn()
    assert records == []


def test_one_that_exchanged_or_took_no_step_is_not(records: list[OwnModel]) -> None:
    OwnModel.of(parse("diloco"))
    shared = OwnModel.of(parse("local_sgd"))
    shared.steps, shared.shared = 30, True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own_models.warn()


@pytest.mark.multiprocess
def test_a_script_is_told_when_it_ends_of_those_that_have_not_agreed_though_they_are_gone() -> None:
    command = [sys.executable, "-m", "fusion_rt.runner", "-np", "2", *forks.interpreter(forks.WORKER), "-c", SCRIPT]
    told = subprocess.run(command, stderr=subprocess.PIPE, check=True, timeout=60, text=True).stderr
    assert told.count("exchanges every") == told.count("local_sgd(steps=4) exchanges every 4 steps") == 1
