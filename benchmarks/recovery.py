"""How long it takes until every survivor of a fault has raised, and until `fusionrun` has ended.

    python -m benchmarks.recovery
    python -m benchmarks.recovery --rounds 9 --heartbeat-timeout 2 --out benchmarks/results/recovery.json

Three hosts (network namespaces; as root) with two workers each add up tensors in a loop, under `fusionrun`. In the
middle of that a worker is killed, or a daemon, or a host is cut off: nothing that it sends arrives any more, nor does
it get anything, and nobody is told. Times are from the fault to the exception in the last of the workers that are left;
those of the host that was cut off are among them. Each round starts a new job.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.netlab import Netlab
from fusion_rt import wire
from fusion_rt.client import Client
from fusion_rt.errors import HorovodInternalError

HOSTS, SLOTS = 3, 2
ELEMENTS = 250_000  # float32: 1 MB
KINDS = ("worker killed", "daemon killed", "host cut off")
TIMEOUT_S = 60.0
_MARK = re.compile(r"(READY|RAISED) (\{.*\})")


def worker() -> None:
    """What each rank runs."""
    rank = int(os.environ["HOROVOD_RANK"])
    path = os.environ["FUSION_SOCKET"]
    client = Client(path, os.environ["FUSION_JOB_ID"], rank, TIMEOUT_S)
    region = client.allocate(4 * ELEMENTS)
    np.frombuffer(region.view, np.float32)[:] = 0
    signature = wire.Signature("allreduce", "float32", (ELEMENTS,))
    daemon = int(Path(path).with_name("lock").read_text())
    try:
        for step in range(1 << 60):
            client.wait(client.submit("sum", signature, place=(region.segment, region.offset)))
            if step == 5:
                print("READY", json.dumps({"rank": rank, "pid": os.getpid(), "daemon": daemon}), flush=True)
    except HorovodInternalError as error:
        print("RAISED", json.dumps({"rank": rank, "at": time.monotonic(), "error": str(error)}), flush=True)
    signal.pause()  # the launcher ends it


class Launched:
    """A job under `fusionrun`, and what its workers say."""

    def __init__(self, lab: Netlab, heartbeat_timeout: float) -> None:
        hosts = ",".join(f"{host.name}:{SLOTS}" for host in lab.hosts)
        argv = [sys.executable, "-m", "fusion_rt.runner", "-np", str(HOSTS * SLOTS), "-H", hosts]
        argv += ["--rsh-agent", lab.agent, "--network-interface", "eth0"]
        environment = {**os.environ, "FUSION_HEARTBEAT_TIMEOUT": f"{heartbeat_timeout:g}s"}
        self.process = subprocess.Popen(
            [*argv, sys.executable, "-m", "benchmarks.recovery", "--worker"],
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
        """Waits until that many workers have said this.

        Raises:
            RuntimeError: they do not.
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
    """One round: `seconds` until the last survivor raised, `launcher` until fusionrun ended, one of the `errors`."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--heartbeat-timeout", type=float, default=3.0, help="seconds")
    parser.add_argument("--out", help="a file for the results, as JSON")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker()
        return
    found: dict[str, Any] = {}
    goals = {kind: 1.0 for kind in KINDS} | {"host cut off": options.heartbeat_timeout + 1}
    with Netlab(hosts=HOSTS) as lab:
        for kind in KINDS:
            rounds = [measure(lab, kind, options.heartbeat_timeout) for _ in range(options.rounds)]
            times = [each["seconds"] for each in rounds]
            ends = [each["launcher"] for each in rounds if each["launcher"] is not None]
            found[kind] = {
                "goal": goals[kind],
                "median": statistics.median(times),
                "most": max(times),
                "launcher": statistics.median(ends) if ends else None,
                "all": times,
                "errors": rounds[-1]["errors"],
            }
    table = Table(
        title=f"{HOSTS} hosts, {HOSTS * SLOTS} workers, heartbeat time-out {options.heartbeat_timeout:g} s: medians"
    )
    for column in ("fault", "goal", "last raised", "most", "fusionrun ended"):
        table.add_column(column, justify="left" if column == "fault" else "right")
    for kind, each in found.items():
        launcher = f"{each['launcher']:.2f} s" if each["launcher"] is not None else ""
        table.add_row(kind, f"{each['goal']:g} s", f"{each['median']:.3f} s", f"{each['most']:.3f} s", launcher)
    Console().print(table)
    if options.out:
        result = {"hosts": HOSTS, "workers": HOSTS * SLOTS, "heartbeat_timeout": options.heartbeat_timeout, **found}
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
