"""A worker leaves its job when its GPU has failed."""

from __future__ import annotations

import pytest

from fusion_rt.core.topology import Topology
from fusion_rt.launchers.environment import Environment
from fusion_rt.settings import Settings
from fusion_rt.torch.core import device
from fusion_rt.torch.core.provisional import provisional
from fusion_rt.torch.core.runtime import Runtime

WHERE = Environment(0, 2, 0, "job", 0, "/nowhere/sock")
FAILURE = "CUDA error: an illegal memory access was encountered"


class Failed(device.Copying):
    def done(self) -> bool:
        return False

    def wait(self) -> None:
        raise RuntimeError(FAILURE)


@pytest.fixture
def told() -> list[str]:
    """What the other ranks are told."""
    return []


@pytest.fixture
def here(told: list[str], monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """A membership with copies that fail."""
    monkeypatch.setattr(device, "layer", device.Layer())
    device.layer.keep(Failed())

    def leave(error: str = "") -> bool:
        told.append(error)
        return False

    made = provisional(WHERE, Topology(("a",), ((0, 1),)), Settings())
    monkeypatch.setattr(made.client, "leave", leave)
    return made


def test_the_first_cause_is_told_and_not_the_failure_that_follows(here: Runtime, told: list[str]) -> None:
    here.close("IndexError: token 50257")
    assert told == ["IndexError: token 50257"]


def test_a_failure_without_another_cause_is_told_and_raised(here: Runtime, told: list[str]) -> None:
    with pytest.raises(RuntimeError, match="illegal memory access"):
        here.close()
    assert told == [f"RuntimeError: {FAILURE}"]


class Hangs(device.Copying):
    """Copies behind a reduction in the node, which waits for a rank that has died."""

    given_up = ""

    def done(self) -> bool:
        return bool(self.given_up)

    def wait(self) -> None:
        assert self.given_up, "this waits for ever"

    def give_up(self, why: str) -> None:
        self.given_up = why

    def leave(self) -> None:
        return


def test_who_leaves_with_an_error_gives_up_what_its_device_may_wait_for(here: Runtime, told: list[str]) -> None:
    device.layer = device.Layer()
    hangs = Hangs()
    device.layer.keep(hangs)
    here.in_node.add(hangs)
    here.close("Traceback:\nIndexError: token 50257")
    assert hangs.given_up == "rank 0 has left the job: IndexError: token 50257"
    assert told == ["Traceback:\nIndexError: token 50257"]
