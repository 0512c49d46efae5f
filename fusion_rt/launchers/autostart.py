"""Joining a job, and starting its daemons where `fusionrun` has not.

Each node's first worker starts the daemon, the others connect when it is up. The workers of several hosts meet first
(`rendezvous`), and exchange the endpoints of their daemons. A daemon has a session of its own, so that Ctrl-C reaches
the workers first, and ends by itself when all its workers have left: a process that joins once more then joins a job of
another id, with a daemon of its own.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import time
import warnings
from collections.abc import Callable
from dataclasses import replace

from fusion_rt.client import Client
from fusion_rt.client.joining import DaemonGone
from fusion_rt.core.errors import FusionError
from fusion_rt.core.topology import Topology
from fusion_rt.host import daemon_start
from fusion_rt.host.bootstrap import DaemonConfig, StartError, socket_path
from fusion_rt.host.daemon_start import StartedDaemon
from fusion_rt.host.private_files import read_secret
from fusion_rt.launchers.entries import Arrival
from fusion_rt.launchers.environment import Environment
from fusion_rt.launchers.kvstore import Store
from fusion_rt.launchers.meeting import Meeting
from fusion_rt.launchers.rendezvous import Rendezvous
from fusion_rt.settings import Settings

SECRET_FILE = "~/.fusion_rt_secret"  # where errors and docs suggest to keep a secret
_STARTS = itertools.count()  # of daemons on one host; all its ranks count alike


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
    danger = ("this job runs on several hosts and its processes share no secret, so that every process that reaches "
              "its rendezvous can take part in it, read its data and run code in its workers")  # fmt: skip
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
    """Returns a key that tells a file from others that were or will be at the same path; None if there is none."""
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
    """Starts this node's daemon, and returns when it listens; for the daemons of other nodes at `address`. Raises as
    `daemon_start.start`."""
    config = DaemonConfig(where.job, where.node, topology, address, attached=False)
    return daemon_start.start(config, os.path.abspath(settings.runtime_root()), settings.start_timeout)
