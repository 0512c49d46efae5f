"""The way to the daemon, and what keeps a worker out."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from fusion_rt import wire
from fusion_rt.client import Client
from fusion_rt.core.errors import FusionError
from fusion_rt.host import stacks
from tests.client.daemon import TIMEOUT_S, WELCOME, Daemon


def test_a_client_says_who_it_is_and_learns_who_is_where(daemon: Daemon, client: Client) -> None:
    offer = client.own_memory.offer
    assert offer is not None
    hello = wire.Hello(wire.PROTOCOL_VERSION, "job", 1, os.getpid(), stacks.STACK_SIGNAL, offer.address, offer.text)
    assert daemon.hello == hello
    assert daemon.stacks.st_size == stacks.STACK_BYTES
    assert client.topology == WELCOME.topology
    assert client.process_sets[0].ranks == (0, 1)


def test_no_daemon(tmp_path: Path) -> None:
    with pytest.raises(FusionError, match=r"no daemon listens at .*nowhere after 0.01 s .*was it started"):
        Client(str(tmp_path / "nowhere"), "job", 0, 0.01)


def test_a_daemon_that_comes_up_late(daemon: Daemon) -> None:
    there, daemon.path = daemon.path, daemon.path + "2"
    timer = threading.Timer(0.02, os.link, [there, daemon.path])
    timer.start()
    daemon.connect().close()
    timer.join()


def test_a_daemon_that_has_listened_and_does_not_any_more_is_not_waited_for(daemon: Daemon, tmp_path: Path) -> None:
    daemon.close()
    for path in (daemon.path, str(tmp_path / "nowhere")):
        with pytest.raises(
            FusionError, match=r"the daemon that listened at .* is gone \(.*\): it has ended with its job"
        ):
            Client(path, "job", 0, 600.0, listened=True)  # the limit of a test is less


def test_a_daemon_that_ends_without_having_looked_who_is_there(daemon: Daemon) -> None:
    """The kernel then tells the client of a reset, not of an end."""
    before = len(os.listdir("/proc/self/fd"))
    found: list[str] = []

    def connect() -> None:
        try:
            Client(daemon.path, "job", 1, TIMEOUT_S)
        except FusionError as error:
            found.append(str(error))

    thread = threading.Thread(target=connect)
    thread.start()
    sock, _ = daemon._listener.accept()
    while not sock.recv(1, socket.MSG_PEEK):
        pass
    sock.close()
    thread.join()
    (error,) = found
    assert "the daemon of rank 1's node" in error
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_job_that_does_not_come_up_in_time(daemon: Daemon) -> None:
    with pytest.raises(FusionError, match=r"rank 1 waited 0.06 s for the other processes"):
        Client(daemon.path, "job", 1, 0.05)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (wire.JobFailed("rank 1 is taken"), "^rank 1 is taken$"),
        (None, "the daemon of rank 1's node .* is gone"),
        (wire.Failed(0, "x"), "answered Hello with Failed"),
    ],
)
def test_a_client_that_is_not_welcome(daemon: Daemon, answer: wire.DaemonMessage | None, why: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FusionError, match=why):
        daemon.connect(answer)
    daemon.sock.close()
    assert len(os.listdir("/proc/self/fd")) == before
