"""The cases of `python -m tests.gpu`: each checks one thing on a GPU, and returns what it has measured.

Each runs in a process of its own, since what hangs or fails on a GPU takes its process along. Those that need no more
than torch also run on the CPU, so that they have been run before a GPU is there.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tests.gpu import ranks
from tests.harness import Job
from tests.kernels import reference

ROOT = Path(__file__).resolve().parents[2]
START = {"HOROVOD_START_TIMEOUT": "120"}
SELECTS = {**START, "FUSION_GPU_SELECTION": "auto", "HOROVOD_FUSION_THRESHOLD": "16KiB"}
TOPK = "topk(density=0.05, minimum=100)"
DTYPE_NAMES = ("float32", "bfloat16", "float16")  # of gradients
NCCL_ON_ONE_GPU = {
    "NCCL_MULTI_RANK_GPU_ENABLE": {"NCCL_MULTI_RANK_GPU_ENABLE": "1"},
    "nothing else": {},
}
SIZES = (1, 2, 1023, 65_537, 1_000_003, 30_000_000)

_BUSY_CYCLES = 1_000_000  # half a millisecond

Measured = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One of the cases.

    Attributes:
        run: gets the device, "cuda" or "cpu"; returns what it has measured, and raises what is wrong.
        seconds: that it may take.
        anywhere: it runs on the CPU, too.
        timed: it measures times, and so wants the machine for itself.
    """

    run: Callable[[str], Measured]
    seconds: float
    anywhere: bool = False
    timed: bool = False

    @property
    def says(self) -> str:
        """What it checks."""
        return (self.run.__doc__ or "").partition("\n")[0]


def versions(device: str) -> Measured:
    """The packages, the compiler of kernels and the GPU are there."""
    found: Measured = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpu": None}
    for package in ("numba", "numba_cuda"):
        spec = importlib.util.find_spec(package)
        found[package] = None if spec is None else getattr(importlib.import_module(package), "__version__", "there")
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
        found["capability"] = torch.cuda.get_device_capability()
        found["nccl"] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        from numba import cuda

        cuda.current_context()
        importlib.import_module("numba.cuda.cudadrv.nvvm").NVVM()
    return found


def shared_memory(device: str) -> Measured:
    """Memory that processes share can be pinned, and a GPU copies to it and from it."""
    nbytes = 64 << 20
    descriptor = os.memfd_create("tests.gpu")
    os.ftruncate(descriptor, nbytes)
    with mmap.mmap(descriptor, nbytes) as memory:
        there = torch.frombuffer(memory, dtype=torch.float32)
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        assert int(runtime.cudaHostRegister(there.data_ptr(), nbytes, 0)) == 0
        values = torch.randn(len(there), device=device)
        began = time.perf_counter()
        there.copy_(values, non_blocking=True)
        queued = time.perf_counter() - began
        torch.cuda.synchronize()
        took = time.perf_counter() - began
        back = torch.empty_like(values).copy_(there, non_blocking=True)
        assert torch.equal(back, values)
        assert int(runtime.cudaHostUnregister(there.data_ptr())) == 0
        del there
    os.close(descriptor)
    return {"queueing, us": round(queued * 1e6), "GB/s": round(nbytes / took / 1e9, 1)}


def kernels(device: str) -> Measured:
    """The kernels select what plain numpy does: 1 to 30 million elements, equal ones, and some that are not finite."""
    from fusion_rt.kernels.cuda.selection import words
    from fusion_rt.kernels.cuda.side import SideSelector, TorchLayer

    layer, checked = TorchLayer(torch, torch.cuda.current_device()), 0
    for n in SIZES:
        k = max(1, n // 1000)
        for momentum in (0.0, 0.9) if n < 10_000_000 else (0.0,):  # numpy takes long for more
            selector = SideSelector(layer, n, [[(0, n)]], np.zeros(words(k), np.int32), momentum=momentum)
            residual, velocity = np.zeros(n, np.float32), np.zeros(n, np.float32) if momentum else None
            for step in range(4):
                gradient = _gradient(n, step)
                selector.start(torch.from_numpy(gradient).to(device), [k])
                (taken,) = selector.finish()
                with np.errstate(invalid="ignore", over="ignore"):
                    residual, velocity = reference.added(residual, gradient, velocity, momentum, False, 1.0)
                expected = reference.largest(residual, k)
                assert taken.indices.tolist() == expected.tolist(), (n, momentum, step)
                assert taken.values.tobytes() == residual[expected].tobytes(), (n, momentum, step)
                residual[expected] = 0
                assert np.array_equal(selector.residual.cpu().numpy(), residual), (n, momentum, step)
                checked += 1
            selector.close()
    return {"selections": checked, "of several groups": _groups(layer, device)}


def _groups(layer: Any, device: str) -> int:
    """Selects from 40 groups at once, of very different sizes; returns how many steps were right."""
    from fusion_rt.kernels.cuda.selection import words
    from fusion_rt.kernels.cuda.side import SideSelector

    sizes = [1 + 37 * number**2 for number in range(40)]
    edges = [0, *accumulate(sizes)]
    groups, ks = [[pair] for pair in pairwise(edges)], [max(1, size // 100) for size in sizes]
    selector = SideSelector(layer, edges[-1], groups, np.zeros(sum(map(words, ks)), np.int32), ks)
    residual = np.zeros(edges[-1], np.float32)
    for step in range(4):
        gradient = _gradient(edges[-1], step)
        selector.start(torch.from_numpy(gradient).to(device), ks)
        with np.errstate(invalid="ignore", over="ignore"):
            residual = reference.added(residual, gradient, None, 0.0, False, 1.0)[0]
        for (low, high), k, taken in zip(pairwise(edges), ks, selector.finish(), strict=True):
            expected = low + reference.largest(residual[low:high], k)
            assert taken.indices.tolist() == expected.tolist(), (step, low, high)
            residual[expected] = 0
        assert np.array_equal(selector.residual.cpu().numpy(), residual), step
    selector.close()
    return 4


def _gradient(n: int, step: int) -> npt.NDArray[np.float32]:
    """Makes numbers: in the second step many are equal, in the third some not finite, in the fourth all small."""
    draw = np.random.default_rng(step)
    if step == 1:
        return draw.integers(-3, 4, n).astype(np.float32)
    values = draw.standard_normal(n, np.float32) * np.float32(1e-9 if step == 3 else 1.0)
    if step == 2:
        values[draw.integers(0, n, 1 + n // 10_000)] = draw.choice([np.nan, np.inf, -np.inf])
    return values


def ptx(device: str) -> Measured:
    """Kernels compile for all architectures, round like the CPU and need no local memory."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/cuda/test_ptx.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "skipped" not in done.stdout, "the compiler is not there: pip install 'numba-cuda[cu12]', or cu13"
    return {}


def one_node(device: str) -> Measured:
    """Two ranks of one node train as one process does, whether NCCL takes two ranks of a GPU or not."""
    return _train((2,), START, device, "dense")


def two_nodes(device: str) -> Measured:
    """Two nodes of one rank train as one process does."""
    return _train((1, 1), START, device, "dense")


def combined(device: str) -> Measured:
    """Two ranks of one node, of one GPU if there is no other, combine gradients there by NCCL, if it takes them."""
    kind = "nccl" if device == "cuda" else "gloo"
    for name, variables in NCCL_ON_ONE_GPU.items():
        environment = {**START, "FUSION_NODE_REDUCTION": kind, "HOROVOD_START_TIMEOUT": "20"}
        with Job((2,), {**environment, **variables}) as job:
            found = job.run(ranks.combined, device, kind, 20)
            alone = job.run(ranks.train_alone, device, 20)[0]
        off = max(float(np.abs(each - alone).max()) for each, _ in found)
        assert off < 1e-4, f"{off} off, {name}"
        if all(taken for _, taken in found):
            return {"combined by": kind, "with": name, "off by": f"{off:.1e}"}
    assert kind == "nccl", "gloo took no ranks"
    return {"combined by": "daemon: NCCL takes no two ranks of a GPU in any of these ways"}


def killed(device: str) -> Measured:
    """A rank that is killed while another waits for it in NCCL is named to that one, and nothing is left on the GPU."""
    kind = "nccl" if device == "cuda" else "gloo"
    environment = {**START, "FUSION_NODE_REDUCTION": kind, "HOROVOD_START_TIMEOUT": "20"}
    took = []
    for dies in (0, 1):
        with Job((2,), {**environment, **next(iter(NCCL_ON_ONE_GPU.values()))}) as job:
            began = time.perf_counter()
            job.start(ranks.die, device, dies)
            job.workers[dies].wait(60)
            (told,) = [answer for answer in job.results(ranks=[1 - dies]) if isinstance(answer, str)]
            assert f"rank {dies}" in told, told
            took.append(round(time.perf_counter() - began, 1))
    return {"s": took}


def distributed(device: str) -> Measured:
    """torch.distributed by the backend fusion: collectives of CUDA tensors, and FSDP2 with two ranks, of one GPU."""
    with tempfile.TemporaryDirectory() as folder, Job((2,), START) as job:
        found = job.run(ranks.distributed, device, f"{folder}/store")
        alone = job.run(ranks.train_alone, device, 10)[0]
    off = max(float(np.abs(each - alone).max()) for each in found)
    assert off < 1e-4, f"{off} off"
    return {"FSDP2 off by": f"{off:.1e}"}


def _train(nodes: tuple[int, ...], environment: Mapping[str, str], device: str, compression: str) -> Measured:
    with Job(nodes, environment) as job:
        found = [parameters for parameters, _ in job.run(ranks.train, device, compression, 20)]
        alone = job.run(ranks.train_alone, device, 20)[0]
    assert all(np.array_equal(each, found[0]) for each in found), "ranks differ"
    off = float(np.abs(found[0] - alone).max())
    assert off < 1e-4, f"{off} off"
    return {"off by": f"{off:.1e}"}


def selection(device: str) -> Measured:
    """What workers select on their GPU gives the bits that daemons' selection does: float32, bfloat16 and float16."""
    with Job((1, 1), SELECTS) as job:  # a single one: on a GPU's machine each process imports torch, and compiles
        for dtype in DTYPE_NAMES:
            selected, sent = (job.run(ranks.train, device, TOPK, 20, dtype, where) for where in ("auto", "off"))
            for (here, by_worker), (there, by_none) in zip(selected, sent, strict=True):
                assert np.array_equal(here, there), dtype
                assert (by_worker, by_none) == (device == "cuda", False), dtype
    return {}


def steps(device: str) -> Measured:
    """A step whose gradients are selected from on the GPU takes no longer than one whose daemons select."""
    with Job((1, 1), START) as job:
        found = {
            f"{name}, ms": round(max(job.run(ranks.step_time, device, "topk(density=0.001)", 60, where)), 1)
            for name, where in (("on the GPU", "auto"), ("by daemons", "off"))
        }
    assert found["on the GPU, ms"] <= 1.1 * found["by daemons, ms"], found
    return found


def memory(device: str) -> Measured:
    """200 steps with new gradients in each take no more memory than 20."""
    with Job((1, 1), SELECTS) as job:
        grown = max(job.run(ranks.growth, device, TOPK, 20, 200))
    assert grown == 0, f"{grown} bytes"
    return {}


def nccl(device: str) -> Measured:
    """A group of NCCL can be made, reduces, and is aborted while a rank that it waits for does not come."""
    from fusion_rt.torch.node.groups import NcclGroup

    where = torch.device("cuda", torch.cuda.current_device())
    with tempfile.TemporaryDirectory() as folder:
        group = NcclGroup(f"{folder}/alone", 0, 1, where, 30.0, 30.0)
        values = torch.ones(1 << 20, device=where)
        under_way = group.reduce(values, "sum", None)
        while not under_way.done():
            time.sleep(1e-3)
        began = time.perf_counter()
        group.abort()
        aborted = time.perf_counter() - began
        try:
            NcclGroup(f"{folder}/two", 0, 2, where, 3.0, 3.0)
        except RuntimeError as error:
            said = str(error)
        else:
            raise AssertionError("a group of two was made by one")
    return {"abort, s": round(aborted, 2), "alone of two": said[:60], "s": round(time.perf_counter() - began, 1)}


def overlap(device: str) -> Measured:
    """Gradients are copied to the host while the backward pass goes on, also when a script waits in it."""
    with Job((1, 1), START) as job:
        shares = {name: job.run(ranks.overlap, waits)[0] for name, waits in (("share", False), ("with item()", True))}
    assert shares["share"] > 0, "nothing was copied beside the backward pass"
    return {name: round(share, 2) for name, share in shares.items()}


def char_gpt(device: str) -> Measured:
    """The example trains, beside DDP on NCCL, or on gloo where there are not as many GPUs as ranks."""
    script = [str(ROOT / "examples" / "char_gpt.py"), "--steps", "60" if device == "cuda" else "10", "--device", device]
    runs = {
        "fusion_rt, 2 ranks": ["-m", "fusion_rt.runner", "-np", "2", sys.executable, *script],
        "alone": script,
    }
    if device == "cuda":
        backend = "gloo" if torch.cuda.device_count() < 2 else "nccl"
        runs[f"DDP on {backend}, 2 ranks"] = ["-m", "torch.distributed.run", "--nproc-per-node", "2",
                                              "-m", "tests.gpu.ddp_char_gpt", backend]  # fmt: skip
    found: Measured = {}
    for name, command in runs.items():
        done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{name}: {(done.stdout + done.stderr)[-2000:]}"
        step = re.search(r"each step of ([\d.]+) ms", done.stdout)
        assert step, done.stdout[-500:]
        found[f"{name}, ms"] = float(step[1])
    return found


def topk(device: str) -> Measured:
    """Selection takes at most twice the time of its bytes, and a quarter of torch.topk's: 25.6 and 4.2 million."""
    from fusion_rt.kernels.cuda.selection import words
    from fusion_rt.kernels.cuda.side import SideSelector, TorchLayer

    layer, found = TorchLayer(torch, torch.cuda.current_device()), {}
    for n in (25_600_000, 4_200_000):
        gradient, other = torch.randn(n, device=device), torch.empty(n * 3 // 2, device=device)
        copied = _timed(lambda other=other: torch.empty_like(other).copy_(other))[0]  # type: ignore[misc]
        for density in (0.001, 0.01):
            k = round(n * density)
            selector = SideSelector(layer, n, [[(0, n)]], np.zeros(words(k), np.int32))

            def select(selector: SideSelector = selector, gradient: torch.Tensor = gradient, k: int = k) -> None:
                selector.start(gradient, [k])
                selector.after()  # what is timed comes after it

            def finish(selector: SideSelector = selector, gradient: torch.Tensor = gradient) -> None:
                selector.finish()
                gradient.normal_()

            ours, queueing = _timed(select, finish)
            theirs = _timed(lambda g=gradient, k=k: torch.topk(g.abs(), k, sorted=False))[0]  # type: ignore[misc]
            halves, wide = gradient.bfloat16(), torch.empty_like(gradient)

            def select_halves(select: Any = select, wide: torch.Tensor = wide, halves: torch.Tensor = halves) -> None:
                wide.copy_(halves)  # as buckets are filled
                select(gradient=wide)

            row = {
                "us": ours, "queueing, us": queueing, "bfloat16, us": _timed(select_halves, finish)[0],
                "/ bytes": ours / copied, "torch.topk / this": theirs / ours,
            }  # fmt: skip
            selector._captures = False  # there is a graph for the other tensor only
            row["queueing kernel by kernel, us"] = _timed(select, finish)[1]
            selector.close()
            found[f"{n / 1e6:g} M, {density:.1%}"] = {name: round(value, 2) for name, value in row.items()}
    first = next(iter(found.values()))
    assert first["/ bytes"] <= 2, found
    assert first["torch.topk / this"] >= 4, found
    return found


def _timed(work: Callable[[], Any], after: Callable[[], Any] = lambda: None) -> tuple[float, float]:
    """Returns the medians (us) of what the GPU takes for some work, and of what this thread takes to queue it. The GPU
    is kept busy until all of it is queued, so that it waits for nothing."""
    took, queued = [], []
    for _ in range(60):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]
        begun.record()  # type: ignore[no-untyped-call]
        began = time.perf_counter()
        work()
        queued.append((time.perf_counter() - began) * 1e6)
        ended.record()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        after()
        took.append(begun.elapsed_time(ended) * 1e3)  # type: ignore[no-untyped-call]
    return statistics.median(took[20:]), statistics.median(queued[20:])


CASES = {
    "selection": Case(selection, 120, anywhere=True),  # first of those side by side: it takes longest
    "versions": Case(versions, 60, anywhere=True),
    "shared memory": Case(shared_memory, 60, timed=True),
    "kernels": Case(kernels, 180),
    "ptx": Case(ptx, 120),
    "one node": Case(one_node, 60, anywhere=True),
    "two nodes": Case(two_nodes, 60, anywhere=True),
    "topk": Case(topk, 60, timed=True),
    "steps": Case(steps, 90, anywhere=True, timed=True),
    "memory": Case(memory, 60),
    "nccl": Case(nccl, 45),
    "combined": Case(combined, 90, anywhere=True),
    "killed": Case(killed, 90, anywhere=True),
    "overlap": Case(overlap, 60, timed=True),
    "distributed": Case(distributed, 90, anywhere=True),
    "char-GPT": Case(char_gpt, 180, anywhere=True, timed=True),
}
