"""Cost of changes of membership: work that is lost, pauses, and the loss at the end.

    python -m benchmarks.elastic
    python -m benchmarks.elastic --samples 4800 --global-batch 0

Four netlab hosts (root needed) with one worker each; a host discovery script lists those that are present. A small GPT
(`examples/char_gpt_elastic.py`) begins on two. Twice, every process of a host is killed, first of the host that came
last, then of that with rank 0; and two hosts come. Beside it is a run in which nothing happens, on two hosts, with the
same number of samples; and the same number in a step, unless `--global-batch` is 0: then a step has 8 samples on each
rank, and the learning rate grows with the root of their number.

*Lost* is the number of samples that were trained on and had to be repeated, beside that between two commits. *Pause* is
the time from the last step before a change to the first one after it. The killed host is noticed, or the script lists
the hosts that came, in between; and a worker that comes has to import torch, for which the others wait.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import arguments as shared
from benchmarks.common import results
from benchmarks.common.machine import Machine
from benchmarks.common.results import Measure, Record
from benchmarks.common.tables import Table
from benchmarks.netlab import Netlab

NAME = "elastic"
HOSTS = 4
SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "char_gpt_elastic.py"
RESULTS = results.RESULTS / "elastic.json"
PAUSE, LOSS = "pause", "loss in the end"
RUNS = {"undisturbed": "undisturbed, two hosts", "disturbed": "with these changes"}
SIZES = ["--width", "64", "--layers", "2", "--context", "32"]
TIMEOUT_S = 900.0
KILLED, CAME = "killed", "came"
CHANGES = ((0.15, KILLED, [1]), (0.35, CAME, [2, 3]), (0.55, KILLED, [0]), (0.75, CAME, [0, 1]))
"""Share of the samples that is done, the change that happens then, and its hosts."""


class Job:
    """A run of the example under `fusionrun`.

    Args:
        lab: its hosts.
        directory: for its files.
        present: hosts at the beginning.
        elastic: whether hosts come and go.
        arguments: of the example.
    """

    def __init__(
        self, lab: Netlab, directory: Path, present: Sequence[int], elastic: bool, arguments: Sequence[str]
    ) -> None:
        self._lab = lab
        self._record, self._hosts = directory / "record", directory / "hosts"
        self._present = list(present)
        self._write_hosts()
        argv = [sys.executable, "-m", "fusion_rt.runner", "-np", str(len(present))]
        argv += ["--rsh-agent", lab.agent, "--network-interface", "eth0"]
        if elastic:
            script = directory / "discover"
            script.write_text(f"#!/bin/sh\ncat {self._hosts}\n", encoding="utf-8")
            script.chmod(0o755)
            argv += ["--host-discovery-script", str(script), "--min-np", "1", "--max-np", str(HOSTS)]
            argv += ["--blacklist-cooldown-range", "1", "2"]
        else:
            argv += ["-H", ",".join(f"{lab.hosts[index].name}:1" for index in present)]
        command = [sys.executable, str(SCRIPT), *SIZES, "--record", str(self._record), *arguments]
        self.output = (directory / "output").open("w+", encoding="utf-8")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen([*argv, *command], env=environment, stdout=self.output, stderr=self.output)

    def notes(self) -> list[dict[str, Any]]:
        """Reads the events that workers have recorded, in order of time."""
        if not self._record.exists():
            return []
        lines = self._record.read_text(encoding="utf-8").split("\n")[:-1]  # the last one may not be complete
        return sorted((json.loads(line) for line in lines), key=lambda note: note["at"])

    def wait(self, condition: Callable[[list[dict[str, Any]]], bool]) -> None:
        """Waits until the recorded events satisfy a condition.

        Raises:
            RuntimeError: the job ends before, or it takes too long.
        """
        deadline = time.monotonic() + TIMEOUT_S
        while not condition(self.notes()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the job ended too early, or does not go on:\n{self.said()}")
            time.sleep(0.1)

    def said(self) -> str:
        """Returns the end of the job's output."""
        self.output.seek(0)
        return self.output.read()[-5000:]

    def kill(self, hosts: Sequence[int]) -> None:
        """Sends SIGKILL to every process of these hosts; the script goes on listing them for a second."""
        for index in hosts:
            listed = subprocess.run(
                ["ip", "netns", "pids", self._lab.hosts[index].name], capture_output=True, text=True, check=True
            )
            for pid in listed.stdout.split():
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(1.0)
        self._present = [index for index in self._present if index not in hosts]
        self._write_hosts()

    def add(self, hosts: Sequence[int]) -> None:
        """Adds hosts to those that the script lists."""
        self._present += hosts
        self._write_hosts()

    def end(self) -> None:
        """Waits for the end of the job. Raises `RuntimeError` if it has failed."""
        try:
            if self.process.wait(TIMEOUT_S):
                raise RuntimeError(f"the job failed:\n{self.said()}")
        finally:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGINT)
                self.process.wait()
            self.output.close()

    @property
    def workers(self) -> int:
        return len(self._present)

    def _write_hosts(self) -> None:
        new = self._hosts.with_suffix(".new")
        new.write_text("".join(f"{self._lab.hosts[index].name}:1\n" for index in self._present), encoding="utf-8")
        new.rename(self._hosts)


def disturbed(lab: Netlab, directory: Path, samples: int, arguments: Sequence[str]) -> dict[str, Any]:
    """Makes the run in which hosts die and come."""
    job = Job(lab, directory, [0, 1], True, arguments)
    changes: list[dict[str, Any]] = []
    try:
        for share, what, hosts in CHANGES:
            job.wait(lambda notes, share=share: done(notes) >= share * samples)  # type: ignore[misc]
            began = time.time()
            if what == KILLED:
                job.kill(hosts)
            else:
                job.add(hosts)
            job.wait(lambda notes, began=began: bool(steps_of(notes, began, job.workers)))  # type: ignore[misc]
            changes.append({"what": what, "hosts": len(hosts), "workers": job.workers, "at": began})
    finally:
        if len(changes) < len(CHANGES):
            job.process.send_signal(signal.SIGINT)
            job.process.wait()
        else:
            job.end()
    notes = job.notes()
    for change in changes:
        change.update(cost(notes, change["at"], change["workers"]))
    return {**outcome(notes), "changes": changes}


def done(notes: Sequence[dict[str, Any]]) -> int:
    """Returns the largest number of samples that a step has recorded as done."""
    return max((note["done"] for note in notes if note["what"] == "step"), default=0)


def steps_of(notes: Sequence[dict[str, Any]], since: float, workers: int) -> list[dict[str, Any]]:
    """Returns the steps of `workers` workers after a moment."""
    return [note for note in notes if note["what"] == "step" and note["at"] > since and note["size"] == workers]


def cost(notes: Sequence[dict[str, Any]], at: float, workers: int) -> dict[str, Any]:
    """Computes the cost of a change: its pause (s) and lost samples, and the number of workers before it."""
    first = steps_of(notes, at, workers)[0]
    before = [note for note in notes if note["what"] == "step" and note["at"] < first["at"] and note["size"] != workers]
    begun = [note for note in notes if note["what"] == "begins" and note["at"] <= first["at"]][-1]
    return {
        "pause_seconds": first["at"] - before[-1]["at"],
        "lost_samples": max(note["done"] for note in before) - begun["done"],
        "workers_before": before[-1]["size"],
    }


def outcome(notes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the outcome of a run: loss, steps, samples and seconds."""
    last = [note for note in notes if note["what"] == "ends"]
    assert len({note["held_out"] for note in last}) == 1, last
    seconds = notes[-1]["at"] - notes[0]["at"]
    return {"loss": last[0]["held_out"], "steps": last[0]["steps"], "samples": last[0]["done"], "seconds": seconds}


def record(found: dict[str, Any], machine: Machine | None, date: str) -> Record:
    """Makes the record of both runs."""
    changes = found["disturbed"]["changes"]
    pauses = {
        what: results.rounded(c["pause_seconds"] for c in changes if c["what"] == what) for what in (KILLED, CAME)
    }
    losses = {name: [found[name]["loss"]] for name in RUNS}
    measures = [Measure(PAUSE, "s", pauses), Measure(LOSS, "", losses, portable=True)]
    return Record({"hosts": HOSTS}, measures, machine, date, results.command_line(), found)


def changes_table(record: Record) -> Table:
    """Makes a table with a row for each change."""
    table = Table(["change", "workers", "pause", "lost samples", "between two commits"])
    for change in record.details["disturbed"]["changes"]:
        what, workers = f"{change['hosts']} {change['what']}", f"{change['workers_before']} to {change['workers']}"
        pause, lost = f"{change['pause_seconds']:.1f} s", str(change["lost_samples"])
        table.add(what, workers, pause, lost, str(change["commit_interval_samples"]))
    return table


def runs_table(record: Record) -> Table:
    """Makes a table with a row for each run."""
    table = Table(["", "held-out loss", "samples", "steps"])
    for name, what in RUNS.items():
        run = record.details[name]
        table.add(what, f"{run['loss']:.4f}", str(run["samples"]), str(run["steps"]))
    return table


def main() -> None:
    """Runs what the command line asks for."""
    parser = shared.parser(NAME, __doc__)
    parser.add_argument("--samples", type=int, default=7200, help="of each run (%(default)s)")
    parser.add_argument("--global-batch", type=int, default=24, help="samples in a step; 0: 8 on each rank")
    parser.add_argument("--commit-every", type=int, default=10, help="steps (%(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate (%(default)s)")
    shared.add_out(parser, RESULTS)
    options = parser.parse_args()
    here, date = results.begin()
    arguments = ["--samples", str(options.samples), "--global-batch", str(options.global_batch), "--batch-size", "8",
                 "--commit-every", str(options.commit_every), "--lr", str(options.lr)]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, Netlab(hosts=HOSTS) as lab:
        runs = Path(folder)
        for name in RUNS:
            (runs / name).mkdir()
        plain = Job(lab, runs / "undisturbed", [0, 1], False, arguments)
        plain.end()
        found: dict[str, Any] = {
            "arguments": arguments,
            "undisturbed": outcome(plain.notes()),
            "disturbed": disturbed(lab, runs / "disturbed", options.samples, arguments),
        }
    for change in found["disturbed"]["changes"]:
        step = options.global_batch or 8 * change["workers_before"]
        change["commit_interval_samples"] = options.commit_every * step
    made = record(found, here, date)
    results.keep(options.out, NAME, made)
    for table in (changes_table(made), runs_table(made)):
        table.show()


if __name__ == "__main__":
    main()
