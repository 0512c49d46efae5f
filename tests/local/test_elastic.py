"""A worker's conversation with the agent of its host."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from fusion_rt.core.errors import FusionError, WireError
from fusion_rt.local import elastic
from fusion_rt.local.elastic import AgentConnection, Assignment, Attach, HostsChanged, Rejoin, Removed


class Agent:
    """The agent's side of one connection."""

    def __init__(self, path: str) -> None:
        self.environ = {elastic.SOCKET: path, elastic.SLOT: "3", elastic.EPOCH: "5"}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen()
        self._listener.settimeout(20)
        self._connection: socket.socket | None = None

    def hear(self) -> elastic.FromWorker:
        """The next thing that the worker says."""
        if self._connection is None:
            self._connection, _ = self._listener.accept()
            self._connection.settimeout(20)
        return elastic.decode_from_worker(self._connection.recv(elastic.MAX_PACKET))

    def say(self, *messages: msgspec.Struct | bytes) -> None:
        assert self._connection is not None
        for message in messages:
            self._connection.send(message if isinstance(message, bytes) else elastic.encode(message))

    def go(self) -> None:
        for sock in (self._connection, self._listener):
            if sock is not None:
                sock.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    found = Agent(str(tmp_path / "agent"))
    yield found
    found.go()


@pytest.fixture
def worker(agent: Agent) -> Iterator[AgentConnection]:
    connection = AgentConnection(agent.environ)
    assert agent.hear() == Attach(3)
    yield connection
    connection.close()


def test_news_of_hosts_is_there_when_it_is_looked_for(agent: Agent, worker: AgentConnection) -> None:
    assert worker.changes() == []
    news = [HostsChanged(1.0, added=True, removed=False), HostsChanged(2.0, added=False, removed=True)]
    agent.say(*news)
    assert worker.changes() == news
    assert worker.changes() == []


def test_a_worker_waits_for_a_later_epoch_and_forgets_old_news(agent: Agent, worker: AgentConnection) -> None:
    agent.say(HostsChanged(1.0, added=True, removed=False))
    agent.say(Assignment(5, {"a": "old"}), Assignment(7, {"a": "new"}))
    assert worker.rejoin("rank 1 is gone") == Assignment(7, {"a": "new"})
    assert agent.hear() == Rejoin(5, "rank 1 is gone")
    assert worker.epoch == 7
    assert worker.changes() == []
    agent.say(Removed("the host is full"))
    assert worker.rejoin() == Removed("the host is full")
    assert agent.hear() == Rejoin(7)


def test_a_word_that_comes_early_is_not_forgotten(agent: Agent, worker: AgentConnection) -> None:
    agent.say(Removed("the host is gone"), HostsChanged(1.0, added=False, removed=True))
    assert len(worker.changes()) == 1
    assert worker.rejoin() == Removed("the host is gone")


def test_a_long_error_is_cut(agent: Agent, worker: AgentConnection) -> None:
    agent.say(Removed(""))
    worker.rejoin("€" * elastic.MAX_PACKET)
    said = agent.hear()
    assert isinstance(said, Rejoin)
    assert 1000 < len(said.error) < elastic.MAX_PACKET
    with pytest.raises(WireError, match="longer than the limit"):
        elastic.encode(Rejoin(0, "x" * elastic.MAX_PACKET))


def test_the_agent_s_end_is_the_job_s(agent: Agent, worker: AgentConnection) -> None:
    agent.go()
    for action in (worker.changes, worker.rejoin):
        with pytest.raises(FusionError, match="agent on this host is gone"):
            action()


@pytest.mark.parametrize("data", [b"{}", b"\xff", b'{"type":"assignment","epoch":"x","environment":{}}'])
def test_nonsense_is_an_error(agent: Agent, worker: AgentConnection, data: bytes) -> None:
    agent.say(data)
    with pytest.raises(FusionError, match="makes no sense"):
        worker.changes()
    with pytest.raises(WireError, match="not a message of an elastic worker"):
        elastic.decode_from_worker(data)


def test_an_agent_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "nobody")
    with pytest.raises(FusionError, match=f"cannot be reached at {path}: No such file"):
        AgentConnection({elastic.SOCKET: path, elastic.SLOT: "0", elastic.EPOCH: "0"})


# --- of this process --------------------------------------------------------------------------------------------------


@pytest.fixture
def process(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentConnection]:
    """This process, in an elastic job."""
    for name, value in agent.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(elastic, "_connection", None)
    connection = elastic.agent()
    assert connection is not None
    assert agent.hear() == Attach(3)
    yield connection
    connection.close()


def test_outside_of_an_elastic_job_there_is_no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(elastic.SOCKET, raising=False)
    assert elastic.agent() is None


def test_a_worker_connects_once(process: AgentConnection) -> None:
    assert elastic.agent() is process


def test_a_place_in_an_epoch_is_a_set_of_variables(
    agent: Agent, process: AgentConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_RANK", "1")
    agent.say(Assignment(6, {"HOROVOD_RANK": "0"}))
    elastic.move(process, "why")
    assert os.environ["HOROVOD_RANK"] == "0"
    assert os.environ[elastic.EPOCH] == "6"
    assert agent.hear() == Rejoin(5, "why")


def test_a_worker_without_a_place_ends_well(
    agent: Agent, process: AgentConnection, capfd: pytest.CaptureFixture[str]
) -> None:
    agent.say(Removed("host1 is gone"))
    with pytest.raises(SystemExit) as caught:
        elastic.move(process)
    assert caught.value.code == 0
    assert capfd.readouterr().err == "fusion_rt: this worker leaves the job: host1 is gone\n"


@pytest.mark.usefixtures("process")
def test_a_forked_child_does_not_talk_to_the_agent() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0 if elastic.agent() is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
