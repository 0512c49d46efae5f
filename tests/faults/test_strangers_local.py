"""Other users of a host of the job: what it has there they cannot enter, and behind open doors they are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fusion_rt import wire
from fusion_rt.bootstrap import job_directory, socket_path
from tests.fusiond.processes import JOB, Daemons

MakeDaemons = Callable[..., Daemons]
NOBODY = 65534
pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it becomes another user"),
]
STRANGER = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.settimeout(20)
try:
    sock.connect(sys.argv[1])
    sock.send(bytes.fromhex(sys.argv[2]))
    print("answer", sock.recv(100))
except OSError as error:
    print(type(error).__name__)
"""


def stranger(path: str, message: wire.WorkerMessage) -> str:
    """What somebody of another user hears who sends a message."""
    command = [sys.executable, "-I", "-c", STRANGER, path, wire.encode(message).hex()]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout.strip()


def test_the_sockets_of_a_job_cannot_be_reached_by_others(daemons: MakeDaemons, runtime_dir: Path) -> None:
    job = daemons(1).start()
    runtime_dir.chmod(0o755)  # the daemon's own directory is still private
    path = socket_path(str(runtime_dir), JOB, 0)
    assert stranger(path, wire.StatusRequest()) == "PermissionError"
    assert job.status()["workers"]["refused"] == 0


def test_others_are_refused_even_where_every_door_was_opened(daemons: MakeDaemons, runtime_dir: Path) -> None:
    job = daemons(1).start()
    job.status()
    path = socket_path(str(runtime_dir), JOB, 0)
    for door, mode in (
        (runtime_dir, 0o755),
        (Path(job_directory(str(runtime_dir), JOB, 0)), 0o755),
        (Path(path), 0o777),
    ):
        door.chmod(mode)
    for message in (wire.StatusRequest(), wire.StopRequest("ha"), wire.Hello(wire.PROTOCOL_VERSION, JOB, 0, 1)):
        assert stranger(path, message) in ("answer b''", "ConnectionResetError", "BrokenPipeError")
    found = job.status()
    assert found["workers"]["refused"] == 3
    assert (found["state"], found["joined"]) == ("starting", [])
