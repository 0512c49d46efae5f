"""The command line of `fusionrun`.

Exit status: 0 when all workers succeed, 1 when anything fails, 2 for a flag that cannot be used, 128 + n when signal n
(Ctrl-C: 130) ended the job.

Flags for settings come from the table in `fusion_rt.settings`; they beat the environment, and reach daemons and workers
as environment variables. Like Horovod's users expect, a flag may be abbreviated as long as it is unique, and everything
from the first word that is no flag on is the command.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import secrets
import sys
from collections.abc import Sequence

import fusion_rt
from fusion_rt.errors import SettingError
from fusion_rt.runner import reach
from fusion_rt.runner.environment import forwarded
from fusion_rt.runner.hosts import Host, assign, parse_hostfile, parse_hosts
from fusion_rt.runner.launch import launch
from fusion_rt.runner.plan import LaunchPlan
from fusion_rt.settings import MIB, Settings, parse_seconds, parse_size

_EXAMPLE = "fusionrun -np 4 -H host1:2,host2:2 python train.py"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a job as the arguments say (those of the process, if none are given).

    Returns:
        The exit status, as above.
    """
    parser = make_parser()
    arguments = parser.parse_args(argv)
    try:
        plan = make_plan(arguments)
    except SettingError as error:
        parser.error(str(error))
    try:
        return asyncio.run(launch(plan))
    except OSError as error:
        print(f"fusionrun: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before or after the job: while it runs, the signal is handled
        return 130


def make_parser() -> argparse.ArgumentParser:
    """The parser of all flags."""
    parser = argparse.ArgumentParser(
        prog="fusionrun",
        usage="fusionrun -np N [-H HOSTS | -hostfile FILE] [flags] COMMAND ...",
        description="Starts a training script on one host or on several, with one communication daemon per host.",
        epilog=f"Example: {_EXAMPLE}",
    )
    add = parser.add_argument
    add("-v", "--version", action="version", version=fusion_rt.__version__)
    add("-np", "--num-proc", type=_positive, metavar="N", help="number of workers (default: all slots of the hosts)")
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument("-H", "--hosts", metavar="HOSTS", help="host:slots,host:slots,... (default: localhost:N)")
    hosts.add_argument("-hostfile", "--hostfile", metavar="FILE", help="file with a line 'name slots=N' per host")
    add(
        "--network-interface",
        action="append",
        default=[],
        metavar="NAME",
        dest="interfaces",
        help="listen on this interface's address; repeated (or a,b), each host uses the first that it has",
    )
    add("--output-filename", default="", metavar="DIR", help="also write DIR/rank.<rank>/stdout and stderr")
    add(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        action="store_true",
        dest="timestamps",
        help="start each line of output with the time",
    )
    add("--verbose", action="store_true", help="report the phases of the job and when they were reached")

    ssh = parser.add_argument_group("how hosts are reached")
    ssh.add_argument("-p", "--ssh-port", type=_positive, default=0, metavar="PORT")
    ssh.add_argument("-i", "--ssh-identity-file", default="", metavar="FILE")
    ssh.add_argument(
        "--rsh-agent",
        default="",
        metavar="'CMD {host}'",
        help="reach every host with this instead of ssh; the agent's command line is appended to it",
    )

    group = parser.add_argument_group("settings (a flag beats the environment variable)")
    for field in dataclasses.fields(Settings):
        flag = _flag(field)
        if flag:
            variable = field.metadata["env"]
            choices = field.metadata["choices"]
            group.add_argument(
                flag,
                dest=_setting_dest(field),
                metavar="|".join(choices) if choices else field.metadata["unit"].upper(),
                help=f"{field.metadata['help']} ({variable})".replace("%", "%%"),
            )
    add("command", nargs=argparse.REMAINDER, metavar="COMMAND ...", help="the training script and its arguments")
    return parser


def make_plan(arguments: argparse.Namespace) -> LaunchPlan:
    """The job that parsed arguments ask for.

    Raises:
        SettingError: they do not make sense together, or with the environment.
    """
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise SettingError(f"there is no command to run; an example is: {_EXAMPLE}")
    wanted = _hosts(arguments)
    num_proc = arguments.num_proc or sum(host.slots for host in wanted)
    hosts, topology = assign(wanted, num_proc)
    if arguments.rsh_agent:
        reach.check_template(arguments.rsh_agent)
    if arguments.ssh_identity_file and not os.path.isfile(arguments.ssh_identity_file):
        raise SettingError(f"--ssh-identity-file {arguments.ssh_identity_file} is not a file")
    environment = {**forwarded(os.environb), **_flag_variables(arguments)}
    text = {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}
    return LaunchPlan(
        job=secrets.token_hex(4),
        command=tuple(os.fsencode(word) for word in command),
        hosts=hosts,
        topology=topology,
        environment=environment,
        directory=os.fsencode(os.getcwd()),
        settings=Settings.from_env(text),
        rsh_agent=arguments.rsh_agent,
        ssh_port=arguments.ssh_port,
        ssh_identity_file=os.path.abspath(arguments.ssh_identity_file) if arguments.ssh_identity_file else "",
        interfaces=tuple(name for names in arguments.interfaces for name in names.split(",") if name),
        output_directory=arguments.output_filename,
        timestamps=arguments.timestamps,
        verbose=arguments.verbose,
    )


def _hosts(arguments: argparse.Namespace) -> tuple[Host, ...]:
    if arguments.hosts is not None:
        return parse_hosts(arguments.hosts)
    if arguments.hostfile is not None:
        try:
            with open(arguments.hostfile, encoding="utf-8") as file:
                return parse_hostfile(file.read(), arguments.hostfile)
        except (OSError, UnicodeDecodeError) as error:
            raise SettingError(f"the hostfile cannot be read: {error}") from None
    if arguments.num_proc is None:
        raise SettingError(f"-np, the number of workers, is missing; an example is: {_EXAMPLE}")
    return parse_hosts(f"localhost:{arguments.num_proc}")


def _flag_variables(arguments: argparse.Namespace) -> dict[bytes, bytes]:
    """The environment variables that stand for the settings given as flags.

    Raises:
        SettingError: a value cannot be used; the text names the flag.
    """
    variables: dict[bytes, bytes] = {}
    for field in dataclasses.fields(Settings):
        flag = _flag(field)
        text = getattr(arguments, _setting_dest(field), None) if flag else None
        if flag is None or text is None:
            continue
        name = field.metadata["env"]
        try:
            value = _in_unit_of_variable(flag, text)
            Settings.from_env({name: value})
        except SettingError as error:
            raise SettingError(f"{flag} {text}: {error}") from None
        variables[os.fsencode(name)] = os.fsencode(value)
    return variables


def _in_unit_of_variable(flag: str, text: str) -> str:
    """A flag's value as its variable has it: a bare number counts what the flag's name says, MiB or milliseconds."""
    if flag.endswith("-mb"):
        return str(parse_size(text, MIB))
    if flag.endswith("-ms"):
        return f"{parse_seconds(text, 1e-3)}s"
    return text


def _flag(field: dataclasses.Field[object]) -> str | None:
    flag: str | None = field.metadata["flag"]
    return flag


def _setting_dest(field: dataclasses.Field[object]) -> str:
    return f"setting_{field.name}"


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
