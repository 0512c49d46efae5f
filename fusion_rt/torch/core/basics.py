"""Functions to join and leave the job, and Horovod's queries of this worker's place and the installation."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fusion_rt.client import Client
from fusion_rt.core.errors import FusionError
from fusion_rt.launchers import autostart, environment
from fusion_rt.launchers.kvstore import Store
from fusion_rt.launchers.meeting import Meeting
from fusion_rt.local import elastic
from fusion_rt.settings import Settings
from fusion_rt.torch.core import process_sets as sets
from fusion_rt.torch.core import recording
from fusion_rt.torch.core.process_sets import ProcessSet, global_process_set
from fusion_rt.torch.core.provisional import provisional, warn_of_operations
from fusion_rt.torch.core.rendezvous import open_store
from fusion_rt.torch.core.runtime import (
    Runtime,
    before_leaving,
    enter,
    is_initialized,
    leave,
    returning,
    runtime,
    step_out,
)
from fusion_rt.tracing.format import Role
from fusion_rt.tracing.recorder import Instrument, Owner, open_recorder

__all__ = [
    "ProcessSet",
    "Runtime",
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
    "runtime",
    "shutdown",
    "start_timeline",
    "stop_timeline",
]


def init(comm: Any = None, process_sets: str | Sequence[ProcessSet] | None = None) -> None:
    """Joins the job, and returns when every rank has. When this worker is in it already, only registers process sets.

    `fusionrun` has started the daemon of this node; under any other launcher, or alone, the node's first worker does.

    In an elastic job a membership epoch may not come about, because another worker has died, for example. Then `init`
    asks the launcher for a place in the next one, until an epoch begins or the launcher ends the job. A worker that is
    started while the others train joins nothing yet: it has its future ranks, and no operations, until it reaches the
    function of `elastic.run`. At the start of a job a warning tells of operations before that.

    Args:
        comm: Horovod's; None, or all ranks, as a list or an MPI communicator.
        process_sets: process sets to register, the same on all ranks; or "dynamic", which Horovod needs for
            `add_process_set`, and which changes nothing here.

    Raises:
        FusionError: the environment is inconsistent, or the daemon or another rank did not come up in time.
        ValueError: `comm` is a part of the ranks, or a process set cannot be registered.
        SystemExit: in an elastic job, if there is no place for this worker any more.
    """
    static = _checked_sets(process_sets)
    if is_initialized():
        sets.register(static)
        return
    agent = elastic.agent()
    while True:
        where, settings = environment.detect(), Settings.from_env()
        _check_comm(comm, where.size)
        if agent is not None and agent.expected is not None:
            enter(provisional(where, agent.expected, settings))
            sets.register(())
            return
        try:
            join(where, settings, static)
            if agent is not None and not agent.trains:
                warn_of_operations(runtime())
            return
        except FusionError as error:
            if agent is None:
                raise
            why = str(error)
        leave()
        elastic.move(agent, why)


def join(
    where: environment.Environment,
    settings: Settings,
    static: Sequence[ProcessSet] = (),
    open_store: Callable[[Meeting, int, int], Store] = open_store,
) -> None:
    """Joins the job, over the connection with which this worker has left it if there is one.

    Args:
        where: this worker's place.
        settings: every knob.
        static: process sets to register.
        open_store: opens the store at which the workers meet.

    Raises:
        as `init`
    """
    before = returning(where)
    if before is None:
        client, daemon = autostart.join(where, settings, open_store)
        trace = _open_recorder(client, settings)
    else:
        daemon, trace = before.daemon, before.trace
        moved = where.rank != before.rank
        if moved:
            recording.forget(trace)
            trace.close()
        client = Client(
            "", before.client.job, where.rank, settings.start_timeout, before.client, formation=where.formation
        )
        if moved:
            trace = _open_recorder(client, settings)
    enter(Runtime(where, client, daemon, trace))
    try:
        _begin_timeline(client, settings)
        sets.register(static)
    except BaseException:
        leave()
        raise


def _open_recorder(client: Client, settings: Settings) -> Instrument:
    node, hosts = client.welcome.node, client.topology.hosts
    owner = Owner(client.job, Role.WORKER, client.rank, node, len(hosts), hosts[node])
    return open_recorder(settings, owner, lambda why: warnings.warn(why, stacklevel=4))


def _begin_timeline(client: Client, settings: Settings) -> None:
    """Begins the timeline that the settings ask for."""
    wanted = settings.timeline_filename
    if wanted and wanted.upper() != "DYNAMIC":
        why = client.start_timeline(os.path.abspath(wanted), settings.timeline_mark_cycles)
        if why:
            warnings.warn(why, stacklevel=5)


def shutdown() -> None:
    """Leaves the job. Operations under way fail; other ranks' operations that still need this rank fail, too.

    Gradients that overlap has still to apply are applied first. After all ranks have left, `init` on all of them begins
    anew.
    """
    for finish in before_leaving:
        finish()
    step_out()


def is_homogeneous() -> bool:
    """Tells whether all nodes that have workers have the same number of them."""
    return len({len(ranks) for ranks in runtime().client.topology.ranks if ranks}) == 1


# --- capabilities -----------------------------------------------------------------------------------------------------
#
# Scripts ask in order to choose between ways of doing things. Here there is one way, which does as Horovod's build
# with Gloo does and needs no MPI, so they get the answers of such a build, and those about the GPU are torch's.


def mpi_threads_supported() -> bool:
    """Raises `ValueError`, as Horovod does without MPI: there is no MPI to share with `mpi4py`."""
    raise ValueError("Horovod MPI is not enabled; fusion_rt does not use MPI, so leave the question out")


def mpi_enabled() -> bool:
    """False: nothing here uses MPI, also not in a job that `mpirun` has started."""
    return False


def mpi_built() -> bool:
    """False, likewise."""
    return False


def gloo_enabled() -> bool:
    """True: the daemons stand in for Horovod's Gloo."""
    return True


def gloo_built() -> bool:
    """True, likewise."""
    return True


def nccl_built() -> int:
    """Returns 0: tensors of a GPU go through the host's memory."""
    return 0


def ddl_built() -> bool:
    """False."""
    return False


def ccl_built() -> bool:
    """False."""
    return False


def cuda_built() -> bool:
    """Tells whether tensors of CUDA devices are accepted, which is so if torch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Tells whether tensors of ROCm devices are accepted, which is so if torch was built with ROCm."""
    return torch.version.hip is not None


# --- the timeline -----------------------------------------------------------------------------------------------------


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begins Horovod's timeline in a file, in place of an earlier one; returns when the file is being written.

    The file is rank 0's, on its host, and calls of other ranks do nothing. With `--timeline-all-ranks` each rank has
    one, with its number before the suffix, and each host records from the first call of one of its ranks on. An
    existing file is kept, with .1 behind its name.

    Args:
        file_path: of the file.
        mark_cycles: the beginning of each step is marked.

    Raises:
        ValueError: before `init`, or without HOROVOD_TIMELINE, which Horovod needs to be DYNAMIC for it; or the file
            cannot be written.
    """
    here = runtime()
    if not os.environ.get("HOROVOD_TIMELINE"):
        raise ValueError("Set HOROVOD_TIMELINE=DYNAMIC to enable dynamic timeline usage.")
    if why := here.client.start_timeline(os.path.abspath(file_path), mark_cycles):
        raise ValueError(why)


def stop_timeline() -> None:
    """Ends Horovod's timeline, whose file is complete then. Raises `ValueError` before `init`."""
    runtime().client.stop_timeline()


# --- arguments of init ------------------------------------------------------------------------------------------------


def _checked_sets(process_sets: str | Sequence[ProcessSet] | None) -> list[ProcessSet]:
    if process_sets is None:
        return []
    if isinstance(process_sets, str):
        if process_sets.lower() == "dynamic":
            os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"  # as Horovod does, for scripts that look there
            return []
        raise ValueError(f'process_sets is a list of ProcessSet or "dynamic", not {process_sets!r}')
    static = list(process_sets)
    for number, process_set in enumerate(static):
        if not isinstance(process_set, ProcessSet):
            raise ValueError(f"process_sets entry number {number} is no ProcessSet: {process_set!r}")
    return static


def _check_comm(comm: Any, size: int) -> None:
    """Raises `ValueError` unless `comm` is all ranks of a job of this size."""
    if comm is None:
        return
    if hasattr(comm, "Get_size"):  # of mpi4py
        ranks = list(range(comm.Get_size()))
    elif isinstance(comm, Iterable):
        ranks = sorted(comm)
    else:
        raise ValueError("Invalid type of argument comm. Expected list of rank integers or mpi4py.MPI.Comm object.")
    if ranks and ranks != list(range(size)):
        raise ValueError(f"init(comm={ranks}) asks for a job of a part of the {size} ranks, which is not supported; "
                         "leave comm out and give a process set of those ranks to the operations")  # fmt: skip
