"""Other users of a host of the job: what it has there they cannot enter, and behind open doors they are refused."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from fusion_rt import wire
from fusion_rt.client import Client
from fusion_rt.core.errors import FusionError
from fusion_rt.core.topology import Topology
from fusion_rt.host.bootstrap import job_directory, socket_path
from tests.fusiond.processes import JOB, TIMEOUT_S, Daemons

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


ASK = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for target in sys.argv[2:]:
    sock = socket.socket()
    sock.settimeout(20)
    sock.connect(("127.0.0.1", int(sys.argv[1])))
    sock.sendall(b"GET %s HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n" % target.encode())
    answer = b"".join(iter(lambda: sock.recv(65536), b""))
    print(answer[9:12].decode(), b"fusion_" in answer)
"""


def test_metrics_are_told_to_who_has_the_token_and_nobody_keeps_the_daemon_from_ending(daemons: MakeDaemons) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = daemons(1, FUSION_METRICS_PORT=str(port)).start()
    address = job.wait_until(lambda status: bool(status["metrics"]))["metrics"]
    assert address.startswith(f"http://127.0.0.1:{port}/metrics?token=")
    assert address.partition("=")[2] not in job.log(0)
    with urllib.request.urlopen(address, timeout=20) as answer:
        assert b"fusion_uptime_seconds" in answer.read()
    targets = ["/metrics", address[:-1].partition(str(port))[2]]
    command = [sys.executable, "-I", "-c", ASK, str(port), *targets]
    asked = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    assert asked.stdout.split("\n")[:2] == ["401 False"] * 2
    with socket.create_connection(("127.0.0.1", port), 20) as dripping:
        ends = threading.Event()

        def drip() -> None:
            with suppress(OSError):
                dripping.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
                while not ends.wait(0.2):
                    dripping.sendall(b"x")

        thread = threading.Thread(target=drip)
        thread.start()
        job.end(0)
        assert thread.join(TIMEOUT_S) is None
        assert not thread.is_alive()  # it was the daemon that ended it
        ends.set()


SQUATTER = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
path = sys.argv[1]
os.umask(0)
os.makedirs(os.path.dirname(path), exist_ok=True)
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(path)
listener.listen()
print("listens", flush=True)
while True:
    sock, _ = listener.accept()
    heard = sock.recv(100)
    print("heard" if heard else "heard nothing", flush=True)
    if heard:
        sock.send(bytes.fromhex(sys.argv[2]))
"""
WELCOME = wire.encode(wire.Welcome(Topology(("a",), ((0, 1),)), 0, 1 << 20, "allreduce", "dense"))


@pytest.mark.parametrize("made_by_stranger", [True, False])
def test_a_worker_says_nothing_to_a_daemon_of_another_user(made_by_stranger: bool) -> None:
    """Without XDG_RUNTIME_DIR the runtime directory is in /tmp: somebody may have made it before the job came."""
    with tempfile.TemporaryDirectory(prefix="frt", dir="/tmp") as parent:
        os.chmod(parent, 0o1777)
        directory = Path(parent) / "fusion_rt-0" / "job.0"
        if not made_by_stranger:
            directory.mkdir(parents=True)
            for each in (directory, directory.parent):
                each.chmod(0o777)
        path = str(directory / "sock")
        command = [sys.executable, "-I", "-c", SQUATTER, path, WELCOME.hex()]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/") as squatter:
            assert squatter.stdout is not None
            try:
                assert squatter.stdout.readline() == "listens\n"
                with pytest.raises(FusionError, match="is not a directory that only user 0 can enter"):
                    Client(path, "job", 1, 1.0)
                if not made_by_stranger:  # closed since: whoever listens there is looked at as well
                    directory.chmod(0o700)
                    with pytest.raises(FusionError, match=f"user {NOBODY} listens at .*, and not a daemon of user 0"):
                        Client(path, "job", 1, 1.0)
                    assert squatter.stdout.readline() == "heard nothing\n"
            finally:
                squatter.kill()
            assert squatter.stdout.read() == ""
