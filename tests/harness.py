"""Jobs for tests: real daemons and real workers on this machine, which run functions of the test modules.

Importing torch takes seconds, so a `Job` keeps its workers and runs many functions on them; tests share one (see
`tests/torch/conftest.py`) unless they break it. Nodes are daemons on loopback.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import inspect
import io
import os
import pickle
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from fusion_rt.core.topology import Topology
from fusion_rt.host.bootstrap import (
    DaemonConfig,
    Endpoint,
    PeerTable,
    StartError,
    decode_line,
    encode_line,
    socket_path,
)
from tests import forks

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 600.0  # for one function: longer than a test may take, whose limit shows where everybody is
END_S = 10.0  # for processes to end by themselves
FAILED_S = 60.0  # for the other ranks to end a function that has failed on one, for which they may wait
_FD = "FUSION_TEST_FD"


class WorkerError(Exception):
    """A function failed on some ranks.

    Attributes:
        errors: by rank: name of the exception's class, and its text.
    """

    def __init__(self, failures: Mapping[int, tuple[str, str, str]]) -> None:
        self.errors = {rank: (name, text) for rank, (name, text, _) in failures.items()}
        super().__init__("\n".join(f"--- rank {rank}\n{trace}" for rank, (_, _, trace) in failures.items()))


class Job:
    """A running job.

    Args:
        nodes: number of ranks on each node.
        environment: variables for daemons and workers besides this process's.
        init: whether the workers call `hvd.init()` before anything else.
        modules: what the workers have imported already (`tests/forks.py`).

    Attributes:
        daemons: processes, by node.
        workers: processes, by rank.
    """

    def __init__(
        self,
        nodes: Sequence[int] = (2,),
        environment: Mapping[str, str] | None = None,
        init: bool = True,
        modules: tuple[str, ...] = forks.WORKER,
    ) -> None:
        self.topology = _topology(nodes)
        self._modules = modules
        self._directory = tempfile.mkdtemp(prefix="frt", dir="/tmp")
        # Two cores, and a process for each rank and node: more threads would only wait for each other.
        threads = {"OMP_NUM_THREADS": "1"}
        directories = {"FUSION_RUNTIME_DIR": self._directory, "FUSION_TRACE_DIR": f"{self._directory}-traces"}
        self._environment = {**os.environ, **threads, **directories, **(environment or {})}
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.workers: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        try:
            self._start_daemons()
            for rank in range(self.topology.size):
                self._start_worker(rank)
            if init:
                self.run(_init)
        except BaseException:
            self.close()
            raise

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT_S) -> list[Any]:
        """Runs a module-level function on all ranks at once; returns its results, by rank.

        Raises:
            WorkerError: it raised, or a worker died.
        """
        self.start(function, *args)
        return self.results(timeout)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Starts a function on all ranks, as `run` does, without waiting."""
        request = pickle.dumps((function, args))
        for connection in self._connections:
            connection.send_bytes(request)

    def results(self, timeout: float = TIMEOUT_S, ranks: Sequence[int] | None = None) -> list[Any]:
        """Returns the results of the function that `start` has started, from all ranks or these."""
        deadline = time.monotonic() + timeout
        asked = list(range(self.topology.size) if ranks is None else ranks)
        results: dict[int, Any] = {}
        failures: dict[int, Any] = {}
        while awaited := {self._connections[rank]: rank for rank in asked if rank not in results}:
            ready = wait(list(awaited), max(deadline - time.monotonic(), 0)) or list(awaited)
            for rank in (awaited[connection] for connection in ready):  # type: ignore[index]
                kind, results[rank] = self._answer(rank, deadline)
                if kind == "error":
                    failures[rank] = results[rank]
                    deadline = min(deadline, time.monotonic() + FAILED_S)
        if failures:
            raise WorkerError(failures)
        return [results[rank] for rank in asked]

    def close(self) -> None:
        """Ends the workers, then the daemons, and waits for them; kills those that do not end by themselves."""
        for connection in self._connections:
            connection.close()
        _end(self.workers)
        for process in self.daemons:
            if process.stdin is not None:
                process.stdin.close()
        _end(self.daemons)
        for process in self.daemons:
            if process.stdout is not None:
                process.stdout.close()
        shutil.rmtree(self._directory)
        shutil.rmtree(f"{self._directory}-traces", ignore_errors=True)  # nobody has recorded, perhaps

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start_daemons(self) -> None:
        endpoints = []
        for node in range(len(self.topology.hosts)):
            process = forks.popen(
                [sys.executable, "-m", "fusiond", "start", "--foreground", "--config-stdin"], forks.WORKER,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self._environment, cwd=ROOT,
            )  # fmt: skip
            self.daemons.append(process)
            assert process.stdin is not None
            process.stdin.write(encode_line(DaemonConfig("test", node, self.topology)))
            process.stdin.flush()
        for process in self.daemons:
            assert process.stdout is not None
            answer: Any = decode_line(process.stdout.readline(), Endpoint | StartError)  # type: ignore[arg-type]
            if isinstance(answer, StartError):
                raise RuntimeError(f"a daemon did not start: {answer.error}")
            endpoints.append(answer)
        if len(endpoints) > 1:
            for process in self.daemons:
                assert process.stdin is not None
                process.stdin.write(encode_line(PeerTable(tuple(endpoints))))
                process.stdin.flush()

    def _start_worker(self, rank: int) -> None:
        topology, node = self.topology, self.topology.node_of(rank)
        ours, theirs = socket.socketpair()
        environment = {
            **self._environment,
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": str(topology.size),
            "HOROVOD_LOCAL_RANK": str(topology.local_rank(rank)),
            "HOROVOD_LOCAL_SIZE": str(topology.local_size(rank)),
            "HOROVOD_CROSS_RANK": str(topology.cross_rank(rank)),
            "HOROVOD_CROSS_SIZE": str(topology.cross_size(rank)),
            "FUSION_JOB_ID": "test",
            "FUSION_NODE": str(node),
            "FUSION_SOCKET": socket_path(self._directory, "test", node),
            _FD: str(theirs.fileno()),
        }
        with theirs:
            self.workers.append(
                forks.popen(
                    [sys.executable, "-c", "from tests.harness import serve; serve()"],
                    self._modules,
                    env=environment,
                    cwd=ROOT,
                    pass_fds=[theirs.fileno()],
                )
            )
        self._connections.append(Connection(ours.detach()))

    def _answer(self, rank: int, deadline: float) -> tuple[str, Any]:
        connection, process = self._connections[rank], self.workers[rank]
        if not connection.poll(max(deadline - time.monotonic(), 0)):
            process.send_signal(signal.SIGUSR1)  # writes its stacks to standard error
            return "error", ("TimeoutError", "no answer in time", f"rank {rank} did not answer in time")
        try:
            answer: tuple[str, Any] = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            status = process.wait(END_S)
            return "error", ("EOFError", f"status {status}", f"rank {rank} ended with status {status}")
        return answer


def run_workers(
    function: Callable[..., Any],
    *args: Any,
    ranks: int = 2,
    nodes: int = 1,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Runs a module-level function on the ranks of a new job, which are spread over the nodes; returns results by rank.

    Raises:
        WorkerError: it raised.
    """
    shares = [ranks // nodes + (node < ranks % nodes) for node in range(nodes)]
    with Job(shares, environment) as job:
        return job.run(function, *args)


def run_scripts(directory: Path, script: Path, *arguments: str, ranks: int = 2) -> list[str]:
    """Runs a script on the ranks of a new job of one node, in a directory; returns each rank's output, in order.

    Raises:
        WorkerError: it failed.
    """
    with Job((ranks,), {"HOROVOD_START_TIMEOUT": "120"}, init=False) as job:
        return job.run(run_script, str(directory), str(script), arguments)


def run_script(directory: str, script: str, arguments: Sequence[str], allowed: str = "") -> str:
    """Runs a script in this process as `python SCRIPT ARGUMENTS` does; returns its output.

    A warning is an error, unless it matches `allowed`.
    """
    os.chdir(directory)
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("error")
        if allowed:
            warnings.filterwarnings("ignore", allowed)
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


def on_ranks(body: Callable[..., None]) -> Callable[..., None]:
    """Makes a test of a function that runs on every rank of the job that the fixture `job` provides.

    The function's parameters are the test's; it asserts on the ranks.
    """

    def test(job: Job, **arguments: Any) -> None:
        job.run(_call_body, body.__module__, body.__qualname__, arguments)

    test.__name__, test.__qualname__, test.__doc__ = body.__name__, body.__qualname__, body.__doc__
    test.__module__ = body.__module__
    test.body = body  # type: ignore[attr-defined]
    parameters = inspect.signature(body).parameters.values()
    fixture = inspect.Parameter("job", inspect.Parameter.KEYWORD_ONLY)
    signature = inspect.Signature([fixture, *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters)])
    test.__signature__ = signature  # type: ignore[attr-defined]
    return test


def _call_body(module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).body(**arguments)


def serve() -> None:
    """Runs the functions that are asked for, in a worker process, until the connection ends."""
    faulthandler.register(signal.SIGUSR1)
    connection = Connection(int(os.environ.pop(_FD)))
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        try:
            function, args = pickle.loads(request)
            answer = pickle.dumps(("result", function(*args)))
        except Exception as error:
            answer = pickle.dumps(("error", (type(error).__name__, str(error), traceback.format_exc())))
        connection.send_bytes(answer)


def _init() -> None:
    import fusion_rt.torch as hvd

    hvd.init()


def _topology(nodes: Sequence[int]) -> Topology:
    starts = [sum(nodes[:node]) for node in range(len(nodes))]
    ranks = tuple(tuple(range(start, start + count)) for start, count in zip(starts, nodes, strict=True))
    return Topology(tuple(f"node{node}" for node in range(len(nodes))), ranks)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Waits until processes have ended; kills those that do not in time."""
    deadline = time.monotonic() + END_S
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
