"""Where a worker finds itself, for every way of starting it."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping

import pytest

from fusion_rt.core.errors import FusionError
from fusion_rt.launchers.environment import Environment, detect
from tests.for_each import for_each

FUSIONRUN = {
    "HOROVOD_RANK": "5",
    "HOROVOD_SIZE": "6",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "2",
    "HOROVOD_CROSS_SIZE": "3",
    "FUSION_NODE": "2",
    "FUSION_JOB_ID": "abc",
    "FUSION_SOCKET": "/run/abc.2/sock",
}
HOROVODRUN = {
    "HOROVOD_HOSTNAME": "b",
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
    "HOROVOD_CONTROLLER": "gloo",
    "HOROVOD_CPU_OPERATIONS": "gloo",
    "HOROVOD_GLOO_IFACE": "eth7",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.9",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "14921",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
TWO_AGENTS = {**TORCHRUN, "RANK": "3", "WORLD_SIZE": "4", "GROUP_RANK": "1", "MASTER_ADDR": "a"}
# What Open MPI 4.1 sets, as far as it matters, for rank 3 on the second of two hosts that are not mpirun's.
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_MCA_ess_base_jobid": "2146107393",
    "OMPI_MCA_orte_hnp_uri": "2146107392.0;tcp://10.77.0.1,192.0.2.1:33493;tcp6://[2001:db8::1]:42651",
    "OMPI_MCA_orte_local_daemon_uri": "2146107392.2;tcp://10.77.0.3:59107",
    "OMPI_MCA_orte_node_regex": "head,n[1:1-2]@0(3)",
    "OMPI_MCA_orte_precondition_transports": "5aabb1aa85d66672-2304e4501bbe52f2",
    "PMIX_NAMESPACE": "2146107393",
    "PMIX_RANK": "3",
}
ONE_HOST_MPI = {
    **{name: value for name, value in OPEN_MPI.items() if name != "OMPI_MCA_orte_node_regex"},
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
}
ALLOCATION = {  # the shell of salloc
    "SLURM_JOB_ID": "77",
    "SLURM_JOBID": "77",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_SUBMIT_DIR": "/home/ann",
    "SLURM_CLUSTER_NAME": "c",
}
BATCH = {**ALLOCATION, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "ENVIRONMENT": "BATCH"}
SLURM = {
    **BATCH,
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURMD_NODENAME": "n2",
}
ONE_HOST_STEP = {**SLURM, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
BY_HAND = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2"}
HYDRA = {**PMI, "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MASTER = {"MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "4711"}
ALONE = (0, 1, 0, "alone")


def summary(environ: Mapping[str, str]) -> tuple[int, int, int, str]:
    """Rank, size, local rank, and who seems to have started the worker."""
    found = detect(environ)
    launcher = "fusionrun" if found.socket else found.job.partition("-")[0]
    return found.rank, found.size, found.local_rank, launcher + ("+" if found.meeting else "")


@for_each(
    ("environ", "found"),
    [
        ({}, ALONE),
        (FUSIONRUN, (5, 6, 1, "fusionrun")),
        ({**FUSIONRUN, **HOROVODRUN, **FUSIONRUN}, (5, 6, 1, "fusionrun")),
        ({**TORCHRUN, **FUSIONRUN}, (5, 6, 1, "fusionrun")),
        (HOROVODRUN, (3, 4, 1, "horovodrun+")),
        ({**HOROVODRUN, "HOROVOD_SIZE": "2", "HOROVOD_RANK": "1"}, (1, 2, 1, "horovodrun")),
        ({**HOROVODRUN, **TORCHRUN}, (3, 4, 1, "horovodrun+")),
        (TORCHRUN, (1, 2, 1, "torchrun")),
        (TWO_AGENTS, (3, 4, 1, "torchrun+")),
        ({**SLURM, **TWO_AGENTS}, (3, 4, 1, "torchrun+")),  # srun torchrun
        ({**BATCH, **TORCHRUN}, (1, 2, 1, "torchrun")),
        ({**OPEN_MPI, **TORCHRUN}, (1, 2, 1, "torchrun")),  # mpirun torchrun
        (OPEN_MPI, (3, 4, 1, "openmpi+")),
        (ONE_HOST_MPI, (1, 2, 1, "openmpi")),
        ({**SLURM, "SLURM_PROCID": "1", **OPEN_MPI}, (3, 4, 1, "openmpi+")),  # mpirun's own daemons are a step
        ({**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "2"}, (3, 4, 1, "openmpi+")),  # a pod's variables
        ({"OMPI_MCA_btl": "tcp,self"}, ALONE),
        (PMI, (1, 2, 1, "pmi")),
        ({**PMI, **MASTER}, (1, 2, -1, "pmi+")),
        (HYDRA, (1, 2, 1, "pmi")),
        ({**HYDRA, "PMI_SIZE": "4", "PMI_RANK": "3", **MASTER}, (3, 4, 1, "pmi+")),
        ({**PMI, "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}, (1, 2, 1, "pmi")),
        ({**SLURM, "SLURM_PROCID": "0", **HYDRA}, (1, 2, 1, "pmi")),  # hydra's own daemons are a step
        ({**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4"}, (3, 4, 1, "slurm+")),  # srun --mpi=pmi2
        (ALLOCATION, ALONE),
        (BATCH, ALONE),
        (SLURM, (3, 4, 1, "slurm+")),
        (ONE_HOST_STEP, (1, 2, 1, "slurm")),
        # An interactive step is a shell, in an allocation for more.
        ({**BATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"},
         (0, 1, 0, "slurm")),
        ({**SLURM, **MASTER, "WORLD_SIZE": "4"}, (3, 4, 1, "slurm+")),  # what batch scripts export
        (BY_HAND, (1, 2, 1, "slurm")),
        ({**BY_HAND, "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_LOCALID": "0"}, (1, 2, 0, "slurm+")),
        ({**BY_HAND, "SLURM_LOCALID": "0", **MASTER}, (1, 2, 0, "slurm+")),
        ({"HOROVOD_FUSION_THRESHOLD": "1", "MASTER_ADDR": "somewhere", "FUSION_RUNTIME_DIR": "/x"}, ALONE),
    ],
)  # fmt: skip
def test_the_launcher_is_recognised(environ: Mapping[str, str], found: tuple[int, int, int, str]) -> None:
    assert summary(environ) == found


def without(environ: Mapping[str, str], name: str) -> dict[str, str]:
    return {each: value for each, value in environ.items() if each != name}


MANDATORY = [
    *[(FUSIONRUN, name) for name in FUSIONRUN],
    *[(HOROVODRUN, name) for name in HOROVODRUN if re.search("HOSTNAME|_SIZE|_RANK|RENDEZVOUS", name)
      and "CROSS" not in name],
    *[(TORCHRUN, name) for name in list(TORCHRUN)[:6]],
    *[(OPEN_MPI, name) for name in list(OPEN_MPI)[:4]],
    *[(PMI, name) for name in PMI],
    *[(BY_HAND, name) for name in ("SLURM_NTASKS", "SLURM_LOCALID")],
]  # fmt: skip


@for_each(("environ", "missing"), MANDATORY)
def test_half_of_a_launchers_variables_are_an_error(environ: Mapping[str, str], missing: str) -> None:
    with pytest.raises(FusionError, match=f"set, but not .*{missing}.*: start this script with .*fusionrun"):
        detect(without(environ, missing))
    with pytest.raises(FusionError, match=f"set, but not .*{missing}"):
        detect({**environ, missing: ""})


@for_each(
    ("environ", "text"),
    [
        ({**FUSIONRUN, "HOROVOD_RANK": "6"}, "HOROVOD_RANK=6 and HOROVOD_SIZE=6"),
        ({**FUSIONRUN, "HOROVOD_RANK": "-1"}, "HOROVOD_RANK=-1 and HOROVOD_SIZE=6: ranks count from 0"),
        ({**FUSIONRUN, "HOROVOD_LOCAL_RANK": "2"}, "HOROVOD_LOCAL_RANK=2 and HOROVOD_LOCAL_SIZE=2"),
        ({**FUSIONRUN, "HOROVOD_CROSS_RANK": "3"}, "HOROVOD_CROSS_RANK=3 and HOROVOD_CROSS_SIZE=3"),
        ({**FUSIONRUN, "HOROVOD_SIZE": "six"}, "HOROVOD_SIZE='six' is not a number"),
        ({**HOROVODRUN, "HOROVOD_GLOO_RENDEZVOUS_PORT": "x"}, "HOROVOD_GLOO_RENDEZVOUS_PORT='x' is not a number"),
        ({**HOROVODRUN, "HOROVOD_ELASTIC": "1"}, "elastic job"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK=2 and LOCAL_WORLD_SIZE=2"),
        ({**SLURM, "SLURM_JOB_NODELIST": "", "SLURM_STEP_NODELIST": ""}, "set MASTER_ADDR to the name or address"),
        ({**SLURM, "SLURM_STEP_NODELIST": "n[1-"}, "not a list of hosts"),
        ({**BY_HAND, "SLURM_LOCALID": "0"}, "set MASTER_ADDR"),
        ({**HYDRA, "PMI_SIZE": "4"}, "set MASTER_ADDR"),
        ({**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "", "OMPI_MCA_orte_node_regex": ""}, "set MASTER_ADDR"),
        ({**OPEN_MPI, "MASTER_ADDR": "a", "MASTER_PORT": "b"}, "MASTER_PORT='b' is not a number"),
    ],
)
def test_what_cannot_be_is_an_error(environ: Mapping[str, str], text: str) -> None:
    with pytest.raises(FusionError, match=re.escape(text)):
        detect(environ)


def test_fusionrun_says_everything() -> None:
    assert detect(FUSIONRUN) == Environment(5, 6, 1, "abc", 2, "/run/abc.2/sock")


def test_in_an_elastic_job_the_daemon_has_listened_before() -> None:
    assert detect({**FUSIONRUN, "FUSION_ELASTIC_EPOCH": "3"}).listened
    assert not detect(FUSIONRUN).listened


def test_jobs_of_one_worker_have_different_ids() -> None:
    assert detect({}).job != detect({}).job


def test_horovodrun_has_a_store_and_chooses_the_interface() -> None:
    meeting = detect(HOROVODRUN).meeting
    assert meeting is not None
    assert (meeting.kind, meeting.addresses) == ("horovodrun", (("10.0.0.9", 14921),))
    assert (meeting.node, meeting.host, meeting.interfaces) == ("b", "b", ("eth7",))


def test_torchrun_has_a_store_unless_its_agent_keeps_it_to_itself() -> None:
    meeting = detect(TWO_AGENTS).meeting
    assert meeting is not None
    assert (meeting.kind, meeting.addresses, meeting.node) == ("torchrun", (("a", 29500),), "1")
    assert meeting.host == socket.gethostname()
    other = detect({**TWO_AGENTS, "TORCHELASTIC_USE_AGENT_STORE": "False"}).meeting
    assert other is not None
    assert (other.kind, other.addresses) == ("rank0", meeting.addresses)
    restarted = detect({**TWO_AGENTS, "TORCHELASTIC_RESTART_COUNT": "1"}).meeting
    assert restarted == meeting, "the agents of several hosts count differently"
    assert detect(TWO_AGENTS) == detect(dict(TWO_AGENTS)), "who joins once more would not be recognised"


def test_open_mpi_says_where_rank_0_may_be() -> None:
    meeting = detect(OPEN_MPI).meeting
    assert meeting is not None
    hosts = list(dict.fromkeys(host for host, _ in meeting.addresses))
    assert hosts == ["10.77.0.1", "192.0.2.1", "2001:db8::1", "n1"], "the hosts of mpirun, and the next one"
    assert len({port for _, port in meeting.addresses}) == 4
    assert meeting.node == "2146107392.2"
    assert meeting.secret == b"5aabb1aa85d66672-2304e4501bbe52f2"
    assert "5aabb1aa" not in repr(meeting)
    on_its_host = detect({**without(OPEN_MPI, "OMPI_MCA_orte_node_regex"), "OMPI_COMM_WORLD_RANK": "0"}).meeting
    assert on_its_host is not None
    assert on_its_host.scope == meeting.scope
    assert set(on_its_host.addresses) < set(meeting.addresses)


def test_slurm_says_where_rank_0_is_unless_a_person_does() -> None:
    meeting = detect(SLURM).meeting
    assert meeting is not None
    assert [host for host, _ in meeting.addresses] == ["n1"] * 4 + ["n2"] * 4
    assert all(20000 <= port < 29000 for _, port in meeting.addresses)
    assert (meeting.node, meeting.host, meeting.expected) == ("1", "n2", ("n1", "n2"))
    other = detect({**SLURM, "SLURM_STEP_ID": "3"}).meeting
    assert other is not None
    assert not set(other.addresses) & set(meeting.addresses)
    for environ, places in (
        (MASTER, {("10.1.1.1", 4711)}),
        ({"MASTER_PORT": "4711"}, {("n1", 4711), ("n2", 4711)}),
        ({"MASTER_ADDR": "x"}, {("x", port) for _, port in meeting.addresses}),
    ):
        chosen = detect({**SLURM, **environ}).meeting
        assert chosen is not None
        assert set(chosen.addresses) == places


def test_a_secret_of_the_persons_own_comes_first() -> None:
    meeting = detect({**OPEN_MPI, "FUSION_JOB_SECRET": "hush"}).meeting
    assert meeting is not None
    assert meeting.secret == b"hush"


def test_a_secret_that_horovodrun_has_shown_to_all_users_is_refused() -> None:
    job = {**HOROVODRUN, "HOROVOD_LOCAL_SIZE": "1", "HOROVOD_LOCAL_RANK": "0", "FUSION_JOB_SECRET": "hush"}
    with pytest.raises(FusionError, match="on command lines that all users of the hosts can read"):
        detect(job)
    detect({**job, "FUSION_JOB_SECRET_FILE": "/secret"})


def test_workers_of_one_torchrun_share_an_id_that_no_other_has() -> None:
    files = [f"/tmp/torchelastic_x/attempt_0/{rank}/error.json" for rank in range(2)]
    first = detect({**TORCHRUN, "TORCHELASTIC_ERROR_FILE": files[0], "RANK": "0", "LOCAL_RANK": "0"}).job
    assert first == detect({**TORCHRUN, "TORCHELASTIC_ERROR_FILE": files[1]}).job
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,32}", first)
    others = [
        detect({**TORCHRUN, "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_y/attempt_0/0/error.json"}).job,
        detect({**TORCHRUN, "TORCHELASTIC_ERROR_FILE": files[0], "TORCHELASTIC_RESTART_COUNT": "1"}).job,
        detect({**TORCHRUN, "TORCHELASTIC_ERROR_FILE": files[0], "MASTER_PORT": "29501"}).job,
        detect(TORCHRUN).job,
    ]
    assert len({first, *others}) == 5


def test_other_launchers_tell_their_jobs_apart_too() -> None:
    horovodrun = {**HOROVODRUN, "HOROVOD_SIZE": "2", "HOROVOD_RANK": "1"}
    for environ, name in (
        (horovodrun, "HOROVOD_GLOO_RENDEZVOUS_PORT"),
        (ONE_HOST_MPI, "PMIX_NAMESPACE"),
        (ONE_HOST_MPI, "OMPI_MCA_ess_base_jobid"),
        (ONE_HOST_STEP, "SLURM_JOB_ID"),
        (ONE_HOST_STEP, "SLURM_STEP_ID"),
        ({**ONE_HOST_STEP, "SLURM_RESTART_COUNT": "1"}, "SLURM_RESTART_COUNT"),
        ({**HYDRA, **MASTER}, "MASTER_PORT"),
    ):
        assert detect(environ).job == detect(dict(environ)).job
        assert detect(environ).job != detect({**environ, name: "4"}).job


def test_where_a_launcher_says_nothing_its_workers_have_their_parent_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = [BY_HAND, HYDRA, {name: ONE_HOST_MPI[name] for name in list(OPEN_MPI)[:4]}]
    here = [detect(environ).job for environ in sets]
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert not set(here) & {detect(environ).job for environ in sets}
