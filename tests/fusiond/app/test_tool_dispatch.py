"""What tools are told, by a daemon whose parts are fakes; `test_daemon` and `test_local_daemons` ask real ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fusion_rt import wire
from fusion_rt.core.topology import Topology
from fusion_rt.host.bootstrap import DaemonConfig
from fusiond.app.tool_dispatch import ToolDispatch
from fusiond.control.waiting import Survey
from fusiond.membership.epoch import Membership

TWO = Topology(("a", "b"), ((0,), (1,)))
TOOL: Any = "the tool's connection"


class Parts:
    """`Gathering`, `RingFiles`, `DaemonEffects`, `JobEnd`, the engine and the workers in one; node 1 has ended."""

    def __init__(self) -> None:
        self.workers = self.codecs = self
        self.failure = ""
        self.told: list[object] = []
        self.stopped: list[str] = []
        self.asked: list[tuple[str, object]] = []
        parts: Any = self
        membership = Membership(TWO, 0)
        membership.started = True
        self.requests = ToolDispatch(DaemonConfig("job", 0, TWO), membership, parts, parts, parts, parts, parts)

    def statistics(self) -> dict[str, object]:
        return {"pid": 7}

    def answer_to(self, message: wire.ToolMessage) -> Any:
        """The one answer, as JSON."""
        self.requests.handlers()[type(message)](TOOL, message)
        (told,) = self.told
        return told

    def send(self, link: object, message: wire.Status) -> None:
        assert link is TOOL
        self.told.append(json.loads(message.json))

    def current_engine(self) -> Parts:
        return self

    def measure(self, then: Callable[[], None]) -> None:
        then()

    def gone(self) -> frozenset[int]:
        return frozenset({1})

    def stop(self, reason: str) -> None:
        self.stopped.append(reason)

    def survey(self, everyone: bool, then: Callable[[Survey], None]) -> None:
        self.asked.append(("survey", everyone))
        then(Survey([], {}, {0: 7}, (), 0))

    def ask(self, without: frozenset[int], then: Callable[[dict[int, wire.Figures]], None]) -> None:
        self.asked.append(("figures", without))
        then({})

    def tell(self, without: frozenset[int], then: Callable[[dict[str, Any]], None]) -> None:
        self.asked.append(("rings", without))
        then({"rings": []})

    def read(self, request: wire.JobRingRequest, then: Callable[[dict[str, Any]], None]) -> None:
        self.asked.append(("ring", request))
        then({"data": ""})


def test_status_is_what_the_daemon_says_about_itself() -> None:
    assert Parts().answer_to(wire.StatusRequest()) == {"pid": 7}


def test_what_waits_comes_with_the_state_of_the_job() -> None:
    parts = Parts()
    told = parts.answer_to(wire.HangRequest(everyone=True))
    assert parts.asked == [("survey", True)]
    assert (told["state"], told["failure"], told["epoch"]) == ("running", "", 0)


def test_a_failed_job_says_so_with_the_reason() -> None:
    parts = Parts()
    parts.failure = "rank 1 died"
    told = parts.answer_to(wire.HangRequest())
    assert (told["state"], told["failure"]) == ("failed", "rank 1 died")


def test_figures_are_asked_of_nodes_that_are_there() -> None:
    parts = Parts()
    told = parts.answer_to(wire.JobRequest())
    assert parts.asked == [("figures", frozenset({1}))]
    assert [node["host"] for node in told["nodes"]] == ["a", "b"]
    assert not any(node["answered"] for node in told["nodes"])


def test_rings_are_asked_of_nodes_that_are_there() -> None:
    parts = Parts()
    assert parts.answer_to(wire.JobRingsRequest()) == {"rings": []}
    assert parts.asked == [("rings", frozenset({1}))]


def test_a_request_to_stop_is_passed_on_with_its_reason_and_answered() -> None:
    parts = Parts()
    assert parts.answer_to(wire.StopRequest("enough")) == {}
    assert parts.stopped == ["enough"]
