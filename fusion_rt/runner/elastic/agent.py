"""The agent of a host in an elastic job: keeps its workers, while each membership epoch has a daemon of its own."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass

import msgspec

from fusion_rt import elastic
from fusion_rt.errors import WireError
from fusion_rt.runner import environment, messages
from fusion_rt.runner.agent import Agent
from fusion_rt.runner.daemon import Daemon
from fusion_rt.runner.elastic.workers import WorkerServer
from fusion_rt.runner.messages import Asked, Ended, Job, Ready, WorkersUp
from fusion_rt.runner.pipes import Channel
from fusion_rt.runner.supervise import Child, signal_tree
from fusion_rt.runner.task import Result

REMOVED_S = 10.0  # seconds that a worker without a place has to end by itself, to save something perhaps
TERM_GRACE = 5.0  # seconds between TERM and KILL then
_DAEMON_S = 2.0  # seconds that the daemon of an epoch that is over has to end by itself


@dataclass(eq=False)
class _Worker:
    child: Child
    rank: int  # in the epoch that it has a place in
    born: int  # number of the epoch that it was started for
    is_unused: bool = False
    is_removed: bool = False


class ElasticAgent(Agent):
    """One elastic job on one host."""

    def __init__(self, job: Job, channel: Channel) -> None:
        super().__init__(job, channel)
        self._environ: dict[bytes, bytes] = {}
        self._server: WorkerServer | None = None
        self._epoch: messages.Epoch | None = None
        self._epoch_job = job  # the same, with what is this epoch's
        self._workers: dict[int, _Worker] = {}  # by slot
        self._retired: set[Daemon] = set()  # of epochs that are over, which have not ended yet

    async def _bring_up(self) -> None:
        environ = await self._check()
        if environ is None:
            return
        self._environ = environ
        directory = os.path.join(self._root, f"{self._job.job}.agent{self._job.elastic}")
        self._server = WorkerServer(directory, self._workers.keys, self._on_rejoin)
        await self._channel.send(Ready())

    async def _do(self, command: messages.Command) -> None:
        match command:
            case messages.Epoch():
                await self._start_epoch(command)
            case messages.Begin():
                await self._begin(command)
            case messages.Abandon(number):
                if self._epoch is not None and self._epoch.number == number:
                    self._retire_daemon()
                    self._end_unused(number)
            case messages.Remove(slots, reason):
                self._remove(slots, reason)
            case messages.Release(reason):
                workers = list(self._workers.values())
                self._remove(tuple(self._workers), reason)
                self._spawn(self._stop_after(workers))
            case messages.Kill(slots):
                for slot in slots:
                    if slot in self._workers:
                        signal_tree(self._workers[slot].child.pid, signal.SIGKILL)
            case messages.Changed(timestamp, added, removed):
                if self._server is not None:
                    self._server.tell_all(elastic.HostsChanged(timestamp, added, removed))

    async def _start_epoch(self, epoch: messages.Epoch) -> None:
        """Starts the daemon of a new epoch; the workers of the one before have all left it."""
        if self._server is None:
            raise WireError("the launcher began an epoch before the agent was ready")
        self._retire_daemon()
        self._epoch = epoch
        self._epoch_job = msgspec.structs.replace(
            self._job,
            job=f"{self._job.job}-{epoch.number}",
            node=epoch.node,
            topology=epoch.topology,
            loopback=epoch.loopback,
        )
        await self._start_daemon(self._epoch_job, self._environ, epoch.number)

    async def _begin(self, begin: messages.Begin) -> None:
        """Gives their places to the workers that wait for them, and starts new ones in the other slots."""
        if self._epoch is None or self._epoch.number != begin.number or self._daemon is None or self._server is None:
            raise WireError(f"the launcher began epoch {begin.number}, which was not started")
        self._server.begin_epoch()
        if begin.table is not None:
            self._daemon.introduce(begin.table)
        ranks = self._epoch.topology.ranks[self._epoch.node]
        for slot, rank in zip(self._epoch.slots, ranks, strict=True):
            if slot not in begin.survivors:
                await self._start(slot, rank)
            elif slot in self._workers:  # if not, it has just ended, as the launcher will hear
                self._workers[slot].rank = rank
                self._server.tell(slot, elastic.Assignment(begin.number, self._place(slot, rank)))
        await self._channel.send(WorkersUp())

    async def _start(self, slot: int, rank: int) -> None:
        env = environment.of_worker(self._environ, self._epoch_job, rank, self._root)
        env.update({name.encode(): os.fsencode(value) for name, value in self._place(slot, rank).items()})
        started = await self._start_worker(env)
        if started is not None:
            child, result = started
            self._workers[slot] = worker = _Worker(child, rank, self._epoch.number if self._epoch else 0)
            self._spawn(self._watch(slot, worker, result))

    def _place(self, slot: int, rank: int) -> dict[str, str]:
        """What tells a worker its place."""
        assert self._epoch is not None
        assert self._server is not None
        return {
            **environment.place_of_worker(self._epoch_job, rank, self._root),
            elastic.SOCKET: self._server.path,
            elastic.SLOT: str(slot),
            elastic.EPOCH: str(self._epoch.number),
        }

    async def _watch(self, slot: int, worker: _Worker, result: Result | None) -> None:
        status = await self._carry(worker.child, lambda: worker.rank, result)
        if not worker.is_removed:
            self._free(slot)
            killed = "" if worker.is_unused else self._oom_kills.explain(status)
            await self._channel.send(Ended(slot, status, killed, worker.is_unused))

    def _on_rejoin(self, slot: int, message: elastic.Rejoin) -> None:
        self._channel.send_now(Asked(slot, message.epoch, message.error))

    def _remove(self, slots: tuple[int, ...], reason: str) -> None:
        for slot in slots:
            worker = self._workers.get(slot)
            if worker is not None:
                worker.is_removed = True
                if self._server is not None:
                    self._server.tell(slot, elastic.Removed(reason))
                self._free(slot)
                self._spawn(self._see_off(worker.child))

    def _end_unused(self, number: int) -> None:
        """Ends workers that would look for the daemon of an epoch that is over, when they have come so far."""
        for slot, worker in self._workers.items():
            if worker.born == number and self._server is not None and not self._server.knows(slot):
                worker.is_unused = True
                signal_tree(worker.child.pid, signal.SIGKILL)

    def _free(self, slot: int) -> None:
        self._workers.pop(slot, None)
        if self._server is not None:
            self._server.forget(slot)

    async def _see_off(self, child: Child) -> None:
        """Waits until a worker without a place has ended, and then helps."""
        for seconds, number in ((REMOVED_S, signal.SIGTERM), (TERM_GRACE, signal.SIGKILL)):
            await asyncio.wait([child.exit], timeout=seconds)
            if child.exit.done():
                return
            signal_tree(child.pid, number)

    async def _stop_after(self, workers: list[_Worker]) -> None:
        if workers:
            await asyncio.wait([worker.child.exit for worker in workers], timeout=REMOVED_S)
        self.stop(TERM_GRACE)

    def _retire_daemon(self) -> None:
        if self._daemon is not None:
            self._daemon.is_unwanted = True
            self._retired.add(self._daemon)
            self._spawn(self._end_daemon(self._daemon))
            self._daemon = None

    async def _end_daemon(self, daemon: Daemon) -> None:
        await daemon.end(_DAEMON_S)
        self._retired.discard(daemon)

    async def _end(self, grace: float) -> None:
        await super()._end(grace)
        for daemon in self._retired:
            daemon.remove_files()
        if self._server is not None:
            self._server.close()
