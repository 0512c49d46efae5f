"""An agent checks its host before anything is started: a sentence for each thing that is wrong.

The launcher puts the host's name in front of each sentence.
"""

from __future__ import annotations

import os
import shutil
import sys

import fusion_rt
from fusion_rt.core.errors import FusionError
from fusion_rt.core.wording import counted
from fusion_rt.host.bootstrap import make_private_directory
from fusion_rt.host.private_files import open_private
from fusion_rt.host.system_memory import available_memory
from fusion_rt.runner.protocol.agent_messages import Job, Versions
from fusion_rt.units import MIB

_LEAST_BYTES = 32 * MIB  # per worker; a model so small that it needs less fits anyway, and less memory is hopeless


def versions() -> Versions:
    """The versions that this process runs."""
    return Versions(f"{sys.version_info[0]}.{sys.version_info[1]}", fusion_rt.__version__)


def check_versions(launcher: Versions) -> list[str]:
    """Checks that this host runs the launcher's version; nothing else of a job can be trusted before."""
    own = versions()
    problems = []
    if own.python != launcher.python:
        problems.append(
            f"Python is {own.python} there ({sys.executable}), but {launcher.python} where fusionrun was "
            "started; use one version on all hosts"
        )
    if own.package != launcher.package:
        problems.append(
            f"fusion_rt is version {own.package} there ({os.path.dirname(fusion_rt.__file__)}), but {launcher.package} "
            "where fusionrun was started; install one version on all hosts"
        )
    return problems


def check(job: Job, runtime_root: str) -> list[str]:
    """Everything that is wrong with this host for this job. Changes to the job's working directory.

    Args:
        job: the one to be run. The process's environment must be the one the workers get.
        runtime_root: absolute path of the directory for the daemon's files; it is made.
    """
    problems = [_directory(job), _command(job), _runtime_root(runtime_root), _memory(job.slots)]
    return [problem for problem in problems if problem]


def _directory(job: Job) -> str:
    path = os.fsdecode(job.directory)
    try:
        os.chdir(path)
    except OSError as error:
        return f"the working directory {path} cannot be entered there: {error.strerror}"
    return ""


def _command(job: Job) -> str:
    command = os.fsdecode(job.command[0])
    if shutil.which(command) is not None:
        return ""
    if command.endswith(".py") and os.path.exists(command):
        return f"the command {command!r} is a script that is not executable; write: python {command}"
    return f"the command {command!r} is not there, or not executable (PATH={os.environ.get('PATH', '')})"


def _runtime_root(path: str) -> str:
    try:
        make_private_directory(path)
        name = os.path.join(path, f"probe.{os.getpid()}")
        with open(open_private(name), "wb") as probe:
            os.unlink(name)
            probe.write(b"\0" * 4096)
            probe.flush()
    except FusionError as error:
        return str(error)
    except OSError as error:
        return (
            f"the directory for the daemon's files, {path}, cannot be used: {error.strerror}; "
            "set FUSION_RUNTIME_DIR to another one"
        )
    return ""


def _memory(workers: int) -> str:
    """Checks that there is memory for buckets. It is anonymous memory: no size limit of /dev/shm applies."""
    needed = _LEAST_BYTES * workers
    nbytes, group = available_memory()
    if nbytes < needed:
        limited = f" within the limit of the control group {group}" if group else ""
        return (
            f"only {nbytes / MIB:.0f} MiB of memory are available{limited}, and buckets of "
            f"{counted(workers, 'worker')} need at least {needed / MIB:.0f} MiB; free some, or run fewer workers there"
        )
    try:
        fd = os.memfd_create("fusion-preflight", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, MIB)
        finally:
            os.close(fd)
    except OSError as error:
        return f"no shared memory can be made (memfd): {error.strerror}"
    return ""
