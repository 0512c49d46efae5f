"""The daemon of one node as a process: who may come, and what happens when somebody goes."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from fusion_rt import wire
from fusion_rt.client import Client, terms
from fusion_rt.core.errors import FusionError, HorovodInternalError
from fusion_rt.core.topology import Topology
from fusion_rt.host.bootstrap import DaemonConfig, Endpoint, StartError, decode_line, encode_line, job_directory
from fusion_rt.local import packets
from tests.fusiond.processes import COMMAND, JOB, NO_LIMITS, TIMEOUT_S, Daemons, kill, quiet, read_line, together

pytestmark = pytest.mark.multiprocess
MakeDaemons = Callable[..., Daemons]
SUM = wire.Signature("allreduce", "float32", (2,))
WAITING = """
print("joined", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def running(short_directory: Path) -> Iterator[Daemons]:
    """A job of two workers, for the tests that leave it running."""
    job = Daemons(short_directory, [2]).start()
    job.join()
    yield job
    job.close()


def add(client: Client, name: str = "x", second: float = 1) -> np.ndarray:  # type: ignore[type-arg]
    """Adds (rank, second) over all ranks."""
    operation = client.submit(name, SUM, inline=np.array([client.rank, second], np.float32).tobytes())
    inline = client.wait(operation).inline
    assert inline is not None
    return np.frombuffer(inline, np.float32)


def keep_adding(client: Client) -> None:
    """Until the job fails."""
    while True:
        add(client)


def average(client: Client) -> float:
    """The average of the ranks, in a large tensor in the arena."""
    region = client.allocate(400_000)
    array = np.frombuffer(region.view, np.float32)[:100_000]
    array[:] = client.rank
    signature = wire.Signature("allreduce", "float32", (100_000,), "average")
    client.wait(client.submit("large", signature, place=(region.segment, region.offset)))
    assert (array == array[0]).all()
    return float(array[0])


def come_back(job: Daemons, *ranks: int) -> None:
    """Clients of these ranks leave, if they have not yet, and come back."""

    def again(rank: int) -> Client:
        client = job.clients[rank]
        client.leave()
        return Client(job.path(job.topology.node_of(rank)), JOB, rank, TIMEOUT_S, client)

    job.clients.update(together({rank: lambda rank=rank: again(rank) for rank in ranks}))  # type: ignore[misc]


# --- a job, from its start to its end ---------------------------------------------------------------------------------


def test_it_listens_before_anybody_is_told_of_it(daemons: MakeDaemons) -> None:
    job = daemons(1)
    process = job.launch(0)
    assert isinstance(job.answer_of(process), Endpoint)
    client = Client(job.path(0), JOB, 0, TIMEOUT_S, listened=True)  # which does not look twice
    assert client.topology == job.topology
    client.close()


@pytest.mark.parametrize("local_sizes", [[2], [1, 2]])
def test_workers_leave_and_come_back(daemons: MakeDaemons, local_sizes: list[int]) -> None:
    job = daemons(*local_sizes).start()
    job.join()
    ranks = tuple(job.clients)
    job.on_clients(lambda client: add(client, "known"))
    for epoch in (1, 2):
        # An operation that only some have submitted, and data that is on its way: neither reaches the next epoch.
        job.clients[0].submit("unfinished", SUM, inline=bytes(8))
        region = job.clients[0].allocate(400_000)
        large = wire.Signature("allreduce", "float32", (100_000,), "average")
        job.clients[0].submit("large", large, place=(region.segment, region.offset))
        come_back(job, *ranks)
        assert job.status()["epoch"] == epoch
        for result in job.on_clients(lambda client: add(client, "unfinished")).values():
            np.testing.assert_array_equal(result, [sum(ranks), len(ranks)])
        assert set(job.on_clients(average).values()) == {sum(ranks) / len(ranks)}
    for client in job.clients.values():
        client.close()
    assert [job.end(node) for node in range(len(local_sizes))] == [0] * len(local_sizes)


def test_who_stays_is_told_that_the_others_left_for_the_next_epoch(daemons: MakeDaemons) -> None:
    job = daemons(1, 1).start()
    job.join()
    waiting = job.clients[1].submit("x", SUM, inline=bytes(8))
    returning = threading.Thread(target=come_back, args=(job, 0))
    returning.start()
    with pytest.raises(HorovodInternalError, match=r"rank 0 \(host host0\).* left the job"):
        job.clients[1].wait(waiting)
    come_back(job, 1)
    returning.join()
    for result in job.on_clients(add).values():
        np.testing.assert_array_equal(result, [1, 2])


def test_a_job_of_one_node_from_start_to_end(daemons: MakeDaemons) -> None:
    job = daemons(3).start()
    job.join()
    for result in job.on_clients(add).values():
        np.testing.assert_array_equal(result, [3, 3])
    assert job.on_clients(average) == {0: 1.0, 1: 1.0, 2: 1.0}
    diverging = job.on_clients(lambda client: add(client, "loss", np.inf if client.rank else -np.inf))
    assert all(np.isnan(result[1]) for result in diverging.values())
    status = job.status()
    assert (status["job"], status["state"], status["joined"]) == (JOB, "running", [0, 1, 2])
    assert status["engine"]["completed"] == 3
    assert status["workers"]["arenas"] >= 3 * 400_000
    for client in job.clients.values():
        client.close()
    assert job.wait_until(lambda status: status["left"] == [0, 1, 2])["state"] == "running"
    assert job.files(0) == {"sock", "lock", "stacks"}
    assert job.end(0) == 0
    assert job.files(0) == set()
    assert job.log(0) == ""


def test_a_plan_from_proposal_to_result(running: Daemons) -> None:
    tensors = (wire.TensorSpec("w", "float32", (100,)), wire.TensorSpec("b", "float32", (3,)))

    def train(client: Client) -> float:
        plan = client.wait(client.propose(wire.Proposal("opt", 0, 0, wire.Reduction(), tensors))).plan
        assert plan is not None
        segment_id, segment = client.plan_segment(plan)
        array = np.frombuffer(segment.view, np.float32)
        for clock in range(3):
            array[:] = client.rank + clock
            client.wait(client.channel.ready("opt.0", plan.id, 0, terms()))
        total = float(array[0])
        del array
        client.arena.drop_segment(segment_id)
        return total

    assert running.on_clients(train) == {0: 2.5, 1: 2.5}


def test_an_idle_daemon_uses_no_processor_time(running: Daemons) -> None:
    """In some quarter of a second: in another one it may have timers that were late on a busy machine."""
    running.on_clients(add)
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        before = running.status()
        time.sleep(0.25)
        after = running.status()
        cpu, turns = after["cpu_seconds"] - before["cpu_seconds"], after["loop"]["turns"] - before["loop"]["turns"]
        if cpu < 0.025 and turns < 10:
            return
        assert time.monotonic() < deadline, f"{cpu} s of processor time, {turns} turns"


# --- who may come -----------------------------------------------------------------------------------------------------

HELLO = wire.Hello(wire.PROTOCOL_VERSION, JOB, 0, 1)
REFUSED = {
    "another job": (wire.Hello(wire.PROTOCOL_VERSION, "other", 0, 1), "rank 0 belongs to job 'other', and this daemon"),
    "a rank that is not there": (
        wire.Hello(wire.PROTOCOL_VERSION, JOB, 5, 1),
        r"rank 5 does not belong on node 0 \(host host0\), whose ranks are \[0, 1\]",
    ),
    "another version": (wire.Hello(99, JOB, 0, 1), "rank 0 speaks version 99 of the protocol and its daemon 1"),
}


def test_who_does_not_belong_is_told_why_and_nobody_else_is_disturbed(running: Daemons) -> None:
    job = running
    for hello, why in REFUSED.values():
        (answer,) = job.say(hello)
        assert isinstance(answer, wire.JobFailed)
        assert re.search(why, answer.message)
    (answer,) = job.say(HELLO)
    assert answer == wire.JobFailed("rank 0 is taken: another process on host host0 has joined the job as rank 0")
    before = job.wait_until(lambda status: status["workers"]["connections"] == 3)  # two workers, and this question
    descriptors = len(os.listdir(f"/proc/{job.processes[0].pid}/fd"))
    garbage = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 1000,
        os.urandom(60_000),
        wire.encode(wire.Heartbeat()),
        wire.encode(wire.Submit(1, "x", 0, SUM, None, bytes(8))),
        wire.encode(wire.AddSegment(1, 4096)),
        wire.encode(wire.Bye()),
    ]
    for message in garbage:
        assert job.say(message) == []
    for message in (b"garbage", wire.encode(HELLO), wire.encode(wire.Bye())) * 3:
        with job.connection() as sock:  # a descriptor that comes with it is closed there
            packets.Packet(message, os.dup(0)).send(sock)
            assert packets.receive(sock) == (b"", -1)
    with job.connection():  # and somebody who comes and goes
        pass
    for result in job.on_clients(add).values():
        np.testing.assert_array_equal(result, [1, 2])
    status = job.wait_until(lambda status: status["workers"]["connections"] == 3)
    assert status["state"] == "running"
    assert status["workers"]["refused"] == before["workers"]["refused"] + len(garbage) + 9
    assert len(os.listdir(f"/proc/{job.processes[0].pid}/fd")) <= descriptors + 1  # the question's


def test_the_descriptors_of_a_daemon_may_run_out_for_a_while(daemons: MakeDaemons) -> None:
    job = daemons(2).start()
    job.join()
    job.on_clients(average)  # with kernels, which are files; they have been loaded now
    pid = job.processes[0].pid
    limit = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    open_now = len(os.listdir(f"/proc/{pid}/fd"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (open_now + 2, limit[1]))
    crowd = [job.connection() for _ in range(10)]
    for result in job.on_clients(add).values():
        np.testing.assert_array_equal(result, [1, 2])  # those who have joined are served
    for sock in crowd:
        sock.close()
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limit)
    status = job.wait_until(lambda status: status["workers"]["connections"] == 3)
    assert (status["state"], status["failure"]) == ("running", "")


def test_a_daemon_may_open_as_many_descriptors_as_the_system_allows(daemons: MakeDaemons) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        job = daemons(1).start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    job.status()
    assert resource.prlimit(job.processes[0].pid, resource.RLIMIT_NOFILE) == (hard, hard)


# --- workers that go --------------------------------------------------------------------------------------------------


def test_a_killed_worker_is_named_without_waiting_for_a_limit(daemons: MakeDaemons) -> None:
    job = daemons(2, **NO_LIMITS).start()
    victim = job.worker_process(1, WAITING)
    job.join([0])
    assert read_line(victim) == "joined"
    operation = job.clients[0].submit("x", SUM, inline=bytes(8))
    kill(victim)
    with pytest.raises(HorovodInternalError) as raised:
        job.clients[0].wait(operation)
    assert str(raised.value) == (
        f"rank 1 (host host0, pid {victim.pid}) died (killed, or crashed) without leaving the job"
    )
    with pytest.raises(HorovodInternalError, match="rank 1"):
        job.clients[0].submit("y", SUM, inline=bytes(8))
    assert job.status()["workers"]["arenas"] == 0  # its memory has been given back
    assert job.end(0) == 1


def test_an_exception_of_a_worker_reaches_the_others(daemons: MakeDaemons) -> None:
    job = daemons(2).start()
    job.join()
    operation = job.clients[0].submit("x", SUM, inline=bytes(8))
    job.clients[1].close("Traceback ...\nValueError: no such file")
    with pytest.raises(HorovodInternalError) as raised:
        job.clients[0].wait(operation)
    assert str(raised.value) == "rank 1 (host host0) failed: Traceback ...\n    ValueError: no such file"


def test_a_worker_that_leaves_early_is_named(daemons: MakeDaemons) -> None:
    job = daemons(2).start()
    job.join()
    operation = job.clients[0].submit("x", SUM, inline=bytes(8))
    job.clients[1].close()
    with pytest.raises(HorovodInternalError, match=r"waits for rank 1 \(host host0\), which left the job"):
        job.clients[0].wait(operation)


NONSENSE = {
    "garbage": b"garbage",
    "a second Hello": wire.encode(wire.Hello(wire.PROTOCOL_VERSION, JOB, 1, 1)),
    "memory that is not there": wire.encode(wire.Submit(1, "x", 0, SUM, wire.Place(9, 0))),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_a_worker_that_talks_nonsense_fails_the_job(daemons: MakeDaemons, what: str) -> None:
    job = daemons(2).start()
    job.join()
    operation = job.clients[0].submit("x", SUM, inline=bytes(8))
    job.clients[1].channel.socket.send(NONSENSE[what])
    with pytest.raises(
        HorovodInternalError, match=r"rank 1 \(host host0, pid \d+\) sent a message that makes no sense"
    ):
        job.clients[0].wait(operation)
    assert job.status()["state"] == "failed"


def test_a_worker_that_says_goodbye_twice_harms_nobody(daemons: MakeDaemons) -> None:
    job = daemons(2).start()
    job.join()
    for _ in range(2):
        packets.Packet(wire.encode(wire.Bye())).send(job.clients[1].channel.socket)
    job.wait_until(lambda status: status["left"] == [1])
    assert job.status()["state"] == "running"


# --- daemons that go --------------------------------------------------------------------------------------------------


def test_a_killed_daemon_is_noticed_and_makes_room_for_the_next(daemons: MakeDaemons) -> None:
    job = daemons(1).start()
    job.join()
    operation = job.clients[0].submit("alone", SUM, inline=bytes(8))
    job.clients[0].wait(operation)
    kill(job.processes[0])
    first = job.clients.pop(0)
    with pytest.raises(HorovodInternalError, match=r"the daemon of rank 0's node \(host .*\) is gone"):
        first.submit("x", SUM, inline=bytes(8))
    first.close()
    assert job.files(0) == {"sock", "lock", "stacks"}  # stale
    job.endpoints.clear()
    job.start()
    job.join()
    np.testing.assert_array_equal(add(job.clients[0]), [0, 1])


def test_a_daemon_cannot_be_started_twice(daemons: MakeDaemons) -> None:
    job = daemons(1).start()
    second = job.launch(0)
    answer = job.answer_of(second)
    assert isinstance(answer, StartError)
    assert answer.error == (
        f"a daemon of job 'test' runs on this host already (pid {job.processes[0].pid}); stop it with `fusiond stop "
        "--job test`, or give the new job another name"
    )
    assert second.wait(TIMEOUT_S) == 1
    assert job.join()[0].topology == job.topology  # the first one is not disturbed


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_daemon_that_is_told_to_stop_tells_its_workers(daemons: MakeDaemons, signal_number: signal.Signals) -> None:
    job = daemons(1).start()
    job.join()
    os.kill(job.processes[0].pid, signal_number)
    assert job.processes[0].wait(TIMEOUT_S) == 1
    with pytest.raises(HorovodInternalError, match=rf"daemon of host host0 was told to stop \({signal_number.name}\)"):
        add(job.clients[0])
    assert job.files(0) == set()


def test_the_end_of_standard_input_ends_a_daemon_and_its_job(daemons: MakeDaemons) -> None:
    job = daemons(1).start()
    job.join()
    assert job.end(0) == 1
    with pytest.raises(HorovodInternalError, match="the process that started the daemon of host host0 is gone"):
        add(job.clients[0])
    assert job.files(0) == set()


def test_a_daemon_that_nobody_attends_ends_with_its_last_worker(daemons: MakeDaemons) -> None:
    job = daemons(2, attached=False).start()
    stdin = job.processes[0].stdin
    assert stdin is not None
    stdin.close()  # means nothing to it
    job.join()
    job.clients[0].close()
    np.testing.assert_array_equal(job.wait_until(lambda status: status["left"] == [0])["joined"], [0, 1])
    job.clients[1].close()
    assert job.processes[0].wait(TIMEOUT_S) == 0
    assert job.files(0) == set()


def test_a_daemon_that_nobody_attends_ends_when_its_job_fails(daemons: MakeDaemons) -> None:
    job = daemons(2, attached=False).start()
    victim = job.worker_process(1, WAITING)
    job.join([0])
    assert read_line(victim) == "joined"
    kill(victim)
    with pytest.raises(HorovodInternalError, match="rank 1"):
        add(job.clients[0])
    job.clients[0].close()
    assert job.processes[0].wait(TIMEOUT_S) == 1


# --- nodes without workers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [(1, 1, 0), (1, 0, 0)])
def test_nodes_without_workers_start_with_the_job_and_end_with_it(
    daemons: MakeDaemons, layout: tuple[int, ...]
) -> None:
    job = daemons(*layout, FUSION_SHARD_HOSTS="host0,host2").start()
    job.join()
    for result in job.on_clients(add).values():
        np.testing.assert_array_equal(result, [sum(range(sum(layout))), sum(layout)])
    status = job.wait_until(lambda status: status["state"] == "running", node=2)  # nobody waits for it
    assert (status["role"], status["ranks"], status["size"]) == ("shard", [], sum(layout))
    assert job.status(0)["role"] == "worker and shard"
    assert job.status(1)["role"] == ("worker" if layout[1] else "shard")
    job.on_clients(Client.close)
    assert [job.end(node) for node in range(3)] == [0, 0, 0]
    assert [quiet(job.log(node)) for node in range(3)] == ["", "", ""]
    assert [job.files(node) for node in range(3)] == [set(), set(), set()]


def test_nodes_without_workers_follow_into_the_next_epoch(daemons: MakeDaemons) -> None:
    job = daemons(1, 1, 0, 0).start()
    job.join()
    for epoch in (1, 2):
        come_back(job, 0, 1)
        for node in range(4):  # those without workers may hear of it a little later
            job.wait_until(lambda status, epoch=epoch: status["epoch"] == epoch, node)  # type: ignore[misc]
        for result in job.on_clients(add).values():
            np.testing.assert_array_equal(result, [1, 2])


def test_nodes_without_workers_that_nobody_attends_end_with_the_last_worker(daemons: MakeDaemons) -> None:
    job = daemons(1, 1, 0, 0, attached=False).start()
    job.join()
    job.on_clients(Client.leave)
    job.wait_until(lambda status: status["left"] == [0])
    come_back(job, 0, 1)  # nobody has ended while the workers might
    for result in job.on_clients(add).values():
        np.testing.assert_array_equal(result, [1, 2])
    job.on_clients(Client.close)
    assert [process.wait(TIMEOUT_S) for process in job.processes] == [0, 0, 0, 0]
    assert [job.files(node) for node in range(4)] == [set()] * 4


def test_a_killed_daemon_without_workers_is_named_to_all_ranks(daemons: MakeDaemons) -> None:
    job = daemons(1, 1, 0, 0, attached=False).start()
    job.join()
    job.on_clients(add)
    kill(job.processes[2])

    for error in job.on_clients(keep_adding).values():
        assert isinstance(error, HorovodInternalError)
        assert "node 2 (host host2) is lost" in str(error)
    job.on_clients(Client.close)
    assert [job.processes[node].wait(TIMEOUT_S) for node in (0, 1, 3)] == [1, 1, 1]


def test_a_node_without_workers_outlives_no_killed_job(daemons: MakeDaemons) -> None:
    job = daemons(1, 0, attached=False).start()
    job.join()
    kill(job.processes[0])
    assert job.processes[1].wait(TIMEOUT_S) == 1
    assert "node 0 (host host0) is lost" in job.log(1)


def test_a_node_without_workers_tells_all_ranks_that_it_was_stopped(daemons: MakeDaemons) -> None:
    job = daemons(1, 0).start()
    job.join()
    job.processes[1].send_signal(signal.SIGTERM)
    with pytest.raises(HorovodInternalError, match=r"the daemon of host host1 was told to stop \(SIGTERM\)"):
        keep_adding(job.clients[0])


@pytest.mark.parametrize(
    ("names", "why"),
    [("host0,elsewhere", "shard host 'elsewhere'.* is no host of this job"), ("host0,host0", "'host0'.* named twice")],
)
def test_shard_hosts_that_cannot_be_are_refused_before_anything_starts(
    daemons: MakeDaemons, names: str, why: str
) -> None:
    job = daemons(1, FUSION_SHARD_HOSTS=names)
    answer = job.answer_of(job.launch(0))
    assert isinstance(answer, StartError)
    assert re.search(why, answer.error)


def test_a_job_whose_first_node_has_no_workers_is_refused(daemons: MakeDaemons) -> None:
    job = daemons(0, 1)
    with pytest.raises(ValueError, match=r"node 0 \(host host0\) has no workers"):
        job.launch(0)


def test_a_job_that_does_not_come_up_names_who_is_missing(daemons: MakeDaemons) -> None:
    job = daemons(2, HOROVOD_START_TIMEOUT="3s").start()
    with pytest.raises(FusionError) as raised:
        job.join([1])
    assert str(raised.value) == (
        "the job did not come up within 3 s: rank 0 (host host0) did not connect to the daemon; raise --start-timeout "
        "(HOROVOD_START_TIMEOUT) if a busy host or a slow link needs longer (docs/troubleshooting.md)"
    )


# --- start-up errors --------------------------------------------------------------------------------------------------


def test_a_runtime_directory_that_others_may_enter_is_refused(daemons: MakeDaemons, runtime_dir: Path) -> None:
    runtime_dir.chmod(0o755)
    job = daemons(1)
    answer = job.answer_of(job.launch(0))
    assert isinstance(answer, StartError)
    assert "is not a directory that only user" in answer.error


@pytest.mark.parametrize("line", [b"", b"nonsense\n", encode_line(StartError("x"))])
def test_a_configuration_that_is_none_is_refused(runtime_dir: Path, line: bytes) -> None:
    done = subprocess.run(COMMAND, input=line, capture_output=True, timeout=TIMEOUT_S)
    assert done.returncode == 1
    answer = decode_line(done.stdout, StartError)
    assert "not a start-up message" in answer.error
    assert b"Traceback" not in done.stderr


def test_standard_input_has_to_be_a_pipe(runtime_dir: Path) -> None:
    path = runtime_dir / "config"
    path.write_bytes(encode_line(DaemonConfig(JOB, 0, Topology(("a",), ((0,),)))))
    with path.open("rb") as file:
        done = subprocess.run(COMMAND, stdin=file, capture_output=True, timeout=TIMEOUT_S)
    assert done.returncode == 1
    assert b"standard input has to be a pipe" in done.stderr
    assert b"Traceback" not in done.stderr
    assert not os.path.exists(job_directory(str(runtime_dir), JOB, 0))


def test_a_setting_that_cannot_be_used_is_refused(daemons: MakeDaemons) -> None:
    job = daemons(1, FUSION_CHUNK_BYTES="tiny")
    answer = job.answer_of(job.launch(0))
    assert isinstance(answer, StartError)
    assert answer.error.startswith("FUSION_CHUNK_BYTES: 'tiny' is not a size")


def test_workers_hear_why_when_something_unusable_ends_the_event_loop(daemons: MakeDaemons) -> None:
    job = daemons(2).start()
    clients = job.join()
    errors = []

    def wait(client: Client) -> None:
        with pytest.raises(HorovodInternalError) as raised:
            client.wait(client.submit("x", SUM, inline=bytes(8)))
        errors.append(str(raised.value))

    waiting = threading.Thread(target=wait, args=(clients[0],))
    waiting.start()
    stdin = job.processes[0].stdin
    assert stdin is not None
    stdin.write(b"no table of peers\n")
    stdin.flush()
    waiting.join(TIMEOUT_S)
    assert len(errors) == 1
    assert errors[0].startswith("the daemon of host host0 failed: not a start-up message"), errors
    assert job.processes[0].wait(TIMEOUT_S) != 0
