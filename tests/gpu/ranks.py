"""What ranks do in the cases of `python -m tests.gpu`."""

from __future__ import annotations

import os
import signal
import statistics
import time
import warnings
from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import fusion_rt.torch as hvd
from fusion_rt.core.errors import HorovodInternalError
from fusion_rt.torch.node import groups

Array = npt.NDArray[Any]


def heed_warnings() -> None:
    """Turns the warning of a selection that CUDA makes no graph of, which is only slower, into an error."""
    warnings.filterwarnings("error", ".*launched kernel by kernel")


def place(device: str) -> torch.device:
    """Returns this rank's device; ranks of a host take its GPUs in turns."""
    heed_warnings()
    if device == "cpu":
        return torch.device("cpu")
    where = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(where)
    return where


def make(where: torch.device, dtype: str = "float32", width: int = 60) -> torch.nn.Sequential:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, width), torch.nn.Tanh(), torch.nn.Linear(width, 4))
    return model.to(where, getattr(torch, dtype))


def optimizer_of(model: torch.nn.Module, compression: str) -> Any:
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    return hvd.DistributedOptimizer(plain, model.named_parameters(), compression=compression)


def step_of(model: torch.nn.Sequential, ranks: Iterable[int], step: int) -> torch.Tensor:
    """Computes the gradients of some ranks' batches of a step, as a mean."""
    losses = []
    for rank in ranks:
        weight = model[0].weight
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(8, 40, generator=generator).to(weight.device, weight.dtype)
        y = torch.randint(0, 4, (8,), generator=generator).to(weight.device)
        losses.append(torch.nn.functional.cross_entropy(model(x).float(), y))
    loss = torch.stack(losses).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def parameters(model: torch.nn.Module) -> Array:
    return np.concatenate([each.detach().float().cpu().numpy().ravel() for each in model.parameters()])


def on_devices_of_their_own() -> None:
    """Has ranks that share a GPU combine gradients there, as if each had one; NCCL has to be told, too."""
    groups.Nccl.device_of = lambda self, tensors: f"rank {hvd.rank()}"  # type: ignore[method-assign]


def combined(device: str, kind: str, steps: int) -> tuple[Array, bool]:
    """Trains with gradients that NCCL, or gloo on CPUs, combines within the node; returns the parameters, and whether
    it did."""
    if kind == "nccl":
        on_devices_of_their_own()
    model = make(place(device))
    optimizer = optimizer_of(model, "dense")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it did not is what is returned
        for step in range(steps):
            optimizer.zero_grad()
            step_of(model, [hvd.rank()], step)
            optimizer.step()
    node = optimizer._sync.plan.node
    return parameters(model), node is not None and bool(node.reduces)


def die(device: str, dies: int) -> str:
    """One rank is killed in the midst of a step; returns what the other is told, and how long the GPU took to end."""
    on_devices_of_their_own()
    where = place(device)
    parameters = [torch.nn.Parameter(torch.zeros(5000, device=where)) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))

    def step() -> None:
        torch.stack([parameter.sum() for parameter in parameters]).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    for _ in range(3):
        step()
    if hvd.rank() == dies:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        step()
    except HorovodInternalError as error:
        if device == "cuda":
            torch.cuda.synchronize()  # nothing waits on the device any more
        return str(error)
    raise AssertionError("the step ended without the rank that was killed")


def distributed(device: str, store: str) -> Array:
    """Runs collectives of torch.distributed and steps of FSDP2 by the backend fusion; returns the parameters."""
    from torch.distributed.fsdp import fully_shard  # torch 2.4, with which all tests are collected, has neither
    from torch.distributed.tensor import DTensor

    where = place(device)
    rank, size = hvd.rank(), hvd.size()
    dist.init_process_group("fusion", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        for n in (5, 1 << 20):
            own = torch.arange(n, device=where).float()
            summed = own * (rank + 1)
            work = dist.all_reduce(summed, async_op=True)
            assert work is not None
            work.wait()
            assert torch.equal(summed, own * size * (size + 1) / 2), n
            gathered = torch.zeros(size * n, device=where)
            dist.all_gather_into_tensor(gathered, own + rank)
            assert torch.equal(gathered, torch.cat([own + other for other in range(size)])), n
            part = torch.zeros(n, device=where)
            dist.reduce_scatter_tensor(part, gathered)
            assert torch.equal(part, size * (own + rank)), n
            dist.broadcast(part, 0)
            assert torch.equal(part, size * own), n
        model = make(where)
        mesh = init_device_mesh(where.type, (size,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(10):
            optimizer.zero_grad()
            step_of(model, [rank], step)
            optimizer.step()
        whole = [cast(DTensor, each).full_tensor().detach().cpu().numpy().ravel() for each in model.parameters()]
        return np.concatenate(whole)
    finally:
        dist.destroy_process_group()


def train(device: str, compression: str, steps: int, dtype: str = "float32", where: str = "off") -> tuple[Array, bool]:
    """Trains on all ranks; returns the parameters, and whether this rank has selected from its gradients itself.

    Args:
        where: FUSION_GPU_SELECTION; optimizers of one job may have different ones.
    """
    os.environ["FUSION_GPU_SELECTION"] = where
    model = make(place(device), dtype)
    optimizer = optimizer_of(model, compression)
    for step in range(steps):
        optimizer.zero_grad()
        step_of(model, [hvd.rank()], step)
        optimizer.step()
    return parameters(model), bool(optimizer._sync.selections.buckets)


def train_alone(device: str, steps: int) -> Array:
    """Trains with all ranks' batches, by torch alone; returns the parameters."""
    model = make(place(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        step_of(model, range(hvd.size()), step)
        optimizer.step()
    return parameters(model)


def step_time(device: str, compression: str, steps: int, where: str) -> float:
    """Returns the median of a step's time (ms) with 12.6 million parameters. `where`: as of `train`."""
    os.environ["FUSION_GPU_SELECTION"] = where
    here, took = place(device), []
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(12))).to(here)
    optimizer = optimizer_of(model, compression)
    for _ in range(steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        model(torch.randn(64, 1024, device=here)).square().mean().backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        took.append((time.perf_counter() - began) * 1e3)
    return statistics.median(took[steps // 3 :])


def growth(device: str, compression: str, before: int, steps: int) -> int:
    """Returns by how many bytes what a GPU has allocated grows between two steps."""
    where = place(device)
    model = make(where)
    optimizer = optimizer_of(model, compression)
    allocated = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        step_of(model, [hvd.rank()], step)
        optimizer.step()
        if step + 1 in (before, steps):
            torch.cuda.synchronize()
            allocated.append(torch.cuda.memory_allocated(where))
    return allocated[1] - allocated[0]


def overlap(waits: bool) -> float:
    """Returns the share of the time of copies to the host in which the GPU also computed, in one backward pass.

    Args:
        waits: the script waits for the GPU when half of the pass is queued.
    """
    where = place("cuda")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(2048, 2048) for _ in range(12)]
    model = torch.nn.Sequential(*layers).to(where)
    optimizer = optimizer_of(model, "dense")
    if waits:
        model[6].register_full_backward_hook(lambda module, inputs, outputs: outputs[0].sum().item() and None)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4096, 2048, device=where)).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()

    for _ in range(5):
        step()
    hvd.barrier()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step()
    spans: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:  # type: ignore[attr-defined]
            spans["DtoH" in event.name].append((event.time_range.start, event.time_range.end))
    copied = sum(end - start for start, end in spans[True])
    beside = sum(
        max(0.0, min(end, until) - max(start, since)) for start, end in spans[True] for since, until in spans[False]
    )
    return beside / copied if copied else 0.0
