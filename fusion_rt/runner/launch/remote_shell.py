"""The command that reaches a host, and the meaning of its failure.

The agent's command line is appended to that of ssh, or of `--rsh-agent`, word by word: `env`, a few variables that say
where Python finds its modules, the interpreter and `-m fusion_rt.runner.agent`. It needs no shell at the other end
(`ip netns exec {host}`, `docker exec -i {host}`) and survives one (`ssh {host}`): these words hold nothing that a shell
would change, save for paths with odd characters, which are quoted when a word before the host is the name of a remote
shell. The working directory, the environment and everything else travel over standard input. Rejected: `sh -c 'cd … &&
exec …'`, which has to be quoted for ssh and must not be for the others, so that a wrapper script around ssh breaks it.
"""

from __future__ import annotations

import os
import shlex
import sys

from fusion_rt.core.errors import SettingError
from fusion_rt.runner.agent.worker_variables import absolute_path_list
from fusion_rt.runner.decisions.host_list import Host
from fusion_rt.runner.launch.launch_plan import LaunchPlan

AGENT = ("-m", "fusion_rt.runner.agent")
LOCAL_AGENT = (sys.executable, *AGENT)
_REMOTE_SHELLS = ("ssh", "rsh", "gsissh", "autossh")  # they join their words with spaces for a shell to split again
_CONNECT_S = 10  # Horovod's SSH_CONNECT_TIMEOUT_S
_SSH = (
    "ssh", "-T", "-o", "BatchMode=yes", "-o", "PasswordAuthentication=no", "-o", "StrictHostKeyChecking=accept-new",
    "-o", f"ConnectTimeout={_CONNECT_S}", "-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3",
    "-o", "LogLevel=ERROR",  # without the welcome, and the warning that a host was not known
)  # fmt: skip


def is_remote(plan: LaunchPlan, host: Host) -> bool:
    """Tells whether something stands between the launcher and the agent of a host."""
    return bool(plan.rsh_agent) or not host.is_local


def agent_argv(plan: LaunchPlan, host: Host) -> list[str]:
    """The command that runs the agent of a host.

    Raises:
        SettingError: the template of `--rsh-agent` cannot be used.
    """
    if not is_remote(plan, host):
        return [sys.executable, *AGENT]
    words = ["env", *_variables(plan), sys.executable, *AGENT]
    if plan.rsh_agent:
        reach, joins = _fill(plan.rsh_agent, host)
    else:
        reach, joins = [*_SSH, *_ssh_words(plan, host)], True
    return reach + ([shlex.quote(word) for word in words] if joins else words)


def agent_environment(plan: LaunchPlan) -> dict[bytes, bytes]:
    """The environment of the command that runs an agent: the launcher's own."""
    environ = dict(os.environb)
    environ.update(pair.encode("utf-8", "surrogateescape").split(b"=", 1) for pair in _variables(plan))  # type: ignore[misc]
    return environ


def check_template(template: str) -> None:
    """Checks that a `--rsh-agent` can be used.

    Raises:
        SettingError: it has no `{host}`, or is not a command line.
    """
    _fill(template, Host("host"))


def explain(plan: LaunchPlan, host: Host, status: int, last_words: str) -> str:
    """A sentence on why an agent ended before it said anything.

    Args:
        plan: the job.
        host: where it was to run.
        status: exit status of the command that was to run it, or minus the signal that ended it.
        last_words: the end of that command's standard error.
    """
    lines = [line.strip() for line in last_words.splitlines() if line.strip()]
    last = lines[-1].rstrip(".") if lines else f"its command ended with status {status} and said nothing"
    if "No module named" in last:
        missing = last.rpartition("No module named")[2].strip().strip("'\"").split(".")[0]
        return (
            f"the package {missing} is missing there (for {sys.executable}); install fusion_rt for that "
            "interpreter on every host"
        )
    if sys.executable in last and status in (126, 127):
        return f"there is no Python at {sys.executable} there ({last}); install the same environment on every host"
    if not is_remote(plan, host):
        return f"the agent ended with status {status}: {last}"
    way = _fill(plan.rsh_agent, host)[0] if plan.rsh_agent else ["ssh", *_ssh_words(plan, host)]
    return f"it cannot be reached with `{shlex.join(way)}`: {last}"


def _variables(plan: LaunchPlan) -> list[str]:
    """The variables with which Python finds the agent, and ignores modules of whatever directory it starts in."""
    variables = ["PYTHONSAFEPATH=1"]
    path = plan.environment.get(b"PYTHONPATH")
    if path:
        variables.append("PYTHONPATH=" + os.fsdecode(absolute_path_list(path, plan.directory)))
    return variables


def _ssh_words(plan: LaunchPlan, host: Host) -> list[str]:
    """The words that ssh is told besides the options that are the same for all."""
    words = []
    if plan.ssh_port:
        words += ["-p", str(plan.ssh_port)]
    if plan.ssh_identity_file:
        words += ["-i", plan.ssh_identity_file]
    return [*words, host.target]


def _fill(template: str, host: Host) -> tuple[list[str], bool]:
    """The words of a template with the host put in, and whether the command joins the words after it for a shell."""
    try:
        words = shlex.split(template)
    except ValueError as error:
        raise SettingError(f"--rsh-agent {template!r} is not a command line: {error}") from None
    places = [place for place, word in enumerate(words) if "{host}" in word]
    if not places or places[0] == 0:
        raise SettingError(f"--rsh-agent {template!r} has no {{host}} after its command; an example is 'ssh {{host}}'")
    joins = any(os.path.basename(word) in _REMOTE_SHELLS for word in words[: places[0]])
    return [word.replace("{host}", host.target) for word in words], joins
