"""Starting a node's daemon without a launcher: the worker of local_rank 0 does it, the others connect when it is up.

The daemon listens on the job's Unix socket only (a job without a launcher has one node, so there is no port to open),
has a session of its own, so that Ctrl-C reaches the workers first, and ends by itself when all its workers have left.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping

from fusion_rt.bootstrap import (
    DaemonConfig,
    Endpoint,
    StartError,
    decode_line,
    encode_line,
    job_directory,
    make_private_directory,
    socket_path,
)
from fusion_rt.environment import Environment
from fusion_rt.errors import FusionError
from fusion_rt.settings import Settings
from fusion_rt.topology import Topology

COMMAND = (sys.executable, "-m", "fusiond", "start", "--foreground", "--config-stdin")
_LOG_TAIL = 2000  # characters of the daemon's log that an error quotes


class StartedDaemon:
    """The daemon that this worker has started; to be kept until the worker leaves."""

    def __init__(self, process: subprocess.Popen[bytes], log: str) -> None:
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        return self._process.pid

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


def path_of_socket(where: Environment, settings: Settings) -> str:
    """Path of the daemon's socket, whoever starts it.

    Raises:
        FusionError: the path would be too long for a Unix socket.
    """
    return where.socket or socket_path(os.path.abspath(settings.runtime_root()), where.job, where.node)


def start(where: Environment, settings: Settings) -> StartedDaemon:
    """Starts the daemon of a job without a launcher, and returns when it listens.

    Raises:
        FusionError: it did not come up; the text says why.
    """
    root = os.path.abspath(settings.runtime_root())
    directory = job_directory(root, where.job, where.node)
    make_private_directory(root)
    make_private_directory(directory)
    topology = Topology((socket.gethostname(),), (tuple(range(where.size)),))
    config = DaemonConfig(where.job, where.node, topology, attached=False)
    log = os.path.join(directory, "log")
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as errors:
        process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd="/",  # files of the working directory might shadow Python's own modules
            env=_environment(os.environ, root),
            start_new_session=True,
        )
    try:
        answer = _introduce(process, encode_line(config), settings.start_timeout)
        if isinstance(answer, StartError):
            process.wait()
            raise FusionError(f"the daemon did not start: {answer.error or _how_it_ended(process, log)}")
    except BaseException:
        process.kill()
        process.wait()
        raise
    return StartedDaemon(process, log)


def _introduce(process: subprocess.Popen[bytes], config: bytes, timeout: float) -> Endpoint | StartError:
    """Sends the configuration and reads the answer; an empty `StartError` if the daemon ends without a word."""
    assert process.stdin is not None
    assert process.stdout is not None
    deadline = time.monotonic() + timeout
    try:
        with process.stdin as stdin:
            stdin.write(config)
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
    with open(log, errors="replace") as file:
        tail = file.read()[-_LOG_TAIL:].strip()
    return f"it ended with status {process.returncode}. Its log ({log}) ends with:\n{tail}"


def _environment(environ: Mapping[str, str], root: str) -> dict[str, str]:
    """The worker's environment with every path in it made absolute, since the daemon runs in another directory."""
    paths = [os.path.abspath(path) for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {
        **environ,
        "FUSION_RUNTIME_DIR": root,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONSAFEPATH": "1",
    }
