"""Training steps by backend `fusion` of `torch.distributed`, side by side with gloo: one word is changed.

    python -m benchmarks.backend_step --ranks 2,4
    python -m benchmarks.backend_step --models ddp-topk --hosts 2 --rate 100mbit

- `ddp`: DistributedDataParallel and the 25.6 M parameters of `benchmarks/step.py`, whose backward pass computes
  nothing, so that communication has nothing to hide behind.
- `ddp-topk`: the same, where fusion's gradients are compressed by top-k (1 %, error feedback); gloo's are dense.
- `fsdp2`: `fully_shard` of each layer of a model of 12 linear layers, 25.2 M parameters, and a batch of one, so that
  there is little to compute.
- `fsdp2-arena`: the same, where fusion's buffers are in the arena (`fully_shard_in_arena`).

*Without* is the step of `ddp` that leaves each rank its own gradients: no backend can take less. A step is forward
and backward pass, and SGD. A sample is the median step of a turn, on the slowest rank. Hosts are as in
`benchmarks.backend`, and so is `FUSION_MEMORY`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import allreduce
from benchmarks.common import arguments as shared
from benchmarks.common import launch, results, sampling, tables
from benchmarks.common.backends import GLOO, OURS, both_backends, run
from benchmarks.common.results import Measure, Record, Setting
from benchmarks.common.tables import Table

NAME = "backend_step"
STEP, WITHOUT = "a step", "without"
_LR = 1e-3
_LAYERS, _WIDTH = 12, 1448
_TOPK = "topk(density=0.01)"


def _ddp(group: Any, backend: str, codec: str = "") -> Callable[[], None]:
    import torch

    from benchmarks.common.resnet import silent_model

    model = silent_model()
    optimizer = torch.optim.SGD(model.parameters(), _LR)
    parallel = torch.nn.parallel.DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    if backend == WITHOUT:
        from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

        parallel.register_comm_hook(None, noop_hook)
    if codec and backend == OURS:
        from fusion_rt.c10d import compress

        compress(parallel, codec)

    def step() -> None:
        optimizer.zero_grad()
        parallel().backward()
        optimizer.step()

    return step


def _ddp_topk(group: Any, backend: str) -> Callable[[], None]:
    return _ddp(group, backend, _TOPK)


def _fsdp2(group: Any, backend: str, in_arena: bool = False) -> Callable[[], None]:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if in_arena and backend == OURS:
        from fusion_rt.c10d import fully_shard_in_arena

        fully_shard_in_arena(model)
    optimizer = torch.optim.SGD(model.parameters(), _LR)
    batch = torch.ones(1, _WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    return step


def _fsdp2_in_arena(group: Any, backend: str) -> Callable[[], None]:
    return _fsdp2(group, backend, in_arena=True)


MODELS: dict[str, Callable[[Any, str], Callable[[], None]]] = {
    "ddp": _ddp,
    "ddp-topk": _ddp_topk,
    "fsdp2": _fsdp2,
    "fsdp2-arena": _fsdp2_in_arena,
}


def worker(models: Sequence[str], steps: int, rounds: int) -> None:
    """Measures on each rank; rank 0 prints the samples (s) by model and backend."""
    import torch
    import torch.distributed as dist

    with both_backends() as groups:
        found: dict[str, dict[str, list[float]]] = {}
        for model in models:
            turns = {name: _turn(MODELS[model](group, name), steps) for name, group in groups.items()}
            if model == "ddp":
                turns[WITHOUT] = _turn(_ddp(groups[OURS], WITHOUT), steps)
            samples = sampling.alternate(turns, rounds, first=dist.barrier)
            slowest = torch.tensor(list(samples.values()), dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            rows = zip(samples, slowest.tolist(), strict=True)
            found[model] = {name: results.rounded(row) for name, row in rows}
        if dist.get_rank() == 0:
            launch.tell(found)


def _turn(step: Callable[[], None], steps: int) -> Callable[[], float]:
    def turn() -> float:
        import torch.distributed as dist

        times = []
        for _ in range(steps):
            dist.barrier()
            began = time.perf_counter()
            step()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    return turn


def measure(setting: Setting, models: Sequence[str], steps: int, rounds: int) -> list[Record]:
    """Runs the workers of one setting; returns a record for each model."""
    here, date = results.begin()
    command = ["-m", "benchmarks.backend_step", "--worker", "--rounds", str(rounds), "--steps", str(steps)]
    found = run(setting, [*command, "--models", ",".join(models)])
    return [
        Record(
            {"model": model, **setting},
            [Measure(STEP, "s", samples, GLOO)],
            here,
            date,
            results.command_line(),
        )
        for model, samples in found.items()
    ]


def show(records: Sequence[Record]) -> None:
    """Prints a table: milliseconds a step, and how many times faster than gloo."""
    columns = ["model", f"{OURS} ms", f"{GLOO} ms", f"{GLOO} / {OURS}", f"{WITHOUT} ms", f"{GLOO} / {WITHOUT}"]
    table = Table(columns, title=allreduce.title(records[0].setting))
    for record in records:
        (each,) = record.measures
        samples = each.samples
        row = [tables.ms(sampling.median(samples[name])) for name in (OURS, GLOO)]
        row.append(tables.ratio(sampling.ratio(samples[GLOO], samples[OURS])))
        least = ["", ""]
        if WITHOUT in samples:
            least = [tables.ms(sampling.median(samples[WITHOUT]))]
            least.append(tables.ratio(sampling.ratio(samples[GLOO], samples[WITHOUT])))
        table.add(str(record.setting["model"]), *row, *least)
    table.show()


def main() -> None:
    """Runs what the command line asks for."""
    parser = shared.parser(NAME, __doc__)
    parser.add_argument("--ranks", help="numbers of ranks, such as 2,4 (2 on one host, else one on each)")
    parser.add_argument("--hosts", default="1", help="numbers of netlab hosts, such as 1,2 (%(default)s)")
    parser.add_argument("--rate", help="rate of each host's link, such as 100mbit")
    parser.add_argument("--models", default="ddp,fsdp2,fsdp2-arena", help=f"of {','.join(MODELS)} (%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="in a turn (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each backend (%(default)s)")
    shared.add_out(parser)
    shared.add_worker(parser)
    arguments = parser.parse_args()
    models = shared.chosen(parser, "model", arguments.models.split(","), MODELS)
    if arguments.worker:
        worker(models, arguments.steps, arguments.rounds)
        return
    chosen = allreduce.settings(arguments.ranks, arguments.hosts, arguments.rate, "control")
    if not chosen:
        parser.error(f"{arguments.ranks} ranks cannot be shared evenly by {arguments.hosts} hosts")
    for setting in chosen:
        found = measure(setting, models, arguments.steps, arguments.rounds)
        if arguments.out:
            results.keep(arguments.out, NAME, *found)
        show(found)


if __name__ == "__main__":
    main()
