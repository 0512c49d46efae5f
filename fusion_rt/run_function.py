"""`fusion_rt.run` calls a function on every rank of a new job, and returns the results as a list.

The launcher is a process of its own (`fusion_rt.runner.command.function_launcher`), because it handles signals and ends
children in ways that a notebook or a test suite would not bear in its own process. It gets the options of `fusionrun`,
so that every flag means the same. The function travels pickled down its standard input, from there to the agents as all
that they are told (through a pipe, or ssh), and the results come back the same way. Nothing listens on a port, so
no other process can send anything that is unpickled.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

import msgspec

from fusion_rt.core.errors import JobError, SettingError
from fusion_rt.host import python_children
from fusion_rt.host.bootstrap import decode_line, encode_line

LAUNCHER = "fusion_rt.runner.command.function_launcher"
# Not `-m`, which puts the current directory first on the path, in which others may have left modules (/tmp, say); and
# PYTHONSAFEPATH does nothing before Python 3.11. The caller's path has the modules that the function needs.
_WORKER = (
    "import sys; sys.path[:] = [path for path in sys.path if path]; "
    "from fusion_rt.runner.agent.function_call import main; main()"
)
# Word for word Horovod's, for programs that look for it.
_FAILED = (
    "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be terminated."
)


class RunRequest(msgspec.Struct, frozen=True):
    """The request to the launcher, one line on its standard input, before the function.

    Attributes:
        arguments: those of `fusionrun`, with the workers' command.
        directory: working directory of the job.
        nbytes: length of the pickled function.
    """

    arguments: tuple[str, ...]
    directory: bytes
    nbytes: int


class RunAnswer(msgspec.Struct, frozen=True):
    """The answer of the launcher, one line before the results.

    Attributes:
        sizes: bytes of each rank's pickled result, in the order of ranks.
        refused: why the job cannot be started as it was asked for, or empty.
        failed: why it failed, or empty.
        is_workers: a worker has failed.
    """

    sizes: tuple[int, ...] = ()
    refused: str = ""
    failed: str = ""
    is_workers: bool = False


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Starts a job in which every worker calls a function, and waits for its results. Arguments are `horovod.run`'s.

    The workers' output comes out marked with their ranks, as from `fusionrun`. No process of the job is left when
    this returns or raises; Ctrl-C ends the job everywhere.

    Args:
        func: any function that `cloudpickle` can send: of a module, of the script itself, nested, a lambda. The workers
            look for modules where this process does.
        args, kwargs: its arguments; they travel with it.
        num_proc, np: number of workers.
        min_num_proc, min_np, max_num_proc, max_np: with the first, or a discovery script, the job is elastic.
        hosts, hostfile, host_discovery_script: where they run, as `-H`, `-hostfile` and `--host-discovery-script` say;
            this host if none is given.
        executable: the workers' Python; this process's if none is given.
        the others: the flags of `fusionrun` of these names.

    Returns:
        The function's results, by rank; in an elastic job, by the ranks that there were at last.

    Raises:
        SettingError: the arguments do not make sense (it is a ValueError).
        TypeError: the function or its arguments cannot be pickled.
        JobError: the job failed (it is a RuntimeError); the text ends with the first failure, its rank and traceback.
    """
    options: list[tuple[str, Any]] = [
        ("--num-proc", num_proc if np is None else np),
        ("--min-num-proc", min_num_proc if min_np is None else min_np),
        ("--max-num-proc", max_num_proc if max_np is None else max_np),
        ("--slots-per-host", slots),
        ("--reset-limit", reset_limit),
        ("--hosts", hosts),
        ("--hostfile", hostfile),
        ("--host-discovery-script", host_discovery_script),
        ("--start-timeout", start_timeout),
        ("--ssh-port", ssh_port),
        ("--ssh-identity-file", ssh_identity_file),
        ("--output-filename", output_filename),
        ("--mpi-args", mpi_args),
        ("--network-interfaces", network_interface or ",".join(network_interfaces or ()) or None),
    ]
    switches = [
        ("--disable-cache", disable_cache),
        ("--verbose", verbose),
        ("--gloo", use_gloo),
        ("--mpi", use_mpi),
    ]
    words = [f"{flag}={value}" for flag, value in options if value is not None]
    words += [flag for flag, on in switches if on]
    if cooldown_range:
        words += ["--blacklist-cooldown-range", *map(str, cooldown_range)]
    words += worker_command(executable or sys.executable)
    answer, results = _launch(words, pickled(func, args, kwargs or {}))
    if answer.refused:
        raise SettingError(answer.refused)
    if answer.failed:
        raise JobError(f"{_FAILED}\n{answer.failed}" if answer.is_workers else answer.failed)
    return [pickle.loads(result) for result in results]


def worker_command(executable: str) -> list[str]:
    """Returns the command of a worker that calls a pickled function, with this Python."""
    return [executable, "-c", _WORKER]


def pickled(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Pickles `sys.path`, and the function with its arguments, which are pickled by themselves because unpickling them
    may need modules that are found by that path."""
    import cloudpickle  # type: ignore[import-untyped]

    try:
        call = cloudpickle.dumps((func, tuple(args), dict(kwargs)))
    except (TypeError, pickle.PicklingError) as error:
        raise TypeError(f"the function or its arguments cannot be sent to the workers: {error}") from error
    return pickle.dumps((sys.path, call))


def _launch(arguments: Sequence[str], function: bytes) -> tuple[RunAnswer, list[bytes]]:
    """Runs the launcher to its end; returns its answer, and the pickled results by rank."""
    request = RunRequest(tuple(arguments), os.fsencode(os.getcwd()), len(function))
    answers, theirs = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with open(answers, "rb") as stream:
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", LAUNCHER, str(theirs)],
                bufsize=0,  # nothing is left to be flushed when it is closed
                stdin=subprocess.PIPE,
                pass_fds=[theirs],
                cwd=python_children.DIRECTORY,
                env=_environment(),
                start_new_session=True,  # so that Ctrl-C reaches it once, from here
            )
        finally:
            os.close(theirs)
        assert process.stdin is not None
        try:
            _send(process.stdin, encode_line(request) + function)
            answer, results = _receive(stream)
            process.wait()
        except BaseException:
            _interrupt(process)
            raise
        finally:
            process.stdin.close()  # open until now: its end tells the launcher that this process is gone
    return answer or RunAnswer(failed=f"the launcher ended with status {process.returncode} without a result"), results


def _send(stdin: IO[bytes], data: bytes) -> None:
    rest = memoryview(data)
    with suppress(BrokenPipeError):  # it has ended already, and its answer says why
        while rest:
            rest = rest[stdin.write(rest) :]


def _receive(stream: IO[bytes]) -> tuple[RunAnswer | None, list[bytes]]:
    """Reads the answer, None if the launcher ended before it was complete, and the pickled results."""
    line = stream.readline()
    if not line:
        return None, []
    answer = decode_line(line, RunAnswer)
    results = [stream.read(size) for size in answer.sizes]
    return (answer if tuple(map(len, results)) == answer.sizes else None), results


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """Has the launcher end the job, and waits until it has; each Ctrl-C meanwhile repeats the signal."""
    while True:
        try:
            process.send_signal(signal.SIGTERM)  # not SIGINT, which may be ignored here and so there
            process.wait()
            return
        except KeyboardInterrupt:
            continue


def _environment() -> dict[str, str]:
    """Returns this process's environment, with the relative entries of PYTHONPATH made absolute."""
    environ = dict(os.environ)
    if paths := environ.get("PYTHONPATH"):
        environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in paths.split(os.pathsep) if path)
    return environ
