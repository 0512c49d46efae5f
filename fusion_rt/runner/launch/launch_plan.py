"""The plan of a job: all that a command line of `fusionrun` asks for, complete and checked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fusion_rt.runner.decisions.host_list import Host
from fusion_rt.runner.decisions.limits import ElasticLimits
from fusion_rt.runner.decisions.places import Places
from fusion_rt.runner.launch.discovery import Discovery
from fusion_rt.settings import Settings


@dataclass(frozen=True)
class ElasticPlan:
    """The ways in which the membership of a job may change.

    Attributes:
        limits: the numbers of workers, and of the wait for them.
        cooldown: seconds that a host which failed is left out, at first and at most.
        script: finds the hosts; None: they stay as they are.
    """

    limits: ElasticLimits
    cooldown: tuple[float, float]
    script: Discovery | None = None


@dataclass(frozen=True)
class LaunchPlan:
    """One job to be started.

    Attributes:
        job: id of the job.
        command: the workers' command line.
        places: hosts and ranks at the start; in an elastic job, if all hosts come.
        environment: the variables forwarded to all hosts, with the settings that flags and the YAML file gave.
        directory: absolute working directory of the workers.
        settings: read from `environment`.
        rsh_agent: template of the command that reaches a host, with `{host}` in it; "": ssh, and none for this machine.
        ssh_port: port of ssh on the hosts; 0: ssh's own default.
        ssh_identity_file: file with the private key for ssh; "": ssh's own default.
        interfaces: names of network interfaces of which each daemon uses the first that its host has.
        output_directory: where a file per rank and stream is written; "": nowhere.
        timestamps: whether each line of output starts with the time.
        verbose: whether phases are reported.
        as_horovod: whether the workers' `import horovod` means this project.
        warnings: for the person, a sentence each.
        function: of the workers (`function_call`), pickled; empty if the command is all they run.
        elastic: how membership may change; None: it stays as it is.
    """

    job: str
    command: tuple[bytes, ...]
    places: Places
    environment: dict[bytes, bytes]
    directory: bytes
    settings: Settings
    rsh_agent: str = ""
    ssh_port: int = 0
    ssh_identity_file: str = ""
    interfaces: tuple[str, ...] = ()
    output_directory: str = ""
    timestamps: bool = False
    verbose: bool = False
    as_horovod: bool = False
    warnings: tuple[str, ...] = ()
    function: bytes = b""
    elastic: ElasticPlan | None = None

    def are_loopback(self, hosts: Iterable[Host]) -> bool:
        """Tells whether all these hosts are this machine, so that no daemon has to be reached from outside."""
        if self.rsh_agent:
            return all(host.is_loopback for host in hosts)
        return all(host.is_local for host in hosts)
