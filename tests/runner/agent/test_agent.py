"""The agent alone, with a test in the launcher's place."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fusion_rt.core.topology import Topology
from fusion_rt.host.bootstrap import encode_line
from fusion_rt.runner.agent.preflight import versions
from fusion_rt.runner.protocol import agent_messages
from tests.runner.conftest import FAKE_DAEMON, LASTING, ROOT
from tests.runner.family import below

pytestmark = pytest.mark.multiprocess


class Agent:
    """A running agent that was given a job of one worker."""

    def __init__(self, directory: Path, script: str, **changes: object) -> None:
        paths = os.pathsep.join(map(str, (directory, FAKE_DAEMON, ROOT)))
        environment = {**os.environ, "PYTHONPATH": paths}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fusion_rt.runner.agent"],
            env={**environment, "PYTHONSAFEPATH": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        own = versions()
        fields: dict[str, object] = {
            "python": own.python,
            "package": own.package,
            "job": "test",
            "slots": 1,
            "epoch": agent_messages.Epoch(1, 0, Topology(("here",), ((0,),)), (0,)),
            "command": (b"sh", b"-c", script.encode()),
            "environment": tuple((os.fsencode(k), os.fsencode(v)) for k, v in environment.items()),
            "directory": os.fsencode(directory),
        }
        self.send(agent_messages.Job(**{**fields, **changes}))  # type: ignore[arg-type]

    def send(self, message: object) -> None:
        self.write(message if isinstance(message, bytes) else encode_line(message))  # type: ignore[arg-type]

    def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def receive(self) -> agent_messages.FromAgent | None:
        """The next message, or None at the end."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return agent_messages.decode_from_agent(line) if line else None

    def until(self, kind: type) -> None:
        """Waits for a message of a kind."""
        while not isinstance(message := self.receive(), kind):
            assert message is not None

    def up(self) -> list[psutil.Process]:
        """Waits for the worker's first output; all processes below the agent then."""
        while not isinstance(self.receive(), agent_messages.Output):
            pass
        return psutil.Process(self.process.pid).children(recursive=True)

    def rest(self) -> list[agent_messages.FromAgent]:
        """What it says until it ends."""
        return list(iter(self.receive, None))  # type: ignore[arg-type]


@pytest.fixture
def start(runtime_dir: Path, tmp_path: Path) -> Iterator[object]:
    agents: list[Agent] = []

    def start_agent(script: str, **changes: object) -> Agent:
        agents.append(Agent(tmp_path, script, **changes))
        return agents[-1]

    yield start_agent
    for agent in agents:
        if agent.process.poll() is None:
            agent.process.terminate()
        agent.process.communicate(timeout=60)


SLEEP = "sleep 600 & echo up; exec sleep 600"


def test_a_job_is_reported_step_by_step(start, tmp_path: Path) -> None:
    agent = start(f"echo out; echo err >&2; {LASTING}; exit 3")
    said = []
    while not said or not isinstance(said[-1], agent_messages.Exited):
        said.append(agent.receive())
        if {agent_messages.WorkersUp, agent_messages.DaemonUp} <= set(map(type, said)):
            (tmp_path / "told").touch()
    kinds = [type(message).__name__ for message in said if not isinstance(message, agent_messages.DaemonLog)]
    assert kinds[0] == "HostReady"
    assert {"WorkersUp", "DaemonUp"} < set(kinds)
    assert {message for message in said if isinstance(message, agent_messages.Output)} == {
        agent_messages.Output(0, 0, "stdout", b"out\n"),
        agent_messages.Output(0, 0, "stderr", b"err\n"),
    }
    assert said[-1] == agent_messages.Exited(0, 3)
    agent.send(agent_messages.Stop(5.0))
    assert agent.rest() == [agent_messages.Stopped()]
    assert agent.process.wait() == 0


SILENT_NAME_SERVER = """
import socket, sys
def getaddrinfo(host, *rest, resolve=socket.getaddrinfo, **more):
    if host != "here":
        return resolve(host, *rest, **more)
    with open({fifo!r}) as answer:
        answer.read()
    raise socket.gaierror("no such name")
if "fusion_rt.runner.agent" in sys.orig_argv:
    socket.getaddrinfo = getaddrinfo
"""


@pytest.mark.parametrize("answers", [True, False])
def test_it_shows_that_it_is_there_while_a_name_server_does_not_answer(start, tmp_path: Path, answers: bool) -> None:
    fifo = tmp_path / "name_server"
    os.mkfifo(fifo)
    (tmp_path / "sitecustomize.py").write_text(SILENT_NAME_SERVER.format(fifo=str(fifo)), encoding="utf-8")
    epoch = agent_messages.Epoch(1, 0, Topology(("here", "there"), ((0,), (1,))), (0,))
    agent = start(SLEEP, epoch=epoch, silence_limit=36.0)
    agent.until(agent_messages.HostReady)
    readable, _, _ = select.select([agent.process.stdout], [], [], 60)
    assert readable, "no sign of life"
    assert isinstance(agent.receive(), agent_messages.SignOfLife)
    if answers:
        with fifo.open("w"):
            pass
        agent.until(agent_messages.DaemonUp)
    agent.send(agent_messages.Stop(5.0))
    assert agent_messages.Stopped() in agent.rest()
    assert agent.process.wait(60) == 0


@pytest.mark.parametrize("end", ["eof", "stop", "garbage", "too long", "term", "silence"])
def test_however_it_is_told_it_ends_everything(start, end: str) -> None:
    agent = start(SLEEP, silence_limit=3.0 if end == "silence" else 0.0)
    processes = agent.up()
    assert len(processes) == 3  # daemon, worker and its child
    match end:
        case "eof":
            agent.process.stdin.close()
            agent.process.stdin = None
        case "stop":
            agent.send(agent_messages.Stop(5.0))
        case "garbage":
            agent.write(b"what?\n")
        case "too long":
            with contextlib.suppress(BrokenPipeError):  # it has had enough before the end of it
                agent.write(b"x" * (17 * 1024 * 1024) + b"\n")
        case "term":
            agent.process.send_signal(signal.SIGTERM)
    said = agent.rest()
    assert said[-1] == agent_messages.Stopped()
    assert agent.process.wait() == 0
    assert not [process for process in processes if process.is_running()]
    refusals = [message.reasons[0] for message in said if isinstance(message, agent_messages.Refused)]
    if end == "garbage":
        assert refusals[0].startswith("b'what?\\n' is not a command of the launcher")
    elif end == "too long":
        assert refusals == ["a line is longer than 16777216 bytes"]
    else:
        assert refusals == []


def test_pings_keep_it_going(start) -> None:
    agent = start(SLEEP, silence_limit=2.0)
    processes = agent.up()
    for _ in range(12):
        with pytest.raises(subprocess.TimeoutExpired):
            agent.process.wait(0.2)
        agent.send(agent_messages.SignOfLife())
    assert all(process.is_running() for process in processes)
    agent.send(agent_messages.Stop(0.0))
    assert agent.rest()[-1] == agent_messages.Stopped()


def test_orphans_are_adopted_and_leave_no_zombies(start, until) -> None:
    agent = start("for n in 1 2 3 4 5; do (setsid sleep 0.1 &); done; sleep 0.5; echo up; sleep 600")
    agent.up()
    until(
        lambda: sorted(name for _, name in below(agent.process.pid, "name")) == ["python", "sh", "sleep"],
        "the end of the orphans",
    )
    agent.send(agent_messages.Stop(0.0))
    assert agent.rest()[-1] == agent_messages.Stopped()


def test_without_a_job_it_just_ends(start) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "fusion_rt.runner.agent"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"},
        input=b"",
        capture_output=True,
        check=True,
    )
    assert (process.stdout, process.stderr) == (b"", b"")
