"""Starts a daemon on this host that no launcher attends: for a job's workers, or as `fusiond start` does."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Mapping

from fusion_rt.core.errors import FusionError
from fusion_rt.host import python_children
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
)
from fusion_rt.host.private_files import open_private

_PATHS = ("FUSION_TRACE_DIR", "FUSION_SNAPSHOT_DIRECTORY", "FUSION_METRICS_TOKEN_FILE")  # of daemons
_LOG_TAIL = 2000  # characters of the daemon's log that an error quotes


class StartedDaemon:
    """The daemon that this process has started; to be kept until the process needs it no more.

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
        ):  # a connection finds out why it is gone
            stdin.write(encode_line(peers))

    def leave(self) -> None:
        """Lets it go on by itself: this process does not wait for its end, nor warns of that at its own."""
        self._process.returncode = 0

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


def start(config: DaemonConfig, root: str, timeout: float) -> StartedDaemon:
    """Starts a daemon in a session of its own, and returns when it listens.

    Args:
        root: FUSION_RUNTIME_DIR, absolute.
        timeout: seconds.

    Raises:
        FusionError: it did not come up; the text says why.
    """
    directory = job_directory(root, config.job, config.node)
    make_private_directory(root)
    make_private_directory(directory)
    log = os.path.join(directory, "log")
    with open(open_private(log, flags=os.O_WRONLY | os.O_APPEND), "wb") as errors:
        process = subprocess.Popen(
            DAEMON_COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=python_children.DIRECTORY,
            env=_environment(os.environ, root),
            start_new_session=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        answer = _introduce(process, encode_line(config), timeout)
        if isinstance(answer, StartError):
            process.wait()
            raise FusionError(f"the daemon did not start: {answer.error or _how_it_ended(process, log)}")
        if len(config.topology.hosts) == 1:
            process.stdin.close()  # there are no peers to tell it of
    except BaseException:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(BrokenPipeError):  # it has ended before it was told anything
                pipe.close()
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
    """This process's environment with every path in it made absolute, since the daemon runs in another directory."""
    given = {name: environ[name] for name in _PATHS if environ.get(name)}
    return {
        **python_children.environment(environ),
        **{name: os.path.abspath(os.path.expanduser(path)) for name, path in given.items()},
        "FUSION_RUNTIME_DIR": root,
    }
