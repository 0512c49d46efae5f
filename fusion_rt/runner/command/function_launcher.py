"""The launcher behind `fusion_rt.run`: `python -m fusion_rt.runner.command.function_launcher FD`.

It is `fusionrun` for a program: what it would read from its command line, and the function, come over standard input
(`run_function.Request`); how it went, and the results, go to the descriptor (`run_function.Answer`). When its standard
input ends, that program is gone, and the job is ended.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
from typing import NoReturn

from fusion_rt.core.errors import FusionError, SettingError
from fusion_rt.host.bootstrap import decode_line, encode_line
from fusion_rt.run_function import RunAnswer, RunRequest
from fusion_rt.runner.command.cli import make_plan
from fusion_rt.runner.command.flags import make_parser
from fusion_rt.runner.decisions.outcome import WorkerFailure, first_cause, tell
from fusion_rt.runner.launch.launch_plan import LaunchPlan
from fusion_rt.runner.launch.launcher import Launch


def make_request_plan(request: RunRequest, function: bytes) -> LaunchPlan:
    """The job that a request asks for. Changes to its directory.

    Raises:
        SettingError: its arguments cannot be used.
        FusionError: the hosts cannot be found.
    """
    parser = make_parser()
    parser.error = _refuse  # type: ignore[method-assign]  # in place of a usage line and exit status 2
    os.chdir(request.directory)
    return dataclasses.replace(make_plan(parser.parse_args(request.arguments)), function=function)


def _refuse(message: str) -> NoReturn:
    raise SettingError(message)


async def _run(plan: LaunchPlan) -> tuple[RunAnswer, list[bytes]]:
    asyncio.get_running_loop().add_reader(0, _on_stdin)
    job = Launch(plan)
    status = await job.run()
    if job.failures and status == 1:
        failed = "\n".join(tell(job.failures))
        return RunAnswer(failed=failed, is_workers=isinstance(first_cause(job.failures), WorkerFailure)), []
    if status:
        return RunAnswer(failed=f"the job was ended by {signal.Signals(status - 128).name}"), []
    if lacking := [rank for rank in range(job.topology.size) if rank not in job.results]:
        return RunAnswer(failed=f"{job.topology.describe(lacking)} ended without a result"), []
    results = [bytes(job.results[rank]) for rank in range(job.topology.size)]
    return RunAnswer(tuple(map(len, results))), results


def _on_stdin() -> None:
    """There is nothing to come but the end."""
    asyncio.get_running_loop().remove_reader(0)
    signal.raise_signal(signal.SIGTERM)


def main() -> None:
    """Serves one request."""
    answers = int(sys.argv[1])
    os.set_inheritable(answers, False)
    stdin = sys.stdin.buffer
    request = decode_line(stdin.readline(), RunRequest)
    function = stdin.read(request.nbytes)
    results: list[bytes] = []
    if len(function) < request.nbytes:
        sys.exit("fusion_rt.run: the program that asked for a job is gone")
    try:
        answer, results = asyncio.run(_run(make_request_plan(request, function)))
    except SettingError as error:
        answer = RunAnswer(refused=str(error))
    except (FusionError, OSError) as error:
        answer = RunAnswer(failed=str(error))
    with os.fdopen(answers, "wb") as stream:
        stream.write(encode_line(answer))
        stream.writelines(results)


if __name__ == "__main__":
    main()
