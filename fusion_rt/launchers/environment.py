"""Finds this worker's ranks, its job and how it meets the others, from the variables of whoever has started it.

Launchers are looked for in this order: `fusionrun`, `horovodrun`, `torchrun`, Open MPI's `mpirun`, other launchers that
speak PMI, `srun`; and without any of them this is a job of one worker. The first whose variables are all there counts,
since one launcher is often started by another and leaves its own variables beside those of the first. If none is
complete but one has begun, that is an error: a job that came up with half of its variables would train on wrong ranks
and say nothing. A Slurm job's shell is not a step of `srun`, although it has most of its variables.

`fusionrun` has started the daemons. All others leave that to the workers, which therefore have to meet when they are on
several hosts (`Meeting`); on one host a shared id of the job is enough.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fusion_rt.core.errors import FusionError
from fusion_rt.launchers.meeting import PORTS_OF_A_MEETING, Address, Meeting, addresses_of, hosts_of_uri, identity
from fusion_rt.local.elastic import EPOCH
from fusion_rt.units import PORTS

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
_HOROVODRUN = (*_FUSIONRUN[:4], "HOROVOD_HOSTNAME", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_PMI = ("PMI_RANK", "PMI_SIZE")
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
_ALONE = "alone-"  # how the id of a job without a launcher begins
_MAX_HOSTS = 65536  # in a list of names
_MAX_NAME = 255  # characters, as in DNS


@dataclass(frozen=True)
class Environment:
    """A worker's place in its job.

    Attributes:
        rank, size: among all workers of the job.
        local_rank: among the workers of this node; -1 if only the meeting will tell.
        job: id of the job; where the workers meet, how its id begins.
        node: index of this node, unless the meeting tells.
        socket: path of the daemon's socket, or empty: the workers start their daemon themselves.
        listened: that daemon listened before this worker was told its place. If it does not any more, it never will.
        formation: in an elastic job, the membership epoch that this place is in; else 0.
        meeting: how they find the other nodes, or None: all of them are on this host, or have their daemon.
    """

    rank: int
    size: int
    local_rank: int
    job: str
    node: int = 0
    socket: str = ""
    meeting: Meeting | None = None
    listened: bool = False
    formation: int = 0

    @property
    def is_alone(self) -> bool:
        """True if no launcher has started this worker."""
        return self.job.startswith(_ALONE)

    def has_daemon_of(self, other: Environment) -> bool:
        """Returns whether a worker that goes from the other place to this one keeps its daemon.

        In an elastic job, whose places change, the same one has to listen there; in any other it is the same place.
        """
        if self.formation and other.formation:
            return (self.job, self.node, self.socket) == (other.job, other.node, other.socket)
        return self == other


def detect(environ: Mapping[str, str] | None = None) -> Environment:
    """This worker's place, as `environ` (default: this process's environment) tells it.

    Raises:
        FusionError: variables are missing, are not numbers, contradict each other, or do not tell where to meet.
    """
    environ = os.environ if environ is None else environ
    for names, place in _LAUNCHERS:
        if all(environ.get(name) for name in names) and _is_meant(names, environ):
            return place(environ)
    for marks, names, launcher in _MARKS:
        if any(name in environ for name in marks) and _is_meant(names, environ):
            missing = [name for name in names if not environ.get(name)]
            present = [name for name in names if environ.get(name)]
            raise FusionError(f"{', '.join(present) or 'empty variables'} set, but not {', '.join(missing)}: start "
                              f"this script with {launcher}, or unset them to run it as a job of one")  # fmt: skip
    return Environment(0, 1, 0, f"{_ALONE}{os.getpid()}-{secrets.token_hex(4)}")


def _is_meant(names: tuple[str, ...], environ: Mapping[str, str]) -> bool:
    """Tells whether variables of Slurm or PMI are this process's own."""
    if names == _SLURM:
        # The shell of an allocation, or a batch script, has been given no step, and has not been started by srun. Where
        # the directory of the submission is missing too, the variables were set by hand.
        return "SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ or "SLURM_SUBMIT_DIR" not in environ
    if names == _PMI:  # srun --mpi=pmi2 sets these besides its own, which say more
        return "MPI_LOCALRANKID" in environ or not all(environ.get(name) for name in _SLURM)
    return True


def _from_fusionrun(environ: Mapping[str, str]) -> Environment:
    rank, size, local_rank = _ranks(environ, *_FUSIONRUN[:4])
    _ranks(environ, "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE")
    node = _number(environ, "FUSION_NODE")
    formation = _number(environ, EPOCH) if environ.get(EPOCH) else 0
    return Environment(
        rank,
        size,
        local_rank,
        environ["FUSION_JOB_ID"],
        node,
        environ["FUSION_SOCKET"],
        listened=formation > 0,  # in an elastic job workers get their places when all daemons are up
        formation=formation,
    )


def _from_horovodrun(environ: Mapping[str, str]) -> Environment:
    rank, size, local_rank = _ranks(environ, *_HOROVODRUN[:4])
    if environ.get("HOROVOD_ELASTIC") == "1":
        raise FusionError("horovodrun has started an elastic job, whose workers come and go; start it without "
                          "--min-np and --host-discovery-script, or with fusionrun")  # fmt: skip
    host, port = environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], _number(environ, "HOROVOD_GLOO_RENDEZVOUS_PORT")
    if _number(environ, "HOROVOD_LOCAL_SIZE") == size:
        return Environment(rank, size, local_rank, identity("horovodrun", host, str(port)))
    if environ.get("FUSION_JOB_SECRET") and not environ.get("FUSION_JOB_SECRET_FILE"):
        raise FusionError("horovodrun has put FUSION_JOB_SECRET on command lines that all users of the hosts can read; "
                          "keep another secret in a file, and name that with FUSION_JOB_SECRET_FILE")  # fmt: skip
    name = environ["HOROVOD_HOSTNAME"]
    meeting = _meeting(environ, ((host, port),), "fusion_rt", name, "horovodrun", name)
    return Environment(rank, size, local_rank, "horovodrun", meeting=meeting)


def _from_torchrun(environ: Mapping[str, str]) -> Environment:
    rank, size, local_rank = _ranks(environ, *_TORCHRUN[:4])
    # Run id and port may repeat from one job to the next. On one host, the directory does not that is made for the
    # workers' error reports, or else the agent, which is every worker's parent (not where it runs under a wrapper).
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    values = [environ.get(name, "") for name in names]
    if _number(environ, "LOCAL_WORLD_SIZE") == size:
        agent = os.path.dirname(os.path.dirname(environ.get("TORCHELASTIC_ERROR_FILE", ""))) or str(os.getppid())
        values.append(environ.get("TORCHELASTIC_RESTART_COUNT", ""))  # the agents of several hosts count differently
        return Environment(rank, size, local_rank, identity("torchrun", agent, *values))
    place = environ["MASTER_ADDR"], _number(environ, "MASTER_PORT")
    served = environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True"
    kind = "torchrun" if served else "rank0"
    meeting = _meeting(environ, (place,), identity("torchrun", *values), environ.get("GROUP_RANK", ""), kind)
    return Environment(rank, size, local_rank, "torchrun", meeting=meeting)


def _from_open_mpi(environ: Mapping[str, str]) -> Environment:
    rank, size, local_rank = _ranks(environ, *_OPEN_MPI)
    names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_precondition_transports")
    values = [environ.get(name, "") for name in names]
    if _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE") == size:
        return Environment(rank, size, local_rank, identity("openmpi", *(values if any(values) else _parent(environ))))
    scope = identity("openmpi", *values)
    # Rank 0 is on the host of mpirun, or else on the first of the others.
    mpirun = environ.get("OMPI_MCA_orte_hnp_uri", "")
    others = hosts_of_list(environ.get("OMPI_MCA_orte_node_regex", "").partition("@")[0])
    hosts = (*hosts_of_uri(mpirun), *others[1:])
    node = environ.get("OMPI_MCA_orte_local_daemon_uri", "").partition(";")[0]
    meeting = _meeting(environ, _addresses(environ, hosts, scope), scope, node)
    if not meeting.secret:
        meeting = replace(meeting, secret=_secret(values[2]))
    return Environment(rank, size, local_rank, "openmpi", meeting=meeting)


def _from_pmi(environ: Mapping[str, str]) -> Environment:
    rank, size = _number(environ, "PMI_RANK"), _number(environ, "PMI_SIZE")
    local_rank = -1
    for names in (("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")):
        if all(environ.get(name) for name in names):
            _, _, local_rank = _ranks(environ, *_PMI, *names)
            if _number(environ, names[1]) == size:
                return Environment(rank, size, local_rank, identity("pmi", *_parent(environ)))
    if local_rank < 0 and "MASTER_ADDR" not in environ:  # nothing says that there are other hosts
        rank, size, local_rank = _ranks(environ, *_PMI)
        return Environment(rank, size, local_rank, identity("pmi", *_parent(environ)))
    scope = identity("pmi", environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", ""))
    meeting = _meeting(environ, _addresses(environ, (), scope), scope, "")
    return Environment(rank, size, local_rank, "pmi", meeting=meeting)


def _from_slurm(environ: Mapping[str, str]) -> Environment:
    size_name = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    rank, size, _ = _ranks(environ, "SLURM_PROCID", size_name)
    local_rank = _number(environ, "SLURM_LOCALID")
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    values = [environ.get(name, "") for name in names]
    hosts = hosts_of_list(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "")
    nodes = next((_number(environ, name) for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
                  if environ.get(name)), len(hosts))  # fmt: skip
    if nodes == 1 or (nodes == 0 and rank == local_rank and "MASTER_ADDR" not in environ):
        return Environment(rank, size, local_rank, identity("slurm", *(values if any(values) else _parent(environ))))
    scope = identity("slurm", *values)
    node, host = environ.get("SLURM_NODEID", ""), environ.get("SLURMD_NODENAME", "")
    meeting = _meeting(environ, _addresses(environ, hosts, scope), scope, node, host=host, expected=hosts)
    return Environment(rank, size, local_rank, "slurm", meeting=meeting)


_LAUNCHERS: tuple[tuple[tuple[str, ...], Callable[[Mapping[str, str]], Environment]], ...] = (
    (_FUSIONRUN, _from_fusionrun),
    (_HOROVODRUN, _from_horovodrun),
    (_TORCHRUN, _from_torchrun),
    (_OPEN_MPI, _from_open_mpi),
    (_PMI, _from_pmi),
    (_SLURM, _from_slurm),
)
_MARKS = (  # the variables that show that a launcher's were meant, all of them, and the launcher
    (_HOROVODRUN[5:], _HOROVODRUN, "horovodrun or fusionrun"),
    (_FUSIONRUN, _FUSIONRUN, "fusionrun"),
    (_TORCHRUN[:4], _TORCHRUN, "torchrun or fusionrun"),
    (_OPEN_MPI, _OPEN_MPI, "mpirun or fusionrun"),
    (_PMI, _PMI, "mpiexec or fusionrun"),
    (_SLURM[:1], _SLURM, "srun or fusionrun"),
)


def _meeting(
    environ: Mapping[str, str],
    addresses: tuple[Address, ...],
    scope: str,
    node: str,
    kind: str = "rank0",
    host: str = "",
    expected: tuple[str, ...] = (),
) -> Meeting:
    """A meeting with the interface and the secret that the person has named; this host's name is the default."""
    host = host or socket.gethostname()
    interface = environ.get("HOROVOD_GLOO_IFACE", "")
    interfaces = (interface,) if interface else ()
    secret = _secret(environ.get("FUSION_JOB_SECRET", ""))
    return Meeting(kind, addresses, scope, node or host, host, expected, interfaces, secret)


def _secret(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _addresses(environ: Mapping[str, str], hosts: tuple[str, ...], scope: str) -> tuple[Address, ...]:
    port = _number(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else 0
    ports = environ.get("FUSION_PORTS", "")  # of daemons, too
    among = PORTS.parse(ports, 1.0) if ports else PORTS_OF_A_MEETING
    return addresses_of(hosts, scope, environ.get("MASTER_ADDR", ""), port, among)


def _parent(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The values that workers of a host share when the launcher says nothing: their parent, and values set by hand."""
    return (str(os.getppid()), environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", ""))


def _ranks(environ: Mapping[str, str], *names: str) -> tuple[int, int, int]:
    """Rank, size and local rank from the variables of rank, size, local rank and local size, or the first two of these.

    Raises:
        FusionError: they are not numbers, or not from 0 to size - 1.
    """
    values = [_number(environ, name) for name in names]
    for place in range(0, len(values), 2):
        if not 0 <= values[place] < values[place + 1]:
            raise FusionError(f"{names[place]}={values[place]} and {names[place + 1]}={values[place + 1]}: ranks count "
                              "from 0 to the size - 1")  # fmt: skip
    return values[0], values[1], values[2] if len(values) > 2 else values[0]


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise FusionError(f"{name}={environ[name]!r} is not a number") from None


def hosts_of_list(text: str) -> tuple[str, ...]:
    """The names in a list as launchers abbreviate it, in their order: Slurm's `a[01-03,7],b`, Open MPI's `a[2:1-3,7]`
    (2: digits). A name may have several brackets (`rack[1-2]n[01-16]`).

    Raises:
        FusionError: it is not such a list, or a very long one.
    """
    if not re.fullmatch(r"(?:[^\[\]]|\[[^\[\]]*\])*", text):
        raise _not_a_list(text)
    names: list[str] = []
    for entry in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        names += _expand_entry(entry, text)
        if len(names) > _MAX_HOSTS:
            raise _too_long(text)
    return tuple(names)


def _expand_entry(entry: str, text: str) -> list[str]:
    names = [""]
    for part in re.split(r"(\[.*?\])", entry):
        if len(names[0]) + (0 if part.startswith("[") else len(part)) > _MAX_NAME:
            raise _not_a_list(text)
        if part.startswith("["):
            numbers = _numbers(part[1:-1], text)
            if len(names) * len(numbers) > _MAX_HOSTS:
                raise _too_long(text)
            names = [name + number for name in names for number in numbers]
        else:
            names = [name + part for name in names]
    return names


def _numbers(ranges: str, text: str) -> list[str]:
    """The numbers in `01-03,7` or `2:1-3,7`, with their leading zeros."""
    width, colon, rest = ranges.rpartition(":")
    found: list[str] = []
    for piece in rest.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", piece)
        if match is None or (colon and not re.fullmatch("[0-9]{1,2}", width)):
            raise _not_a_list(text)
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise _not_a_list(text)
        digits = int(width) if colon else len(first)
        if int(last) - int(first) >= _MAX_HOSTS:
            raise _too_long(text)
        found += [f"{number:0{digits}d}" for number in range(int(first), int(last) + 1)]
    return found


def _not_a_list(text: str) -> FusionError:
    return FusionError(f"{text[:80]!r} is not a list of hosts such as a[01-03,7],b")


def _too_long(text: str) -> FusionError:
    return FusionError(f"the list of hosts {text[:80]!r} has more than {_MAX_HOSTS} names")
