"""What daemon and workers find in their environment."""

from __future__ import annotations

import pytest

from fusion_rt.core.topology import Topology
from fusion_rt.local import elastic
from fusion_rt.runner.agent.worker_variables import absolute_path_list, forwarded, of_worker, on_host, place_of_worker
from fusion_rt.runner.protocol.agent_messages import Epoch, Job

TOPOLOGY = Topology(("a", "b"), ((0, 1), (2,)))


def worker(base: dict[bytes, bytes], node: int, rank: int, as_horovod: bool = False) -> dict[bytes, bytes]:
    epoch = Epoch(1, node, TOPOLOGY, tuple(range(len(TOPOLOGY.ranks[node]))))
    return of_worker(base, place_of_worker(epoch, rank, "jobid", f"/run/f/jobid.{node}/sock"), as_horovod)


def test_a_worker_gets_horovods_variables_and_its_daemons_socket() -> None:
    assert worker({b"PATH": b"/bin", b"HOROVOD_RANK": b"9"}, 0, 1) == {
        b"PATH": b"/bin",
        b"HOROVOD_HOSTNAME": b"a",
        b"HOROVOD_RANK": b"1",
        b"HOROVOD_SIZE": b"3",
        b"HOROVOD_LOCAL_RANK": b"1",
        b"HOROVOD_LOCAL_SIZE": b"2",
        b"HOROVOD_CROSS_RANK": b"0",
        b"HOROVOD_CROSS_SIZE": b"1",
        b"HOROVOD_CONTROLLER": b"gloo",
        b"HOROVOD_CPU_OPERATIONS": b"gloo",
        b"PYTHONUNBUFFERED": b"1",
        b"FUSION_JOB_ID": b"jobid",
        b"FUSION_NODE": b"0",
        b"FUSION_SOCKET": b"/run/f/jobid.0/sock",
    }


def test_the_third_worker_is_the_first_of_the_second_host() -> None:
    environment = worker({}, 1, 2)
    assert environment[b"HOROVOD_LOCAL_RANK"] == b"0"
    assert environment[b"HOROVOD_CROSS_RANK"] == b"1"
    assert environment[b"HOROVOD_CROSS_SIZE"] == b"2"
    assert environment[b"FUSION_SOCKET"] == b"/run/f/jobid.1/sock"


def test_as_horovod_puts_the_stand_in_before_all_other_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusion_rt.as_horovod.python_path", lambda: "/shim")
    assert worker({b"PYTHONPATH": b"lib:/b"}, 0, 0, as_horovod=True)[b"PYTHONPATH"] == b"/shim:lib:/b"
    assert worker({b"PYTHONPATH": b""}, 0, 0, as_horovod=True)[b"PYTHONPATH"] == b"/shim"
    assert worker({}, 0, 0, as_horovod=True)[b"PYTHONPATH"] == b"/shim"
    assert b"PYTHONPATH" not in worker({}, 0, 0)


def test_a_host_keeps_what_is_its_own() -> None:
    job = Job("3.11", "0", "jobid", 1, (b"x",), ((b"A", b"launcher"),), b"/")
    own = {b"A": b"host", b"CUDA_VISIBLE_DEVICES": b"1", b"XDG_RUNTIME_DIR": b"/run/user/7", b"B": b"host"}
    assert on_host(job, own) == {
        b"A": b"launcher",
        b"CUDA_VISIBLE_DEVICES": b"1",
        b"XDG_RUNTIME_DIR": b"/run/user/7",
    }


def test_a_job_that_a_worker_of_an_elastic_one_starts_is_a_job_of_its_own() -> None:
    of_worker_there = {
        name.encode(): b"x" for name in (elastic.SOCKET, elastic.SLOT, elastic.EPOCH, elastic.PROVISIONAL)
    }
    assert forwarded({**of_worker_there, b"PATH": b"/bin", b"CUDA_VISIBLE_DEVICES": b"1"}) == {b"PATH": b"/bin"}


def test_relative_paths_are_taken_from_the_working_directory() -> None:
    assert absolute_path_list(b"a:/b::../c", b"/w") == b"/w/a:/b:/w/../c"
