"""Footprint of an idle daemon: CPU time, resident memory, and names in /dev/shm. And the memory of large models.

    python -m benchmarks.footprint
    python -m benchmarks.footprint --ranks 4 --seconds 30
    python -m benchmarks.footprint --parameters 1e8,3e8
    python -m benchmarks.footprint --parameters 7e8 --codecs topk,int8,dense --algorithms ""

The workers of a job on this host train for a few steps, with 100 MB of gradients, and reduce a few tensors besides;
then they are idle, and the daemon is watched from outside, through /proc. Its resident memory is split as the kernel
does: the arenas, which the workers have mapped, too, are shared; the rest is the daemon's own.

With `--parameters` a model of so many parameters (float32, matrices of 2048 x 2048) is trained on two hosts of this
machine (network namespaces, root needed), with SGD and random gradients: with each codec, and with each algorithm. The
memory of workers and daemons is read from the kernel after the second exchange and after the last step, and sampled in
between.
It is split into memory of the process alone and arenas, which both have mapped, and given in units of the model (4
bytes for each parameter), without the memory that the process had before there was a model. The longest callback is
that of the daemons' event loops: no heartbeat leaves meanwhile.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import arguments as shared
from benchmarks.common import launch, results
from benchmarks.common.results import Measure, Record, Setting
from benchmarks.common.tables import Table

NAME = "footprint"
OURS, CPU, OWN = "fusion_rt", "CPU", "resident memory beyond the arenas"
ELEMENTS = 25_000_000  # float32
STEPS = 5
SETTLE_S = 1.0  # between the last operation and the watch
SAMPLE_S = 0.05  # between two looks at memory
MATRIX = 2048
WARM = 2  # exchanges, after which memory should not grow any more
CODECS = "dense,fp16,bf16,topk,gaussiank,thresholdk,randomk,demo,int8,int4,int2,onebit,powersgd"
ALGORITHMS = (
    "bsp;ssp;asp;hogwild;softsync;dc_asgd;partial;collaborative;easgd(steps=2);ea_wild(steps=2);dpsgd;sgp;adpsgd;"
    "choco+topk;noloco(steps=2);local_sgd(steps=2);diloco(steps=2);diloco(steps=2)+topk;sparseloco(steps=2);"
    "decoupled(steps=2)"
)
MEASURES = {
    "worker": "x model", "worker, at most": "x model", "arenas": "x model", "daemon": "x model",
    "daemon, at most": "x model", "daemon beyond the arenas": "B", "longest callback": "s", "step": "s",
}  # fmt: skip


def worker(seconds: float) -> None:
    """Measures on each rank; rank 0 watches the daemon and prints the result."""
    import torch

    import fusion_rt.torch as hvd

    hvd.init()
    layers = [torch.nn.Parameter(torch.zeros(ELEMENTS // 10)) for _ in range(10)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layers, 1e-3))
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.stack([layer.sum() for layer in layers]).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        hvd.allreduce(torch.ones(1000), name="metric")
        hvd.allgather(torch.ones(1000), name="outputs")
    hvd.barrier()
    if hvd.rank() == 0:
        time.sleep(SETTLE_S)
        before = launch.daemon()
        began = time.perf_counter()
        cpu = launch.cpu_seconds(before["pid"])
        time.sleep(seconds)
        share = (launch.cpu_seconds(before["pid"]) - cpu) / (time.perf_counter() - began)
        memory = resident(before["pid"])
        result = {"share": share, "arenas": before["workers"]["arenas"], "memory": memory, "shm": _shm()}
        launch.tell(result)
    else:
        time.sleep(SETTLE_S + seconds)
    hvd.barrier()
    hvd.shutdown()


def resident(pid: int) -> dict[str, int]:
    """Returns the resident memory of a process in bytes: anonymous (Anon), of files (File), shared (Shmem)."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    found = dict(line.split(":") for line in lines if line.startswith("Rss"))
    return {name.removeprefix("Rss"): int(size.split()[0]) * 1024 for name, size in found.items()}


def _shm() -> int:
    """Counts the files in /dev/shm."""
    return len(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else 0


def collect(ranks: int, seconds: float) -> Record:
    """Runs the job, and watches its daemon."""
    here, date = results.begin()
    before = _shm()
    command = ["-m", "benchmarks.footprint", "--worker", "--seconds", str(seconds)]
    found = launch.fusionrun(ranks, command)
    memory = found["memory"]
    measures = [
        Measure(CPU, "of a core", {OURS: [found["share"]]}),
        Measure(OWN, "B", {OURS: [memory["Anon"] + memory["File"]]}, portable=True),
    ]
    details = {"memory": memory, "arenas": found["arenas"], "shm": [before, found["shm"], _shm()], "seconds": seconds}
    return Record({"ranks": ranks}, measures, here, date, results.command_line(), details)


def show(record: Record) -> None:
    """Prints the results as a table."""
    memory = record.details["memory"]
    table = Table(["what", "how much"], title=f"an idle daemon, {record.setting['ranks']} ranks on this host")
    table.add("CPU", f"{record.measure(CPU).samples[OURS][0]:.3%} of a core")
    table.add(OWN, f"{record.measure(OWN).samples[OURS][0] / 1e6:.1f} MB")
    table.add("  anonymous", f"{memory['Anon'] / 1e6:.1f} MB")
    table.add("  of files (libraries)", f"{memory['File'] / 1e6:.1f} MB")
    table.add("resident memory in arenas", f"{memory['Shmem'] / 1e6:.1f} MB")
    table.add("size of the arenas", f"{record.details['arenas'] / 1e6:.1f} MB")
    table.add("files in /dev/shm before, during, after", ", ".join(map(str, record.details["shm"])))
    table.show()


# --- large models -----------------------------------------------------------------------------------------------------


class Peak:
    """The most memory that a process has alone (bytes), sampled by a thread."""

    def __init__(self, pid: int) -> None:
        self._pid, self.nbytes = pid, 0

    def look(self) -> int:
        """Returns what it has now."""
        now = resident(self._pid)["Anon"]
        self.nbytes = max(self.nbytes, now)
        return now


@contextmanager
def sampled(peaks: Sequence[Peak]) -> Iterator[None]:
    """Looks at memory again and again while the block runs."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(SAMPLE_S):
            for peak in peaks:
                peak.look()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def train(parameters: int, codec: str, algorithm: str, steps: int) -> None:
    """Trains on each rank; rank 0 prints the most that any rank has measured of itself and its daemon."""
    import torch

    import fusion_rt.torch as hvd
    from fusion_rt import algorithms

    class Signal(torch.autograd.Function):
        """A number that depends on a parameter, with random gradients."""

        @staticmethod
        def forward(ctx: Any, parameter: torch.Tensor) -> torch.Tensor:
            ctx.shape = parameter.shape
            return parameter.new_zeros(())

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            return torch.empty(ctx.shape).uniform_(-1e-3, 1e-3)

    hvd.init()
    small = torch.nn.Parameter(torch.zeros(1000))  # for what the first step of any model needs
    first = hvd.DistributedOptimizer(torch.optim.SGD([small], 1e-3), [("small", small)], compression=codec)
    Signal.apply(small).backward()  # type: ignore[no-untyped-call]
    first.step()
    hvd.barrier()
    status = launch.daemon()
    daemon, started = status["pid"], status["loop"]["longest"]
    peaks = [Peak(os.getpid()), Peak(daemon)]
    before = [peak.look() for peak in peaks]
    matrices = [torch.nn.Parameter(torch.zeros(MATRIX, MATRIX)) for _ in range(parameters // MATRIX**2)]
    rest = parameters - len(matrices) * MATRIX**2
    layers = [*matrices, *([torch.nn.Parameter(torch.zeros(rest))] if rest else [])]
    named = [(f"layer{index}", layer) for index, layer in enumerate(layers)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layers, 1e-3), named, compression=codec, algorithm=algorithm)
    early: list[int] = []
    warm, cpu = WARM * algorithms.parse(algorithm).period, 0.0
    seconds: list[float] = []
    with sampled(peaks):
        for step in range(steps):
            began = time.perf_counter()
            optimizer.zero_grad()
            torch.stack([Signal.apply(layer) for layer in layers]).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            seconds.append(time.perf_counter() - began)
            if step + 1 in (warm, steps):
                hvd.barrier()
            if step + 1 == warm:
                early, cpu = [peak.look() for peak in peaks], launch.cpu_seconds(daemon)
    hvd.barrier()
    model = 4 * parameters
    late, status = [peak.look() for peak in peaks], launch.daemon()
    callbacks = {name: took for name, took in status["loop"]["longest"].items() if took > started.get(name, 0.0)}
    own, beside = (now - then for now, then in zip(late, before, strict=True))
    found = {
        "worker": own / model,
        "worker, at most": (peaks[0].nbytes - before[0]) / model,
        "arenas": resident(os.getpid())["Shmem"] / model,
        "daemon": beside / model,
        "daemon, at most": (peaks[1].nbytes - before[1]) / model,
        "daemon beyond the arenas": float(peaks[1].nbytes + resident(daemon)["File"]),
        "growth": float(late[1] - early[1]),
        "cpu": (launch.cpu_seconds(daemon) - cpu) / (steps - warm),
        "longest callback": max(callbacks.values(), default=0.0),
        "step": sorted(seconds[1:])[len(seconds[1:]) // 2],
    }
    everybody = hvd.allgather_object((found, max(callbacks, key=lambda name: callbacks[name], default="")))
    if hvd.rank() == 0:
        slowest = max(everybody, key=lambda one: float(one[0]["longest callback"]))[1]
        launch.tell({**{name: max(one[name] for one, _ in everybody) for name in found}, "callback": slowest})
    hvd.shutdown()


def collect_model(parameters: int, codec: str, algorithm: str, steps: int) -> Record:
    """Trains a model with a codec and an algorithm on two hosts."""
    here, date = results.begin()
    command = ["-m", "benchmarks.footprint", "--worker", "--parameters", str(parameters), "--steps", str(steps)]
    found = launch.on_hosts(2, None, [*command, "--codecs", codec, "--algorithms", algorithm])
    measures = [
        Measure(name, unit, {OURS: results.rounded([found[name]])}, portable=unit != "s")
        for name, unit in MEASURES.items()
    ]
    details = {name: found[name] for name in ("growth", "cpu", "callback")} | {"steps": steps}
    setting: Setting = {"parameters": parameters, "codec": codec, "algorithm": algorithm}
    return Record(setting, measures, here, date, results.command_line(), details)


def runs(codecs: str, algorithms: str) -> list[tuple[str, str]]:
    """Returns the pairs of codec and algorithm that are measured: `A+C` is algorithm A with codec C."""
    from fusion_rt import algorithms as algorithms_by_name

    found = [(codec, "allreduce") for codec in codecs.split(",") if codec]
    for one in algorithms.split(";"):
        algorithm, _, codec = one.partition("+")
        found += [(codec or algorithms_by_name.parse(algorithm).codec or "dense", algorithm)] if algorithm else []
    return found


def collect_models(sizes: Sequence[int], pairs: Sequence[tuple[str, str]], steps: int, out: Path | None) -> int:
    """Measures models, and shows each as it is there; returns 1 if a job has failed."""
    failed = 0
    made: list[Record] = []
    for parameters in sizes:
        for codec, algorithm in pairs:
            try:
                made.append(collect_model(parameters, codec, algorithm, steps))
            except subprocess.CalledProcessError as error:
                print(f"{algorithm} with {codec}: the job failed with status {error.returncode}", file=sys.stderr)
                failed = 1
                continue
            if out:
                results.keep(out, NAME, made[-1])
            show_models(made[-1:])
    if len(made) > 1:
        show_models(made)
    return failed


def show_models(records: Sequence[Record]) -> None:
    """Prints a table with a row for each run."""
    table = Table(
        ["parameters", "algorithm", "codec", "worker", "at most", "arenas", "daemon", "at most", "daemon, MB",
         "growth, MB", "callback, ms", "which", "step, s"],
        title="memory in units of the model",
    )  # fmt: skip
    for record in records:
        of = {name: record.measure(name).samples[OURS][0] for name in MEASURES}
        table.add(
            f"{record.setting['parameters']:,}",
            str(record.setting["algorithm"]),
            str(record.setting["codec"]),
            *(f"{of[name]:.2f}" for name in ("worker", "worker, at most", "arenas", "daemon", "daemon, at most")),
            f"{of['daemon beyond the arenas'] / 1e6:.0f}",
            f"{record.details['growth'] / 1e6:.1f}",
            f"{of['longest callback'] * 1e3:.0f}",
            str(record.details["callback"]).partition(".<locals>")[0],
            f"{of['step']:.2f}",
        )
    table.show()


def main() -> None:
    """Runs what the command line asks for."""
    parser = shared.parser(NAME, __doc__)
    parser.add_argument("--ranks", type=int, default=2, help="ranks, on one host (%(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="for which the daemon is watched (%(default)s)")
    parser.add_argument(
        "--parameters", default="", help="of models on two hosts, such as 1e8,3e8 (none: an idle daemon)"
    )
    parser.add_argument("--codecs", default=CODECS, help="with all-reduce (%(default)s)")
    parser.add_argument("--algorithms", default=ALGORITHMS, help="NAME or NAME+CODEC, with ; between (%(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="with each model (%(default)s)")
    shared.add_out(parser)
    shared.add_worker(parser)
    arguments = parser.parse_args()
    sizes = [round(float(size)) for size in arguments.parameters.split(",") if size]
    if arguments.worker and sizes:
        train(sizes[0], arguments.codecs, arguments.algorithms, arguments.steps)
        return
    if arguments.worker:
        worker(arguments.seconds)
        return
    if sizes:
        pairs = runs(arguments.codecs, arguments.algorithms)
        sys.exit(collect_models(sizes, pairs, arguments.steps, arguments.out))
    record = collect(arguments.ranks, arguments.seconds)
    if arguments.out:
        results.keep(arguments.out, NAME, record)
    show(record)


if __name__ == "__main__":
    main()
