"""Hosts found by a script, and how many workers they get."""

from __future__ import annotations

import errno
import shlex
import subprocess
import sys

from fusion_rt.errors import FusionError, SettingError
from fusion_rt.runner.choices import Choices
from fusion_rt.runner.hosts import Host, parse_hosts

SHELL = "/bin/sh"
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
    words = split(script)
    try:
        run = _run(words, timeout)
    except OSError as error:
        raise FusionError(f"{describe(script)} cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise FusionError(f"{describe(script)} did not end within {timeout:g} s (--start-timeout)") from None
    hosts = read(script, slots, run.returncode, run.stdout, run.stderr)
    sys.stderr.write(run.stderr)
    if not hosts:
        raise FusionError(f"{describe(script)} printed no host")
    return hosts


def describe(script: str) -> str:
    """The script, in the middle of a sentence."""
    return f"the host discovery script {script!r}"


def split(script: str) -> list[str]:
    """The words of the script's command line.

    Raises:
        SettingError: it is none.
    """
    try:
        words = shlex.split(script)
    except ValueError as error:
        raise SettingError(f"--host-discovery-script {script!r} is not a command line: {error}") from None
    if not words:
        raise SettingError("--host-discovery-script is empty")
    return words


def read(script: str, slots: int, status: int, stdout: str, stderr: str) -> tuple[Host, ...]:
    """The hosts in what a script has printed, which may be none.

    Args:
        script, slots: as for `discover`.
        status: its exit status, or minus the signal that ended it.
        stdout, stderr: what it printed.

    Raises:
        FusionError: it failed, or printed something else.
    """
    if status != 0:
        last = [line for line in stderr.splitlines() if line.strip()][-_LINES:]
        said = "; it said:\n" + "\n".join(f"  {line}" for line in last) if last else " and said nothing"
        raise FusionError(f"{describe(script)} failed with status {status}{said}")
    lines = [line.strip() for line in stdout.splitlines() if line.strip()]
    try:
        return parse_hosts(",".join(lines), slots) if lines else ()
    except SettingError as error:
        raise FusionError(f"{describe(script)} printed what is no host: {error}") from None


def _run(words: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout
        )
    except OSError as error:
        if error.errno != errno.ENOEXEC or words[0] == SHELL:
            raise
        return _run([SHELL, *words], timeout)  # a script without a first line that names its interpreter


def number_of_workers(choices: Choices, hosts: tuple[Host, ...]) -> int:
    """How many workers the hosts of a job get whose membership stays: those of -np, or all slots, up to --max-np.

    Raises:
        SettingError: -np and --max-np contradict each other.
    """
    check_numbers(choices)
    most, wanted = choices["max_num_proc"], choices["num_proc"]
    slots = sum(host.slots for host in hosts)
    number: int = wanted or min(slots, most or slots)
    return number


def check_numbers(choices: Choices) -> None:
    """Whether -np, --min-np and --max-np make sense together.

    Raises:
        SettingError: they contradict each other.
    """
    least, most, wanted = choices["min_num_proc"], choices["max_num_proc"], choices["num_proc"]
    for low, high, what in (
        (least, most, "--min-np {} is above --max-np {}"),
        (least, wanted, "--min-np {} is above -np {}"),
        (wanted, most, "-np {} is above --max-np {}"),
    ):
        if low is not None and high is not None and low > high:
            raise SettingError(what.format(low, high))
