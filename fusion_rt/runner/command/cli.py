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
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fusion_rt.core.errors import FusionError, SettingError
from fusion_rt.runner.agent.worker_variables import forwarded
from fusion_rt.runner.command import config_file, flags
from fusion_rt.runner.command.flags import Choices, make_parser
from fusion_rt.runner.decisions.host_list import Host, parse_hostfile, parse_hosts
from fusion_rt.runner.decisions.limits import ElasticLimits
from fusion_rt.runner.decisions.places import add_shard_hosts, fill, shard_host_names
from fusion_rt.runner.launch import remote_shell
from fusion_rt.runner.launch.console import process_age
from fusion_rt.runner.launch.discovery import Discovery
from fusion_rt.runner.launch.launch_plan import ElasticPlan, LaunchPlan
from fusion_rt.runner.launch.launcher import launch
from fusion_rt.settings import KNOBS, Settings
from fusion_rt.units import SECONDS

_ADVISED = ["python", "train.py"]  # the command that --advise shows, if none is given


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a job as the arguments say (those of the process, if none are given).

    Returns:
        The exit status, as above.
    """
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.check_build:
        from fusion_rt.runner.command.check_build import report  # looks at many packages

        print(report())
        return 0
    try:
        plan = make_plan(arguments)
        if arguments.advise:
            from fusion_rt.runner.command import advise  # brings numpy along

            words = advise.words_of(sys.argv[1:] if argv is None else argv, _command(arguments))
            return asyncio.run(advise.run(plan, " ".join(arguments.advise), words, process_age()))
        return asyncio.run(launch(plan, process_age()))
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
    command = _command(arguments) or _ADVISED * bool(arguments.advise)
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
    script = None
    if choices["host_discovery_script"] is not None:
        script = Discovery(choices["host_discovery_script"], choices["slots_per_host"], settings.start_timeout)
    wanted = _hosts(choices, script)
    elastic = _elastic(choices, environment, settings, script)
    if elastic is not None:
        environment[b"HOROVOD_ELASTIC"] = b"1"
        if settings.shard_hosts:
            raise SettingError(
                "--shard-hosts (FUSION_SHARD_HOSTS) names hosts that have to stay, which those of an elastic job "
                "(--min-np, --host-discovery-script) need not; leave one of the two out"
            )
    places = fill(wanted, _number_of_workers(choices, wanted, elastic))
    if settings.shard_hosts:
        places = add_shard_hosts(settings.shard_hosts, wanted, places)
        names = shard_host_names(settings.shard_hosts)
        environment[b"FUSION_SHARD_HOSTS"] = names.encode()
        settings = replace(settings, shard_hosts=names)
    if choices["rsh_agent"]:
        remote_shell.check_template(choices["rsh_agent"])
    identity = choices["ssh_identity_file"] or ""
    if identity and not os.path.isfile(identity):
        raise SettingError(f"--ssh-identity-file {identity} is not a file")
    return LaunchPlan(
        job=secrets.token_hex(4),
        command=tuple(os.fsencode(word) for word in command),
        places=places,
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
        elastic=elastic,
    )


def _command(arguments: argparse.Namespace) -> list[str]:
    command: list[str] = arguments.command
    return command[1:] if command[:1] == ["--"] else command


def _elastic(
    choices: Choices, environment: Mapping[bytes, bytes], settings: Settings, script: Discovery | None
) -> ElasticPlan | None:
    """The plan of how the membership of the job may change; None if it stays.

    Raises:
        SettingError: -np, --min-np and --max-np contradict each other.
    """
    least, most, wanted = choices["min_num_proc"], choices["max_num_proc"], choices["num_proc"]
    for low, high, what in (
        (least, most, "--min-np {} is above --max-np {}"),
        (least, wanted, "--min-np {} is above -np {}"),
        (wanted, most, "-np {} is above --max-np {}"),
    ):
        if low is not None and high is not None and low > high:
            raise SettingError(what.format(low, high))
    if script is None and not least:
        return None
    least = least or wanted or 1
    limits = ElasticLimits(
        wanted=wanted or least,
        least=least,
        most=most,
        timeout=_elastic_timeout(choices, environment),
        resets=choices["reset_limit"],
        leave=choices["leave_timeout"],
        start=settings.start_timeout,
        probe=settings.heartbeat_timeout,
        restarts=choices["restart_limit"] > 0,
        failures=choices["restart_limit"],
        begin=choices["newcomer_timeout"],
    )
    return ElasticPlan(limits, _cooldown(choices["blacklist_cooldown_range"]), script)


def _number_of_workers(choices: Choices, hosts: tuple[Host, ...], elastic: ElasticPlan | None) -> int:
    """The workers of -np, or all slots, up to --max-np; in an elastic job, all slots."""
    slots = sum(host.slots for host in hosts)
    if elastic is not None:
        return slots
    return choices["num_proc"] or min(slots, choices["max_num_proc"] or slots)


def _elastic_timeout(choices: Choices, environment: Mapping[bytes, bytes]) -> float:
    """The variable's value, which a flag has set already, or the default."""
    knob = next(knob for knob in KNOBS if knob.name == "elastic_timeout")
    text = os.fsdecode(environment.get(os.fsencode(knob.variable), b""))
    seconds: float = knob.parse(text, knob.variable) if text else choices["elastic_timeout"]
    return seconds


def _cooldown(text: str) -> tuple[float, float]:
    """The two numbers of --blacklist-cooldown-range."""
    try:
        least, most = (SECONDS.parse(word, 1.0) for word in text.split())
    except (SettingError, ValueError):
        raise SettingError(f"--blacklist-cooldown-range: {text!r} is not two durations") from None
    if not 0 < least <= most:
        raise SettingError(f"--blacklist-cooldown-range: {text!r} is not a range: MIN is above 0 and not above MAX")
    return least, most


def _hosts(choices: Choices, script: Discovery | None) -> tuple[Host, ...]:
    slots = choices["slots_per_host"]
    if choices["hosts"] is not None:
        return parse_hosts(choices["hosts"], slots)
    if choices["hostfile"] is not None:
        try:
            with open(choices["hostfile"], encoding="utf-8") as file:
                return parse_hostfile(file.read(), choices["hostfile"], slots)
        except (OSError, UnicodeDecodeError) as error:
            raise SettingError(f"the hostfile cannot be read: {error}") from None
    if script is not None:
        return asyncio.run(script.first())
    if choices["num_proc"] is None:
        raise SettingError(f"-np, the number of workers, is missing; an example is: {flags.EXAMPLE}")
    return parse_hosts(f"localhost:{choices['num_proc']}")


if __name__ == "__main__":
    sys.exit(main())
