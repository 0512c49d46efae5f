"""The limits of an elastic job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ElasticLimits:
    """The limits of an elastic job.

    Attributes:
        wanted: workers that the first epoch needs.
        least, most: workers of any later epoch; `most` is None for as many as there are slots.
        timeout: seconds to wait for enough hosts.
        resets: changes of membership after the first epoch, as `Epochs` counts them; None: any number.
        leave: seconds that workers have to leave an epoch after the first of them did.
        begin: seconds that a newcomer has from its start until it asks for its place.
        start: seconds in which an agent has to answer, and a daemon to listen.
        probe: seconds in which an agent has to say that it is there, when others have lost a process.
        probe_missed: the same when they have lost its own host. It is out at once if a sign of life that nobody
            has asked for has been overdue for so long.
        restarts: a worker that fails is replaced; if not, its host is left out.
        failures: workers that may fail in a slot in a row, none after a minute of training, until it is abandoned.
    """

    wanted: int
    least: int
    most: int | None = None
    timeout: float = 600.0
    resets: int | None = None
    leave: float = 60.0
    start: float = 30.0
    probe: float = 10.0
    probe_missed: float = 1.0
    restarts: bool = True
    failures: int = 5
    begin: float = 600.0
