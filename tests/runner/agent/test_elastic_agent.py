"""The agent of a host in an elastic job alone, with a test in the launcher's place and a stand-in for the daemon."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from fusion_rt.core.topology import Topology
from fusion_rt.host.bootstrap import Abandon, Endpoint, EpochOver, Reform, encode_line
from fusion_rt.runner.agent.preflight import versions
from fusion_rt.runner.protocol import agent_messages
from tests.runner.conftest import FAKE_DAEMON, ROOT

pytestmark = pytest.mark.multiprocess

ONE = Topology(("here",), ((0, 1),))
TURNED = Topology(("here",), ((1, 0),))
ALONE = Topology(("here",), ((0,),))
REJOIN = """
import os, sys
from fusion_rt.local.elastic import AgentConnection, Assignment
agent = AgentConnection(os.environ)
while True:
    names = ("HOROVOD_RANK", "HOROVOD_SIZE", "FUSION_SOCKET", "FUSION_ELASTIC_SLOT", "FUSION_ELASTIC_EPOCH")
    print(agent.epoch, agent.expected is not None, *(os.environ[name] for name in names), os.getpid(), flush=True)
    answer = agent.rejoin("why")
    if not isinstance(answer, Assignment):
        sys.exit(answer.reason)
    os.environ.update(answer.environment)
"""
T = TypeVar("T")


class ElasticAgent:
    """A running agent that was given a job."""

    def __init__(self, directory: Path, command: tuple[bytes, ...]) -> None:
        self.kept: list[agent_messages.FromAgent] = []
        paths = os.pathsep.join(map(str, (FAKE_DAEMON, ROOT)))
        environment = {**os.environ, "PYTHONPATH": paths}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fusion_rt.runner.agent"],
            env={**environment, "PYTHONSAFEPATH": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        own = versions()
        variables = tuple((os.fsencode(name), os.fsencode(value)) for name, value in environment.items())
        job = agent_messages.Job(
            own.python, own.package, "test", 2, command, variables, os.fsencode(directory), elastic=7, loopback=True
        )
        self.send(job)
        self.until(agent_messages.HostReady)

    def send(self, message: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(encode_line(message))
        self.process.stdin.flush()

    def receive(self) -> agent_messages.FromAgent | None:
        """The next message, or None at the end."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return agent_messages.decode_from_agent(line) if line else None

    def until(self, kind: type[T]) -> T:
        """The next message of a kind; others are kept."""
        while True:
            for message in self.kept:
                if isinstance(message, kind):
                    self.kept.remove(message)
                    return message
            received = self.receive()
            assert received is not None, self.process.communicate()[1]
            self.kept.append(received)

    def rest(self) -> list[agent_messages.FromAgent]:
        """What nobody has waited for, to the end."""
        return [*self.kept, *iter(self.receive, None)]  # type: ignore[list-item]

    def start(self, serial: int) -> int:
        """Starts a daemon; its process."""
        self.send(agent_messages.StartDaemon(0, serial, ("here",)))
        up = self.until(agent_messages.DaemonUp)
        assert up.serial == serial
        self.endpoint = up.endpoint
        return up.endpoint.pid

    def begin(
        self, number: int, waiting: tuple[int, ...] = (), topology: Topology = ONE, slots: tuple[int, ...] = (0, 1)
    ) -> None:
        """Begins an epoch."""
        epoch = agent_messages.Epoch(number, 0, topology, slots)
        self.send(agent_messages.Begin(Reform(number, topology, (), (self.endpoint,)), epoch, waiting))

    def outputs(self, count: int) -> list[list[str]]:
        """The next lines of workers, split into words, with the rank of which they are in front; sorted."""
        found: dict[int, bytes] = {}
        while sum(data.count(b"\n") for data in found.values()) < count:
            message = self.until(agent_messages.Output)
            found[message.rank] = found.get(message.rank, b"") + message.data
        return sorted([str(rank), *line.split()] for rank, data in found.items() for line in data.decode().splitlines())


@pytest.fixture
def start(runtime_dir: Path, tmp_path: Path) -> Iterator[Callable[..., ElasticAgent]]:
    agents: list[ElasticAgent] = []

    def start_agent(*command: str) -> ElasticAgent:
        agents.append(ElasticAgent(tmp_path, tuple(os.fsencode(word) for word in command)))
        return agents[-1]

    yield start_agent
    for agent in agents:
        if agent.process.poll() is None:
            agent.process.terminate()
        agent.process.communicate(timeout=60)
    assert os.listdir(runtime_dir) == []


def place(line: list[str]) -> list[str]:
    """What a worker has printed, without the directories of its socket, and without its process."""
    return [os.path.basename(os.path.dirname(word)) or word for word in line[:-1]]


def test_daemon_and_workers_go_from_epoch_to_epoch(start: Callable[..., ElasticAgent]) -> None:
    agent = start(sys.executable, "-c", REJOIN)
    daemon = agent.start(1)
    agent.begin(1)
    before = agent.outputs(2)
    assert [place(line) for line in before] == [
        [str(n), "1", "False", str(n), "2", "test.0", str(n), "1"] for n in (0, 1)
    ]
    asked = [agent.until(agent_messages.Asked) for _ in range(2)]
    assert {(message.slot, message.epoch, message.error) for message in asked} == {(0, 1, "why"), (1, 1, "why")}
    agent.begin(2, (0, 1), TURNED)
    after = agent.outputs(2)
    assert [place(line) for line in after] == [
        ["0", "2", "False", "0", "2", "test.0", "1", "2"],
        ["1", "2", "False", "1", "2", "test.0", "0", "2"],
    ]
    assert [line[-1] for line in after] == [line[-1] for line in reversed(before)], "in the same processes"
    assert psutil.pid_exists(daemon)
    agent.send(agent_messages.Stop(1.0))
    agent.until(agent_messages.Stopped)


def test_workers_go_on_with_another_daemon(start: Callable[..., ElasticAgent], until: Callable[..., object]) -> None:
    agent = start(sys.executable, "-c", REJOIN)
    first = agent.start(1)
    agent.begin(1)
    agent.outputs(2)
    agent.start(2)
    until(lambda: not psutil.pid_exists(first), "the end of the daemon before")
    agent.begin(2, (0, 1))
    assert {line[5].split("/")[-2] for line in agent.outputs(2)} == {"test-2.0"}


def test_a_newcomer_has_its_place_when_it_has_asked(start: Callable[..., ElasticAgent]) -> None:
    agent = start(sys.executable, "-c", REJOIN)
    agent.start(1)
    agent.begin(1, topology=ALONE, slots=(1,))
    ((*_, first),) = agent.outputs(1)
    agent.send(agent_messages.Recruit(0, agent_messages.Epoch(1, 0, TURNED, (0, 1))))
    ((*begun, second),) = agent.outputs(1)
    assert place([*begun, second]) == ["1", "1", "True", "1", "2", "test.0", "0", "1"], "the place that it is to have"
    assert {agent.until(agent_messages.Asked).slot for _ in range(2)} == {0, 1}
    agent.begin(2, (0, 1), TURNED)
    assert [(line[2], line[3], line[-1]) for line in agent.outputs(2)] == [
        ("False", "0", first),
        ("False", "1", second),
    ]


def test_an_epoch_is_overtaken_by_the_next(start: Callable[..., ElasticAgent]) -> None:
    agent = start(sys.executable, "-c", REJOIN)
    agent.start(1)
    agent.begin(1)
    agent.outputs(2)
    agent.begin(2, (0, 1))
    agent.begin(3, (0, 1))
    assert {line[1] for line in agent.outputs(2)} <= {"2", "3"}
    agent.send(Abandon(3, "rank 9 is gone"))
    while (over := agent.until(EpochOver)).number != 3:
        pass
    assert over == EpochOver(3, (), "rank 9 is gone")


def test_an_epoch_of_a_daemon_that_is_gone_is_taken_back(start: Callable[..., ElasticAgent]) -> None:
    agent = start(sys.executable, "-c", REJOIN)
    daemon = psutil.Process(agent.start(1))
    agent.begin(1, topology=ALONE, slots=(0,))
    assert agent.until(agent_messages.Asked) == agent_messages.Asked(0, 1, "why")
    daemon.suspend()
    agent.begin(2, (0,))
    daemon.kill()
    assert agent.until(agent_messages.DaemonDown).serial == 1
    assert agent.until(agent_messages.Asked) == agent_messages.Asked(0, 2, "the daemon of its host is gone")
    assert agent.until(agent_messages.Exited) == agent_messages.Exited(1, 0, unused=True)
    agent.start(2)
    agent.begin(3, (0,))
    assert {line[1] for line in agent.outputs(3)} == {"1", "3"}


def test_an_agent_says_that_it_is_there(start: Callable[..., ElasticAgent]) -> None:
    agent = start("sleep", "600")
    agent.send(agent_messages.Hail())
    assert agent.until(agent_messages.Present)


def test_a_daemon_that_others_have_lost_is_ended_if_it_does_not_answer(
    start: Callable[..., ElasticAgent], runtime_dir: Path
) -> None:
    agent = start("sleep", "600")
    first = psutil.Process(agent.start(1))
    agent.send(agent_messages.CheckDaemon(1))
    agent.begin(1)
    agent.until(agent_messages.WorkersUp)
    assert first.is_running(), "it has answered"
    first.suspend()
    agent.send(agent_messages.CheckDaemon(2))  # which is not there any more, or not yet
    agent.send(agent_messages.CheckDaemon(1))
    why = "other hosts had declared it dead, and it did not answer its agent within 0.5 s"
    assert agent.until(agent_messages.DaemonDown) == agent_messages.DaemonDown(1, -9, why)
    assert not first.is_running()


def test_an_agent_tries_until_it_has_reached_other_daemons(start: Callable[..., ElasticAgent]) -> None:
    agent = start("sleep", "600")
    agent.start(1)
    with socket.socket() as control, socket.socket() as payload:
        for one in (control, payload):
            one.bind(("127.0.0.1", 0))
        ports = control.getsockname()[1], payload.getsockname()[1]
        control.listen()
        agent.send(agent_messages.Reach(1, (Endpoint(1, 1, "127.0.0.1", *ports, "k" * 40),)))
        control.accept()[0].close()
        agent.send(agent_messages.Hail())
        agent.until(agent_messages.Present)
        assert not [message for message in agent.kept if isinstance(message, agent_messages.InReach)]
        payload.listen()
        assert agent.until(agent_messages.InReach) == agent_messages.InReach(1)


def test_a_survivor_that_has_just_ended_is_not_replaced_by_a_worker_without_the_state(
    start: Callable[..., ElasticAgent],
) -> None:
    agent = start("sh", "-c", "echo up; [ $FUSION_ELASTIC_SLOT = 1 ] && exit 3; exec sleep 600")
    agent.start(1)
    agent.begin(1)
    assert agent.until(agent_messages.Exited) == agent_messages.Exited(1, 3)
    agent.begin(2, (0, 1))
    agent.until(agent_messages.WorkersUp)
    workers = [child for child in psutil.Process(agent.process.pid).children() if child.name() in ("sh", "sleep")]
    assert len(workers) == 1
    agent.begin(3, (0,))
    assert agent.until(agent_messages.Exited) == agent_messages.Exited(1, 3), "this one was asked for"


def test_workers_that_have_not_begun_end_with_their_epoch(start: Callable[..., ElasticAgent]) -> None:
    slow = f"import os, time\nif os.environ['FUSION_ELASTIC_SLOT'] == '0': time.sleep(600)\n{REJOIN}"
    agent = start(sys.executable, "-c", slow)
    agent.start(1)
    agent.begin(1)
    assert agent.until(agent_messages.Asked).slot == 1
    agent.send(Abandon(1, "why"))
    assert agent.until(agent_messages.Exited) == agent_messages.Exited(0, -9, unused=True)
    agent.begin(2, (1,))
    assert agent.until(agent_messages.Asked) == agent_messages.Asked(1, 2, "why"), "it has gone on"
    agent.send(Abandon(2, "why"))
    assert agent.until(agent_messages.Exited) == agent_messages.Exited(0, -9, unused=True)


def test_a_worker_is_killed_with_all_that_it_has_started(start: Callable[..., ElasticAgent]) -> None:
    agent = start("sh", "-c", "trap '' TERM; setsid sleep 600 & echo $!; wait")
    agent.start(1)
    agent.begin(1)
    children = {int(rank): psutil.Process(int(pid)) for rank, pid in agent.outputs(2)}
    agent.send(agent_messages.Kill((0,)))
    assert agent.until(agent_messages.Exited) == agent_messages.Exited(0, -9)
    assert psutil.wait_procs([children[0]], timeout=60)[1] == []
    assert children[1].is_running()


def test_a_daemon_that_dies_is_told_and_one_that_is_ended_is_not(
    start: Callable[..., ElasticAgent], runtime_dir: Path
) -> None:
    agent = start("sleep", "600")
    (runtime_dir / "test.0").mkdir()  # what a killed daemon leaves
    psutil.Process(agent.start(1)).kill()
    assert agent.until(agent_messages.DaemonDown) == agent_messages.DaemonDown(1, -9)
    process = psutil.Process(agent.start(2))
    assert not (runtime_dir / "test.0").exists()
    agent.start(3)
    assert psutil.wait_procs([process], timeout=60)[1] == []
    agent.send(agent_messages.Stop(1.0))
    said = agent.rest()
    assert not [message for message in said if isinstance(message, agent_messages.DaemonDown | agent_messages.Exited)]


def test_a_released_host_ends_its_workers_and_itself(start: Callable[..., ElasticAgent]) -> None:
    lingers = REJOIN.replace("sys.exit(answer.reason)", "print(answer.reason); __import__('time').sleep(600)")
    agent = start(sys.executable, "-c", f"import os\nif os.environ['HOROVOD_RANK'] == '1': exec({lingers!r})\n{REJOIN}")
    agent.start(1)
    agent.begin(1)
    for _ in range(2):
        agent.until(agent_messages.Asked)
    agent.send(agent_messages.Release("no room"))
    said = agent.rest()
    printed = b"".join(message.data for message in said if isinstance(message, agent_messages.Output))
    assert printed.count(b"no room") == 2  # their lines may be mixed
    assert isinstance(said[-1], agent_messages.Stopped)
    assert not [message for message in said if isinstance(message, agent_messages.Exited)]
    assert agent.process.wait(60) == 0


def test_a_worker_that_was_removed_has_its_time_although_its_host_is_released(
    start: Callable[..., ElasticAgent],
) -> None:
    saves = REJOIN.replace("sys.exit(answer.reason)", "__import__('time').sleep(0.5); sys.exit('saved')")
    agent = start(sys.executable, "-c", saves)
    agent.start(1)
    agent.begin(1)
    for _ in range(2):
        agent.until(agent_messages.Asked)
    agent.send(agent_messages.Remove((0, 1), "no place"))
    agent.send(agent_messages.Release("no room"))
    printed = b"".join(message.data for message in agent.rest() if isinstance(message, agent_messages.Output))
    assert printed.count(b"saved") == 2  # their lines may be mixed
    assert agent.process.wait(60) == 0
