"""How a benchmark starts its own workers, on this host or on netlab hosts, and hears from them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.netlab import Netlab

MARK = "RESULT "  # in front of the JSON that rank 0 prints
PORT = "29512"  # where torch.distributed meets on a netlab host, on which nobody else listens


def tell(result: Any) -> None:
    """What rank 0 does with its result."""
    print(MARK + json.dumps(result), flush=True)


def environment() -> dict[str, str]:
    """Variables for workers that also use torch.distributed: where to meet, and one thread each."""
    return {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}


def fusionrun(ranks: int, arguments: Sequence[str]) -> dict[str, Any]:
    """Runs Python with these arguments on `ranks` workers; returns what rank 0 has told.

    Raises:
        subprocess.CalledProcessError: the job failed; why is on standard error.
    """
    found: dict[str, Any] = _run(["-np", str(ranks)], arguments, environment())
    return found


def on_lab(
    lab: Netlab, arguments: Sequence[str], *, per_host: int = 1, variables: Mapping[str, str] | None = None
) -> Any:
    """Runs Python with these arguments on `per_host` workers of each host of a lab; returns what rank 0 has told.

    Payloads are not encrypted unless `variables` say otherwise, because the peers encrypt nothing.

    Raises:
        subprocess.CalledProcessError: the job failed; why is on standard error.
    """
    hosts = ",".join(f"{host.name}:{per_host}" for host in lab.hosts)
    launch = ["-np", str(per_host * len(lab.hosts)), "-H", hosts, "--rsh-agent", lab.agent]
    meeting = {"MASTER_ADDR": lab.hosts[0].address, "MASTER_PORT": PORT}
    defaults = {"FUSION_ENCRYPTION": "control", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    return _run(launch, arguments, {**os.environ, **defaults, **meeting, **(variables or {})})


def on_hosts(
    hosts: int,
    rate: str | None,
    arguments: Sequence[str],
    *,
    per_host: int = 1,
    rates: Mapping[int, str | None] | None = None,
    variables: Mapping[str, str] | None = None,
) -> Any:
    """The same in a lab that is made for it (root needed), with links of this rate; `rates`: those of single hosts."""
    from benchmarks.netlab import Netlab

    with Netlab(hosts=hosts, rate=rate, rates=dict(rates or {})) as lab:
        return on_lab(lab, arguments, per_host=per_host, variables=variables)


def _run(launch: Sequence[str], arguments: Sequence[str], variables: Mapping[str, str]) -> Any:
    command = [sys.executable, "-m", "fusion_rt.runner", *launch, sys.executable, *arguments]
    run = subprocess.run(command, env=dict(variables), stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in run.stdout.splitlines() if MARK in line)
    return json.loads(line.split(MARK, 1)[1])


def link_bytes() -> int:
    """Bytes that this host has sent on all links to others."""
    lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()[2:]
    fields = [line.replace(":", " ").split() for line in lines]
    return sum(int(words[9]) for words in fields if words[0] != "lo")


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process so far. From the scheduler's statistics, which count nanoseconds: the usual
    counters advance in ticks of 10 ms, and an idle daemon needs less than that in a second."""
    found = (path.read_text(encoding="utf-8").split()[0] for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(map(int, found)) / 1e9


def daemon() -> dict[str, Any]:
    """What the daemon of this worker's node says about itself."""
    where = ["--job", os.environ["FUSION_JOB_ID"], "--node", os.environ["FUSION_NODE"]]
    command = [sys.executable, "-m", "fusiond", "status", "--json", *where]
    found: dict[str, Any]
    (found,) = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


def free_port() -> int:
    """A TCP port that nobody listens on at the moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
