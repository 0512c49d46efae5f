"""A job of two nodes that is killed while it writes snapshots goes on from one that both have."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.local import array_codec
from tests.harness import Job, WorkerError

pytestmark = pytest.mark.multiprocess
SIZE = 2000  # elements of a parameter: more than half a bucket


def test_a_restart_loads_what_both_nodes_have(tmp_path: Path) -> None:
    settings = {"HOROVOD_FUSION_THRESHOLD": "4KiB", "FUSION_SNAPSHOT_DIRECTORY": str(tmp_path)}
    with Job((1, 1), {**settings, "FUSION_SNAPSHOT_EVERY": "0.02"}) as job:
        job.start(_train_on)
        while len(_numbers(tmp_path, 0)) < 2 or len(_numbers(tmp_path, 1)) < 2:
            assert all(process.poll() is None for process in job.workers)
            time.sleep(0.005)
        for process in (*job.daemons, *job.workers):
            process.kill()
        for process in (*job.daemons, *job.workers):
            process.wait()
    common = _numbers(tmp_path, 0) & _numbers(tmp_path, 1)
    assert common
    if len(common) > 1 and _numbers(tmp_path, 0) == _numbers(tmp_path, 1):  # as if one had been killed a moment before
        _path(tmp_path, 1, max(common)).unlink()
        common.remove(max(common))
    saved = [value for node in (0, 1) for value in _values(_path(tmp_path, node, max(common)))]
    with Job((1, 1), {**settings, "FUSION_SNAPSHOT_RESTORE": "1"}) as job:
        for values in job.run(_look):
            assert sorted(values) == sorted(saved)
    _path(tmp_path, 1, max(common)).unlink()
    with Job((1, 1), {**settings, "FUSION_SNAPSHOT_RESTORE": "1"}) as job, pytest.raises(WorkerError) as caught:
        job.run(_look)
    assert "that all hosts with shards have" in str(caught.value)


def _numbers(directory: Path, node: int) -> set[int]:
    return {int(path.name.split(".")[2]) for path in directory.glob(f"*.node{node}.*.snapshot")}


def _path(directory: Path, node: int, number: int) -> Path:
    return next(directory.glob(f"*.node{node}.{number}.snapshot"))


def _values(path: Path) -> list[float]:
    """Returns the value that all elements of each home in a snapshot have."""
    arrays = array_codec.read(np.frombuffer(path.read_bytes(), np.uint8))
    homes = [array for name, array in arrays.items() if name.endswith(":value")]
    assert all((array == array[0]).all() for array in homes)
    return [float(array[0]) for array in homes]


def _optimizer(rate: float) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    parameters = [torch.nn.Parameter(torch.zeros(SIZE)) for _ in range(2)]
    plain = torch.optim.SGD(parameters, lr=rate)
    return parameters, hvd.DistributedOptimizer(plain, algorithm="bsp")


def _step(parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    torch.stack([parameter.sum() for parameter in parameters]).sum().backward()
    optimizer.step()


def _train_on() -> None:
    parameters, optimizer = _optimizer(0.125)
    while True:
        _step(parameters, optimizer)


def _look() -> list[float]:
    """Returns the value that all elements of each parameter have, after a step that changes nothing."""
    parameters, optimizer = _optimizer(0.0)
    _step(parameters, optimizer)
    assert all((parameter == parameter[0]).all() for parameter in parameters)
    return [float(parameter.detach()[0]) for parameter in parameters]
