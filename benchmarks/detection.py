"""Time from a fault until every surviving worker has raised an exception, and until `fusionrun` has ended.

    python -m benchmarks.detection
    python -m benchmarks.detection --rounds 9 --heartbeat-timeout 2 --out benchmarks/results/detection.json

Three hosts (network namespaces; as root) with two workers each sum tensors in a loop, under `fusionrun`. In the middle
of that a worker is killed, or a daemon, or a host is cut off: all packets to and from it are dropped silently. Times
are from the fault to the exception in the last of the workers that are left; those of the host that was cut off are
among them. Each round starts a new job.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import arguments as shared
from benchmarks.common import results, sampling
from benchmarks.common.machine import Machine
from benchmarks.common.results import Measure, Record, Setting
from benchmarks.common.tables import Table
from benchmarks.netlab import Netlab
from fusion_rt import wire
from fusion_rt.client import Client
from fusion_rt.core.errors import HorovodInternalError

NAME = "detection"
RAISED, ENDED = "until the last survivor has raised", "until fusionrun has ended"
HOSTS, SLOTS = 3, 2
ELEMENTS = 250_000  # float32: 1 MB
KINDS = ("worker killed", "daemon killed", "host cut off")
TIMEOUT_S = 60.0
_MARK = re.compile(r"(READY|RAISED) (\{.*\})")


def worker() -> None:
    """Reduces in a loop on each rank, until an operation raises."""
    rank = int(os.environ["HOROVOD_RANK"])
    path = os.environ["FUSION_SOCKET"]
    client = Client(path, os.environ["FUSION_JOB_ID"], rank, TIMEOUT_S)
    region = client.allocate(4 * ELEMENTS)
    np.frombuffer(region.view, np.float32)[:] = 0
    signature = wire.Signature("allreduce", "float32", (ELEMENTS,))
    daemon = int(Path(path).with_name("lock").read_text(encoding="utf-8"))
    try:
        for step in range(1 << 60):
            client.wait(client.submit("sum", signature, place=(region.segment, region.offset)))
            if step == 5:
                print("READY", json.dumps({"rank": rank, "pid": os.getpid(), "daemon": daemon}), flush=True)
    except HorovodInternalError as error:
        print("RAISED", json.dumps({"rank": rank, "at": time.monotonic(), "error": str(error)}), flush=True)
    signal.pause()  # the launcher ends it


class Launched:
    """A job under `fusionrun`, and the messages of its workers."""

    def __init__(self, lab: Netlab, heartbeat_timeout: float) -> None:
        hosts = ",".join(f"{host.name}:{SLOTS}" for host in lab.hosts)
        argv = [sys.executable, "-m", "fusion_rt.runner", "-np", str(HOSTS * SLOTS), "-H", hosts]
        argv += ["--rsh-agent", lab.agent, "--network-interface", "eth0"]
        environment = {**os.environ, "FUSION_HEARTBEAT_TIMEOUT": f"{heartbeat_timeout:g}s"}
        self.process = subprocess.Popen(
            [*argv, sys.executable, "-m", "benchmarks.detection", "--worker"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._said: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
        self.errors = ""
        self._threads = [threading.Thread(target=self._read), threading.Thread(target=self._read_errors)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if match := _MARK.search(line):
                self._said.put((match[1], json.loads(match[2])))

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors = self.process.stderr.read()

    def hear(self, what: str, count: int) -> list[dict[str, Any]]:
        """Waits until `count` workers have sent the message `what`; returns their values.

        Raises:
            RuntimeError: they do not within `TIMEOUT_S`.
        """
        heard: list[dict[str, Any]] = []
        while len(heard) < count:
            try:
                said, values = self._said.get(timeout=TIMEOUT_S)
            except queue.Empty:
                self.end()
                raise RuntimeError(
                    f"{count - len(heard)} of {count} workers did not say {what}: {self.errors}"
                ) from None
            if said == what:
                heard.append(values)
        return heard

    def end(self) -> None:
        """Ends the job, if it has not ended by itself."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        self.process.wait(TIMEOUT_S)
        for thread in self._threads:
            thread.join(TIMEOUT_S)


def measure(lab: Netlab, kind: str, heartbeat_timeout: float) -> dict[str, Any]:
    """Runs one round: `seconds` until the last survivor raised, `launcher` until fusionrun ended (None if unknown), and
    the texts of the `errors`."""
    job = Launched(lab, heartbeat_timeout)
    try:
        ready = {said["rank"]: said for said in job.hear("READY", HOSTS * SLOTS)}
        time.sleep(0.2)
        with ExitStack() as stack:
            survivors = HOSTS * SLOTS
            began = time.monotonic()
            if kind == "worker killed":
                os.kill(ready[1]["pid"], signal.SIGKILL)
                survivors -= 1
            elif kind == "daemon killed":
                os.kill(ready[SLOTS]["daemon"], signal.SIGKILL)
            else:
                stack.enter_context(lab.cut_off(HOSTS - 1))
                began = time.monotonic()
            raised = job.hear("RAISED", survivors)
            launcher = None
            if kind != "host cut off":  # the launcher reaches these hosts on another way, and sees nothing
                job.process.wait(TIMEOUT_S)
                launcher = time.monotonic() - began
    finally:
        job.end()
    last = max(said["at"] for said in raised) - began
    return {"seconds": last, "launcher": launcher, "errors": sorted({said["error"] for said in raised})}


def goal(kind: str, heartbeat_timeout: float) -> float:
    """Returns the seconds after which all should have raised."""
    return heartbeat_timeout + 1 if kind == "host cut off" else 1.0


def collect(rounds: int, heartbeat_timeout: float) -> Record:
    """Measures all faults, `rounds` times each."""
    here, date = results.begin()
    raised, ended, errors = {}, {}, {}
    with Netlab(hosts=HOSTS) as lab:
        for kind in KINDS:
            found = [measure(lab, kind, heartbeat_timeout) for _ in range(rounds)]
            raised[kind] = results.rounded(each["seconds"] for each in found)
            ends = results.rounded(each["launcher"] for each in found if each["launcher"] is not None)
            if ends:
                ended[kind] = ends
            errors[kind] = found[-1]["errors"]
    return record(heartbeat_timeout, raised, ended, errors, here, date)


def record(
    heartbeat_timeout: float,
    raised: dict[str, list[float]],
    ended: dict[str, list[float]],
    errors: dict[str, list[str]],
    machine: Machine | None,
    date: str,
) -> Record:
    """Makes the record of the results."""
    setting: Setting = {"hosts": HOSTS, "workers": HOSTS * SLOTS, "heartbeat_timeout": heartbeat_timeout}
    measures = [Measure(RAISED, "s", raised), Measure(ENDED, "s", ended)]
    return Record(setting, measures, machine, date, results.command_line(), {"errors": errors})


def table(record: Record) -> Table:
    """Makes a table with a row for each fault."""
    raised, ended = record.measure(RAISED).samples, record.measure(ENDED).samples
    heartbeat = float(record.setting["heartbeat_timeout"])
    title = f"{HOSTS} hosts, {HOSTS * SLOTS} workers, heartbeat time-out {heartbeat:g} s: medians"
    made = Table(["fault", "goal", "median", "most", "until `fusionrun` has ended"], title=title)
    for kind, times in raised.items():
        launcher = f"{sampling.median(ended[kind]):.2f} s" if kind in ended else ""
        limit = f"{goal(kind, heartbeat):g} s"
        made.add(kind, limit, f"{sampling.median(times):.3f} s", f"{max(times):.3f} s", launcher)
    return made


def main() -> None:
    """Runs what the command line asks for."""
    parser = shared.parser(NAME, __doc__)
    parser.add_argument("--rounds", type=int, default=7, help="of each fault (%(default)s)")
    parser.add_argument("--heartbeat-timeout", type=float, default=3.0, help="seconds (%(default)s)")
    shared.add_out(parser)
    shared.add_worker(parser)
    options = parser.parse_args()
    if options.worker:
        worker()
        return
    found = collect(options.rounds, options.heartbeat_timeout)
    if options.out:
        results.keep(options.out, NAME, found)
    table(found).show()


if __name__ == "__main__":
    main()
