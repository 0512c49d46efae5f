"""Starts a benchmark's own workers, on this host or on netlab hosts, and reads their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.netlab import Netlab

MARK = "RESULT "  # before the JSON that rank 0 prints
PYTHON = [sys.executable]  # how workers are started
MEETING = "FUSION_BENCHMARK_MEETING"  # address of rank 0's host, at which torch.distributed meets


def tell(result: Any) -> None:
    """Prints the result of rank 0, for the process that has started the workers."""
    print(MARK + json.dumps(result), flush=True)


def environment() -> dict[str, str]:
    """Returns the environment for workers on this host: one thread each."""
    return {**os.environ, MEETING: "127.0.0.1", "OMP_NUM_THREADS": "1"}


def process_group(hvd: Any, backend: str = "gloo") -> None:
    """Makes torch.distributed's default group, with this backend, of the ranks of this job.

    They meet at a port that the system has given to rank 0, which listens on it before the others hear of it: a port
    that was found free before the job began may be taken by then.
    """
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it

    host, rank, size = os.environ[MEETING], hvd.rank(), hvd.size()
    store = TCPStore(host, 0, size, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = hvd.broadcast_object(store.port if store else None, root_rank=0, name="benchmarks.process_group")
    store = store or TCPStore(host, port, size, wait_for_workers=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)


def fusionrun(ranks: int, arguments: Sequence[str], variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Runs Python with these arguments on `ranks` workers; returns the result of rank 0.

    Args:
        variables: of the environment, besides the usual ones.

    Raises:
        subprocess.CalledProcessError: the job failed; why is on standard error.
    """
    found: dict[str, Any] = _run(["-np", str(ranks)], arguments, {**environment(), **(variables or {})})
    return found


def on_lab(
    lab: Netlab, arguments: Sequence[str], *, per_host: int = 1, variables: Mapping[str, str] | None = None
) -> Any:
    """Runs Python with these arguments on `per_host` workers of each host of a lab; returns the result of rank 0.

    Payloads are not encrypted unless `variables` say otherwise, because the peers encrypt nothing.

    Raises:
        subprocess.CalledProcessError: the job failed; why is on standard error.
    """
    hosts = ",".join(f"{host.name}:{per_host}" for host in lab.hosts)
    launch = ["-np", str(per_host * len(lab.hosts)), "-H", hosts, "--rsh-agent", lab.agent]
    meeting = {MEETING: lab.hosts[0].address}
    defaults = {"FUSION_ENCRYPTION": "control", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    return _run(launch, arguments, {**os.environ, **defaults, **meeting, **(variables or {})})


def on_loopback(ranks: int, hosts: str, arguments: Sequence[str], variables: Mapping[str, str]) -> dict[str, Any]:
    """Does the same as `fusionrun`, with a daemon for each of `hosts`: addresses of loopback, with their slots."""
    launch = ["-np", str(ranks), "-H", hosts, "--rsh-agent", "env H={host}"]
    found: dict[str, Any] = _run(launch, arguments, {**environment(), **variables})
    return found


def on_hosts(
    hosts: int,
    rate: str | None,
    arguments: Sequence[str],
    *,
    per_host: int = 1,
    rates: Mapping[int, str | None] | None = None,
    variables: Mapping[str, str] | None = None,
) -> Any:
    """Does the same as `on_lab` in a new lab (root needed), with links of `rate`; `rates`: those of single hosts."""
    from benchmarks.netlab import Netlab

    with Netlab(hosts=hosts, rate=rate, rates=dict(rates or {})) as lab:
        return on_lab(lab, arguments, per_host=per_host, variables=variables)


def _run(launch: Sequence[str], arguments: Sequence[str], variables: Mapping[str, str]) -> Any:
    command = [sys.executable, "-m", "fusion_rt.runner", *launch, *PYTHON, *arguments]
    run = subprocess.run(command, env=dict(variables), stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in run.stdout.splitlines() if MARK in line)
    return json.loads(line.split(MARK, 1)[1])


def link_bytes() -> int:
    """Returns the bytes that this host has sent on all links to others."""
    lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()[2:]
    fields = [line.replace(":", " ").split() for line in lines]
    return sum(int(words[9]) for words in fields if words[0] != "lo")


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time (s) of all threads of a process so far.

    It is read from the scheduler's statistics, which count nanoseconds: the usual counters advance in ticks of 10 ms,
    and an idle daemon needs less than that in a second.
    """
    found = (path.read_text(encoding="utf-8").split()[0] for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(map(int, found)) / 1e9


def daemon() -> dict[str, Any]:
    """Returns the status of the daemon of this worker's node."""
    where = ["--job", os.environ["FUSION_JOB_ID"], "--node", os.environ["FUSION_NODE"]]
    command = [sys.executable, "-m", "fusiond", "status", "--json", *where]
    found: dict[str, Any]
    (found,) = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found
