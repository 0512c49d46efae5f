"""The start of a daemon: its configuration, its endpoint and its files.

The starter of a daemon (`fusionrun`'s agent on each host, or the first worker of a job without a launcher) writes one
line of JSON to its standard input, a `DaemonConfig`, and reads one line from its standard output, an `Endpoint` (or a
`StartError`). In a job of several nodes it then writes a second line, the `PeerTable` with every node's endpoint. The
daemon goes on to write a line, a `Phase`, whenever the start of the job has come further. No secret is ever on a
command line or in a file: each daemon makes its own CURVE key pair, and only public keys travel, over the launcher's
own channel.

When the config says `attached`, the end of standard input means that the starter is gone, and the daemon ends the
job.

In an elastic job a daemon outlives membership epochs. Each of them, the first one included, begins with a `Reform` on
its standard input, in place of the table. It writes `Reformed` when it takes that epoch's workers, then the epoch's
phases, and `EpochOver` when the epoch has failed.
"""

from __future__ import annotations

import ipaddress
import os
import stat
import sys
from contextlib import suppress
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec

from fusion_rt.core.errors import FusionError, WireError
from fusion_rt.core.topology import Topology

DAEMON_COMMAND = (sys.executable, "-m", "fusiond", "start", "--foreground", "--config-stdin")
MAX_LINE = 16 * 1024 * 1024  # bytes of one line of JSON
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"  # ZeroMQ RFC 32
Job: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,32}$")]
PhaseName: TypeAlias = Literal["joined", "connected", "started", "first_done"]
RANKS_DIRECTORY = "ranks"
"""Subdirectory of a daemon's directory, with the files by which its workers find each other."""
Port: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=65536)]


class DaemonConfig(msgspec.Struct, frozen=True):
    """The configuration that a daemon needs before it can listen; the rest is in its settings (environment).

    Attributes:
        job: id of the job, part of the path of the daemon's directory.
        node: index of this daemon's node in the topology.
        topology: all nodes and ranks; node 0, which coordinates the operations, has workers.
        address: IP address to listen on for peers; unused in a job of one node.
        attached: end the job when standard input ends.
        elastic: epochs come as `Reform`s, and one that fails ends the epoch and not the daemon. Of `topology` only the
            host of `node` counts.
        serial: from 1 on, which daemon of this node it is. Each has a directory of its own: the one before may still be
            ending, on a host that was cut off.
    """

    job: Job
    node: int
    topology: Topology
    address: str = "127.0.0.1"
    attached: bool = True
    elastic: bool = False
    serial: Annotated[int, msgspec.Meta(ge=1)] = 1

    def __post_init__(self) -> None:
        if not 0 <= self.node < len(self.topology.hosts):
            raise ValueError(f"there is no node {self.node} in a job of {len(self.topology.hosts)} nodes")
        if not self.topology.ranks[0] and not self.elastic:
            raise ValueError(f"node 0 (host {self.topology.hosts[0]}) has no workers, but it has to coordinate them; "
                             "name nodes without workers last")  # fmt: skip
        ipaddress.ip_address(self.address)  # raises ValueError


class Endpoint(msgspec.Struct, frozen=True, tag="endpoint"):
    """The address and ports on which a daemon listens for its peers; ports are 0 in a job of one node.

    `public_key`: CURVE key in Z85.
    """

    node: int
    pid: int
    address: str
    control_port: Port
    payload_port: Port
    public_key: str

    def __post_init__(self) -> None:
        ipaddress.ip_address(self.address)  # raises ValueError
        if self.public_key and not _is_key(self.public_key):
            raise ValueError(f"{self.public_key[:50]!r} is no CURVE key")


class StartError(msgspec.Struct, frozen=True, tag="error"):
    """Reports that a daemon did not come up; `error`: a sentence that says why."""

    error: str


class Phase(msgspec.Struct, frozen=True, tag="phase"):
    """A phase that the start has reached on this node.

    `joined`: its workers have; `connected`: to the other daemons; `started`: the links are measured and all ranks have
    been told that the job runs; `first_done`: one operation is done. A node without workers says `joined` at once, and
    `first_done` when the job has started.
    """

    phase: PhaseName


class PeerTable(msgspec.Struct, frozen=True, tag="peer_table"):
    """Every node's endpoint, by node index."""

    endpoints: tuple[Endpoint, ...]


class Reform(msgspec.Struct, frozen=True, tag="reform"):
    """Orders a daemon of an elastic job into its next membership epoch, at any time, also while another comes up.

    Attributes:
        number: of the epoch, above those before.
        topology: every node that there ever was, by its number, which a host keeps as long as the job lives. Ranks are
            dealt anew.
        absent: nodes that are not in the epoch, without ranks: lost, not back yet, or gone.
        peers: endpoints of all nodes that are, in the order of their numbers. A daemon with another key than before has
            taken the place of one that is gone.
    """

    number: Annotated[int, msgspec.Meta(ge=1)]
    topology: Topology
    absent: tuple[int, ...]
    peers: tuple[Endpoint, ...]

    def __post_init__(self) -> None:
        if any(not 0 <= node < len(self.topology.hosts) or self.topology.ranks[node] for node in self.absent):
            raise ValueError(f"nodes {self.absent} are not absent from {self.topology}: absent ones have no ranks")
        present = [node for node in range(len(self.topology.hosts)) if node not in self.absent]
        if [endpoint.node for endpoint in self.peers] != present:
            raise ValueError(f"the endpoints are not those of nodes {present}, which take part")


class Reformed(msgspec.Struct, frozen=True, tag="reformed"):
    """Reports that the daemon takes workers of this epoch; phases that follow are of it."""

    number: int


class Abandon(msgspec.Struct, frozen=True, tag="abandon"):
    """Orders a daemon to fail its epoch, if it is this one; `reason`: a sentence for its workers."""

    number: int
    reason: str


class Knock(msgspec.Struct, frozen=True, tag="knock"):
    """Asks a daemon whether its event loop runs; it answers `Awake` at once."""


class Awake(msgspec.Struct, frozen=True, tag="awake"):
    """Reports that the daemon's event loop runs: its answer to `Knock`."""


class EpochOver(msgspec.Struct, frozen=True, tag="epoch_over"):
    """Reports that an epoch has failed. `reason`: a sentence; `lost`: nodes that this daemon takes for lost, or has not
    reached in time when the epoch was to begin."""

    number: int
    lost: tuple[int, ...]
    reason: str


class Farewell(msgspec.Struct, frozen=True, tag="farewell"):
    """Tells a daemon that its starter ends the workers: that they die is no news from now on."""


Order: TypeAlias = PeerTable | Reform | Abandon | Knock | Farewell
"""Messages of a starter to a daemon after its configuration: `PeerTable`, or, in an elastic job, `Reform`, `Abandon`
and `Knock`; and, in any, `Farewell`."""
Report: TypeAlias = Phase | Reformed | Awake | EpochOver
"""Messages of a daemon to its starter, after its endpoint."""
_T = TypeVar("_T")


def encode_line(message: msgspec.Struct) -> bytes:
    """Encodes a message as one line of JSON, newline included."""
    return msgspec.json.encode(message) + b"\n"


def decode_line(line: bytes, kind: type[_T]) -> _T:
    """Decodes the message in a line of JSON.

    Raises:
        WireError: the line is too long, or not a message of that kind.
    """
    if len(line) > MAX_LINE:
        raise WireError(f"a start-up line of {len(line)} bytes is longer than the limit of {MAX_LINE}")
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"not a start-up message: {error}") from None


def _is_key(text: str) -> bool:
    """Returns whether a text is Z85 for 32 bytes: 40 characters, of which each five encode a number of 32 bits."""
    digits = [_Z85.find(character) for character in text]
    numbers = [sum(digit * 85 ** (4 - i) for i, digit in enumerate(digits[at : at + 5])) for at in range(0, 40, 5)]
    return len(digits) == 40 and min(digits) >= 0 and max(numbers) < 2**32


def job_directory(runtime_root: str, job: str, node: int, serial: int = 1) -> str:
    """Returns the directory of one daemon's files (socket, lock, log); `serial` as in `DaemonConfig`."""
    return os.path.join(runtime_root, f"{job}.{node}" if serial == 1 else f"{job}-{serial}.{node}")


def socket_path(runtime_root: str, job: str, node: int, serial: int = 1) -> str:
    """Returns the path of the daemon's local socket.

    Raises:
        FusionError: the path is longer than a Unix socket's may be.
    """
    path = os.path.join(job_directory(runtime_root, job, node, serial), "sock")
    if len(os.fsencode(path)) > 107:
        raise FusionError(f"the socket path {path} is longer than the 107 bytes a Unix socket's path may have; "
                          "set FUSION_RUNTIME_DIR to a shorter directory")  # fmt: skip
    return path


def make_private_directory(path: str, variable: str = "FUSION_RUNTIME_DIR") -> None:
    """Makes a directory that only this user can enter, with its parents, or checks that it is one.

    `variable`: the environment variable that names the directory, for errors.

    Raises:
        FusionError: it cannot be made, belongs to another user, others may enter it, or it is a link.
    """
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
    except OSError as error:
        base = os.environ.get("XDG_RUNTIME_DIR", "")
        of_system = variable == "FUSION_RUNTIME_DIR" and base and path.startswith(base) and not os.path.isdir(base)
        why = f"XDG_RUNTIME_DIR={base} is not there, and {error.filename}" if of_system else f"{error.filename}"
        raise FusionError(f"the directory {path} cannot be made: {why}: {error.strerror}; set {variable} to a "
                          "directory that this user may make") from None  # fmt: skip
    check_private_directory(path, variable)


def check_private_directory(path: str, variable: str = "FUSION_RUNTIME_DIR") -> None:
    """Checks that only this user can enter a directory.

    `variable`: the environment variable that names the directory, for errors.

    Raises:
        FusionError: it belongs to another user, others may enter it, or it is a link.
        FileNotFoundError: it is not there.
    """
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise FusionError(f"{path} is not a directory that only user {os.getuid()} can enter (mode 0700); "
                          f"remove it, or set {variable} to another one")  # fmt: skip
