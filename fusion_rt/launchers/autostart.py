"""Joining a job, and starting its daemons where `fusionrun` has not.

Each node's first worker starts the daemon, the others connect when it is up. The workers of several hosts meet first
(`rendezvous`), and exchange the endpoints of their daemons. A daemon has a session of its own, so that Ctrl-C reaches
the workers first, and ends by itself when all its workers have left: a process that joins once more then joins a job of
another id, with a daemon of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import select
import socket
import subprocess
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace

from fusion_rt.client import Client
from fusion_rt.client.joining import DaemonGone
from fusion_rt.core.errors import FusionError
from fusion_rt.core.topology import Topology
from fusion_rt.host.bootstrap import (
    DAEMON_COMMAND,
    DaemonConfig,
    Endpoint,
    PeerTable,
    StartError,
    decode_line,
    encode_line,
    job_directory,
    make_private_directory,
    socket_path,
)
from fusion_rt.host.private_files import read_secret
from fusion_rt.launchers.entries import Arrival
from fusion_rt.launchers.environment import Environment
from fusion_rt.launchers.kvstore import Store
from fusion_rt.launchers.meeting import Meeting
from fusion_rt.launchers.rendezvous import Rendezvous
from fusion_rt.settings import Settings

SECRET_FILE = "~/.fusion_rt_secret"  # where errors and docs suggest to keep a secret
_STARTS = itertools.count()  # of daemons on one host; all its ranks count alike
_LOG_TAIL = 2000  # characters of the daemon's log that an error quotes


class StartedDaemon:
    """The daemon that this worker has started; to be kept until the worker leaves.

    Attributes:
        endpoint: where its peers reach it.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: str, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        return self._process.pid

    def introduce(self, peers: PeerTable) -> None:
        """Tells it where its peers listen."""
        assert self._process.stdin is not None
        with (
            contextlib.suppress(BrokenPipeError),
            self._process.stdin as stdin,
        ):  # who connects finds out why it is gone
            stdin.write(encode_line(peers))

    def end(self) -> None:
        """Ends it, because its job has not come about."""
        assert self._process.stdin is not None
        self._process.terminate()
        self._process.stdin.close()
        self._process.wait()

    def wait(self, timeout: float) -> bool:
        """Waits at most `timeout` seconds for it to end, as it does once all its workers have left; whether it has."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        if os.path.exists(self._log) and not os.path.getsize(self._log):  # nothing happened that is worth keeping
            os.unlink(self._log)
            os.rmdir(os.path.dirname(self._log))
        return True


def join(
    where: Environment, settings: Settings, open_store: Callable[[Meeting, int, int], Store]
) -> tuple[Client, StartedDaemon | None]:
    """Joins the job, and returns when every rank has, with the daemon if this worker has started it.

    Args:
        where: this worker's place.
        settings: every knob.
        open_store: opens the store of a meeting for a rank and size.

    Raises:
        FusionError: a daemon or another rank did not come up in time, or refuses this worker; or the job runs on
            several hosts and has no secret.
    """
    if where.socket:
        return _connect(where, settings), None
    if where.meeting is None:
        here = replace(where, job=f"{where.job}-{next(_STARTS)}")
        topology = Topology((socket.gethostname(),), (tuple(range(where.size)),))
        daemon = start(here, topology, settings) if where.local_rank == 0 else None
        return _connect(here, settings), daemon
    meeting = _with_secret(where.meeting, settings)
    if not meeting.tells_hosts:
        _check_secret(meeting, settings)
    with Rendezvous(
        open_store(meeting, where.rank, where.size),
        meeting,
        where.rank,
        where.size,
        settings.start_timeout,
    ) as rendezvous:
        return _meet(where, settings, meeting, rendezvous)


def _with_secret(meeting: Meeting, settings: Settings) -> Meeting:
    """Returns the meeting with the secret that the settings name, or else the launcher's."""
    if settings.job_secret_file:
        return replace(meeting, secret=read_secret(settings.job_secret_file, "FUSION_JOB_SECRET_FILE"))
    return meeting


def _check_secret(meeting: Meeting, settings: Settings) -> None:
    """Raises `FusionError` if there is no secret, and the settings do not say that the job may do without."""
    if meeting.secret:
        return
    danger = ("this job runs on several hosts and its processes share no secret, so that anybody who reaches its "
              "rendezvous can take part in it, read its data and run code in its workers")  # fmt: skip
    if not settings.insecure_rendezvous:
        raise FusionError(
            f"{danger}: make one with `(umask 077; openssl rand -hex 32 > {SECRET_FILE})`, copy that file to every "
            f"host, and set FUSION_JOB_SECRET_FILE={SECRET_FILE} for all workers; or, on a network without "
            "strangers, set FUSION_INSECURE_RENDEZVOUS=1 (docs/launchers.md)"
        )
    warnings.warn(f"{danger} (FUSION_INSECURE_RENDEZVOUS)", stacklevel=3)


def _meet(
    where: Environment, settings: Settings, meeting: Meeting, rendezvous: Rendezvous
) -> tuple[Client, StartedDaemon | None]:
    """Joins a job whose nodes do not know of each other yet."""
    from fusion_rt.host.address import address_towards

    arrival = Arrival(where.size, where.local_rank, meeting.node, meeting.host, secrets.token_hex(8))

    def check(topology: Topology) -> None:
        if len(topology.hosts) > 1:
            _check_secret(meeting, settings)

    assignment = rendezvous.assign(arrival, where.job, check)
    topology = assignment.topology
    alone = len(topology.hosts) == 1
    node = topology.node_of(where.rank)
    here = replace(where, job=assignment.job, node=node)
    daemon = None
    if topology.ranks[node][0] == where.rank:
        try:
            address = "127.0.0.1" if alone else address_towards(rendezvous.hosts, meeting.interfaces)
            daemon = start(here, topology, settings, address)
        except FusionError as error:
            rendezvous.introduce(here.job, node, StartError(str(error)))
            raise
    try:
        if daemon is not None:
            rendezvous.introduce(here.job, node, daemon.endpoint)
        if daemon is not None or where.rank == 0:
            peers = rendezvous.peers(assignment)
        if daemon is not None and not alone:
            daemon.introduce(peers)
    except BaseException:
        if daemon is not None:
            daemon.end()  # it would wait for peers
        raise
    client = _connect(here, settings)
    if where.rank == 0:
        rendezvous.clear()
    return client, daemon


def _connect(where: Environment, settings: Settings) -> Client:
    path = where.socket or path_of_socket(where, settings)
    deadline = time.monotonic() + settings.start_timeout
    while True:
        found = _identity(path)
        timeout = max(0.0, deadline - time.monotonic())
        try:
            client = Client(path, where.job, where.rank, timeout, listened=where.listened, formation=where.formation)
            break
        except DaemonGone:
            # A script may start one job after the other under one name. A daemon that has ended in order has removed
            # its socket: it was the last job's, and this one's is still to come.
            if where.listened or found is None or _identity(path) == found:
                raise
    if client.topology.size != where.size:
        client.close()
        raise FusionError(f"this worker was started as one of {where.size}, but the daemon at {path} belongs to a job "
                          f"of {client.topology.size}")  # fmt: skip
    return client


def _identity(path: str) -> tuple[int, int] | None:
    """Returns what tells a file from others that were or will be at the same path; None if there is none."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_ctime_ns


def path_of_socket(where: Environment, settings: Settings) -> str:
    """Path of the socket of a daemon that workers start.

    Raises:
        FusionError: the path would be too long for a Unix socket.
    """
    return socket_path(os.path.abspath(settings.runtime_root()), where.job, where.node)


def start(where: Environment, topology: Topology, settings: Settings, address: str = "127.0.0.1") -> StartedDaemon:
    """Starts this node's daemon, and returns when it listens; for the daemons of other nodes at `address`.

    Raises:
        FusionError: it did not come up; the text says why.
    """
    root = os.path.abspath(settings.runtime_root())
    directory = job_directory(root, where.job, where.node)
    make_private_directory(root)
    make_private_directory(directory)
    config = DaemonConfig(where.job, where.node, topology, address, attached=False)
    log = os.path.join(directory, "log")
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as errors:
        process = subprocess.Popen(
            DAEMON_COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd="/",  # files of the working directory might shadow Python's own modules
            env=_environment(os.environ, root),
            start_new_session=True,
        )
    assert process.stdin is not None
    try:
        answer = _introduce(process, encode_line(config), settings.start_timeout)
        if isinstance(answer, StartError):
            process.wait()
            raise FusionError(f"the daemon did not start: {answer.error or _how_it_ended(process, log)}")
        if len(topology.hosts) == 1:
            process.stdin.close()  # there are no peers to tell it of
    except BaseException:
        process.kill()
        process.wait()
        process.stdin.close()
        raise
    return StartedDaemon(process, log, answer)


def _introduce(process: subprocess.Popen[bytes], config: bytes, timeout: float) -> Endpoint | StartError:
    """Sends the configuration and reads the answer; an empty `StartError` if the daemon ends without a word."""
    assert process.stdin is not None
    assert process.stdout is not None
    deadline = time.monotonic() + timeout
    try:
        process.stdin.write(config)
        process.stdin.flush()
    except BrokenPipeError:
        return StartError("")
    line = b""
    with process.stdout as stdout:
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([stdout], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise FusionError(f"the daemon did not come up within {timeout:g} s; raise HOROVOD_START_TIMEOUT if "
                                  "this host needs longer")  # fmt: skip
            part = os.read(stdout.fileno(), 65536)
            if not part:
                return StartError("")
            line += part
    answer: Endpoint | StartError = decode_line(line, Endpoint | StartError)  # type: ignore[arg-type]
    return answer


def _how_it_ended(process: subprocess.Popen[bytes], log: str) -> str:
    with open(log, encoding="utf-8", errors="replace") as file:
        tail = file.read()[-_LOG_TAIL:].strip()
    return f"it ended with status {process.returncode}. Its log ({log}) ends with:\n{tail}"


def _environment(environ: Mapping[str, str], root: str) -> dict[str, str]:
    """The worker's environment with every path in it made absolute, since the daemon runs in another directory."""
    paths = [os.path.abspath(path) for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    traces = environ.get("FUSION_TRACE_DIR")
    return {
        **environ,
        **({"FUSION_TRACE_DIR": os.path.abspath(traces)} if traces else {}),
        "FUSION_RUNTIME_DIR": root,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONSAFEPATH": "1",
    }
