"""Selection of the largest elements of a gradient: `python -m benchmarks.topk`.

*codec* is a whole step of the codec `topk`: the gradient is added to the residual, the largest elements are found
exactly, taken out of the residual, rounded to fp16 and packed, as two ranges by two threads. `torch.topk` only finds
the largest of given absolute values, with the same number of threads, and neither sorts them nor clears anything. A
third row is a lower bound: adding the gradient to the residual with the same threads. All alternate in one run; medians
count.

With `--device cuda`, *codec* is a step of `fusion_rt.kernels.cuda.side`, from a gradient on the GPU to the result in
memory of the host: the same, without rounding and packing. Beside it are `torch.topk` of absolute values on the GPU,
and a copy there that moves as many bytes as the step has to (12 for each element).
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.common import arguments as shared
from benchmarks.common import results, sampling, tables
from benchmarks.common.results import Measure, Record, Setting
from benchmarks.common.tables import Table
from fusion_rt.codecs import Layout
from fusion_rt.codecs.selecting import SelectingBucketCodec
from fusion_rt.codecs.topk import TopK, TopKBucket
from fusion_rt.core.dtypes import DTYPES
from fusion_rt.kernels import cpu
from fusion_rt.kernels.team import Team

Array = npt.NDArray[Any]

NAME = "topk"
CODEC, TORCH = "codec", "torch.topk"
_WARM_UP = 20  # steps on a GPU that do not count: kernels are compiled, and what is queued has settled


def main() -> None:
    """Runs what the command line asks for."""
    parser = shared.parser(NAME, __doc__)
    parser.add_argument("--elements", type=int, default=25_600_000, help="of the gradient (%(default)s)")
    parser.add_argument("--densities", default="0.001,0.01", help="shares that are selected (%(default)s)")
    parser.add_argument("--rounds", type=int, default=11, help="timings of each (%(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of both sides on the CPU (%(default)s)")
    parser.add_argument("--value", default="fp16", help="how values are sent by the CPU (%(default)s)")
    shared.add_out(parser)
    arguments = parser.parse_args()
    densities = [float(text) for text in arguments.densities.split(",")]
    if arguments.device == "cuda":
        record = on_gpu(arguments.elements, densities, arguments.rounds)
    else:
        record = on_cpu(arguments, densities)
    if arguments.out:
        results.keep(arguments.out, NAME, record)
    show(record)


def show(record: Record) -> None:
    """Prints a table with a row for each density."""
    names = list(record.measures[0].samples)
    where = ", ".join(str(value) for value in record.setting.values())
    table = Table(
        ["density", *(f"{name}, ms" for name in names), "torch.topk / codec", "B/element"],
        title=f"{record.details['elements']:,} float32, {where}",
    )
    for each in record.measures:
        row = [tables.ms(sampling.median(each.samples[name])) for name in names]
        size = record.details.get("bytes_per_element", {}).get(each.name)
        faster = tables.ratio(sampling.ratio(each.samples[TORCH], each.samples[CODEC]))
        table.add(f"{float(each.name):.3%}", *row, faster, f"{size:.2f}" if size else "")
    table.show()


def _measure(density: float, names: Sequence[str], rows: Sequence[Sequence[float]]) -> Measure:
    samples = {name: results.rounded(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
    return Measure(f"{density:g}", "s", samples, TORCH)


def on_cpu(arguments: argparse.Namespace, densities: list[float]) -> Record:
    """Measures each density on the CPU."""
    here, date = results.begin()
    made: list[Measure] = []
    sizes: dict[str, float] = {}
    torch.set_num_threads(arguments.threads)
    team = Team(arguments.threads)
    gradient = np.random.default_rng(1).standard_normal(arguments.elements, dtype=np.float32)
    gradients = [gradient, np.roll(gradient, arguments.elements // 3)]
    magnitudes = torch.from_numpy(np.abs(gradient))
    residual = np.zeros_like(gradient)
    cpu.reduce("sum", DTYPES["float32"], [residual, gradient], [residual])  # compiles
    layout = Layout(DTYPES["float32"], arguments.elements)
    for density in densities:
        codec = TopKBucket(layout, TopK(density=density, value=arguments.value), team)
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
        made.append(_measure(density, (CODEC, "of it packing", "add only", TORCH), rows[1:]))
        sizes[f"{density:g}"] = round(nbytes / k, 3)
    team.close()
    setting: Setting = {"device": "cpu", "threads": arguments.threads, "value": arguments.value}
    details = {"elements": arguments.elements, "bytes_per_element": sizes}
    return Record(setting, made, here, date, results.command_line(), details)


def on_gpu(elements: int, densities: list[float], rounds: int) -> Record:
    """Measures each density on the GPU.

    Raises:
        SystemExit: there is no GPU, or no package for it.
    """
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU on this machine, so nothing was measured.")
    if importlib.util.find_spec("numba_cuda") is None:
        raise SystemExit("The kernels need the package numba-cuda: pip install numba-cuda.")
    from fusion_rt.kernels.cuda.selection import words
    from fusion_rt.kernels.cuda.side import SideSelector, TorchLayer

    layer = TorchLayer(torch, torch.cuda.current_device())
    torch.manual_seed(1)
    gradient = torch.randn(elements, device="cuda")
    gradients = [gradient.clone(), gradient.roll(elements // 3)]
    magnitudes = gradient.abs()
    source = torch.zeros(elements * 3 // 2, device="cuda")  # 6 bytes read and 6 written for each element
    target = torch.empty_like(source)
    here, date = results.begin()
    made: list[Measure] = []
    for density in densities:
        k = round(density * elements)
        selector = SideSelector(layer, elements, [[(0, elements)]], np.zeros(words(k), np.int32))
        rows: list[tuple[float, float, float]] = []
        for turn in range(rounds + _WARM_UP):
            gradient.copy_(gradients[turn % 2])  # as a bucket is filled: it is at the same place in each step
            began = _idle()
            selector.start(gradient, [k])
            selected = selector.finish()[0].count
            ended = _idle()
            torch.topk(magnitudes, k, sorted=False)
            torched = _idle()
            target.copy_(source)
            copied = _idle()
            if selected != k:
                raise RuntimeError(f"the kernels selected {selected} elements instead of {k}")
            rows.append((ended - began, torched - ended, copied - torched))
        selector.close()
        made.append(_measure(density, (CODEC, TORCH, "copy"), rows[_WARM_UP:]))
    setting: Setting = {"device": torch.cuda.get_device_name()}
    return Record(setting, made, here, date, results.command_line(), {"elements": elements})


def _idle() -> float:
    """Waits until the GPU has done all queued work; returns the time (s)."""
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
