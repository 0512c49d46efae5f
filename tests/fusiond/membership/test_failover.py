"""Real daemons that lose one of them, with an algorithm that can go on: the others do, and agree about it."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import pytest

from fusion_rt import wire
from fusion_rt.client import Client, terms
from fusion_rt.core.errors import HorovodInternalError
from tests.fusiond.processes import JOB, NO_LIMITS, TIMEOUT_S, Daemons, kill, together

pytestmark = pytest.mark.multiprocess
MakeDaemons = Callable[..., Daemons]
TENSORS = (wire.TensorSpec("w", "float32", (1000,)),)
TOLERANT = {**NO_LIMITS, "FUSION_TOLERATE_LOSSES": "1"}  # a connection that is closed is noticed without a limit
SILENCE = {"FUSION_HEARTBEAT_INTERVAL": "50ms", "FUSION_HEARTBEAT_TIMEOUT": "6s"}
LAST_WORDS_S = 20.0
COMPUTING_S = 0.002  # between two steps


class Trainer:
    """A worker that posts to a gossip plan, again and again, in a thread of its own."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.error = ""
        self.steps = 0
        self.step = threading.Condition()
        self._plan = self._propose(0, 0, "adpsgd")
        self._array = self._memory(self._plan)
        self._stop = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _propose(self, process_set: int, clock: int, algorithm: str, group: str = "model") -> wire.Plan:
        reduction = wire.Reduction(algorithm=algorithm)
        plan = self.client.wait(self.client.propose(wire.Proposal(group, process_set, clock, reduction, TENSORS))).plan
        assert plan is not None
        return plan

    def _memory(self, plan: wire.Plan) -> npt.NDArray[np.float32]:
        _, segment = self.client.plan_segment(plan)
        return np.frombuffer(segment.view, np.float32)

    def _run(self) -> None:
        try:
            self._array[:] = 1
            seed = terms()
            seed.kind = "seed"
            self.client.wait(self.client.channel.ready("model.0", self._plan.id, 0, seed))
            while not self._stop:
                self._array[:] = 1
                time.sleep(COMPUTING_S)
                self.client.wait(self.client.channel.ready("model.0", self._plan.id, 0, terms()))
                with self.step:
                    self.steps += 1
                    self.step.notify_all()
        except HorovodInternalError as error:
            self.error = str(error)
            with self.step:
                self.step.notify_all()

    def go_on(self, steps: int = 20) -> None:
        """Waits until so many more steps are done."""
        with self.step:
            wanted = self.steps + steps
            assert self.step.wait_for(lambda: self.steps >= wanted or self.error, LAST_WORDS_S), "it stands still"
            assert not self.error, self.error

    def stop(self) -> None:
        """Ends the thread; the client may be used from here."""
        self._stop = True
        self._thread.join(LAST_WORDS_S)
        assert not self._thread.is_alive()

    def forget(self) -> None:
        """Ends the thread whatever its operation does, and lets go of the arena."""
        self._stop = True
        self.client.close()
        self._thread.join(LAST_WORDS_S)
        self._array = np.zeros(1, np.float32)

    def after(self, ranks: tuple[int, ...]) -> tuple[int, float, str]:
        """What those that are left do then: a process set, a plan of all-reduce and a new plan of gossip, a sum, and an
        operation of all ranks, which has to fail. Returns the plan's id, the sum and the error."""
        process_set = self.client.add_process_set(ranks)
        plan = self._propose(process_set.id, 0, "allreduce", "small")
        array = self._memory(plan)
        array[:] = self.client.rank
        self.client.wait(self.client.channel.ready("small.0", plan.id, 0, terms()))
        assert array[0] == sum(ranks) / len(ranks)
        gossip = self._propose(0, 1, "adpsgd")
        assert gossip.id > plan.id > self._plan.id
        signature = wire.Signature("allreduce", "float32", (2,), process_set=process_set.id)
        one = np.ones(2, np.float32).tobytes()
        inline = self.client.wait(self.client.submit("named", signature, inline=one)).inline
        assert inline is not None
        everyone = wire.Signature("allreduce", "float32", (2,))
        with pytest.raises(HorovodInternalError) as raised:
            self.client.wait(self.client.submit("everyone", everyone, inline=one))
        return plan.id, float(np.frombuffer(inline, np.float32)[0]), str(raised.value)


def go_on_and_stop(trainers: dict[int, Trainer], ranks: tuple[int, ...]) -> None:
    """These ranks, which need each other, train on for a while; then they are at rest."""
    for rank in ranks:
        trainers[rank].go_on()
    for rank in ranks:
        trainers[rank].stop()


@contextmanager
def training(job: Daemons) -> Iterator[dict[int, Trainer]]:
    """All ranks of a job train."""
    job.join()
    trainers: dict[int, Trainer] = together({rank: lambda c=c: Trainer(c) for rank, c in job.clients.items()})  # type: ignore[misc]
    try:
        yield trainers
    finally:
        for trainer in trainers.values():
            trainer.forget()


@pytest.mark.parametrize("victim", [0, 1], ids=["the coordinator's", "another"])
def test_a_gossip_job_goes_on_without_a_daemon(daemons: MakeDaemons, victim: int) -> None:
    job = daemons(1, 1, 1, **TOLERANT).start()
    left = tuple(rank for rank in range(3) if rank != victim)
    with training(job) as trainers:
        for trainer in trainers.values():
            trainer.go_on()
        kill(job.processes[victim])
        views = [job.wait_until(lambda status: status["views"]["view"] == 1, node)["views"] for node in left]
        assert [view["nodes"] for view in views] == [list(left)] * 2
        assert [view["coordinator"] for view in views] == [left[0]] * 2
        go_on_and_stop(trainers, left)
        found = together({rank: lambda rank=rank: trainers[rank].after(left) for rank in left})  # type: ignore[misc]
    assert len({plan for plan, _, _ in found.values()}) == 1
    assert {total for _, total, _ in found.values()} == {2.0}
    errors = {error for _, _, error in found.values()}
    assert len(errors) == 1
    pattern = rf"tensor 'everyone': allreduce needs all ranks, and rank {victim} \(host host{victim}\) is lost \(node "
    assert re.match(pattern, errors.pop())
    for rank in left:
        job.clients[rank].close()
        assert "the job goes on without it" in job.log(rank)
    assert [job.end(node) for node in left] == [0, 0]


@pytest.mark.parametrize("lost", ["daemon", "worker"])
def test_who_is_left_may_leave_and_come_back_without_the_first(daemons: MakeDaemons, lost: str) -> None:
    job = daemons(1, 1, 1, **TOLERANT).start()
    with training(job) as trainers:
        trainers[0].go_on()
        if lost == "daemon":
            kill(job.processes[0])
        else:
            trainers[0].stop()
            job.clients[0].channel.socket.close()
        for node in (1, 2):
            job.wait_until(lambda status: status["views"]["view"] == 1, node)
        go_on_and_stop(trainers, (1, 2))

        def again(rank: int) -> Client:
            job.clients[rank].leave()
            return Client(job.path(rank), JOB, rank, TIMEOUT_S, job.clients[rank])

        def last() -> Client:  # the coordinator's, whose peers have begun the next epoch, and said so
            job.wait_until(lambda status: status["epoch"] == 1, 2)
            return again(1)

        back = together({1: last, 2: lambda: again(2)})
        job.clients.update(back)
        assert job.status(1)["epoch"] == 1

        def work(rank: int) -> float:
            process_set = back[rank].add_process_set((1, 2))
            signature = wire.Signature("allreduce", "float32", (2,), process_set=process_set.id)
            inline = back[rank].wait(back[rank].submit("x", signature, inline=np.ones(2, np.float32).tobytes())).inline
            return float(np.frombuffer(inline, np.float32)[0])

        assert together({rank: lambda rank=rank: work(rank) for rank in (1, 2)}) == {1: 2.0, 2: 2.0}  # type: ignore[misc]
        for client in back.values():
            client.close()


def test_who_has_come_back_does_not_wait_for_a_worker_that_is_lost(daemons: MakeDaemons) -> None:
    job = daemons(2, **TOLERANT, HOROVOD_LOG_LEVEL="info").start()
    with training(job) as trainers:
        go_on_and_stop(trainers, (0, 1))
        job.clients[0].leave()
        with ThreadPoolExecutor(1) as pool:
            again = pool.submit(Client, job.path(0), JOB, 0, TIMEOUT_S, job.clients[0])
            job.wait_until(lambda _: job.log(0).count("has joined") == 3)
            job.clients[1].channel.socket.close()
            job.clients[0] = again.result(TIMEOUT_S)
        assert job.status()["epoch"] == 1


def test_a_daemon_that_was_stopped_and_given_up_says_so_when_it_goes_on(daemons: MakeDaemons) -> None:
    job = daemons(1, 1, 1, **{**TOLERANT, **SILENCE}).start()
    with training(job) as trainers:
        for trainer in trainers.values():
            trainer.go_on()
        job.processes[2].send_signal(signal.SIGSTOP)
        for node in (0, 1):
            job.wait_until(lambda status: status["views"]["nodes"] == [0, 1], node)
            trainers[node].go_on()
        job.processes[2].send_signal(signal.SIGCONT)
        with trainers[2].step:
            assert trainers[2].step.wait_for(lambda: trainers[2].error, LAST_WORDS_S)
        assert "node 2 (host host2)" in trainers[2].error
        # It is told so by the others, or finds itself cut off from them: whichever comes first.
        assert re.search("declared it dead|was declared dead by the others", trainers[2].error)
        assert "silent" in trainers[2].error  # and why
        go_on_and_stop(trainers, (0, 1))
    assert job.status(0)["state"] == "running"


def test_a_lost_worker_is_agreed_upon_and_its_daemon_stays(daemons: MakeDaemons) -> None:
    job = daemons(2, 1, **TOLERANT).start()
    with training(job) as trainers:
        for trainer in trainers.values():
            trainer.go_on()
        trainers[1].stop()
        job.clients[1].channel.socket.close()
        for node in (0, 1):
            views = job.wait_until(lambda status: status["views"]["view"] == 1, node)["views"]
            assert views["nodes"] == [0, 1]
            assert re.match(r"rank 1 \(host host0, pid \d+\) died", views["lost"][0])
        go_on_and_stop(trainers, (0, 2))


def test_all_ranks_are_told_one_sentence_when_a_synchronous_job_loses_a_daemon(daemons: MakeDaemons) -> None:
    job = daemons(1, 1, 1).start()
    job.join()

    def add(client: Client) -> None:
        while True:
            inline = np.ones(2, np.float32).tobytes()
            client.wait(client.submit("x", wire.Signature("allreduce", "float32", (2,)), inline=inline))

    killer = threading.Timer(0.3, kill, [job.processes[0]])
    killer.start()
    errors = job.on_clients(add)
    killer.join()
    assert isinstance(errors[1], HorovodInternalError)
    assert str(errors[1]) == str(errors[2])
    assert str(errors[1]).startswith("node 0 (host host0) is lost: ")
