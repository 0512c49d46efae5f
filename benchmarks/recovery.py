"""Costs of a loss to the workers that are left, and of a newcomer to the others, with a fault every 20 s.

    python -m benchmarks.recovery --beside torchft
    python -m benchmarks.recovery --ranks 8 --seconds 120 --faults "worker killed"
    python -m benchmarks.recovery --ranks 4 --samples 40000

Four netlab hosts (root needed) train a model of a million parameters, 50 ms a step, for five minutes. In turns a
worker is killed, all processes of a host are, or a host is cut off for some seconds; what was lost is started again,
by `fusionrun` or, with torchft, by this program at once. torchft (an extra: `pip install torchft-nightly`) has a
lighthouse on a fifth host, replica groups of one process each, gloo, and the time-outs that are given here instead of
its own, which are longer.

*Pause*: how much longer than a step a survivor, at most, stood still after a fault. *Dropped*: steps that it took in
vain or repeated. *Back*: seconds from the fault until a worker in the place of the lost one counts. *Pause at a
join*: that of the others when it comes. *Kept*: the steps that were taken until the next fault, of those that the
workers which were there take in as much time without a fault, with their commits; who is cut off is not there.
*Differing*: steps after which parameters were not the same, bit by bit, on all ranks.

With `--samples` a small GPT (`faulted/gpt.py`) trains on so many pieces of text instead, each of them once, without a
fault and then with 20, one after the other when all workers are there. What is compared is the loss of text that is
held out, at the same number of samples; and each worker notes the samples that it gives to a step, which tells how
often each of them counts in the end.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.common import arguments as shared
from benchmarks.common import results, sampling
from benchmarks.common.results import Measure, Record, Setting
from benchmarks.common.tables import Table
from benchmarks.faulted import notes
from benchmarks.faulted.notes import Fault
from benchmarks.netlab import Host, Netlab

NAME = "recovery"
OURS, TORCHFT = "fusion_rt", "torchft"
HOSTS = 4
WORKER, HOST, CUT = "worker killed", "host killed", "host cut off"
KINDS = (WORKER, HOST, CUT)
COMMIT_EVERY = 5  # steps
CUT_S = 8.0  # seconds for which a host is cut off
START_S = 120.0  # seconds that all have to come up
LEARN_S = 1800.0  # seconds that a training of the small GPT may take
LEARN_FAULTS = 20
PAUSE, DROPPED, BACK, JOIN = "pause", "dropped", "back", "pause at a join"
KEPT, DIFFERING = "kept", "differing"
LOSS, LOST, REPEATED, IN_VAIN = "held-out loss", "samples lost", "samples repeated", "samples given in vain"


class Job(Protocol):
    """A training of all ranks."""

    def look(self) -> None:
        """Starts again what was lost, where nobody else does. Raises `RuntimeError` if the job has ended."""

    def end(self) -> None:
        """Ends the job."""


class Ours:
    """The training under `fusionrun`, which starts lost workers again.

    Args:
        lab: has the hosts.
        ranks: of all hosts.
        folder: for notes, and what the job says.
        options: of this program.
        command: of a worker: its module, and arguments; that of the million parameters if there is none.
    """

    def __init__(self, lab: Netlab, ranks: int, folder: Path, options: Any, command: Sequence[str] = ()) -> None:
        hosts = ",".join(f"{host.name}:{ranks // HOSTS}" for host in lab.hosts[:HOSTS])
        argv = [sys.executable, "-m", "fusion_rt.runner", "-np", str(ranks), "-H", hosts, "--min-np", "1"]
        argv += ["--rsh-agent", lab.agent, "--network-interface", "eth0", "--blacklist-cooldown-range", "1", "2"]
        argv += ["--leave-timeout", f"{options.timeout + 5:g}s"]
        command = command or ["benchmarks.faulted.ours", str(options.compute), str(COMMIT_EVERY)]
        environment = {
            **os.environ,
            notes.FOLDER: str(folder / "notes"),
            "OMP_NUM_THREADS": "1",
            "FUSION_ENCRYPTION": "control",
            "FUSION_HEARTBEAT_TIMEOUT": f"{options.timeout:g}s",
        }
        self._said = (folder / "said").open("w+", encoding="utf-8")
        self._process = subprocess.Popen(
            [*argv, sys.executable, "-m", *command], env=environment, stdout=self._said, stderr=self._said
        )

    def look(self) -> None:
        if self._process.poll() is not None:
            self._said.seek(0)
            raise RuntimeError(f"the job has ended:\n{self._said.read()[-4000:]}")

    def complete(self, seconds: float) -> None:
        """Waits until the job has ended. Raises `RuntimeError` if it fails, or takes longer."""
        try:
            status: int | None = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        if status != 0:
            self._said.seek(0)
            how = f"takes longer than {seconds:g} s" if status is None else f"has ended with status {status}"
            raise RuntimeError(f"the job {how}:\n{self._said.read()[-4000:]}")

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait()
        self._said.close()


class Torchft:
    """The training under torchft, whose lost workers this program starts again. The arguments are those of `Ours`."""

    def __init__(self, lab: Netlab, ranks: int, folder: Path, options: Any) -> None:
        self._lab, self._options = lab, options
        self._said = (folder / "said").open("w+", encoding="utf-8")
        self._notes = folder / "notes"
        lighthouse = ["torchft_lighthouse", "--min_replicas", "1", "--bind", f"{lab.hosts[HOSTS].address}:29510"]
        lighthouse += ["--heartbeat_timeout_ms", f"{options.timeout * 1000:.0f}", "--join_timeout_ms", "1000"]
        self._all = [lab.run(HOSTS, lighthouse, stdout=self._said, stderr=self._said)]
        self._workers: dict[tuple[int, int], subprocess.Popen[Any]] = {}
        for place in ((host, slot) for host in range(HOSTS) for slot in range(ranks // HOSTS)):
            self._start(place)

    def look(self) -> None:
        for place, process in list(self._workers.items()):
            if process.poll() is not None:
                self._start(place)

    def end(self) -> None:
        for process in (*self._workers.values(), *self._all):
            process.kill()
            process.wait()
        self._said.close()

    def _start(self, place: tuple[int, int]) -> None:
        host, slot = place
        environment = {
            **os.environ,
            notes.FOLDER: str(self._notes),
            notes.PLACE: f"{host}.{slot}",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "TORCHFT_LIGHTHOUSE": f"http://{self._lab.hosts[HOSTS].address}:29510",
        }
        command = [sys.executable, "-m", "benchmarks.faulted.with_torchft"]
        command += [str(self._options.compute), str(self._options.timeout), self._lab.hosts[host].address]
        self._workers[place] = self._lab.run(host, command, env=environment, stdout=self._said, stderr=self._said)


CONTENDERS: dict[str, Callable[[Netlab, int, Path, Any], Job]] = {OURS: Ours, TORCHFT: Torchft}


def run(name: str, ranks: int, folder: Path, options: Any) -> dict[str, Any]:
    """Trains under faults; returns their costs, and the seconds of a step: the median, and the mean without a fault."""
    (folder / "notes").mkdir(parents=True)
    chance = random.Random(options.seed)
    kinds = [options.faults[index % len(options.faults)] for index in range(int(options.seconds // options.every))]
    faults: list[Fault] = []
    with Netlab(hosts=HOSTS + 1) as lab:
        job = CONTENDERS[name](lab, ranks, folder, options)
        try:
            wait(job, START_S, lambda: len(present(folder, lab)) == ranks)
            wait(job, options.every / 2)
            for kind in kinds:
                faults.append(strike(lab, job, kind, chance, folder))
                wait(job, faults[-1].at + options.every - time.monotonic())
            ended = time.monotonic()
        finally:
            job.end()
    found = notes.workers(notes.read(folder / "notes"))
    step = notes.step_seconds(found.values())
    everybody = list(found.values())
    spans = [*zip(faults, [*(fault.at for fault in faults[1:]), ended], strict=True)]
    for fault, until in spans:
        notes.judge(fault, until, found, step)
    calm = notes.calm_seconds(everybody, faults, ended)
    for fault, until in spans:
        fault.kept = notes.throughput(everybody, faults, calm, fault.at, until)
    return {
        "step": step,
        "calm": calm,
        "differing": notes.differing(found.values()),
        "faults": [vars(fault) for fault in faults],
    }


def strike(lab: Netlab, job: Job, kind: str, chance: random.Random, folder: Path) -> Fault:
    """Makes a fault of a host or of one of its workers, chosen by chance."""
    host = lab.hosts[chance.randrange(HOSTS)]
    victims = [one.pid for one in present(folder, lab) if pid_is_on(one.pid, host)]
    if kind == WORKER:
        victims = [chance.choice(victims or [one.pid for one in present(folder, lab)])]
    made = Fault(kind, time.monotonic(), victims)
    if kind == CUT:
        with lab.cut_off(host):
            wait(job, CUT_S)
    else:
        for pid in victims if kind == WORKER else pids_on(host):
            kill(pid)
    return made


def learn(ranks: int, folder: Path, options: Any, faults: int) -> dict[str, Any]:
    """Trains the small GPT on so many pieces of text, with so many faults; returns its loss and what it took."""
    (folder / "notes").mkdir(parents=True)
    chance = random.Random(options.seed)
    pause = options.compute if faults else 0.0
    command = ["benchmarks.faulted.gpt", f"{pause}", f"{COMMIT_EVERY}", f"{options.samples}", f"{options.seed}"]
    kinds: Counter[str] = Counter()
    with Netlab(hosts=HOSTS) as lab:
        job = Ours(lab, ranks, folder, options, command)
        try:
            for number in range(faults):
                share = (number + 0.5) / (faults + 0.5)

                def is_time(share: float = share) -> bool:
                    there = present(folder, lab)
                    last = [one.steps[-1] for one in there]
                    whole = len(there) == ranks and {note.size for note in last} == {ranks}
                    return whole and min(note.done for note in last) >= share * options.samples

                wait(job, LEARN_S, is_time)
                kind = options.faults[number % len(options.faults)]
                kinds[kind] += 1
                strike(lab, job, kind, chance, folder)
            job.complete(LEARN_S)
        finally:
            job.end()
    told = notes.read(folder / "notes")
    taken = notes.samples_taken(told)
    ends = [note for note in told if note.what == "ends"]
    return {
        "faults": dict(kinds),
        "loss": ends[0].loss if ends else None,
        "ranks_in_the_end": len(ends),
        "differing": len({(note.step, note.fingerprint, note.loss) for note in ends}) - 1,
        "steps": taken.steps,
        "steps_not_told": len(taken.missing),
        "samples": options.samples,
        "lost": sum(taken.counted[sample] == 0 for sample in range(options.samples)),
        "repeated": sum(often - 1 for often in taken.counted.values()),
        "in_vain": taken.in_vain,
        "seconds": told[-1].at - told[0].at,
    }


def present(folder: Path, lab: Netlab) -> list[notes.Worker]:
    """Returns the workers that have taken a step and still live, which may be cut off."""
    found = notes.workers(notes.read(folder / "notes")).values()
    return [one for one in found if one.counted and any(pid_is_on(one.pid, host) for host in lab.hosts)]


def pids_on(host: Host) -> list[int]:
    """Returns the processes on a host."""
    listed = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True, check=True)
    return [int(pid) for pid in listed.stdout.split()]


def pid_is_on(pid: int, host: Host) -> bool:
    """Returns whether a process lives on a host."""
    return pid in pids_on(host)


def kill(pid: int) -> None:
    """Kills a process, if it is still there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def wait(job: Job, seconds: float, condition: Callable[[], bool] | None = None) -> None:
    """Waits so long, or until a condition holds, and has the job looked after meanwhile.

    Raises:
        RuntimeError: the job has ended, or the condition does not come to hold.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        job.look()
        if condition is not None and condition():
            return
        time.sleep(0.1)
    if condition is not None:
        raise RuntimeError(f"not all workers have come within {seconds:g} s")


def record(found: dict[str, dict[str, Any]], ranks: int, options: Any, begun: tuple[Any, str]) -> Record:
    """Makes the record of the runs with so many ranks."""
    setting: Setting = {"ranks": ranks, "every": options.every, "compute": options.compute, "timeout": options.timeout}
    measures = []
    for kind in options.faults:
        for what, name in ((PAUSE, "pause"), (DROPPED, "dropped"), (BACK, "returned"), (JOIN, "join_pause")):
            samples = {
                contender: results.rounded(
                    fault[name] for fault in run["faults"] if fault["kind"] == kind and fault[name] is not None
                )
                for contender, run in found.items()
            }
            if samples := {contender: values for contender, values in samples.items() if values}:  # somebody came back
                measures.append(Measure(f"{kind}: {what}", "" if what == DROPPED else "s", samples))
        shares = {
            contender: results.rounded(fault["kept"] for fault in run["faults"] if fault["kind"] == kind)
            for contender, run in found.items()
        }
        measures.append(Measure(f"{kind}: {KEPT}", "", shares, better="more", portable=True))
    differing = {contender: [float(run["differing"])] for contender, run in found.items()}
    measures.append(Measure(DIFFERING, "", differing, portable=True))
    return Record(setting, measures, begun[0], begun[1], results.command_line(), found)


def learning(found: dict[str, Any], ranks: int, options: Any, begun: tuple[Any, str]) -> Record:
    """Makes the record of the trainings of the small GPT."""
    setting: Setting = {"ranks": ranks, "samples": options.samples, "faults": LEARN_FAULTS, "seed": options.seed}
    measures = [
        Measure(LOSS, "", {name: results.rounded([run["loss"]]) for name, run in found.items()}, portable=True),
        *(
            Measure(what, "", {name: [float(run[key])] for name, run in found.items()}, portable=True)
            for what, key in ((LOST, "lost"), (REPEATED, "repeated"), (IN_VAIN, "in_vain"))
        ),
    ]
    return Record(setting, measures, begun[0], begun[1], results.command_line(), found)


def learning_table(record: Record) -> Table:
    """Makes a table with a row for each training."""
    made = Table(["", "faults", "held-out loss", "steps", "samples", LOST, REPEATED, IN_VAIN], left=1)
    for name, run in record.details.items():
        counts = [str(run[key]) for key in ("steps", "samples", "lost", "repeated", "in_vain")]
        made.add(name, str(sum(run["faults"].values())), f"{run['loss']:.4f}", *counts)
    return made


def table(record: Record) -> Table:
    """Makes a table with a row for each contender and kind of fault."""
    ranks, every = record.setting["ranks"], record.setting["every"]
    title = f"{ranks} ranks, a fault every {every:g} s: medians (most)"
    made = Table(
        ["", "fault", "pause", "steps dropped", "back", "pause at a join", "kept", "differing"], title=title, left=2
    )
    for contender, run in record.details.items():
        for kind in dict.fromkeys(fault["kind"] for fault in run["faults"]):
            of_kind = [fault for fault in run["faults"] if fault["kind"] == kind]
            cells = [
                _told([fault[name] for fault in of_kind if fault[name] is not None], len(of_kind), unit)
                for name, unit in (("pause", " s"), ("dropped", ""), ("returned", " s"), ("join_pause", " s"))
            ]
            kept = f"{sampling.median([fault['kept'] for fault in of_kind]):.3f}"
            made.add(contender, kind, *cells, kept, str(run["differing"]))
    return made


def _told(values: Sequence[float], of: int, unit: str) -> str:
    """Returns the median and the most, and how many there are if some are missing."""
    if not values:
        return "never"
    digits = 2 if unit else 0
    told = f"{sampling.median(values):.{digits}f} ({max(values):.{digits}f}){unit}"
    return told if len(values) == of else f"{told}, {len(values)} of {of}"


def main() -> None:
    """Runs what the command line asks for."""
    parser = shared.parser(NAME, __doc__)
    parser.add_argument("--beside", default="", metavar="NAME", help="torchft, measured after fusion_rt")
    parser.add_argument("--only", default="", metavar="NAME", help="measure only this one")
    parser.add_argument("--ranks", type=shared.numbers, default=[4, 8], help="multiples of 4 (4,8)")
    parser.add_argument("--seconds", type=float, default=300.0, help="of each run (%(default)s)")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two faults (%(default)s)")
    parser.add_argument("--faults", type=lambda text: re.split(", *", text), default=list(KINDS), help=", ".join(KINDS))
    parser.add_argument("--compute", type=float, default=0.05, help="seconds of a step's computation (%(default)s)")
    parser.add_argument("--timeout", type=float, default=3.0, help="seconds of silence after which one is lost")
    parser.add_argument("--seed", type=int, default=1, help="of the choice of victims (%(default)s)")
    parser.add_argument("--samples", type=int, default=0, help="train the small GPT on so many, with 20 faults")
    parser.add_argument("--keep", type=Path, help="a folder for the workers' notes and output")
    shared.add_out(parser)
    options = parser.parse_args()
    shared.chosen(parser, "fault", options.faults, dict.fromkeys(KINDS))
    asked = [options.only] if options.only else [OURS, *filter(None, [options.beside])]
    contenders = shared.chosen(parser, "contender", asked, CONTENDERS)
    for ranks in options.ranks:
        if ranks % HOSTS:
            parser.error(f"{ranks} ranks cannot be on {HOSTS} hosts, as many on each: take a multiple of {HOSTS}")
    for ranks in options.ranks:
        begun = results.begin()
        found = {}
        with tempfile.TemporaryDirectory() as folder:
            if options.samples:
                for name, faults in (("undisturbed", 0), ("disturbed", LEARN_FAULTS)):
                    found[name] = learn(ranks, (options.keep or Path(folder)) / f"{name}.{ranks}", options, faults)
                    print(json.dumps({name: found[name]}), file=sys.stderr, flush=True)
                made = learning(found, ranks, options, begun)
                if options.out:
                    results.keep(options.out, NAME, made)
                learning_table(made).show()
                continue
            for contender in contenders:
                place = (options.keep or Path(folder)) / f"{contender}.{ranks}"
                found[contender] = run(contender, ranks, place, options)
                print(json.dumps({contender: found[contender]}), file=sys.stderr, flush=True)
        made = record(found, ranks, options, begun)
        if options.out:
            results.keep(options.out, NAME, made)
        table(made).show()


if __name__ == "__main__":
    main()
