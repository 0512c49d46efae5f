"""Messages between a worker of an elastic job and the agent of its host. Knows no torch.

The agent started the worker, outlives the daemons, and knows from the launcher which membership epochs there are. A
worker connects once (a Unix SEQPACKET socket in the job's private directory, one JSON message a packet)
and says in which slot of the host it runs. The agent tells it when hosts come and go (`HostsChanged`), which it looks
at when it commits; there is no thread. When the worker has left an epoch, because of an error or because hosts have
changed, it asks for the next one (`Rejoin`), and waits for its `Assignment`, or to be told that there is no place for
it (`Removed`).

A worker that is started while the others train is *provisional*: its variables tell the place that it is to have, but
it is in no epoch until it has asked.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import TypeAlias

import msgspec

from fusion_rt.core.errors import FusionError, WireError
from fusion_rt.core.topology import Topology
from fusion_rt.local import packets

SOCKET = "FUSION_ELASTIC_SOCKET"  # the variable that has the path of the agent's socket
SLOT = "FUSION_ELASTIC_SLOT"  # the variable that has the worker's slot on its host: 0, 1, ...
EPOCH = "FUSION_ELASTIC_EPOCH"  # the variable that has the membership epoch that the worker was started for
PROVISIONAL = "FUSION_ELASTIC_PROVISIONAL"  # the variable that has the topology expected, if it has no place there yet
MAX_PACKET = 64 * 1024  # bytes of one message


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """A worker's first message: its slot on this host."""

    slot: int


class Rejoin(msgspec.Struct, frozen=True, tag="rejoin"):
    """A worker has left membership epoch `epoch`, or was not in it yet, and waits for a later one. `error`: why; empty
    if hosts changed. `is_unfit`: since no epoch with as many ranks is of use."""

    epoch: int
    error: str = ""
    is_unfit: bool = False


class Assignment(msgspec.Struct, frozen=True, tag="assignment"):
    """A worker's place in a membership epoch: the variables that a worker which is started for it would have."""

    epoch: int
    environment: dict[str, str]


class Removed(msgspec.Struct, frozen=True, tag="removed"):
    """There is no place for this worker any more; it should end. A sentence says why."""

    reason: str


class HostsChanged(msgspec.Struct, frozen=True, tag="hosts_changed"):
    """Hosts have come or gone; `timestamp` (seconds, by the launcher's clock) orders the changes."""

    timestamp: float
    added: bool
    removed: bool


FromWorker: TypeAlias = Attach | Rejoin
FromAgent: TypeAlias = Assignment | Removed | HostsChanged
_FROM_WORKER = msgspec.json.Decoder(FromWorker)
_FROM_AGENT = msgspec.json.Decoder(FromAgent)


def encode(message: msgspec.Struct) -> bytes:
    """One packet.

    Raises:
        WireError: it is longer than `MAX_PACKET`.
    """
    data = msgspec.json.encode(message)
    if len(data) > MAX_PACKET:
        raise WireError(f"a {type(message).__name__} of {len(data)} bytes is longer than the limit of {MAX_PACKET}")
    return data


def decode_from_worker(data: bytes) -> FromWorker:
    """Returns a worker's message.

    Raises:
        WireError: it is no message of a worker.
    """
    try:
        message: FromWorker = _FROM_WORKER.decode(data)
        return message
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"not a message of an elastic worker: {error}") from None


class AgentConnection:
    """A worker's connection to the agent of its host.

    Args:
        environ: has the variables above.

    Attributes:
        epoch: the membership epoch that this worker has a place in, or that ran when it was started.
        expected: the topology as it is to be with this worker, as long as it has no place in an epoch.
        trains: this worker has come to its training function.

    Raises:
        FusionError: the agent cannot be reached.
    """

    def __init__(self, environ: os._Environ[str] | dict[str, str]) -> None:
        self.epoch = int(environ[EPOCH])
        text = environ.get(PROVISIONAL)
        self.expected = msgspec.json.decode(text, type=Topology) if text else None
        self.trains = False
        self._removed: Removed | None = None  # heard while news of hosts was looked for
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            packets.connect(self._socket, environ[SOCKET])
            self._socket.send(encode(Attach(int(environ[SLOT]))))
        except FusionError:
            self._socket.close()
            raise
        except OSError as error:
            self._socket.close()
            raise FusionError(
                f"the launcher's agent on this host cannot be reached at {environ[SOCKET]}: {error.strerror}"
            ) from None

    def changes(self) -> list[HostsChanged]:
        """Returns the notices of hosts that came or went since the last call, in order. Does not wait.

        Raises:
            FusionError: the agent is gone, or says what makes no sense.
        """
        found = []
        while (message := self._receive(wait=False)) is not None:
            if isinstance(message, HostsChanged):
                found.append(message)
            elif isinstance(message, Removed):
                self._removed = message
        return found

    def rejoin(self, error: str = "", is_unfit: bool = False) -> Assignment | Removed:
        """Asks for this worker's place in the next membership epoch and waits for it, as long as the launcher does.

        Earlier notices of hosts that changed are forgotten: the next epoch takes it into account.

        Raises:
            FusionError: the agent is gone, or says what makes no sense.
        """
        try:
            self._socket.send(encode(Rejoin(self.epoch, error[: MAX_PACKET // 8], is_unfit)))
        except OSError:
            raise self._gone() from None
        while self._removed is None:
            message = self._receive(wait=True)
            if isinstance(message, Assignment) and message.epoch > self.epoch:
                self.epoch, self.expected = message.epoch, None
                return message
            if isinstance(message, Removed):
                return message
        return self._removed

    def close(self) -> None:
        """Ends the conversation; the agent then expects that this process ends."""
        self._socket.close()

    def _receive(self, wait: bool) -> FromAgent | None:
        try:
            data = self._socket.recv(MAX_PACKET, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            raise self._gone()
        try:
            message: FromAgent = _FROM_AGENT.decode(data)
            return message
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise FusionError(f"the launcher's agent on this host sent what makes no sense: {error}") from None

    @staticmethod
    def _gone() -> FusionError:
        return FusionError("the launcher's agent on this host is gone, and with it the job")


# --- of this process --------------------------------------------------------------------------------------------------

_connection: AgentConnection | None = None
_forked = False


def agent() -> AgentConnection | None:
    """This process's connection to the agent of its host, which is made once; None where the job is not elastic.

    A forked child has none: it would read messages that its parent waits for.

    Raises:
        FusionError: the agent cannot be reached.
    """
    global _connection
    if _connection is None and not _forked and SOCKET in os.environ:
        _connection = AgentConnection(os.environ)
    return _connection


def move(connection: AgentConnection, error: str = "", is_unfit: bool = False) -> None:
    """Waits for this worker's place in the next membership epoch, and takes it: its variables are in `os.environ` then.

    Args:
        connection: the result of `agent`.
        error: why the worker has left the epoch before; empty if hosts changed.
        is_unfit: no epoch with as many ranks is of use.

    Raises:
        SystemExit: there is no place for this worker any more. It has said so on standard error.
        FusionError: the agent is gone.
    """
    answer = connection.rejoin(error, is_unfit)
    if isinstance(answer, Removed):
        print(f"fusion_rt: this worker leaves the job: {answer.reason}", file=sys.stderr, flush=True)
        raise SystemExit(0)
    os.environ.update(answer.environment)
    os.environ[EPOCH] = str(answer.epoch)


def _after_fork() -> None:
    global _connection, _forked
    _forked = True
    if _connection is not None:
        _connection.close()  # this process's copy, or the agent would not notice the parent's death before the child's
        _connection = None


os.register_at_fork(after_in_child=_after_fork)
