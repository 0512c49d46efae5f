"""Cost of recording: a step of training with it and without, and one event.

    python -m benchmarks.tracing
    python -m benchmarks.tracing --ranks 2 --steps 20 --rounds 30 --out benchmarks/results/tracing.json

Two jobs of the char-GPT of `examples/char_gpt.py` run at the same time, one whose workers and daemon record and one in
which nothing does, and take turns: while one of them trains, the other waits for a byte on a socket. So both run under
the same conditions, and the daemons are measured, too. A sample is the mean step of a turn, on the slowest rank; each
is compared with that of the turn beside it. *CPU* is the CPU time of a worker in a step, which depends less on other
load of the machine.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import arguments as shared
from benchmarks.common import results, sampling, tables
from benchmarks.common.results import Measure, Record
from benchmarks.common.tables import Table

NAME = "tracing"
ON, OFF = "recorded", "not recorded"
STEP, CPU, EVENT = "a step", "CPU of a worker", "an event"
GOAL_STEP, GOAL_EVENT = 1.01, 0.5e-6
RESULTS = results.RESULTS / "tracing.json"
_PORT = "FUSION_BENCHMARK_PORT"


def worker(steps: int) -> None:
    """Trains on each rank, a turn for each byte on the socket; answers with seconds and CPU seconds of a step."""
    import torch

    import fusion_rt.torch as hvd
    from benchmarks.common import training

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = training.char_gpt_task(0, hvd.rank(), hvd.size())
    optimizer = hvd.DistributedOptimizer(training.sgd(task.model, 0.05), task.model.named_parameters())
    with socket.create_connection(("127.0.0.1", int(os.environ[_PORT]))) as told:
        told.sendall(b"\0")
        while told.recv(1):
            began, computed = time.perf_counter(), time.process_time()
            for _ in range(steps):
                optimizer.zero_grad()
                task.loss(task.model).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            took = time.perf_counter() - began, time.process_time() - computed
            told.sendall(f"{took[0] / steps:.9f} {took[1] / steps:.9f}".encode())
    hvd.shutdown()


class Job:
    """A job that waits for its turn. `records`: whether its processes record."""

    def __init__(self, ranks: int, steps: int, records: bool, directory: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            environment = {
                **os.environ,
                _PORT: str(listener.getsockname()[1]),
                "FUSION_TRACE": str(int(records)),
                "FUSION_TRACE_DIR": directory,
                "OMP_NUM_THREADS": "1",
            }
            script = ["-m", f"benchmarks.{NAME}", "--worker", "--steps", str(steps)]
            command = [sys.executable, "-m", "fusion_rt.runner", "-np", str(ranks), sys.executable, *script]
            self._process = subprocess.Popen(command, env=environment)
            listener.settimeout(300)
            self._ranks = [listener.accept()[0] for _ in range(ranks)]
        for rank in self._ranks:
            rank.settimeout(600)
            rank.recv(1)

    def turn(self) -> tuple[float, float]:
        """Takes a turn; returns the seconds of a step on the slowest rank, and a worker's mean CPU seconds in it."""
        for rank in self._ranks:
            rank.sendall(b"\0")
        told = [[float(word) for word in rank.recv(64).split()] for rank in self._ranks]
        return max(took for took, _ in told), statistics.fmean(computed for _, computed in told)

    def close(self) -> None:
        """Ends the job. Raises `subprocess.CalledProcessError` if it failed."""
        for rank in self._ranks:
            rank.close()
        if code := self._process.wait(120):
            raise subprocess.CalledProcessError(code, "fusionrun")


def measure(ranks: int, steps: int, rounds: int) -> Record:
    """Runs both jobs. Raises `subprocess.CalledProcessError`: one of them failed; why is on standard error."""
    machine, date = results.begin()
    with tempfile.TemporaryDirectory(prefix="tracing") as directory:
        jobs = {ON: Job(ranks, steps, True, directory), OFF: Job(ranks, steps, False, directory)}
        samples: dict[str, list[float]] = {name: [] for name in jobs}
        computed: dict[str, list[float]] = {name: [] for name in jobs}
        for number in range(-2, rounds):  # the first two are for warming up
            for name in sorted(jobs, reverse=bool(number % 2)):
                took, spent = jobs[name].turn()
                if number >= 0:
                    samples[name].append(took)
                    computed[name].append(spent)
        for job in jobs.values():
            job.close()
        (ring,) = Path(directory).glob("*/rank-0.ring")
        events = _events(ring) / (steps * (rounds + 2))
    measures = [
        Measure(STEP, "s", {name: results.rounded(row) for name, row in samples.items()}, OFF),
        Measure(CPU, "s", {name: results.rounded(row) for name, row in computed.items()}, OFF),
        Measure(EVENT, "s", {ON: results.rounded(event())}),
        Measure("events of a worker in a step", "1", {ON: results.rounded([events])}, portable=True),
    ]
    return Record({"ranks": ranks, "steps": steps}, measures, machine, date, results.command_line())


def event(repeats: int = 300, number: int = 1000) -> list[float]:
    """Measures the seconds that recording an event takes; one sample for each repeat, which is so short that many are
    not interrupted."""
    from fusion_rt.tracing.format import Kind, Role
    from fusion_rt.tracing.recorder import Owner, Recorder

    with tempfile.TemporaryDirectory(prefix="tracing") as directory:
        recorder = Recorder(os.path.join(directory, "ring"), Owner("job", Role.WORKER, 0, 0, 1), 16 << 20)
        try:
            kind = int(Kind.SENT)
            timer = timeit.Timer(lambda: recorder.record(kind, "bucket 3", 1 << 20, 17, 1, 5, 2))
            return [taken / number for taken in timer.repeat(repeats, number)]
        finally:
            recorder.close()


def _events(ring: Path) -> int:
    """Returns the number of records that were written to a ring."""
    from fusion_rt.tracing.format import HEADER_NBYTES, WRITTEN_AT

    with open(ring, "rb") as file:
        return int.from_bytes(file.read(HEADER_NBYTES)[WRITTEN_AT : WRITTEN_AT + 8], "little")


def show(record: Record) -> None:
    """Prints the results as a table."""
    steps = record.measure(STEP).samples
    ratio = sampling.ratio(steps[ON], steps[OFF])
    best = min(record.measure(EVENT).samples[ON])
    table = Table(["what recording costs", "found", "goal"])
    table.add("a step, recorded / not", tables.ratio(ratio), f"<= {GOAL_STEP}")
    worker = record.measure(CPU).samples
    table.add("CPU of a worker, recorded / not", tables.ratio(sampling.ratio(worker[ON], worker[OFF])), "")
    table.add("a step, recorded", f"{tables.ms(statistics.median(steps[ON]))} ms", "")
    table.add("a step, not recorded", f"{tables.ms(statistics.median(steps[OFF]))} ms", "")
    table.add("an event, best of several", f"{best * 1e6:.2f} us", f"<= {GOAL_EVENT * 1e6:.1f} us")
    table.add("events of a worker in a step", f"{record.measures[-1].samples[ON][0]:.0f}", "")
    table.show()


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what the command line asks for."""
    parser = shared.parser(NAME, __doc__)
    parser.add_argument("--ranks", type=int, default=2, help="of each job (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="in a turn (%(default)s)")
    parser.add_argument("--rounds", type=int, default=30, help="turns of each job (%(default)s)")
    shared.add_out(parser, RESULTS)
    shared.add_table(parser)
    shared.add_worker(parser)
    arguments = parser.parse_args(argv)
    if arguments.worker:
        worker(arguments.steps)
        return
    if arguments.table:
        for record in results.load(arguments.out, NAME).records:
            show(record)
        return
    record = measure(arguments.ranks, arguments.steps, arguments.rounds)
    results.keep(arguments.out, NAME, record)
    show(record)


if __name__ == "__main__":
    main()
