"""Finds the first of a job's failures, and the words to tell it.

When one part of a job fails, others fail because of it: their collectives raise HorovodInternalError. So the cause is
the first failure that is no such echo. Where all ranks raise that error (they disagree about a shape), it is the first
that raised its own, and not one that quotes another rank's traceback (`worker_errors` tells them apart).
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar

from fusion_rt.runner.decisions.worker_errors import echo_of, excerpt, in_a_line, last_error


@dataclass(frozen=True)
class HostFailure:
    """A host on which the job cannot run, or that was lost.

    Attributes:
        host: its name.
        reasons: a sentence each.
        echo: how far it tells of another failure only: 0 not at all, 1 it does, 2 in the other one's own words,
            or that the other one has died.
    """

    host: str
    reasons: tuple[str, ...]

    echo: ClassVar[int] = 0

    def tell(self) -> list[str]:
        return [f"fusionrun: host {self.host}: {reason}" for reason in self.reasons]


@dataclass(frozen=True)
class DaemonFailure:
    """A daemon that ended by itself. `status`: exit status or minus a signal; `reason`: its own word, or empty."""

    host: str
    status: int
    reason: str
    ranks: str  # such as `ranks 0-1 (host a)`, or `host c (no workers)`

    echo: ClassVar[int] = 0

    def tell(self) -> list[str]:
        why = f": {self.reason}" if self.reason else ""
        return [f"fusionrun: the daemon of {self.ranks} {ending(self.status)}{why}"]


@dataclass(frozen=True)
class WorkerFailure:
    """A worker that failed.

    Attributes:
        status: exit status or minus a signal.
        stderr: the end of its output there.
        killed: how it came to be killed, as far as the kernel says.
    """

    host: str
    rank: int
    status: int
    stderr: str
    killed: str = ""

    @property
    def echo(self) -> int:
        return 0 if self.status < 0 else echo_of(self.stderr)

    @property
    def exit_code(self) -> int:
        """As a shell has it: 128 more than the signal for a worker that one ended."""
        return self.status if self.status >= 0 else 128 - self.status

    @property
    def exit_line(self) -> str:
        """The line that Horovod prints to its standard output when a worker fails, word for word."""
        return f"Process {self.rank} exit with status code {self.exit_code}."

    def is_like(self, failure: Failure) -> bool:
        """Tells whether a failure is a worker's with the same error."""
        return isinstance(failure, WorkerFailure) and last_error(failure.stderr) == last_error(self.stderr)

    def tell(self) -> list[str]:
        who = f"rank {self.rank} on host {self.host}"
        if self.status < 0:
            how = f" ({self.killed})" if self.killed else ""
            return [f"fusionrun: {who} {ending(self.status)}{how}"]
        error = last_error(self.stderr)
        if not error:
            return [f"fusionrun: {who} {ending(self.status)} and printed nothing to stderr"]
        end = [f"  {line}" for line in excerpt(self.stderr)]
        return [f"The end of the stderr of {who}:", *end, f"fusionrun: {who} failed first: {error}"]


@dataclass(frozen=True)
class WorkerGaveUp:
    """A worker of an elastic job that has left its epoch because of an error, when there was no other one."""

    host: str
    rank: int
    error: str

    echo: ClassVar[int] = 1

    def tell(self) -> list[str]:
        return [f"fusionrun: rank {self.rank} on host {self.host} could not go on: {in_a_line(self.error)}"]


@dataclass(frozen=True)
class MembershipFailure:
    """An elastic job that cannot go on. `reason`: a sentence."""

    reason: str

    echo: ClassVar[int] = 3  # an earlier error says more

    def tell(self) -> list[str]:
        return [f"fusionrun: {self.reason}"]


Failure = HostFailure | DaemonFailure | WorkerFailure | WorkerGaveUp | MembershipFailure


def first_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that the others follow from; `failures`, at least one, are in the order in which they happened."""
    return min(failures, key=attrgetter("echo"))  # the first of equals


def tell(failures: Sequence[Failure]) -> list[str]:
    """The lines that are printed last; the cause is in the last one.

    Hosts that fail at the start usually do so together, and all of them want mending: all are told.
    """
    cause = first_cause(failures)
    if isinstance(cause, HostFailure):
        return [line for failure in failures if isinstance(failure, HostFailure) for line in failure.tell()]
    lines = cause.tell()
    alike = isinstance(cause, WorkerFailure) and sum(cause.is_like(failure) for failure in failures) > 1
    return lines[-1:] if alike else lines  # of a mistake that all have made, all have just printed the traceback


def in_short(failure: Failure) -> str:
    """A failure in one line, without an end, for a job that goes on."""
    if isinstance(failure, HostFailure):
        return f"host {failure.host}: {'; '.join(failure.reasons)}"
    return failure.tell()[-1].removeprefix("fusionrun: ").replace(" failed first: ", " failed: ")


def ending(status: int) -> str:
    """`ended with status 3`, `was killed by SIGKILL`."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}"
