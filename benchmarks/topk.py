"""Selecting the largest elements of a gradient: `python -m benchmarks.topk`.

Ours is a whole step of the codec `topk`: the gradient is added to the residual, the largest elements are found exactly,
taken out of the residual, rounded to fp16 and packed, as two ranges by two threads. `torch.topk` only finds the largest
of absolute values that are there already, with the same number of threads, and neither sorts them nor clears anything.
A third row is the least that could be done: adding the gradient to the residual with the same threads. All alternate in
one run; medians count.
"""

from __future__ import annotations

import argparse
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=25_600_000, help="of the gradient (default: %(default)s)")
    parser.add_argument("--densities", default="0.001,0.01", help="shares that are selected (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=11, help="timings of each (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of both sides (default: %(default)s)")
    parser.add_argument("--value", default="fp16", help="how values are sent (default: %(default)s)")
    arguments = parser.parse_args()

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
    for density in (float(text) for text in arguments.densities.split(",")):
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
