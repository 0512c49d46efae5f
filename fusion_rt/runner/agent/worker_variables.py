"""The environment variables of a job: those that are forwarded, and those that daemon and workers get on each host."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from fusion_rt.local import elastic
from fusion_rt.runner.protocol.agent_messages import Epoch, Job

_OWN_OF_HOST = re.compile(rb"BASH_FUNC_.*|OLDPWD|.*CUDA_VISIBLE_DEVICES|XDG_RUNTIME_DIR")

_OF_ANOTHER_JOB = {name.encode() for name in (elastic.SOCKET, elastic.SLOT, elastic.EPOCH, elastic.PROVISIONAL)}


def forwarded(environ: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """The part of the launcher's environment that goes to all hosts.

    Left out are Horovod's exceptions, XDG_RUNTIME_DIR, which names a directory of one host, and variables that make
    this process a worker of another elastic job, if it is one.
    """
    return {
        name: value
        for name, value in environ.items()
        if not _OWN_OF_HOST.fullmatch(name) and name not in _OF_ANOTHER_JOB
    }


def on_host(job: Job, own: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """The environment of the job on one host: the forwarded variables, and of the exceptions the host's own (so
    that `CUDA_VISIBLE_DEVICES=1 fusionrun …` has its usual meaning on the launcher's own host)."""
    kept = {name: value for name, value in own.items() if _OWN_OF_HOST.fullmatch(name)}
    return {**dict(job.environment), **kept}


def absolute_path_list(paths: bytes, directory: bytes) -> bytes:
    """A list of paths such as PYTHONPATH, its relative entries taken from `directory`; empty entries are dropped."""
    return b":".join(os.path.join(directory, path) for path in paths.split(b":") if path)


def of_worker(base: Mapping[bytes, bytes], place: Mapping[str, str], as_horovod: bool) -> dict[bytes, bytes]:
    """One worker's environment: the host's, and its place."""
    environ = {**base, **{name.encode(): os.fsencode(value) for name, value in place.items()}}
    if as_horovod:
        from fusion_rt.as_horovod import python_path

        paths = [os.fsencode(python_path()), *filter(None, [base.get(b"PYTHONPATH")])]
        environ[b"PYTHONPATH"] = b":".join(paths)
    return environ


def place_of_worker(epoch: Epoch, rank: int, job: str, socket: str) -> dict[str, str]:
    """The variables that tell a worker its place in an epoch: Horovod's, and where its daemon is.

    Args:
        epoch: the places on this host.
        rank: the worker's.
        job: id of the job.
        socket: the daemon's.
    """
    topology = epoch.topology
    return {
        "HOROVOD_HOSTNAME": topology.hosts[epoch.node],
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(topology.size),
        "HOROVOD_LOCAL_RANK": str(topology.local_rank(rank)),
        "HOROVOD_LOCAL_SIZE": str(topology.local_size(rank)),
        "HOROVOD_CROSS_RANK": str(topology.cross_rank(rank)),
        "HOROVOD_CROSS_SIZE": str(topology.cross_size(rank)),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "PYTHONUNBUFFERED": "1",
        "FUSION_JOB_ID": job,
        "FUSION_NODE": str(epoch.node),
        "FUSION_SOCKET": socket,
    }
