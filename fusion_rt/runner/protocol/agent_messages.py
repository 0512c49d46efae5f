"""Messages between the launcher and the agent of a host: one JSON object a line, limited and validated.

The launcher writes to the agent's standard input: first a `Job`, then commands, at last `Stop`. The agent writes to its
standard output. Command, environment and paths are bytes, since Unix does not promise that they are text. JSON lines
and not a binary framing, because a login shell may print a banner in front of the first one.

A job whose membership is fixed has one epoch, which comes with the `Job`: the agent starts a daemon, and the workers at
once, so that the imports of both take place side by side; the daemon hears of its peers when all listen (`Introduce`).
In an elastic job the agent is told to start a daemon (`StartDaemon`), which goes from epoch to epoch (`Begin`), and
beside it workers that may be in a later epoch (`Recruit`).
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from fusion_rt.core.errors import WireError
from fusion_rt.core.topology import Topology
from fusion_rt.host.bootstrap import Abandon, Endpoint, EpochOver, PeerTable, PhaseName, Reform
from fusion_rt.host.bootstrap import Job as JobId

MAX_AGENT_LINE = 256 * 1024  # bytes of one line from an agent
FUNCTION_CHUNK = 1024 * 1024  # bytes of a function in one message
OUTPUT_CHUNK = 32 * 1024  # bytes of a worker's output in one message; base64 makes a third more of it
REMOVED_S = 10.0  # seconds that a worker without a place has to end by itself, to save something perhaps
LINE_START = b'{"type":"'  # how each message starts; any other line is not ours

Stream: TypeAlias = Literal["stdout", "stderr"]


class Versions(msgspec.Struct, frozen=True):
    """The part of a `Job` that every version of the package can read: who wrote it."""

    python: str  # such as 3.11
    package: str


class Epoch(msgspec.Struct, frozen=True, tag="epoch"):
    """The places of an epoch on one host.

    Attributes:
        number: from 1 on.
        node: index of this host in the topology.
        topology: all hosts and ranks.
        slots: of this host's workers, in the order of local_rank.
    """

    number: int
    node: int
    topology: Topology
    slots: tuple[int, ...]


class Job(msgspec.Struct, frozen=True, tag="job"):
    """Everything an agent has to know.

    Attributes:
        python: the launcher's Python, major.minor.
        package: the launcher's version of the package.
        job: id of the job.
        slots: number of workers that the host must be fit for.
        command: the worker's command line.
        environment: names and values of the variables that are forwarded.
        directory: working directory of the workers.
        interfaces: network interfaces of which the first that the host has gives the daemon's address; may be empty.
        silence_limit: seconds without a line after which launcher and agent take each other for gone; 0: never.
        as_horovod: the workers' `import horovod` means this project.
        function_bytes: size of the function that workers call, which follows in pieces; 0: there is none.
        elastic: number of this agent in an elastic job, from 1 on; 0: membership is fixed.
        loopback: every node is on this machine, so that daemons listen on 127.0.0.1; None: so far, and others may come.
        epoch: the only one of a job whose membership is fixed; None: epochs follow.
    """

    python: str
    package: str
    job: JobId
    slots: int
    command: tuple[bytes, ...]
    environment: tuple[tuple[bytes, bytes], ...]
    directory: bytes
    interfaces: tuple[str, ...] = ()
    silence_limit: float = 0.0
    as_horovod: bool = False
    function_bytes: int = 0
    elastic: int = 0
    loopback: bool | None = False
    epoch: Epoch | None = None


class SignOfLife(msgspec.Struct, frozen=True, tag="ping"):
    """The sender is there. Both say so, `pipes.BEATS` times in the silence limit."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the workers (TERM, KILL after `grace` seconds) and the daemon. The end of input means the same."""

    grace: float


class Function(msgspec.Struct, frozen=True, tag="function"):
    """The next piece of the function that the workers call, pickled. The agent does not look into it."""

    data: bytes


class Introduce(msgspec.Struct, frozen=True, tag="introduce"):
    """All daemons of a job whose membership is fixed listen here, if there are several."""

    table: PeerTable


class StartDaemon(msgspec.Struct, frozen=True, tag="start_daemon"):
    """Start a daemon of an elastic job, and end the one before.

    Attributes:
        node: number of this host, which it keeps.
        serial: of the daemon, among those of this host.
        nodes: names of all hosts so far, by number.
    """

    node: int
    serial: int
    nodes: tuple[str, ...]


class Reach(msgspec.Struct, frozen=True, tag="reach"):
    """Connect to these daemons, and again until each has been reached, and then say `InReach`. `serial`: of the daemon
    here. Replaces an order before."""

    serial: int
    endpoints: tuple[Endpoint, ...]


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """An epoch of an elastic job begins.

    Attributes:
        reform: the order to the daemon.
        epoch: the places here.
        waiting: slots whose worker waits for its place; in the others a new one is started.
    """

    reform: Reform
    epoch: Epoch
    waiting: tuple[int, ...]


class Recruit(msgspec.Struct, frozen=True, tag="recruit"):
    """Start a worker in a slot that has no place in the epoch that runs; it asks for one when it is ready.

    `would`: the places as they would be with it, with the number of the epoch that runs.
    """

    slot: int
    would: Epoch


class Hail(msgspec.Struct, frozen=True, tag="hail"):
    """Answer `Present` at once."""


class CheckDaemon(msgspec.Struct, frozen=True, tag="check_daemon"):
    """Other hosts take this daemon for lost: end it if it does not answer, so that its workers do not wait for it.
    `serial` as in `DaemonUp`."""

    serial: int


class Remove(msgspec.Struct, frozen=True, tag="remove"):
    """The workers in these slots have no place any more: tell them, and end those that do not end by themselves."""

    slots: tuple[int, ...]
    reason: str


class Release(msgspec.Struct, frozen=True, tag="release"):
    """The host has no place any more: as `Remove` for all its workers, and then as `Stop`."""

    reason: str


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """End the workers in these slots at once, with what they have started."""

    slots: tuple[int, ...]


class Changed(msgspec.Struct, frozen=True, tag="changed"):
    """To be passed on to all workers: hosts have come or gone (`fusion_rt.local.elastic.HostsChanged`)."""

    timestamp: float
    added: bool
    removed: bool


class HostReady(msgspec.Struct, frozen=True, tag="ready"):
    """The host passed all checks; its daemon is being started."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The job cannot run on this host. `reasons`: a sentence each."""

    reasons: tuple[str, ...]


class Present(msgspec.Struct, frozen=True, tag="present"):
    """The agent is there: its answer to `Hail`."""


class DaemonUp(msgspec.Struct, frozen=True, tag="daemon_up"):
    """A daemon listens. `serial`: which of this host's; 1 where membership is fixed."""

    endpoint: Endpoint
    serial: int


class InReach(msgspec.Struct, frozen=True, tag="in_reach"):
    """This host has reached the daemons that it was to; `serial` as in `Reach`."""

    serial: int


class DaemonDown(msgspec.Struct, frozen=True, tag="daemon_down"):
    """A daemon ended before it was told to. `status` as in `Exited`; `reason`: its own last word, how it came to be
    killed, or empty."""

    serial: int
    status: int
    reason: str = ""


class Reached(msgspec.Struct, frozen=True, tag="reached"):
    """An epoch has come so far on this host."""

    epoch: int
    phase: PhaseName


class WorkersUp(msgspec.Struct, frozen=True, tag="workers_up"):
    """All workers of the host were started."""


class Output(msgspec.Struct, frozen=True, tag="output"):
    """Bytes that the worker in a slot, which has this rank or is to have it, printed, cut anywhere."""

    slot: int
    rank: int
    stream: Stream
    data: bytes


class DaemonLog(msgspec.Struct, frozen=True, tag="daemon_log"):
    """Bytes that the daemon logged, cut anywhere."""

    data: bytes


class FunctionResult(msgspec.Struct, frozen=True, tag="result"):
    """The next piece of what a worker's function returned, pickled. Sent before its `Exited`."""

    rank: int
    data: bytes


class Asked(msgspec.Struct, frozen=True, tag="asked"):
    """The worker in a slot of an elastic job has left an epoch and asks for the next (`local.elastic.Rejoin`)."""

    slot: int
    epoch: int
    error: str
    is_unfit: bool = False


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    """The worker in a slot ended; its output was sent before. Not sent for those in `Remove`.

    Attributes:
        slot: its slot.
        status: its exit status, or minus the signal that ended it.
        killed: how it came to be killed, as far as the kernel says (`oom.OomKills.explain`).
        unused: it was ended because its epoch was abandoned before it had begun with anything.
    """

    slot: int
    status: int
    killed: str = ""
    unused: bool = False


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """Nothing of the job is left on this host; the agent's last message."""


Command: TypeAlias = (
    SignOfLife
    | Hail
    | CheckDaemon
    | Function
    | Stop
    | Introduce
    | StartDaemon
    | Reach
    | Begin
    | Recruit
    | Abandon
    | Remove
    | Release
    | Kill
    | Changed
)
FromAgent: TypeAlias = (
    SignOfLife
    | Present
    | HostReady
    | Refused
    | DaemonUp
    | InReach
    | DaemonDown
    | Reached
    | EpochOver
    | WorkersUp
    | Output
    | DaemonLog
    | FunctionResult
    | Exited
    | Asked
    | Stopped
)

_COMMAND = msgspec.json.Decoder(Command)
_FROM_AGENT = msgspec.json.Decoder(FromAgent)


def decode_command(line: bytes) -> Command:
    """The command in one line of the launcher, after the job.

    Raises:
        WireError: it is no command.
    """
    command: Command = _decode(_COMMAND, line, "a command of the launcher")
    return command


def decode_from_agent(line: bytes) -> FromAgent:
    """The message in one line of an agent.

    Raises:
        WireError: it is not one.
    """
    message: FromAgent = _decode(_FROM_AGENT, line, "a message of an agent")
    return message


def _decode(decoder: Any, line: bytes, what: str) -> Any:
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"{line[:80]!r} is not {what}: {error}") from None
