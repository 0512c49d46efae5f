"""`fusionrun --advise MODEL_MB STEP_MS` starts a job that only comes up, and whose daemons measure the links."""

from __future__ import annotations

import os
import pickle
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusion_rt.choice.advice import HostMemory, advise, conditions_of, tell
from fusion_rt.core.errors import SettingError
from fusion_rt.host.system_memory import available_memory
from fusion_rt.run_function import pickled, worker_command
from fusion_rt.runner.launch.launch_plan import LaunchPlan
from fusion_rt.runner.launch.launcher import Launch
from fusion_rt.settings import Settings
from fusion_rt.units import NUMBER

_MB, _MS = 1e6, 1e-3


@dataclass(frozen=True)
class MeasuredLinks:
    """The links of a job, and the memory of a host.

    Attributes:
        worst: latency (s) and seconds a byte of the worst one.
        ring: the same of a ring in a measured order; None: the worst link is in it.
        memory: bytes that this worker's host has left, and the control group whose limit decides, or an empty text.
    """

    worst: tuple[float, float]
    ring: tuple[float, float] | None
    memory: tuple[int, str]


def measured_links() -> MeasuredLinks:
    """Joins the job of `fusionrun` that this process is a worker of, and leaves it; all workers have to.

    Raises:
        FusionError: the job did not come up.
    """
    from fusion_rt.client.client import Client  # brings numpy along, which the launcher need not wait for

    memory = available_memory()
    environ, settings = os.environ, Settings.from_env()
    client = Client(
        environ["FUSION_SOCKET"], environ["FUSION_JOB_ID"], int(environ["HOROVOD_RANK"]), settings.start_timeout
    )
    welcome = client.welcome
    client.close()
    return MeasuredLinks((welcome.latency, welcome.seconds_per_byte), welcome.ring, memory)


def parse(text: str) -> tuple[float, float]:
    """Parses the two numbers of the flag. Returns bytes of gradients, and seconds of a step.

    Raises:
        SettingError: they are not two numbers above 0.
    """
    try:
        model, step = (NUMBER.parse(word, 1.0) for word in text.split())
    except (SettingError, ValueError):
        raise SettingError(f"--advise: {text!r} is not two numbers, MB of gradients and ms of a step") from None
    if model <= 0 or step <= 0:
        raise SettingError(f"--advise: {text!r}: both numbers have to be above 0")
    return model * _MB, step * _MS


def check(plan: LaunchPlan) -> None:
    """Raises `SettingError` if there is nothing to measure in such a job."""
    if plan.elastic is not None:
        raise SettingError("--advise measures hosts that stay; leave --min-np and --host-discovery-script out")
    if len(plan.places.topology.hosts) < 2:
        raise SettingError("--advise compares several hosts with one; name two or more with -H or -hostfile")


def words_of(argv: Sequence[str], command: Sequence[str]) -> list[str]:
    """Returns the flags of a command line but for --advise; `command`: the words behind them."""
    flags = list(argv)[: len(argv) - len(command)]
    start = next(index for index, word in enumerate(flags) if word.startswith("--adv"))
    del flags[start : start + 3]
    return flags[:-1] if flags[-1:] == ["--"] else flags


async def run(plan: LaunchPlan, wanted: str, words: Sequence[str], gone: float = 0.0) -> int:
    """Measures, and prints the advice.

    Args:
        plan: the job that is planned; its command is not run.
        wanted: the two numbers of the flag.
        words: the other flags, with which to start the job.
        gone: seconds since the person asked for it.

    Returns:
        The exit status, as `Launch.run`.

    Raises:
        SettingError: the numbers cannot be used, or there is nothing to measure in such a job.
    """
    model, step = parse(wanted)
    check(plan)
    command = tuple(os.fsencode(word) for word in worker_command(sys.executable))
    job = Launch(replace(plan, command=command, function=pickled(measured_links, (), {})), gone)
    status = await job.run()
    if status == 0:
        # From workers of ours, as those of `fusion_rt.run`.
        found: dict[int, MeasuredLinks] = {rank: pickle.loads(told) for rank, told in job.results.items()}
        links, topology = found[0], plan.places.topology
        slots = tuple(map(len, topology.ranks))
        conditions = conditions_of(slots, links.worst, links.ring, model, step, plan.settings.chunk_bytes)
        hosts = [
            HostMemory(host, len(ranks), *found[ranks[0]].memory)
            for host, ranks in zip(topology.hosts, topology.ranks, strict=True)
        ]
        script = shlex.join(map(os.fsdecode, plan.command))
        print(tell(conditions, advise(conditions, plan.settings.fusion_threshold), hosts, shlex.join(words), script))
    return status
