"""The effects of decisions about a job: those of `Fixed` and `Epochs`, carried out by the launcher."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from fusion_rt.host.bootstrap import Endpoint
from fusion_rt.runner.decisions.host_list import Host
from fusion_rt.runner.decisions.outcome import Failure
from fusion_rt.runner.decisions.places import Place, Places


class JobControl(Protocol):
    """The launcher of a job; `launch.Launch`, or a test."""

    def connect(self, host: Host) -> None:
        """Starts the agent of a host; `ready`, `refused` or `lost` follows."""

    def release(self, host: str, reason: str) -> None:
        """The agent tells its workers that there is no place for them, and ends."""

    def drop(self, host: str) -> None:
        """Ends an agent at once; nothing is heard of it any more."""

    def start(self, number: int, places: Places) -> None:
        """The agents of a job with one epoch start its daemons, and its workers, once they are connected; `daemon_up`
        follows from each."""

    def start_daemon(self, host: str, node: int, serial: int, nodes: Sequence[str]) -> None:
        """The agent of a host starts a daemon in the place of the one before; `daemon_up` or `daemon_down` follows.

        `serial`: of the daemons of this host; `nodes`: the names of all hosts that have a number, in their order.
        """

    def reach(self, host: str, serial: int, endpoints: Sequence[Endpoint]) -> None:
        """The agent of a host tries to reach these daemons until it has; `reached` follows. `serial`: of its own."""

    def begin(self, number: int, places: Places, endpoints: Sequence[Endpoint], waiting: Collection[Place]) -> None:
        """Daemons enter an epoch, and their agents give places to the workers that wait, and start workers for all
        other places."""

    def recruit(self, number: int, place: Place, would: Places) -> None:
        """The agent of a host starts a worker that has no place in the epoch of this number; `asked` or `ended`
        follows. `would`: the places of an epoch in which it were."""

    def abandon(self, number: int, reason: str) -> None:
        """The daemons fail an epoch that cannot come up, and the agents end workers that were started for it and have
        not begun yet; for these, `unused` follows."""

    def probe(self, host: str) -> None:
        """The agent of a host is asked whether it is there; `answered` follows."""

    def overdue(self, host: str) -> float:
        """Returns the seconds since the agent of a host should have given a sign of life."""

    def check_daemon(self, host: str, serial: int) -> None:
        """The agent of a host ends this daemon if it does not answer; `daemon_down` follows then."""

    def remove(self, host: str, slots: Sequence[int], reason: str) -> None:
        """The agent tells some of its workers that there is no place for them."""

    def kill(self, host: str, slots: Sequence[int]) -> None:
        """The agent kills some of its workers; `ended` follows."""

    def tell_change(self, added: bool, removed: bool) -> None:
        """The agents tell all workers that hosts have come or gone."""

    def say(self, line: str) -> None:
        """Tells the person."""

    def end(self, failures: Sequence[Failure]) -> None:
        """Ends the job, which has failed if there are failures. Said once."""
