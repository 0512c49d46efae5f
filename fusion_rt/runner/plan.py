"""What a command line of `fusionrun` asks for, complete and checked."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_rt.runner.hosts import Host
from fusion_rt.settings import Settings
from fusion_rt.topology import Topology


@dataclass(frozen=True)
class LaunchPlan:
    """One job to be started.

    Attributes:
        job: id of the job.
        command: the workers' command line.
        hosts: the nodes' hosts, by node index.
        topology: which rank runs on which node.
        environment: what is forwarded to all hosts, with the settings that flags and the YAML file gave.
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
        warnings: what the person should know, a sentence each.
        function: what the workers call (`task`), pickled; empty if the command is all they run.
    """

    job: str
    command: tuple[bytes, ...]
    hosts: tuple[Host, ...]
    topology: Topology
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

    @property
    def is_loopback(self) -> bool:
        """Whether every node is on this machine, so that no daemon has to be reached from outside."""
        if self.rsh_agent:
            return all(host.is_loopback for host in self.hosts)
        return all(host.is_local for host in self.hosts)
