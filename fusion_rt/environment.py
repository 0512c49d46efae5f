"""Where this worker is: its ranks, its job and its daemon's socket, from the variables that whoever started it has set.

In this order: `fusionrun` (HOROVOD_* and FUSION_*), `torchrun` on one host (RANK, WORLD_SIZE, LOCAL_RANK, ...), and
without either a job of one worker. A set of variables counts as soon as one of it is there, and has to be whole then:
a job that came up with half of its variables would train on wrong ranks and say nothing.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from fusion_rt.errors import FusionError

_FUSIONRUN = (
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE",
    "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE",
    "FUSION_NODE",
    "FUSION_JOB_ID",
    "FUSION_SOCKET",
)
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Environment:
    """A worker's place in its job.

    Attributes:
        rank, size: among all workers of the job.
        local_rank, local_size: among the workers of this node.
        cross_rank, cross_size: among the nodes that have a worker of the same local_rank.
        node: index of this node.
        job: id of the job.
        socket: path of the daemon's socket, or empty: the workers have no launcher and start their daemon themselves.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    node: int
    job: str
    socket: str = ""

    def __post_init__(self) -> None:
        for kind in ("", "local_", "cross_"):
            rank, size = getattr(self, f"{kind}rank"), getattr(self, f"{kind}size")
            if not 0 <= rank < size:
                raise FusionError(f"this worker was started with {kind}rank {rank} of {kind}size {size}; ranks count "
                                  f"from 0 to {kind}size - 1")  # fmt: skip


def detect(environ: Mapping[str, str] | None = None) -> Environment:
    """This worker's place, as `environ` (default: this process's environment) tells it.

    Raises:
        FusionError: variables are missing, are not numbers, contradict each other, or describe a job that needs
            `fusionrun`.
    """
    environ = os.environ if environ is None else environ
    if any(name in environ for name in _FUSIONRUN):
        return _from_fusionrun(environ)
    if any(name in environ for name in _TORCHRUN[:4]):
        return _from_torchrun(environ)
    return Environment(0, 1, 0, 1, 0, 1, 0, f"alone-{os.getpid()}-{secrets.token_hex(4)}")


def _from_fusionrun(environ: Mapping[str, str]) -> Environment:
    _require(environ, _FUSIONRUN, "start this script with fusionrun, or unset them to run it as a job of one worker")
    rank, size, local_rank, local_size, cross_rank, cross_size, node = (
        _number(environ, name) for name in _FUSIONRUN[:7]
    )
    return Environment(
        rank,
        size,
        local_rank,
        local_size,
        cross_rank,
        cross_size,
        node,
        environ["FUSION_JOB_ID"],
        environ["FUSION_SOCKET"],
    )


def _from_torchrun(environ: Mapping[str, str]) -> Environment:
    _require(environ, _TORCHRUN, "start this script with torchrun or fusionrun, or unset them to run it alone")
    rank, size, local_rank, local_size = (_number(environ, name) for name in _TORCHRUN[:4])
    if size != local_size:
        raise FusionError(f"torchrun started this job on several hosts (WORLD_SIZE={size}, LOCAL_WORLD_SIZE="
                          f"{local_size}); start it with `fusionrun -H host1:slots,host2:slots` for now")  # fmt: skip
    if rank != local_rank:
        raise FusionError(f"RANK={rank} and LOCAL_RANK={local_rank} differ although all workers are on one host")
    return Environment(rank, size, local_rank, local_size, 0, 1, 0, _torchrun_job(environ))


def _torchrun_job(environ: Mapping[str, str]) -> str:
    """An id that all workers of one (re)start by torchrun share, and nobody else.

    Its run id and port may repeat from one job to the next. What does not is the directory made for the workers' error
    reports, or else the agent, which is every worker's parent (not where the script runs under a wrapper).
    """
    error_file = environ.get("TORCHELASTIC_ERROR_FILE", "")
    agent = os.path.dirname(os.path.dirname(error_file)) or str(os.getppid())
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    identity = "\0".join([agent, *(environ.get(name, "") for name in names)])
    return "torchrun-" + hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()


def _require(environ: Mapping[str, str], names: tuple[str, ...], advice: str) -> None:
    missing = [name for name in names if not environ.get(name)]
    if missing:
        present = [name for name in names if environ.get(name)]
        raise FusionError(f"{', '.join(present) or 'empty variables'} set, but not {', '.join(missing)}: {advice}")


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise FusionError(f"{name}={environ[name]!r} is not a number") from None
