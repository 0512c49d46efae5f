"""A job of the soak: its daemons, its workers' processes, and their messages."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.netlab import Netlab
from tests import forks
from tests.faults import nemesis
from tests.faults.jobs import HANGABLE, LabDaemons, fifo
from tests.fusiond.processes import JOB, Daemons

START_S = 30.0  # for a job to come up
STEPS_S = 30.0  # for a few steps; a fault lasts a second or two
END_S = 10.0  # for a daemon to end once it has been told to
TIMES = {
    "FUSION_HEARTBEAT_INTERVAL": "100ms",
    "FUSION_HEARTBEAT_TIMEOUT": "6s",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "4s",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "8s",
    "HOROVOD_START_TIMEOUT": f"{START_S:g}s",
    "FUSION_CHUNK_BYTES": "256KiB",
}


class SoakError(Exception):
    """A check of the soak has failed; the text says which."""


@dataclass
class RankState:
    """What a rank has said. `models`: after which steps; `error`, `kind`, `at`: what it raised, and when; `ended`: it
    has ended, and all that it said is here."""

    process: subprocess.Popen[bytes]
    joined: bool = False
    step: int = -1
    operations: int = 0
    elements: int = 0
    wrong: list[int] = field(default_factory=list)
    error: str = ""
    kind: str = ""
    at: float = 0.0
    done: bool = False
    ended: bool = False
    models: dict[int, list[int]] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        return self.done or bool(self.error) or self.ended


class SoakJob:
    """A job that runs.

    Args:
        lab: where its nodes are; None: all on loopback.
        directory: of the daemons' files; for the FIFOs that hang daemons, too.
        local_sizes: ranks of each node.
        step, model: where it goes on.

    Attributes:
        ranks: by rank.
        samples: of each process, by its name: what it held, and `at` when.
    """

    def __init__(
        self, lab: Netlab | None, directory: Path, local_sizes: Sequence[int], step: int, model: Sequence[int]
    ) -> None:
        self.daemons = (
            Daemons(directory, local_sizes, True, **TIMES)
            if lab is None
            else LabDaemons(lab, directory, local_sizes, **TIMES)
        )
        self.lab = lab
        self.topology = self.daemons.topology
        self.ranks: dict[int, RankState] = {}
        self.samples: dict[str, list[dict[str, float]]] = {}
        self._directory = directory
        self._readers: list[threading.Thread] = []
        self._begin = {"job": JOB, "ranks": list(range(self.topology.size)), "timeout": START_S, "step": step}
        self._begin["model"] = list(model)

    def start(self) -> None:
        """Starts everything.

        Raises:
            SoakError: it does not come up.
        """
        for node in range(len(self.topology.hosts)):
            self.daemons.log_path(node).unlink(missing_ok=True)  # the last job's
            path = self._directory / f"hang.{node}"
            if not path.exists():
                fifo(self._directory, node)
            self.daemons.environment["FUSION_TEST_HANG"] = str(path)
            wrapper = [] if self.lab is None else ["ip", "netns", "exec", self.lab.hosts[node].name]
            self.daemons.commands[node] = [*wrapper, *HANGABLE]
            process = self.daemons.launch(node)
            self.daemons.processes.append(process)
        for process in self.daemons.processes:
            answer = self.daemons.answer_of(process)
            self.daemons.endpoints.append(answer)  # type: ignore[arg-type]
        for node in range(len(self.topology.hosts)):
            self.daemons.tell(node)
        for rank in range(self.topology.size):
            self._start_rank(rank)
        states = self.ranks.values()
        self.wait(lambda: all(s.joined for s in states) or any(s.over for s in states), START_S, "all ranks to join")
        if not all(state.joined for state in states):
            raise SoakError(f"the job does not come up; {self.describe()}")

    def _start_rank(self, rank: int) -> None:
        process = forks.popen(
            [sys.executable, "-m", "tests.faults.soak_worker"],
            forks.DAEMON,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self.daemons.environment,
        )
        state = self.ranks[rank] = RankState(process)
        self.tell(rank, {**self._begin, "rank": rank, "path": self.daemons.path(self.topology.node_of(rank))})
        reader = threading.Thread(target=self._read, args=(state,))
        reader.start()
        self._readers.append(reader)

    @staticmethod
    def _read(state: RankState) -> None:
        assert state.process.stdout is not None
        for line in state.process.stdout:
            said = json.loads(line)
            state.joined = state.joined or "joined" in said
            if "step" in said:
                state.operations += said["operations"]
                state.elements += said["elements"]
                if said["wrong"]:
                    state.wrong.append(said["step"])
                state.step = said["step"]
            if "models" in said:
                state.models = {int(step): model for step, model in said["models"].items()}
                state.kind, state.at = said.get("kind", ""), said.get("at", 0.0)
                state.error, state.done = said.get("error", ""), said.get("done", False)
        state.ended = True

    def tell(self, rank: int, what: dict[str, Any]) -> None:
        """Sends a request to a rank."""
        stdin = self.ranks[rank].process.stdin
        assert stdin is not None
        stdin.write(json.dumps(what).encode() + b"\n")
        stdin.flush()

    @property
    def nodes(self) -> int:
        return len(self.topology.hosts)

    def daemon(self, node: int) -> nemesis.Process:
        return self.daemons.processes[node]

    def workers(self) -> list[nemesis.Process]:
        return [state.process for state in self.ranks.values()]

    def addresses(self, node: int) -> list[tuple[str, int]]:
        endpoint = self.daemons.endpoints[node]
        return [(endpoint.address, port) for port in (endpoint.control_port, endpoint.payload_port)]

    def connection(self, node: int) -> socket.socket:
        return self.daemons.connection(node)

    def hang_daemon(self, node: int, seconds: float) -> None:
        nemesis.hang(self._directory / f"hang.{node}", seconds)

    def hang_worker(self, rank: int, seconds: float) -> None:
        self.tell(rank, {"hang": seconds})

    def wait(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Waits until a condition holds.

        Raises:
            SoakError: it does not in time.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise SoakError(f"waited {seconds:g} s in vain for {what}; {self.describe()}")
            time.sleep(0.005)

    def describe(self) -> str:
        """Describes the step of each rank and the log of each daemon, for messages."""
        ranks = [f"rank {rank}: step {state.step} {state.error[:400]}" for rank, state in self.ranks.items()]
        logs = [f"node {node}: {self.daemons.log(node)[-1000:]}" for node in range(len(self.topology.hosts))]
        return "; ".join(ranks) + "\n" + "\n".join(logs)

    def go_on(self, steps: int) -> None:
        """Waits until every rank has taken `steps` more steps.

        Raises:
            SoakError: a rank has failed, or it takes too long.
        """
        goal = {rank: state.step + steps for rank, state in self.ranks.items()}

        def reached() -> bool:
            if failed := [rank for rank, state in self.ranks.items() if state.over]:
                time.sleep(0.5)  # for the others' messages
                raise SoakError(f"rank {failed[0]} failed under a fault that is to be survived; {self.describe()}")
            return all(state.step >= goal[rank] for rank, state in self.ranks.items())

        self.wait(reached, STEPS_S, f"{steps} more steps")

    def sample(self) -> None:
        """Records the resources of each daemon and each rank."""
        processes = {f"the daemon of node {node}": process for node, process in enumerate(self.daemons.processes)}
        processes |= {f"rank {rank}": state.process for rank, state in self.ranks.items()}
        for name, process in processes.items():
            held = {"at": time.monotonic(), **nemesis.resources(process.pid)}
            self.samples.setdefault(name, []).append(held)

    def stop(self) -> None:
        """Lets all ranks stop after the same step.

        Raises:
            SoakError: one does not.
        """
        self.tell(0, {"stop": True})
        self.wait(lambda: all(state.done for state in self.ranks.values()), STEPS_S, "all ranks to stop")

    def close(self) -> list[str]:
        """Ends everything. Returns errors of the end as sentences."""
        wrong = []
        for rank, state in self.ranks.items():
            try:
                state.process.wait(END_S)
            except subprocess.TimeoutExpired:
                wrong.append(f"rank {rank} did not end by itself")
                state.process.kill()
                state.process.wait()
            assert state.process.stdin is not None
            state.process.stdin.close()
        for node, process in enumerate(self.daemons.processes):
            if process.stdin is not None and not process.stdin.closed:
                process.stdin.close()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                wrong.append(f"the daemon of node {node} did not end within {END_S:g} s")
                process.kill()
            if process.wait() >= 0 and (files := self.daemons.files(node)):  # a killed one cannot remove its own
                wrong.append(f"the daemon of node {node} left {', '.join(sorted(files))}")
        for reader in self._readers:
            reader.join(END_S)
        for state in self.ranks.values():
            assert state.process.stdout is not None
            state.process.stdout.close()
        self.daemons.close()
        return wrong
