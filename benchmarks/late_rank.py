"""Memory of daemons while one rank is late, and all-reduces of the other one wait for it.

    python -m benchmarks.late_rank
    python -m benchmarks.late_rank --gib 40 --late 60

Two hosts (network namespaces; as root) with a worker each run under `fusionrun`. Rank 0 begins all-reduces of 16 MiB,
and waits for none of them. Rank 1 begins its own so many seconds later. Each operation has a name of its own, and the
next of `--tensors` tensors, each in a segment of its own, so that a worker takes no more than those. They have zeros;
a last operation on each, of ones, shows that sums are right. The resident memory of each daemon beyond its worker's
arena is read from /proc, twice a second.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any

import numpy as np

from benchmarks.common import arguments as shared
from benchmarks.common import launch, results
from benchmarks.common.results import Measure, Record
from benchmarks.common.tables import Table
from benchmarks.footprint import resident
from benchmarks.netlab import Netlab
from fusion_rt import wire
from fusion_rt.client import Client

NAME = "late_rank"
PUNCTUAL, LATE = "daemon of the rank in time", "daemon of the late rank"
OWN, FIRST = "most resident memory beyond the arena", "the same before"
ENDED = "until the last all-reduce after rank 1 came"
NBYTES = 16 << 20
_EVERY_S = 0.5
_KEPT = 10  # every so many samples are kept in the results
_READY = "READY "
_TIMEOUT_S = 3600.0


def worker(count: int, tensors: int, late: float) -> None:
    """Begins `count` all-reduces on each rank, on rank 1 `late` seconds after rank 0, and waits for all of them."""
    rank = int(os.environ["HOROVOD_RANK"])
    path = os.environ["FUSION_SOCKET"]
    client = Client(path, os.environ["FUSION_JOB_ID"], rank, _TIMEOUT_S)
    regions = [client.allocate(NBYTES) for _ in range(tensors)]
    places = [(region.segment, region.offset) for region in regions]
    values = [np.frombuffer(region.view, np.float32) for region in regions]
    signature = wire.Signature("allreduce", "float32", (NBYTES // 4,))
    client.wait(client.submit("first", signature, place=places[0]))
    print(_READY + Path(path).with_name("lock").read_text(encoding="utf-8").strip(), rank, flush=True)
    if rank == 1:
        time.sleep(late)
    began = time.monotonic()
    handles = [
        client.submit(f"gradient {number}", signature, place=place)
        for number, place in zip(range(count), itertools.cycle(places), strict=False)
    ]
    for handle in handles:
        client.wait(handle)
    seconds = time.monotonic() - began
    right = all(not tensor.any() for tensor in values)
    for tensor in values:
        tensor[:] = 1
    handles = [client.submit(f"last {number}", signature, place=place) for number, place in enumerate(places)]
    for handle in handles:
        client.wait(handle)
    right = right and all(bool((tensor == 2).all()) for tensor in values)
    if rank == 1:
        launch.tell({"seconds": seconds, "right": right})
    client.close()


class Watch:
    """Reads the resident memory of daemons until the output of their job ends.

    Attributes:
        samples: (s since the first one was seen, MiB beyond the arena), by rank of its worker.
        result: of rank 1.
    """

    def __init__(self, output: IO[str]) -> None:
        self._output = output
        self._pids: dict[int, int] = {}
        self._began = 0.0
        self._over = threading.Event()
        self.samples: dict[int, list[tuple[float, float]]] = {}
        self.result: dict[str, Any] = {}
        self._threads = [threading.Thread(target=self._read), threading.Thread(target=self._watch)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        for line in self._output:
            if _READY in line:
                pid, rank = map(int, line.partition(_READY)[2].split())
                self._began = self._began or time.monotonic()
                self._pids[rank] = pid
            elif launch.MARK in line:
                self.result = json.loads(line.partition(launch.MARK)[2])
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(_EVERY_S):
            for rank, pid in sorted(self._pids.items()):
                try:
                    found = resident(pid)
                except OSError:  # it has ended
                    continue
                if found:
                    sample = round(time.monotonic() - self._began, 1), round((found["Anon"] + found["File"]) / 2**20, 1)
                    self.samples.setdefault(rank, []).append(sample)

    def join(self) -> None:
        """Waits for the end of the output."""
        for thread in self._threads:
            thread.join()


def collect(gib: float, tensors: int, late: float) -> Record:
    """Runs the job.

    Raises:
        RuntimeError: it failed.
    """
    here, date = results.begin()
    count = round(gib * 2**30 / NBYTES)
    variables = {"HOROVOD_STALL_CHECK_TIME_SECONDS": str(max(1, round(late / 3))), "FUSION_ENCRYPTION": "control"}
    with Netlab(hosts=2) as lab, tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        hosts = ",".join(f"{host.name}:1" for host in lab.hosts)
        argv = [sys.executable, "-m", "fusion_rt.runner", "-np", "2", "-H", hosts, "--rsh-agent", lab.agent]
        argv += ["--network-interface", "eth0", sys.executable, "-m", "benchmarks.late_rank", "--worker"]
        job = subprocess.Popen(
            [*argv, "--gib", str(gib), "--tensors", str(tensors), "--late", str(late)],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert job.stdout is not None
        watch = Watch(job.stdout)
        watch.join()
        status = job.wait()
        errors.seek(0)
        said = errors.read()
    if status or not watch.result.get("right"):
        raise RuntimeError(f"the job ended with status {status}, {watch.result}: {said}")
    memory = {name: [mib * 2**20 for _, mib in watch.samples[rank]] for rank, name in enumerate((PUNCTUAL, LATE))}
    measures = [
        Measure(OWN, "B", {name: [max(samples)] for name, samples in memory.items()}, portable=True),
        Measure(FIRST, "B", {name: samples[:1] for name, samples in memory.items()}, portable=True),
        Measure(ENDED, "s", {"fusion_rt": [watch.result["seconds"]]}),
    ]
    named = [line for line in said.splitlines() if "rank 1" in line]
    thinned = {rank: samples[::_KEPT] for rank, samples in watch.samples.items()}
    details = {"operations": count, "MiB": thinned, "named": named[:3]}
    return Record({"GiB": gib, "tensors": tensors, "late": late}, measures, here, date, results.command_line(), details)


def show(record: Record) -> None:
    """Prints the results as a table."""
    setting, details = record.setting, record.details
    title = f"{setting['GiB']:g} GiB under way of {setting['tensors']} tensors, one rank late by {setting['late']:g} s"
    table = Table(["what", "how much"], title=title)
    for what in (OWN, FIRST):
        for name, samples in record.measure(what).samples.items():
            table.add(f"{what}, {name}", f"{samples[0] / 2**20:.0f} MiB")
    table.add(ENDED, f"{record.measure(ENDED).samples['fusion_rt'][0]:.1f} s")
    table.add("warnings that name the late rank", str(len(details["named"])))
    table.show()


def main() -> None:
    """Runs what the command line asks for."""
    parser = shared.parser(NAME, __doc__)
    parser.add_argument("--gib", type=float, default=40.0, help="of tensors that wait for the late rank (%(default)s)")
    parser.add_argument("--tensors", type=int, default=64, help="of each worker, of 16 MiB (%(default)s)")
    parser.add_argument("--late", type=float, default=60.0, help="seconds (%(default)s)")
    shared.add_out(parser)
    shared.add_worker(parser)
    options = parser.parse_args()
    if options.worker:
        worker(round(options.gib * 2**30 / NBYTES), options.tensors, options.late)
        return
    found = collect(options.gib, options.tensors, options.late)
    if options.out:
        results.keep(options.out, NAME, found)
    show(found)


if __name__ == "__main__":
    main()
