"""The effects of decisions about a job: what `Fixed` and `Epochs` have done by the launcher."""

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
        """The agents start the daemons of a new epoch; `daemon_up` follows from each."""

    def begin(self, number: int, places: Places, endpoints: Sequence[Endpoint], survivors: Collection[Place]) -> None:
        """The agents give their places to the survivors, and start workers for all other places."""

    def abandon(self, number: int) -> None:
        """The agents end the daemons of an epoch that cannot come up, and workers that have not begun yet; for these,
        `unused` follows."""

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
