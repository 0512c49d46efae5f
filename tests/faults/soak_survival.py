"""One elastic job under `fusionrun` that lives through faults of all kinds: its processes, and the orders to them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.netlab import Netlab
from tests import forks
from tests.faults import nemesis
from tests.faults.soak_job import SoakError
from tests.faults.soak_ledger import SIZE, SLOTS, Ledger, WorkerState

ROOT = Path(__file__).resolve().parents[2]
PAUSE_S = 0.15  # of a worker in a step
START_S = 120.0  # for a job to come up
WHOLE_S = 120.0  # for all workers to be there again
STEPS_S = 60.0
SAMPLE_S = 4.0  # between two looks at what processes hold
END_S = 60.0
TIMES = {
    "FUSION_HEARTBEAT_INTERVAL": "100ms",
    "FUSION_HEARTBEAT_TIMEOUT": "6s",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "6s",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "12s",
    "FUSION_TRACE_BUFFER": "2MiB",  # rings that are full before the warm-up ends
}
# The launcher waits longer each time for a slot in which workers fail in a row, each less than a minute after it got
# its place; it has a place again some seconds after a loss.
FAILURES, STEADY_S = 5, 90.0


class Running:
    """A process that this one has not started, and may be gone."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def send_signal(self, sig: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, sig)

    def poll(self) -> int | None:
        """Returns nothing as long as it lives, a zombie too."""
        return None if Path(f"/proc/{self.pid}").exists() else 0


class ElasticJob:
    """A job on the hosts of a lab; a `soak_faults.Target`.

    Args:
        lab: its hosts.
        directory: for files of daemons; short.
        folder: for notes, orders and output.
        codec: of the gradients.

    Attributes:
        ledger: of what workers tell.
        current: workers by place, the last of each.
        spared: a host whose daemon and first worker are not to be lost any more; -1: none is.
        samples: of each process, by its name: what it held, and `at` when.
        sample_every: seconds between two of them.
    """

    def __init__(self, lab: Netlab, directory: Path, folder: Path, codec: str) -> None:
        self.lab: Netlab | None = lab
        self._hosts = lab.hosts
        self._directory, self._folder, self._codec = directory, folder, codec
        self._namespaces = [os.stat(f"/run/netns/{host.name}").st_ino for host in lab.hosts]
        self._read: dict[Path, int] = {}
        self._known: dict[int, WorkerState] = {}
        self._failures: Counter[str] = Counter()
        self._disturbed: defaultdict[str, float] = defaultdict(float)
        self._ports: dict[int, list[tuple[str, int]]] = {}
        self._launcher: subprocess.Popen[bytes] | None = None
        self.ledger = Ledger()
        self.current: dict[str, WorkerState] = {}
        self.spared = -1
        self.samples: dict[str, list[dict[str, float]]] = defaultdict(list)
        self._sampled = 0.0
        self.sample_every = SAMPLE_S

    def start(self) -> None:
        """Starts it, and waits for its first steps.

        Raises:
            SoakError: it does not come up.
        """
        lab = self.lab
        assert lab is not None
        slots = ",".join(f"{host.name}:{count}" for host, count in zip(self._hosts, SLOTS, strict=True))
        command = [sys.executable, "-m", "fusion_rt.runner", "-np", str(SIZE), "--min-np", "1", "-H", slots]
        command += ["--rsh-agent", lab.agent, "--network-interface", "eth0", "--blacklist-cooldown-range", "1", "2"]
        command += ["--reset-limit", "100000", "--restart-limit", "100000", "--leave-timeout", "11s"]
        command += [*forks.interpreter(forks.WORKER), "-m", "tests.faults.survivor", str(self._folder), str(PAUSE_S)]
        paths = [ROOT / "tests" / "faults" / "hangable_daemon", ROOT, ROOT / "daemon"]
        environment = {
            **os.environ,
            **TIMES,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "FUSION_RUNTIME_DIR": str(self._directory),
            "FUSION_TEST_HANG": str(self._folder),
            "OMP_NUM_THREADS": "1",
        }
        if forks.possible():
            environment["FUSION_TEST_DAEMONS"] = forks.nursery(forks.DAEMON).address
        with (self._folder / "said").open("wb") as said:
            self._launcher = subprocess.Popen(
                [*command, self._codec], env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said, cwd=ROOT
            )
        self.wait(lambda: self.is_whole, START_S, "the first steps of all")

    # --- what there is ------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Reads what workers have told since.

        Raises:
            SoakError: the job has ended, or something is wrong.
        """
        notes = []
        for path in self._folder.glob("*.notes"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                lines = file.read().split(b"\n")[:-1]
                self._read[path] = self._read.get(path, 0) + sum(len(line) + 1 for line in lines)
            notes += [json.loads(line) for line in lines]
        for note in sorted(notes, key=lambda note: note["at"]):
            self._take(note)
        if self.ledger.problems:
            raise SoakError(f"{self.ledger.problems[0]}; {self.describe()}")
        assert self._launcher is not None
        if self._launcher.poll() is not None:
            raise SoakError(f"the job has ended with status {self._launcher.returncode}; {self.describe()}")

    def _take(self, note: dict[str, Any]) -> None:
        self.ledger.take(note)
        known = self._known.setdefault(note["pid"], WorkerState(note["pid"], note["place"]))
        self.current[known.place] = known
        if note["what"] == "step" and note["counts"]:
            known.counted.append(note["at"])
            known.rank, known.size, known.epoch = note["rank"], note["size"], note["epoch"]
        known.ended = known.ended or note["what"] == "ends"

    def come(self, place: str) -> int:
        """Returns how many workers there have been in a place so far."""
        return sum(one.place == place for one in self._known.values())

    def describe(self) -> str:
        """Describes the workers and what the job has said, for messages."""
        workers = [
            f"{one.place}: process {one.pid}, rank {one.rank} of {one.size} in epoch {one.epoch}, "
            f"{time.monotonic() - (one.counted or [0.0])[-1]:.1f} s ago"
            for one in self.current.values()
        ]
        said = (self._folder / "said").read_text(errors="replace")
        return "; ".join(workers) + f"\n{said[-4000:]}"

    @property
    def epoch(self) -> int:
        """The last membership epoch in which a step counted."""
        return max((one.epoch for one in self.current.values()), default=0)

    @property
    def is_whole(self) -> bool:
        """Tells whether all workers train together."""
        there = self.present()
        return len(there) == SIZE and all(one.size == SIZE for one in there) and len({one.epoch for one in there}) == 1

    def present(self) -> list[WorkerState]:
        """Returns the workers that live and have taken a step, by rank."""
        there = [one for one in self.current.values() if one.counted and Running(one.pid).poll() is None]
        return sorted(there, key=lambda one: one.rank)

    def host_of(self, one: WorkerState) -> int:
        """Returns the index of a worker's host."""
        name = one.place.rpartition(".")[0]
        return next(host.index for host in self._hosts if host.name == name)

    def can_fail(self) -> list[WorkerState]:
        """Returns the workers that may be lost, and whose slot would not be closed for long."""
        return [
            one
            for one in self.present()
            if (self.host_of(one) != self.spared or one.place.endswith(".1")) and self._has_chances(one)
        ]

    def hosts_that_can_fail(self) -> list[int]:
        """Returns the hosts that may be lost, and whose slots would not be closed for long."""
        there = self.present()
        few = {self.host_of(one) for one in there if not self._has_chances(one)}
        return [host for host in range(self.nodes) if host not in few and host != self.spared]

    def _has_chances(self, one: WorkerState) -> bool:
        return self._is_steady(one) or self._failures[one.place] < FAILURES - 2

    def _is_steady(self, one: WorkerState) -> bool:
        since = max([self._disturbed[one.place], *one.counted[:1]])
        return bool(one.counted) and time.monotonic() > since + STEADY_S

    def note_failure(self, one: WorkerState) -> None:
        """Notes that a worker is about to fail, or its host in a way that may count as that."""
        self._failures[one.place] = 1 if self._is_steady(one) else self._failures[one.place] + 1
        self._disturbed[one.place] = time.monotonic()

    def note_disturbance(self, host: int) -> None:
        """Notes that the workers of a host are about to get another place in the job."""
        for one in self.present():
            if self.host_of(one) == host:
                self._disturbed[one.place] = time.monotonic()

    def pids_on(self, host: int) -> list[int]:
        """Returns the processes on a host."""
        found = []
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if entry.isdigit() and os.stat(f"/proc/{entry}/ns/net").st_ino == self._namespaces[host]:
                    found.append(int(entry))
        return found

    def agent(self, host: int) -> Running:
        """Returns the agent of a host."""
        assert self._launcher is not None
        here = set(self.pids_on(host))
        found = [child for child in psutil.Process(self._launcher.pid).children() if child.pid in here]
        if not found:
            raise SoakError(f"host {host} has no agent; {self.describe()}")
        return Running(found[0].pid)

    @property
    def nodes(self) -> int:
        return len(self._hosts)

    def daemon(self, node: int) -> nemesis.Process:
        here = set(self.pids_on(node))
        fifos = {int(path.suffix[1:]): path for path in self._folder.glob("hang.*")}
        if not (found := here & set(fifos)):
            raise SoakError(f"host {node} has no daemon; {self.describe()}")
        return Running(max(found, key=lambda pid: fifos[pid].stat().st_ctime))

    def workers(self) -> Sequence[nemesis.Process]:
        return [Running(one.pid) for one in self.present()]

    def addresses(self, node: int) -> list[tuple[str, int]]:
        pid = self.daemon(node).pid
        if pid not in self._ports:
            listening = [one for one in psutil.Process(pid).net_connections("tcp") if one.status == psutil.CONN_LISTEN]
            own = {tuple(one.laddr) for one in listening if one.laddr[0] != "127.0.0.1"}
            self._ports[pid] = sorted((str(address), int(port)) for address, port in own)
        return self._ports[pid]

    def connection(self, node: int) -> socket.socket:
        paths = sorted(self._directory.glob(f"*.{node}/sock"), key=lambda path: path.stat().st_ctime)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(STEPS_S)
        sock.connect(str(paths[-1]))
        return sock

    def hang_daemon(self, node: int, seconds: float) -> None:
        nemesis.hang(self._folder / f"hang.{self.daemon(node).pid}", seconds)

    def hang_worker(self, rank: int, seconds: float) -> None:
        self.order(self.present()[rank].place, "hang", str(seconds))

    def order(self, place: str, what: str, text: str = "now") -> None:
        """Gives an order to the worker of a place."""
        path = self._folder / f"{place}.{what}"
        path.with_suffix(".new").write_text(text, encoding="utf-8")
        path.with_suffix(".new").rename(path)

    def revoke(self, place: str, what: str) -> None:
        """Takes an order back that nobody may have followed."""
        (self._folder / f"{place}.{what}").unlink(missing_ok=True)

    def kill_all(self, host: int) -> None:
        """Kills all processes of a host."""
        for pid in self.pids_on(host):
            Running(pid).send_signal(signal.SIGKILL)

    # --- what comes of it ---------------------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Waits until a condition holds, and reads meanwhile what workers tell.

        Raises:
            SoakError: it does not in time, or something is wrong.
        """
        deadline = time.monotonic() + seconds
        while True:
            self.look()
            if time.monotonic() > self._sampled + self.sample_every:
                self._sample()
            if condition():
                return
            if time.monotonic() > deadline:
                raise SoakError(f"waited {seconds:g} s in vain for {what}; {self.describe()}")
            time.sleep(0.05)

    def go_on(self, steps: int) -> None:
        """Waits until all workers have taken so many more steps together."""
        goal = self.ledger.steps + steps
        self.wait(lambda: self.is_whole and self.ledger.steps >= goal, WHOLE_S, f"{steps} more steps of all")

    def wait_for_survivors(self, survivors: Iterable[WorkerState], epoch: int) -> None:
        """Waits until these workers have gone on in a later membership epoch."""
        those = list(survivors)
        self.wait(lambda: all(one.epoch > epoch for one in those), STEPS_S, f"steps of {[one.place for one in those]}")

    def _sample(self) -> None:
        """Records the resources of the launcher, and of each agent, daemon and worker."""
        assert self._launcher is not None
        self._sampled = time.monotonic()
        found = {f"the launcher {self._launcher.pid}": self._launcher.pid}
        for host in range(self.nodes):
            with contextlib.suppress(SoakError, psutil.Error, OSError):
                for name, process in (("agent", self.agent(host)), ("daemon", self.daemon(host))):
                    found[f"the {name} {process.pid} of host {host}"] = process.pid
        found |= {f"the worker {one.pid} of {one.place}": one.pid for one in self.present()}
        for name, pid in found.items():
            with contextlib.suppress(OSError, StopIteration, ValueError):  # it has just ended
                self.samples[name].append({"at": time.monotonic(), **nemesis.resources(pid)})

    def end(self) -> None:
        """Has all workers stop after the same step.

        Raises:
            SoakError: the job does not end well.
        """
        assert self._launcher is not None
        (self._folder / "stop").touch()
        try:
            status = self._launcher.wait(END_S)
        except subprocess.TimeoutExpired:
            raise SoakError(f"the job does not end within {END_S:g} s; {self.describe()}") from None
        with contextlib.suppress(SoakError):
            self.look()
        if status:
            raise SoakError(f"the job has ended with status {status}; {self.describe()}")
        self.ledger.check_end()

    def close(self) -> None:
        """Ends what is left of it."""
        if self._launcher is not None and self._launcher.poll() is None:
            self._launcher.terminate()
            try:
                self._launcher.wait(END_S)
            except subprocess.TimeoutExpired:
                self._launcher.kill()
                self._launcher.wait()
