"""What ranks do in the cases of `python -m tests.gpu`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.profiler import ProfilerActivity, profile

import fusion_rt.torch as hvd

Array = npt.NDArray[Any]


def place(device: str) -> torch.device:
    """Returns this rank's device; ranks of a host take its GPUs in turns."""
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


def train(device: str, compression: str, steps: int, dtype: str = "float32") -> Array:
    """Trains on all ranks; returns the parameters."""
    model = make(place(device), dtype)
    optimizer = optimizer_of(model, compression)
    for step in range(steps):
        optimizer.zero_grad()
        step_of(model, [hvd.rank()], step)
        optimizer.step()
    return parameters(model)


def train_alone(device: str, steps: int) -> Array:
    """Trains with all ranks' batches, by torch alone; returns the parameters."""
    model = make(place(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        step_of(model, range(hvd.size()), step)
        optimizer.step()
    return parameters(model)


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
