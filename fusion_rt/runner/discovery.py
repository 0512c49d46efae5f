"""Hosts found by a script at the start of a job, and how many workers they get."""

from __future__ import annotations

import errno
import shlex
import subprocess
import sys

from fusion_rt.errors import FusionError, SettingError
from fusion_rt.runner.choices import Choices
from fusion_rt.runner.hosts import Host, parse_hosts

_SHELL = "/bin/sh"
_LINES = 10  # of a failing script's standard error that are shown


def discover(script: str, slots: int, timeout: float) -> tuple[Host, ...]:
    """The hosts that a script prints, `host[:slots]` on a line each.

    Args:
        script: its command line.
        slots: of hosts for which it prints none.
        timeout: seconds it may take.

    Raises:
        SettingError: the command line cannot be used.
        FusionError: the script cannot be run, fails, takes too long, or prints something else.
    """
    try:
        words = shlex.split(script)
    except ValueError as error:
        raise SettingError(f"--host-discovery-script {script!r} is not a command line: {error}") from None
    if not words:
        raise SettingError("--host-discovery-script is empty")
    who = f"the host discovery script {script!r}"
    try:
        run = _run(words, timeout)
    except OSError as error:
        raise FusionError(f"{who} cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise FusionError(f"{who} did not end within {timeout:g} s (--start-timeout)") from None
    if run.returncode != 0:
        last = [line for line in run.stderr.splitlines() if line.strip()][-_LINES:]
        said = "; it said:\n" + "\n".join(f"  {line}" for line in last) if last else " and said nothing"
        raise FusionError(f"{who} failed with status {run.returncode}{said}")
    sys.stderr.write(run.stderr)
    lines = [line.strip() for line in run.stdout.splitlines() if line.strip()]
    if not lines:
        raise FusionError(f"{who} printed no host")
    try:
        return parse_hosts(",".join(lines), slots)
    except SettingError as error:
        raise FusionError(f"{who} printed what is no host: {error}") from None


def _run(words: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout
        )
    except OSError as error:
        if error.errno != errno.ENOEXEC or words[0] == _SHELL:
            raise
        return _run([_SHELL, *words], timeout)  # a script without a first line that names its interpreter


def number_of_workers(choices: Choices, hosts: tuple[Host, ...]) -> int:
    """How many workers the hosts get: those of -np, or all slots, up to --max-np.

    Raises:
        SettingError: -np, --min-np and --max-np contradict each other.
        FusionError: there are fewer slots than --min-np.
    """
    least, most, wanted = choices["min_num_proc"], choices["max_num_proc"], choices["num_proc"]
    for low, high, what in (
        (least, most, "--min-np {} is above --max-np {}"),
        (least, wanted, "--min-np {} is above -np {}"),
        (wanted, most, "-np {} is above --max-np {}"),
    ):
        if low is not None and high is not None and low > high:
            raise SettingError(what.format(low, high))
    slots = sum(host.slots for host in hosts)
    if least is not None and slots < least:
        raise FusionError(f"--min-np asks for {least} workers, but there are only {slots} slots: "
                          f"{', '.join(f'{host.name}:{host.slots}' for host in hosts)}")  # fmt: skip
    number: int = wanted or min(slots, most or slots)
    return number
