"""Workers that are killed, stand still, or keep their interpreter to themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from fusion_rt.core.errors import HorovodInternalError
from tests.faults import nemesis
from tests.faults.jobs import WAIT_S, Workers, add, adding_process, total, wait
from tests.fusiond.processes import Daemons, kill, read_line

pytestmark = pytest.mark.multiprocess
MakeDaemons = Callable[..., Daemons]
LARGE = 500_000  # elements: 4 MB, which take some milliseconds, so that a fault falls into the middle of them
SOON_S = 30.0  # generous: what is measured is in docs/faults.md


def test_a_worker_killed_amid_large_tensors_is_named_on_every_node_and_its_memory_is_freed(
    daemons: MakeDaemons,
) -> None:
    job = daemons(2, 2).start()
    under_way = adding_process(job, 3, LARGE)
    job.join([0, 1, 2])
    workers = Workers(job.clients, LARGE, range(4))
    under_way()
    before = nemesis.resources(job.processes[1].pid)
    killed = nemesis.kill(job.others[-1])
    workers.join()
    victim = f"rank 3 (host host1, pid {job.others[-1].pid}) died (killed, or crashed) without leaving the job"
    assert workers.errors == dict.fromkeys(range(3), victim)
    assert max(workers.raised.values()) - killed < SOON_S
    assert workers.wrong == []
    wait(lambda: nemesis.resources(job.processes[1].pid)["arenas"] < before["arenas"], "the victim's memory is freed")
    job.clients[2].close()
    assert job.wait_until(lambda status: status["workers"]["arenas"] == 0, node=1)["state"] == "failed"
    assert [job.end(0), job.end(1)] == [1, 1]


def test_a_worker_that_stands_still_for_a_while_is_waited_for(daemons: MakeDaemons) -> None:
    job = daemons(1, 1).start()
    under_way = adding_process(job, 1, 1000)
    job.join([0])
    workers = Workers(job.clients, 1000, range(2))
    under_way()
    with nemesis.stopped(job.others[-1]):
        done = wait_for_stillness(workers, 0)
        assert job.status()["state"] == "running"
    workers.go_on()
    assert workers.steps[0] >= done + 3
    kill(job.others[-1])
    workers.join()
    assert workers.wrong == []


def wait_for_stillness(workers: Workers, rank: int) -> int:
    """Waits until a rank waits; the steps it has completed."""
    done = -1
    while workers.steps[rank] > done:
        done = workers.steps[rank]
        time.sleep(0.2)
    return done


@pytest.mark.parametrize("how", ["stopped", "holds its GIL"])
def test_a_worker_that_does_not_come_is_warned_of_and_then_given_up_by_all(daemons: MakeDaemons, how: str) -> None:
    limits = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "500ms", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3s"}
    job = daemons(1, 2, **limits).start()
    hang = "from tests.faults.hanging import hold_gil\nhold_gil(60)"
    code = f"print('joined', flush=True)\nsys.stdin.readline()\n{hang}"
    silent = job.worker_process(2, code)
    job.join([0, 1])
    assert read_line(silent) == "joined"
    assert silent.stdin is not None
    if how == "stopped":
        with nemesis.stopped(silent):
            errors = both_fail(job)
    else:
        silent.stdin.write(b"\n")
        silent.stdin.flush()
        errors = both_fail(job)
    assert len(errors) == 1
    (error,) = errors
    assert "rank 2 (host host1" in error
    assert "'sum'" in error
    assert "rank 2 (host host1" in job.log(0)  # the warning, which came first
    kill(silent)


def both_fail(job: Daemons) -> set[str]:
    """What ranks 0 and 1 are told about an operation that the other rank does not submit."""

    def error(rank: int) -> None:
        with pytest.raises(HorovodInternalError) as raised:
            add(job.clients[rank], 0, 10)
        errors.add(str(raised.value))

    errors: set[str] = set()
    threads = [threading.Thread(target=error, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    return errors


def test_a_worker_that_comes_back_too_late_gets_the_same_sentence_and_the_job_goes_on(daemons: MakeDaemons) -> None:
    job = daemons(1, 1, HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="3s").start()
    code = """
from fusion_rt.core.errors import HorovodInternalError
from tests.faults.jobs import add
print("joined", flush=True)
try:
    add(client, 0, 10)
except HorovodInternalError as error:
    print(str(error).splitlines()[0], flush=True)
print(add(client, 1, 10, "next").tolist(), flush=True)
sys.stdin.readline()
"""
    late = job.worker_process(1, "print('ready', flush=True)\nsys.stdin.readline()\n" + code)
    job.join([0])
    assert read_line(late) == "ready"
    with nemesis.stopped(late):
        with pytest.raises(HorovodInternalError) as raised:
            add(job.clients[0], 0, 10)
        assert late.stdin is not None
        late.stdin.write(b"\n")
        late.stdin.flush()
    assert read_line(late) == "joined"
    assert read_line(late) == str(raised.value).splitlines()[0]
    result = add(job.clients[0], 1, 10, "next")
    np.testing.assert_array_equal(result, total(range(2), 1, 10))
    assert read_line(late) == str(result.tolist())
    late.stdin.close()
