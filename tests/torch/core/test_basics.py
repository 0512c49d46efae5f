"""Joining and leaving a job, and what a worker's end means for the others."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import fusion_rt.torch as hvd
from tests import forks
from tests.harness import ROOT, on_ranks
from tests.torch.training import assert_equal_on_all_ranks, loss_of, make_model, my_batch, train


def start(script: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """A Python process that runs a script."""
    return start_process("-c", textwrap.dedent(script), environment=environment)


def start_process(*arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    return forks.popen(
        [sys.executable, *arguments], forks.WORKER,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
    )  # fmt: skip


def start_pair(script: str) -> list[subprocess.Popen[str]]:
    """Two processes that run a script as torchrun's workers."""
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    return [start(script, {**common, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Its exit status, standard output and standard error."""
    out, err = process.communicate(timeout=180)
    return process.returncode, out, err


def test_everything_but_asking_needs_init() -> None:
    assert not hvd.is_initialized()
    assert hvd.global_process_set.size() is None
    hvd.shutdown()
    model = make_model()
    for call in (
        hvd.rank,
        hvd.size,
        hvd.local_rank,
        hvd.local_size,
        hvd.cross_rank,
        hvd.cross_size,
        hvd.barrier,
        hvd.join,
        hvd.is_homogeneous,
        hvd.stop_timeline,
        lambda: hvd.start_timeline("timeline.json"),
        lambda: hvd.allreduce(torch.ones(1)),
        lambda: hvd.grouped_allreduce([torch.ones(1)]),
        lambda: hvd.allgather(torch.ones(1)),
        lambda: hvd.broadcast(torch.ones(1), 0),
        lambda: hvd.alltoall(torch.ones(1)),
        lambda: hvd.reducescatter(torch.ones(1)),
        lambda: hvd.poll(1),
        lambda: hvd.synchronize(1),
        lambda: hvd.empty(1),
        lambda: hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)),
    ):
        with pytest.raises(ValueError, match=r"has not been initialized; use hvd\.init\(\)"):
            call()


@on_ranks
def test_a_worker_knows_its_place() -> None:
    assert hvd.is_initialized()
    assert (hvd.size(), hvd.local_size(), hvd.cross_size(), hvd.cross_rank()) == (2, 2, 1, 0)
    assert hvd.rank() == hvd.local_rank() == hvd.global_process_set.rank() == int(os.environ["HOROVOD_RANK"])
    assert hvd.global_process_set.size() == 2
    assert hvd.global_process_set.included()
    assert hvd.global_process_set.ranks == [0, 1]
    hvd.init()  # again
    assert hvd.allgather_object(hvd.rank()) == [0, 1]


def in_fork(function: object) -> str:
    """What a function returns, or the error that it raises, in a forked child of this process."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = repr(function())  # type: ignore[operator]
        except BaseException as error:
            text = "".join(traceback.format_exception_only(error))
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text


@on_ranks
def test_a_forked_child_cannot_communicate_and_disturbs_nothing() -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, optimizer, range(2))
    gradients = [p.grad.clone() for p in model.parameters()]
    assert in_fork(hvd.rank) == str(hvd.rank())
    refused = f"was forked from rank {hvd.rank()} and has no connection"
    for operation in (
        lambda: hvd.allreduce(torch.ones(1)),
        lambda: hvd.allreduce(torch.ones(9000)),
        lambda: hvd.broadcast_object(1),
        hvd.barrier,
        lambda: (model.zero_grad(), loss_of(model, my_batch(2)).backward()),
    ):
        text = in_fork(operation)
        assert text.startswith("fusion_rt.core.errors.FusionError: this process"), text
        assert refused in text
    assert in_fork(hvd.shutdown) == "None"
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
    train(model, optimizer, range(2, 4))
    assert_equal_on_all_ranks(model)


@pytest.mark.multiprocess
def test_the_error_of_a_worker_is_what_the_others_raise(runtime_dir: Path) -> None:
    processes = start_pair("""
        import torch, fusion_rt.torch as hvd
        hvd.init()
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [2.0] * 3

        def train():
            if hvd.rank() == 1:
                raise KeyError("the label 17")
            hvd.allreduce(torch.ones(3))

        try:
            train()
        except hvd.HorovodInternalError as error:
            print(error)
    """)
    outcomes = [finish(process) for process in processes]
    assert outcomes[0][0] == 0, outcomes[0][2]
    assert "rank 1 (host" in outcomes[0][1]
    assert "in train" in outcomes[0][1]
    assert "KeyError: 'the label 17'" in outcomes[0][1]
    assert outcomes[1][0] == 1
    assert "KeyError: 'the label 17'" in outcomes[1][2]


@pytest.mark.multiprocess
def test_a_job_of_one_may_leave_and_come_back(runtime_dir: Path) -> None:
    status, out, err = finish(start("""
        import os, torch, fusion_rt.torch as hvd
        hvd.init()
        torch.manual_seed(0)
        net, twin = (torch.nn.Linear(50, 60) for _ in range(2))
        twin.load_state_dict(net.state_dict())
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        plain = torch.optim.SGD(twin.parameters(), lr=0.1)

        def train():
            for model, chosen in ((net, optimizer), (twin, plain)):
                chosen.zero_grad()
                model(torch.ones(3, 50)).square().mean().backward()
                chosen.step()

        train()
        train()
        result = hvd.allreduce(torch.ones(9000))
        hvd.shutdown()
        assert not hvd.is_initialized()
        assert result.sum() == 9000, "results outlive the job"
        hvd.init()
        train()
        train()
        torch.testing.assert_close(net.weight, twin.weight)
        print(hvd.size(), hvd.rank(), optimizer.statistics().steps)
    """))  # fmt: skip
    assert (status, out) == (0, "1 0 4\n"), err
    assert os.listdir(runtime_dir) == []


@pytest.mark.multiprocess
def test_a_process_of_multiprocessing_says_how_it_ends(runtime_dir: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import multiprocessing, os

        def worker(rank, fails):
            import torch, fusion_rt.torch as hvd
            common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
            os.environ.update(common, RANK=str(rank), LOCAL_RANK=str(rank))
            hvd.init()
            if rank == 0:
                1 / (not fails)
            else:
                try:
                    hvd.allreduce(torch.ones(1))
                except hvd.HorovodInternalError as error:
                    print(repr(str(error)), flush=True)

        if __name__ == "__main__":
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["fusion_rt.torch"])
            for fails in (False, True):
                processes = [context.Process(target=worker, args=(rank, fails)) for rank in range(2)]
                for process in processes:
                    process.start()
                for process in processes:
                    process.join()
        """)
    )
    status, out, err = finish(start_process(str(script)))
    assert status == 0, err
    assert len(out.splitlines()) == 2, out + err
    left, failed = out.splitlines()
    for line, text in ((left, "left the job"), (failed, "ZeroDivisionError: division by zero")):
        assert text in line
        assert "rank 0 (host" in line


def test_what_scripts_ask_about_the_installation() -> None:
    assert (hvd.mpi_enabled(), hvd.mpi_built(), hvd.gloo_enabled(), hvd.gloo_built()) == (False, False, True, True)
    assert (hvd.nccl_built(), hvd.ddl_built(), hvd.ccl_built()) == (0, False, False)
    assert hvd.cuda_built() == (torch.version.cuda is not None)
    assert hvd.rocm_built() == (torch.version.hip is not None)
    with pytest.raises(ValueError, match="Horovod MPI is not enabled"):
        hvd.mpi_threads_supported()


@on_ranks
def test_a_timeline_needs_a_variable_and_a_place() -> None:
    with pytest.raises(ValueError, match="Set HOROVOD_TIMELINE=DYNAMIC"):
        hvd.start_timeline("timeline.json")
    os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
    try:
        if hvd.rank() == 0:
            with pytest.raises(ValueError, match=r"timeline /no/such.json cannot be written: No such file"):
                hvd.start_timeline("/no/such.json")
        else:
            hvd.start_timeline("/no/such.json")
        hvd.stop_timeline()
    finally:
        del os.environ["HOROVOD_TIMELINE"]
    assert hvd.is_homogeneous()
