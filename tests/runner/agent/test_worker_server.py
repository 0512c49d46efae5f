"""What the agent of a host and its workers say to each other, over the real socket."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from fusion_rt.core.errors import FusionError
from fusion_rt.local import elastic
from fusion_rt.local.elastic import AgentConnection, Assignment, HostsChanged, Rejoin, Removed
from fusion_rt.runner.agent import worker_server
from fusion_rt.runner.agent.worker_server import WorkerServer
from fusiond.host.leftovers import remove_dead

TIMEOUT_S = 20.0


class Agent:
    """A server of two slots, and what was asked of it."""

    def __init__(self, directory: Path) -> None:
        self.asked: list[tuple[int, Rejoin]] = []
        self.server = WorkerServer(str(directory / "job.agent1"), lambda: [0, 1], self._on_rejoin)

    def _on_rejoin(self, slot: int, message: Rejoin) -> None:
        self.asked.append((slot, message))

    def worker(self, slot: int, epoch: int = 1) -> AgentConnection:
        """A connection of a worker."""
        variables = {elastic.SOCKET: self.server.path, elastic.SLOT: str(slot), elastic.EPOCH: str(epoch)}
        return AgentConnection(variables)

    async def attached(self, *slots: int) -> None:
        """Waits until the server knows the workers of these slots."""
        await until(lambda: set(slots) <= self.server._connections.keys())


async def until(condition: Callable[[], object]) -> None:
    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.002)

    await asyncio.wait_for(poll(), TIMEOUT_S)


def served(body: Callable[[Agent], Coroutine[Any, Any, None]]) -> Callable[[Path], None]:
    """Makes a test of a coroutine that talks to a server."""

    def test(runtime_dir: Path) -> None:
        async def run() -> None:
            agent = Agent(runtime_dir)
            try:
                await body(agent)
            finally:
                agent.server.close()
            assert os.listdir(runtime_dir) == []

        asyncio.run(run())

    test.__doc__ = body.__doc__
    return test


@served
async def test_a_worker_asks_and_gets_its_place(agent: Agent) -> None:
    worker = agent.worker(1)
    place = asyncio.create_task(asyncio.to_thread(worker.rejoin, "rank 3 is gone"))
    await until(lambda: agent.asked)
    assert agent.asked == [(1, Rejoin(1, "rank 3 is gone"))]
    agent.server.tell(0, Assignment(2, {}))  # nobody is there
    agent.server.tell(1, Assignment(2, {"HOROVOD_RANK": "0"}))
    assert await place == Assignment(2, {"HOROVOD_RANK": "0"})
    assert worker.epoch == 2
    worker.close()


@served
async def test_a_worker_without_a_place_is_told_and_its_slot_is_free(agent: Agent) -> None:
    old = agent.worker(0)
    answer = asyncio.create_task(asyncio.to_thread(old.rejoin))
    await until(lambda: agent.asked)
    agent.server.tell(0, Removed("no room"))
    agent.server.forget(0)
    assert await answer == Removed("no room")
    new = agent.worker(0, epoch=2)
    await agent.attached(0)
    agent.server.tell(0, HostsChanged(1.0, True, False))
    await until(lambda: new.changes())
    assert old.changes() == [], "it is spoken to no more, but not cut off either"
    new.close()
    old.close()


@served
async def test_all_hear_of_hosts_that_change_even_those_who_come_later(agent: Agent) -> None:
    early = agent.worker(0)
    await agent.attached(0)
    news = [HostsChanged(1.0, True, False), HostsChanged(2.0, False, True)]
    agent.server.tell_all(news[0])
    late = agent.worker(1)
    await agent.attached(1)
    agent.server.tell_all(news[1])
    heard: dict[AgentConnection, list[HostsChanged]] = {early: [], late: []}
    for worker, messages in heard.items():
        while len(messages) < 2:
            messages += worker.changes()
            await asyncio.sleep(0)
        assert messages == news
        worker.close()
    await until(lambda: not agent.server._connections)
    agent.server.begin_epoch()
    new = agent.worker(0, epoch=2)
    await agent.attached(0)
    assert new.changes() == [], "the new epoch takes it into account"
    new.close()


@served
async def test_a_worker_that_never_looks_does_not_stop_the_agent(agent: Agent) -> None:
    worker = agent.worker(0)
    await agent.attached(0)
    for number in range(20_000):
        agent.server.tell_all(HostsChanged(float(number), True, False))
    assert len(worker.changes()) > 10
    worker.close()


@served
async def test_who_makes_no_sense_or_has_no_slot_is_cut_off(agent: Agent) -> None:
    worker = agent.worker(0)
    await agent.attached(0)
    for first in (b"nonsense", b'{"type":"attach","slot":7}', b'{"type":"attach","slot":0}', b"x" * elastic.MAX_PACKET):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.settimeout(TIMEOUT_S)
            stranger.connect(agent.server.path)
            stranger.send(first)
            assert await asyncio.to_thread(stranger.recv, 1) == b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(TIMEOUT_S)
        stranger.connect(agent.server.path)
        stranger.send(elastic.encode(Rejoin(1, "I was never started")))
        stranger.shutdown(socket.SHUT_WR)
        assert await asyncio.to_thread(stranger.recv, 1) == b"", "it was heard to the end"
    agent.server.tell_all(HostsChanged(1.0, True, False))
    await until(worker.changes)
    assert agent.asked == []
    worker.close()


@served
async def test_other_users_are_not_served(agent: Agent) -> None:
    directory = os.path.dirname(agent.server.path)
    assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_server, "peer_credentials", lambda connection: (1, os.getuid() + 1, 1))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.settimeout(TIMEOUT_S)
            stranger.connect(agent.server.path)
            assert await asyncio.to_thread(stranger.recv, 1) == b""


@served
async def test_when_the_agent_ends_its_workers_hear_of_it(agent: Agent) -> None:
    worker = agent.worker(0)
    answer = asyncio.create_task(asyncio.to_thread(worker.rejoin))
    await until(lambda: agent.asked)
    agent.server.close()
    with pytest.raises(FusionError, match="agent on this host is gone, and with it the job"):
        await answer
    worker.close()


SERVE_AND_DIE = """
import asyncio, os, signal, sys
from fusion_rt.runner.agent import worker_server
from fusion_rt.runner.agent.worker_server import WorkerServer

async def serve():
    WorkerServer(sys.argv[1], lambda: [], lambda slot, message: None)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(serve())
"""


def test_what_an_agent_that_was_killed_has_left_is_removed_by_the_next_daemon(runtime_dir: Path) -> None:
    left = runtime_dir / "job.agent2"
    died = subprocess.run([sys.executable, "-c", SERVE_AND_DIE, str(left)], timeout=60)
    assert died.returncode == -signal.SIGKILL
    assert sorted(os.listdir(left)) == ["lock", "workers"]

    async def beside_one_that_lives() -> list[str]:
        agent = Agent(runtime_dir)
        try:
            with pytest.raises(FusionError, match="another agent of this job"):
                Agent(runtime_dir)
            return remove_dead(str(runtime_dir))
        finally:
            agent.server.close()

    assert asyncio.run(beside_one_that_lives()) == [str(left)]
    assert os.listdir(runtime_dir) == []


def test_a_path_that_is_too_long_is_told(runtime_dir: Path) -> None:
    with pytest.raises(FusionError, match=r"is longer than the 107 bytes .*; set FUSION_RUNTIME_DIR"):
        WorkerServer(str(runtime_dir / ("x" * 100)), lambda: [], lambda slot, message: None)
