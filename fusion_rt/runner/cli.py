"""The command line of `fusionrun`.

Exit status: 0 when all workers succeed, 1 when anything fails, 2 for a flag that cannot be used, 128 + n when signal n
(Ctrl-C: 130) ended the job.

The flags come from the table in `fusion_rt.settings`. Those of settings reach daemons and workers as environment
variables.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import replace

from fusion_rt.errors import FusionError, SettingError
from fusion_rt.runner import config_file, discovery, flags, reach
from fusion_rt.runner.choices import Choices
from fusion_rt.runner.environment import forwarded
from fusion_rt.runner.flags import make_parser
from fusion_rt.runner.hosts import Host, add_shard_hosts, assign, parse_hostfile, parse_hosts, shard_host_names
from fusion_rt.runner.launch import launch
from fusion_rt.runner.phases import process_age
from fusion_rt.runner.plan import LaunchPlan
from fusion_rt.settings import Settings


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a job as the arguments say (those of the process, if none are given).

    Returns:
        The exit status, as above.
    """
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.check_build:
        from fusion_rt.runner.check_build import report  # looks at many packages

        print(report())
        return 0
    try:
        return asyncio.run(launch(make_plan(arguments), process_age()))
    except SettingError as error:
        parser.error(str(error))
    except (FusionError, OSError) as error:
        print(f"fusionrun: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before or after the job: while it runs, the signal is handled
        return 130


def make_plan(arguments: argparse.Namespace) -> LaunchPlan:
    """The job that parsed arguments ask for.

    Raises:
        SettingError: they do not make sense together, or with the YAML file or the environment.
        FusionError: the hosts cannot be found.
    """
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise SettingError(f"there is no command to run; an example is: {flags.EXAMPLE}")
    chosen = flags.choices_in(arguments)
    warnings: list[str] = []
    if "config_file" in chosen:
        in_file, warnings = config_file.read(chosen["config_file"].value)
        chosen = {**in_file, **chosen}
    choices = Choices(chosen)
    environment = {**forwarded(os.environb), **choices.variables()}
    settings = Settings.from_env({os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()})
    wanted = _hosts(choices, settings.start_timeout)
    hosts, topology = assign(wanted, discovery.number_of_workers(choices, wanted))
    if settings.shard_hosts:
        hosts, topology = add_shard_hosts(settings.shard_hosts, wanted, hosts, topology)
        names = shard_host_names(settings.shard_hosts)
        environment[b"FUSION_SHARD_HOSTS"] = names.encode()
        settings = replace(settings, shard_hosts=names)
    if choices["host_discovery_script"] or choices["min_num_proc"]:
        environment[b"HOROVOD_ELASTIC"] = b"1"
    if choices["rsh_agent"]:
        reach.check_template(choices["rsh_agent"])
    identity = choices["ssh_identity_file"] or ""
    if identity and not os.path.isfile(identity):
        raise SettingError(f"--ssh-identity-file {identity} is not a file")
    return LaunchPlan(
        job=secrets.token_hex(4),
        command=tuple(os.fsencode(word) for word in command),
        hosts=hosts,
        topology=topology,
        environment=environment,
        directory=os.fsencode(os.getcwd()),
        settings=settings,
        rsh_agent=choices["rsh_agent"] or "",
        ssh_port=choices["ssh_port"] or 0,
        ssh_identity_file=os.path.abspath(identity) if identity else "",
        interfaces=tuple(name for name in (choices["network_interfaces"] or "").split(",") if name),
        output_directory=choices["output_filename"] or "",
        timestamps=bool(choices["prefix_output_with_timestamp"]),
        verbose=bool(choices["verbose"]),
        as_horovod=bool(choices["as_horovod"]),
        warnings=(*warnings, *choices.warnings(os.environ)),
    )


def _hosts(choices: Choices, timeout: float) -> tuple[Host, ...]:
    slots = choices["slots_per_host"]
    if choices["hosts"] is not None:
        return parse_hosts(choices["hosts"], slots)
    if choices["hostfile"] is not None:
        try:
            with open(choices["hostfile"], encoding="utf-8") as file:
                return parse_hostfile(file.read(), choices["hostfile"], slots)
        except (OSError, UnicodeDecodeError) as error:
            raise SettingError(f"the hostfile cannot be read: {error}") from None
    if choices["host_discovery_script"] is not None:
        return discovery.discover(choices["host_discovery_script"], slots, timeout)
    if choices["num_proc"] is None:
        raise SettingError(f"-np, the number of workers, is missing; an example is: {flags.EXAMPLE}")
    return parse_hosts(f"localhost:{choices['num_proc']}")


if __name__ == "__main__":
    sys.exit(main())
