"""The workers of one host: starts them, tells them their places, passes on their output, and ends them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import msgspec

from fusion_rt.core.errors import FusionError
from fusion_rt.local import elastic
from fusion_rt.runner.agent import worker_variables
from fusion_rt.runner.agent.function_call import FunctionFile, ResultFile
from fusion_rt.runner.agent.oom import OomKills
from fusion_rt.runner.agent.tasks import Tasks
from fusion_rt.runner.agent.worker_server import WorkerServer
from fusion_rt.runner.protocol import agent_messages
from fusion_rt.runner.protocol.agent_messages import OUTPUT_CHUNK, REMOVED_S, Epoch, Job
from fusion_rt.runner.protocol.child_processes import Child, Children, signal_tree
from fusion_rt.runner.protocol.pipes import LineWriter, Pump, settle

TERM_GRACE = 5.0  # seconds between TERM and KILL


@dataclass(eq=False)
class _Worker:
    child: Child
    rank: int  # in the epoch that it has a place in, or is to have one
    born: int  # number of the epoch that it was started for; 0: it asks for a place when it is ready
    has_place: bool
    is_unused: bool = False
    is_removed: bool = False


class LocalWorkers:
    """The workers of one job on one host.

    Args:
        job: theirs.
        environ: of the job on this host.
        channel: the launcher's.
        children: starts them.
        function: the one that they call, if they do.
        oom_kills: explains how they were killed.
        tasks: the agent's.

    Attributes:
        server: their connections; None where membership is fixed.
    """

    def __init__(
        self,
        job: Job,
        environ: Mapping[bytes, bytes],
        channel: LineWriter,
        children: Children,
        function: FunctionFile | None,
        oom_kills: OomKills,
        tasks: Tasks,
    ) -> None:
        self._job = job
        self._environ = environ
        self._channel = channel
        self._children = children
        self._function = function
        self._oom_kills = oom_kills
        self._tasks = tasks
        self._workers: dict[int, _Worker] = {}  # by slot
        self._leaving: set[asyncio.Future[int]] = set()  # the exits of workers that were told to go
        self.server: WorkerServer | None = None

    def slots(self) -> list[int]:
        """Returns the slots that have a worker."""
        return list(self._workers)

    def connectable(self) -> list[int]:
        """Returns the slots whose workers may connect. One that was ended before it had begun with anything may have
        connected just then: the launcher is told that it has ended, and must not hear that it asks for a place."""
        return [slot for slot, worker in self._workers.items() if not worker.is_unused]

    async def give_places(self, epoch: Epoch, socket: str, waiting: tuple[int, ...] = ()) -> None:
        """Tells the workers that wait their places in an epoch, and starts new workers in the other slots.

        `socket`: the daemon's.

        Raises:
            FusionError: a worker cannot be run.
        """
        for slot, rank in zip(epoch.slots, epoch.topology.ranks[epoch.node], strict=True):
            if slot not in waiting:
                await self.start(epoch, socket, slot, has_place=True)
            elif slot in self._workers and self.server is not None:  # if not, it has ended, and the launcher will hear
                self._workers[slot].rank, self._workers[slot].has_place = rank, True
                self.server.tell(slot, elastic.Assignment(epoch.number, self._place(epoch, socket, slot, rank, True)))
        await self._channel.send(agent_messages.WorkersUp())

    async def start(self, epoch: Epoch, socket: str, slot: int, has_place: bool) -> None:
        """Starts a worker in a slot of an epoch; or (`has_place` is false) one that is to ask for such a place.

        Raises:
            FusionError: it cannot be run.
        """
        job, rank = self._job, epoch.topology.ranks[epoch.node][epoch.slots.index(slot)]
        place = self._place(epoch, socket, slot, rank, has_place)
        env = worker_variables.of_worker(self._environ, place, job.as_horovod)
        result = await self._function.open_result() if self._function else None
        if result is not None:
            env.update(result.variables())
        try:
            inherits = result.descriptors if result else ()
            child = await self._children.start(job.command, env, job.directory, inherits=inherits)
        except OSError as error:
            command = os.fsdecode(job.command[0])
            raise FusionError(f"the command {command!r} cannot be run: {error.strerror}") from None
        self._workers[slot] = worker = _Worker(child, rank, epoch.number if has_place else 0, has_place)
        self._tasks.start(self._watch(slot, worker, result))

    def _place(self, epoch: Epoch, socket: str, slot: int, rank: int, has_place: bool) -> dict[str, str]:
        """The variables that tell a worker its place."""
        place = worker_variables.place_of_worker(epoch, rank, self._job.job, socket)
        if self.server is not None:
            place[elastic.SOCKET] = self.server.path
            place[elastic.SLOT] = str(slot)
            place[elastic.EPOCH] = str(epoch.number)
            place[elastic.PROVISIONAL] = "" if has_place else msgspec.json.encode(epoch.topology).decode()
        return place

    async def _watch(self, slot: int, worker: _Worker, result: ResultFile | None) -> None:
        """Passes on a worker's output and result, under its present rank, and tells of its end."""
        pumps = [
            Pump(worker.child.stdout, self._channel, partial(_output, slot, worker, "stdout")),
            Pump(worker.child.stderr, self._channel, partial(_output, slot, worker, "stderr")),
        ]
        for pump in pumps:
            self._tasks.pump(pump)
        status = await worker.child.exit
        await settle(pumps, self._channel)
        if result is not None and status == 0 and worker.has_place:
            for data in result.pieces(OUTPUT_CHUNK):
                await self._channel.send(agent_messages.FunctionResult(worker.rank, data))
        if not worker.is_removed:
            self._free(slot)
            killed = "" if worker.is_unused else self._oom_kills.explain(status)
            await self._channel.send(agent_messages.Exited(slot, status, killed, worker.is_unused))

    # Their end

    def kill(self, slots: Iterable[int]) -> None:
        """Kills workers, with the processes that they have started."""
        for slot in slots:
            if slot in self._workers:
                signal_tree(self._workers[slot].child.pid, signal.SIGKILL)

    def remove(self, slots: Iterable[int], reason: str) -> None:
        """Tells workers that there is no place for them, and ends those that do not end by themselves."""
        for slot in slots:
            worker = self._workers.get(slot)
            if worker is not None:
                worker.is_removed = True
                if self.server is not None:
                    self.server.tell(slot, elastic.Removed(reason))
                self._free(slot)
                self._tasks.start(_see_off(worker.child))
                self._leaving.add(worker.child.exit)
                worker.child.exit.add_done_callback(self._leaving.discard)

    async def all_have_left(self) -> None:
        """Waits for REMOVED_S at most until all workers have ended that were removed, by whatever order."""
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=REMOVED_S)

    def end_unused(self, number: int) -> None:
        """Ends workers that were started for an epoch which is over, and would look for it when they have come so
        far."""
        for slot, worker in self._workers.items():
            if worker.born == number and self.server is not None and not self.server.knows(slot):
                worker.is_unused = True
                signal_tree(worker.child.pid, signal.SIGKILL)

    def _free(self, slot: int) -> None:
        self._workers.pop(slot, None)
        if self.server is not None:
            self.server.forget(slot)


def _output(slot: int, worker: _Worker, stream: agent_messages.Stream, data: bytes) -> agent_messages.Output:
    return agent_messages.Output(slot, worker.rank, stream, data)


async def _see_off(child: Child) -> None:
    """Waits until a worker without a place has ended, and then helps."""
    for seconds, number in ((REMOVED_S, signal.SIGTERM), (TERM_GRACE, signal.SIGKILL)):
        await asyncio.wait([child.exit], timeout=seconds)
        if child.exit.done():
            return
        signal_tree(child.pid, number)
