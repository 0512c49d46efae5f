"""A job of many hosts, each of them an agent, a daemon and a worker of this machine: seconds, memory and descriptors.

    python -m benchmarks.scale --processes 64

`fusionrun` starts an elastic job by an `--rsh-agent` that stays on this machine, so that its way through other hosts,
its epochs and its ends are those of a cluster; only the network and the processors are shared. Workers are without
torch: in a step they add up 2,000 integers. They take 20 steps, one is killed and replaced, a host is killed, and all
end. Times are from the event until the last rank has taken its first step after it. All processes compete for the
processors of this machine, so its number of them bounds every time.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

NAME = "processes"
STEPS = 20
ELEMENTS = 2000
TIMEOUT_S = 900.0
HEARTBEAT_S = 60  # a daemon that waits for a processor is not lost
_SAID = re.compile(r"SAID (\{.*\})")


# --- a worker ---------------------------------------------------------------------------------------------------------


def work(directory: Path) -> None:
    """Steps with the others, in one epoch after another, until there is a file `stop`."""
    import numpy as np

    from fusion_rt.client import Client
    from fusion_rt.core.errors import FusionError
    from fusion_rt.local.elastic import AgentConnection, Removed
    from fusion_rt.wire import Signature

    def add(client: Client, first: int) -> int:
        values = np.ones(ELEMENTS, np.int32)
        values[0] = first
        operation = client.submit("step", Signature("allreduce", "int32", (ELEMENTS,)), inline=values.tobytes())
        found = np.frombuffer(client.wait(operation).inline or b"", np.int32)
        assert found[1] == client.topology.size
        return int(found[0])

    def train(client: Client, agent: AgentConnection) -> bool:
        for step in range(1, 1 << 30):
            news = add(client, 1000 * (directory / "stop").exists() + bool(agent.changes()))
            if step in (1, STEPS + 1):
                what = {"epoch": agent.epoch, "size": client.topology.size, "step": step, "at": time.monotonic()}
                print("SAID", json.dumps({**what, "rank": client.rank, "pid": os.getpid()}), flush=True)
            if news:
                return news >= 1000
            time.sleep(0.01)
        return True

    agent = AgentConnection(os.environ)
    is_beside, error = agent.expected is not None, ""
    while True:
        if is_beside:
            answer = agent.rejoin(error)
            if isinstance(answer, Removed):
                return
            os.environ.update(answer.environment)
        client, error, is_beside = None, "", agent.expected is not None
        if is_beside:
            continue
        try:
            where = os.environ["FUSION_SOCKET"], os.environ["FUSION_JOB_ID"], int(os.environ["HOROVOD_RANK"])
            client = Client(*where, TIMEOUT_S, formation=agent.epoch)
            if train(client, agent):
                client.close()
                return
        except FusionError as failure:
            error = str(failure)
        if client is not None:
            client.close()
        is_beside = True


# --- the job ----------------------------------------------------------------------------------------------------------


class Job:
    """A running job, and what its workers have said."""

    def __init__(self, hosts: int, directory: Path) -> None:
        names = ",".join(f"h{number}:1" for number in range(hosts))
        argv = [sys.executable, "-m", "fusion_rt.runner", "-np", str(hosts), "--min-np", "2", "-H", names]
        argv += ["--rsh-agent", "env BENCHMARKED={host}", "--network-interface", "lo"]
        argv += ["--start-timeout", f"{TIMEOUT_S:g}s", "--elastic-timeout", f"{TIMEOUT_S:g}s"]
        environment = {**os.environ, "FUSION_HEARTBEAT_TIMEOUT": f"{HEARTBEAT_S}s", "OMP_NUM_THREADS": "1"}
        # Round trips of processes that wait for a processor are as long as those of links over a distance.
        environment["FUSION_CONNECTIONS"] = "1"
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - as long as the job
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [*argv, sys.executable, "-m", "benchmarks.processes", os.fspath(directory)],
            env=environment, stdout=subprocess.PIPE, stderr=self._errors, text=True,
        )  # fmt: skip
        self._said: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if match := _SAID.search(line):
                self._said.append(json.loads(match[1]))

    def wait(self, after: int, size: int, step: int = 1) -> list[dict[str, Any]]:
        """Waits until all ranks of an epoch after this one, with so many workers, have taken a step; returns what they
        said, by rank.

        Raises:
            RuntimeError: they do not within `TIMEOUT_S`, or the job has ended.
        """
        until = time.monotonic() + TIMEOUT_S
        while time.monotonic() < until and self.process.poll() is None:
            found = [
                one for one in [*self._said] if one["epoch"] > after and (one["size"], one["step"]) == (size, step)
            ]
            for epoch in sorted({one["epoch"] for one in found}):
                of_epoch = {one["rank"]: one for one in found if one["epoch"] == epoch}
                if len(of_epoch) == size:
                    return [of_epoch[rank] for rank in range(size)]
            time.sleep(0.05)
        self.end()
        self._errors.seek(0)
        raise RuntimeError(f"no epoch of {size} workers after epoch {after}: {self._errors.read()[-4000:]}")

    def end(self) -> None:
        """Ends the job, if it has not ended by itself."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        self._reader.join(60)


def measure(hosts: int) -> dict[str, tuple[str, float]]:
    """Runs a job of so many hosts; returns each figure's unit and value."""
    import psutil

    found: dict[str, tuple[str, float]] = {}

    def since(began: float, said: Iterable[dict[str, Any]]) -> float:
        return float(max(one["at"] for one in said) - began)

    with tempfile.TemporaryDirectory() as name:
        job = Job(hosts, Path(name))
        try:
            first = job.wait(0, hosts)
            epoch = first[0]["epoch"]
            found["start"] = "s", since(job.began, first)
            found[f"{STEPS} steps"] = "s", since(max(one["at"] for one in first), job.wait(epoch - 1, hosts, STEPS + 1))
            found |= footprint(psutil.Process(job.process.pid))
            killed = time.monotonic()
            os.kill(first[hosts // 2]["pid"], signal.SIGKILL)
            without = job.wait(epoch, hosts - 1)
            found["a lost worker: the others go on"] = "s", since(killed, without)
            again = job.wait(without[0]["epoch"], hosts)
            found["... and another one has its place"] = "s", since(killed, again)
            lost = f"h{hosts - 1}"
            agents = [p for p in psutil.Process(job.process.pid).children(recursive=True) if _is_agent(p, lost)]
            killed = time.monotonic()
            for process in agents:
                process.kill()
            without = job.wait(again[0]["epoch"], hosts - 1)
            found["a lost host: the others go on"] = "s", since(killed, without)
            stopped = time.monotonic()
            (Path(name) / "stop").touch()
            if status := job.process.wait(TIMEOUT_S):
                raise RuntimeError(f"the job ended with status {status}")
            found["end"] = "s", time.monotonic() - stopped
        finally:
            job.end()
    return found


def _is_agent(process: Any, host: str) -> bool:
    import psutil

    try:
        return "fusion_rt.runner.agent" in process.cmdline() and process.environ().get("BENCHMARKED") == host
    except psutil.Error:
        return False


def footprint(launcher: Any) -> dict[str, tuple[str, float]]:
    """Returns memory (proportional set size, in which shared pages count once) and descriptors of a job's processes."""
    import psutil

    kinds: dict[str, Callable[[str], bool]] = {
        "daemon": lambda line: "fusiond" in line,
        "worker": lambda line: "benchmarks.processes" in line,
        "agent": lambda line: "fusion_rt.runner.agent" in line,
    }
    memory: dict[str, list[int]] = {"launcher": [launcher.memory_full_info().pss]}
    descriptors: dict[str, list[int]] = {"launcher": [launcher.num_fds()]}
    for process in launcher.children(recursive=True):
        try:
            line, pss, fds = " ".join(process.cmdline()), process.memory_full_info().pss, process.num_fds()
        except psutil.Error:
            continue
        kind = next((kind for kind, fits in kinds.items() if fits(line)), "other")
        memory.setdefault(kind, []).append(pss)
        descriptors.setdefault(kind, []).append(fds)
    found = {"memory of all processes": ("B", float(sum(map(sum, memory.values()))))}
    for kind in ("launcher", "agent", "daemon", "worker"):
        found[f"memory, {kind} (the largest)"] = "B", float(max(memory.get(kind, [0])))
        found[f"descriptors, {kind} (the most)"] = "1", float(max(descriptors.get(kind, [0])))
    return found


def main(hosts: Sequence[int], out: Path | None, only_table: bool) -> None:
    """Runs jobs of so many hosts; keeps the results in a file, and shows all that are there."""
    from rich.console import Console
    from rich.table import Table

    from benchmarks.common import results

    path = out or results.RESULTS / f"{NAME}.json"
    for count in () if only_table else hosts:
        here, date = results.begin()
        measures = [
            results.Measure(name, unit, {"fusion_rt": results.rounded([value])})
            for name, (unit, value) in measure(count).items()
        ]
        results.keep(path, NAME, results.Record({"hosts": count}, measures, here, date, results.command_line()))
    records = sorted(results.load(path, NAME).records, key=lambda record: int(record.setting["hosts"]))
    table = Table(title="jobs of processes of this machine")
    for column in ("", *(f"{record.setting['hosts']} hosts" for record in records)):
        table.add_column(column, justify="right" if column else "left")
    for name in dict.fromkeys(measure.name for record in records for measure in record.measures):
        cells = [next((_cell(one) for one in record.measures if one.name == name), "") for record in records]
        table.add_row(name, *cells)
    Console(width=None).print(table)


def _cell(measure: Any) -> str:
    value = measure.samples["fusion_rt"][0]
    if measure.unit == "s":
        return f"{value:,.3g} s"
    return f"{value / 2**20:,.1f} MiB" if measure.unit == "B" else f"{value:,.0f}"


if __name__ == "__main__":
    work(Path(sys.argv[1]))
