"""Selecting the largest elements of a gradient: `python -m benchmarks.topk`.

Ours is a whole step of the codec `topk`: the gradient is added to the residual, the largest elements are found exactly,
taken out of the residual, rounded to fp16 and packed, as two ranges by two threads. `torch.topk` only finds the largest
of absolute values that are there already, with the same number of threads, and neither sorts them nor clears anything.
A third row is the least that could be done: adding the gradient to the residual with the same threads. All alternate in
one run; medians count.

With `--device cuda` ours is a step of `fusion_rt.kernels.cuda.side`, from a gradient on the GPU to the result in memory
of the host: the same, without rounding and packing. Beside it are `torch.topk` of absolute values on the GPU, and a
copy there that moves as many bytes as the step has to (16 for each element).
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fusion_rt.codecs import Layout, SelectingBucketCodec
from fusion_rt.codecs.topk import TopK
from fusion_rt.dtypes import DTYPES
from fusion_rt.kernels import cpu
from fusion_rt.kernels.team import Team

Array = npt.NDArray[Any]

_WARM_UP = 3  # steps on a GPU that do not count: kernels are compiled, and a threshold is known from the third on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=25_600_000, help="of the gradient (default: %(default)s)")
    parser.add_argument("--densities", default="0.001,0.01", help="shares that are selected (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=11, help="timings of each (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of both sides on the CPU (default: %(default)s)")
    parser.add_argument("--value", default="fp16", help="how values are sent by the CPU (default: %(default)s)")
    arguments = parser.parse_args()
    densities = [float(text) for text in arguments.densities.split(",")]
    if arguments.device == "cuda":
        on_gpu(arguments.elements, densities, arguments.rounds)
    else:
        on_cpu(arguments, densities)


def on_cpu(arguments: argparse.Namespace, densities: list[float]) -> None:
    """Prints a row for each density."""
    torch.set_num_threads(arguments.threads)
    team = Team(arguments.threads)
    gradient = np.random.default_rng(1).standard_normal(arguments.elements, dtype=np.float32)
    gradients = [gradient, np.roll(gradient, arguments.elements // 3)]
    magnitudes = torch.from_numpy(np.abs(gradient))
    residual = np.zeros_like(gradient)
    cpu.reduce("sum", DTYPES["float32"], [residual, gradient], [residual])  # compiles
    print(f"{arguments.elements} float32, {arguments.threads} threads; medians of {arguments.rounds} in ms")
    titles = ("density", "step", "of it packing", "add only", "torch.topk", "ratio", "B/element")
    print("{:>8} {:>8} {:>14} {:>9} {:>11} {:>6} {:>10}".format(*titles))
    for density in densities:
        codec = TopK(density=density, value=arguments.value).open(Layout(DTYPES["float32"], arguments.elements), team)
        k = round(density * arguments.elements)
        rows: list[tuple[float, float, float, float]] = []
        nbytes = 0
        for turn in range(arguments.rounds + 1):
            began = time.perf_counter()
            selected = codec.accumulate_and_select(gradients[turn % 2])
            found = time.perf_counter()
            nbytes = _pack(codec, selected, arguments.elements, team)
            ended = time.perf_counter()
            if len(selected) != k:
                raise RuntimeError(f"topk selected {len(selected)} elements instead of {k}")
            _add(residual, gradients[turn % 2], team)
            added = time.perf_counter()
            torch.topk(magnitudes, k, sorted=False)
            torched = time.perf_counter()
            rows.append((ended - began, ended - found, added - ended, torched - added))
        step, packing, add, theirs = (statistics.median(column) * 1e3 for column in zip(*rows[1:], strict=True))
        ours = f"{density:8.3%} {step:8.2f} {packing:14.2f}"
        print(f"{ours} {add:9.2f} {theirs:11.1f} {theirs / step:6.1f} {nbytes / k:10.2f}", flush=True)
    team.close()


def on_gpu(elements: int, densities: list[float], rounds: int) -> None:
    """Prints a row for each density.

    Raises:
        SystemExit: there is no GPU, or no package for it.
    """
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU on this machine, so nothing was measured.")
    if importlib.util.find_spec("numba_cuda") is None:
        raise SystemExit("The kernels need the package numba-cuda: pip install 'fusion_rt[cuda]'.")
    from fusion_rt.kernels.cuda.selection import words
    from fusion_rt.kernels.cuda.side import SideSelector, TorchLayer

    layer = TorchLayer(torch, torch.cuda.current_device())
    torch.manual_seed(1)
    gradient = torch.randn(elements, device="cuda")
    gradients = [gradient, gradient.roll(elements // 3)]
    magnitudes = gradient.abs()
    source = torch.zeros(2 * elements, device="cuda")  # 8 bytes read and 8 written for each element
    target = torch.empty_like(source)
    print(f"{elements} float32 on {torch.cuda.get_device_name()}; medians of {rounds} in ms")
    print("{:>8} {:>8} {:>11} {:>6} {:>8} {:>6}".format("density", "step", "torch.topk", "ratio", "copy", "ratio"))
    for density in densities:
        k = round(density * elements)
        selector = SideSelector(layer, elements, [(0, elements)], np.zeros(words(k), np.int32))
        rows: list[tuple[float, float, float]] = []
        for turn in range(rounds + _WARM_UP):
            began = _idle()
            selector.start(gradients[turn % 2], k)
            selected = selector.finish().count
            ended = _idle()
            torch.topk(magnitudes, k, sorted=False)
            torched = _idle()
            target.copy_(source)
            copied = _idle()
            if selected != k:
                raise RuntimeError(f"the kernels selected {selected} elements instead of {k}")
            rows.append((ended - began, torched - ended, copied - torched))
        selector.close()
        ours, theirs, copy = (statistics.median(column) * 1e3 for column in zip(*rows[_WARM_UP:], strict=True))
        print(
            f"{density:8.3%} {ours:8.3f} {theirs:11.3f} {theirs / ours:6.1f} {copy:8.3f} {ours / copy:6.1f}", flush=True
        )


def _idle() -> float:
    """When the GPU has done all that was queued."""
    torch.cuda.synchronize()
    return time.perf_counter()


def _pack(codec: SelectingBucketCodec, selected: Any, elements: int, team: Team) -> int:
    sizes = [0] * team.threads

    def work(part: int) -> None:
        low, high = (elements * edge // team.threads for edge in (part, part + 1))
        sizes[part] = codec.pack(selected, low, high).nbytes

    team.run([partial(work, part) for part in range(team.threads)])
    return sum(sizes)


def _add(residual: Array, gradient: Array, team: Team) -> None:
    def work(low: int, high: int) -> None:
        mine = residual[low:high]
        cpu.reduce("sum", DTYPES["float32"], [mine, gradient[low:high]], [mine])

    team.run([partial(work, low, high) for low, high in cpu.split(len(residual), team.threads, 4)])


if __name__ == "__main__":
    main()
