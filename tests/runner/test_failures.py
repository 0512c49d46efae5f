"""Jobs that fail: exit codes, which failure is told last, and that nothing waits for what never comes."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest

from tests.runner.conftest import LASTING, TIMEOUT_S

pytestmark = pytest.mark.multiprocess

RANK = "import os, signal, sys, time; rank = int(os.environ['HOROVOD_RANK'])\n"
WAIT = "time.sleep(600)"
MEET = """open(f'ready.{rank}', 'w').close()
while sum(name.startswith('ready.') for name in os.listdir()) < int(os.environ['HOROVOD_SIZE']): time.sleep(0.01)
"""  # so that no rank fails before another one has come so far


def last_line(text: str) -> str:
    return text.splitlines()[-1]


def test_the_exception_of_the_rank_that_failed_is_the_last_line(fusionrun) -> None:
    result = fusionrun.python(f"{RANK}if rank == 1: raise ValueError('boom')\n{WAIT}", np=3)
    assert result.returncode == 1
    assert "Process 1 exit with status code 1." in result.stdout.splitlines()
    assert "[1]<stderr>:ValueError: boom" in result.stderr
    assert last_line(result.stderr) == "fusionrun: rank 1 on host localhost failed first: ValueError: boom"


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL"),
        ("sys.exit(7)", 7, "ended with status 7 and printed nothing to stderr"),
        ("sys.exit('no data')", 1, "failed first: no data"),
    ],
)
def test_every_way_to_fail_is_told(fusionrun, how: str, code: int, words: str) -> None:
    result = fusionrun.python(f"{RANK}{how}", np=1)
    assert result.returncode == 1
    assert f"Process 0 exit with status code {code}.\n" in result.stdout
    assert words in last_line(result.stderr)


def test_survivors_that_report_the_death_do_not_hide_it(fusionrun) -> None:
    echo = "time.sleep(0.2)\nraise HorovodInternalError('rank 2 is gone')"
    die = "if rank == 2: os.kill(os.getpid(), 9)\n"
    code = f"{RANK}from fusion_rt.core.errors import HorovodInternalError\n{MEET}{die}{echo}"
    result = fusionrun.python(code, np=3, TEST_SETTLE="60")
    assert result.returncode == 1
    assert result.stderr.count("HorovodInternalError: rank 2 is gone\n") == 2  # they had the time to say so
    assert last_line(result.stderr).startswith("fusionrun: rank 2 on host localhost was killed by SIGKILL")
    assert re.findall("Process . exit", result.stdout) == ["Process 2 exit"]


def test_an_error_of_all_ranks_is_told_once(fusionrun) -> None:
    error = "HorovodInternalError('shapes differ: rank 0 (2,), rank 1 (3,)')"
    code = f"from fusion_rt.core.errors import HorovodInternalError\nraise {error}"
    result = fusionrun.python(code)
    assert result.returncode == 1
    assert last_line(result.stderr).endswith("HorovodInternalError: shapes differ: rank 0 (2,), rank 1 (3,)")


def test_the_traceback_of_many_ranks_is_printed_once(fusionrun) -> None:
    error = "HorovodInternalError('rank 9 is late')"
    code = f"{RANK}from fusion_rt.core.errors import HorovodInternalError\n{MEET}raise {error}"
    result = fusionrun.python(code, np=3, TEST_SETTLE="60")
    assert result.stderr.count("]<stderr>:Traceback (most recent call last):\n") == 1
    assert result.stderr.count("]<stderr>:Traceback as of rank ") == 2
    assert len(re.findall(r"\]<stderr>:.*HorovodInternalError: rank 9 is late\n", result.stderr)) == 3


def test_a_traceback_whose_end_does_not_come_is_printed_while_the_job_runs(fusionrun) -> None:
    line = "Traceback (most recent call last):"
    process = fusionrun.start("-np", "1", "sh", "-c", f"echo '{line}' >&2; {LASTING}")
    fusionrun.until_told(process, f"[0]<stderr>:{line}\n")
    assert process.wait(TIMEOUT_S) == 0


def test_the_others_get_term_and_may_still_act(fusionrun, tmp_path: Path) -> None:
    save = f"lambda *_: (open({str(tmp_path / 'saved')!r}, 'w').close(), sys.exit(0))"
    code = f"{RANK}signal.signal(signal.SIGTERM, {save})\n{MEET}if rank == 1: sys.exit(1)\n{WAIT}"
    assert fusionrun.python(code).returncode == 1
    assert (tmp_path / "saved").exists()


def test_a_worker_deaf_to_term_is_killed(fusionrun) -> None:
    started = time.monotonic()
    code = f"{RANK}signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{MEET}if rank == 1: sys.exit(1)\n{WAIT}"
    assert fusionrun.python(code).returncode == 1
    assert time.monotonic() - started > 5  # seconds of grace, as Horovod has it


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("die", "fusionrun: the daemon of ranks 0-1 (host localhost) was killed by SIGKILL"),
        ("fail", "the daemon of ranks 0-1 (host localhost) ended with status 1: out of descriptors"),
        ("refuse", "host localhost: its daemon cannot start: port 4711 is taken"),
        ("crash", "host localhost: its daemon ended with status 1 before it listened: no kernels here"),
        ("garble", "host localhost: not a start-up message: JSON is malformed"),
    ],
)
def test_a_daemon_that_fails_ends_the_job(fusionrun, mode: str, words: str) -> None:
    result = fusionrun.python("import time; time.sleep(600)", FAKE_DAEMON=mode)
    assert result.returncode == 1
    assert words in last_line(result.stderr)


def test_one_daemon_of_two_that_dies_is_named_with_its_host_and_ranks(fusionrun) -> None:
    result = fusionrun.python(
        "import time; time.sleep(600)", "-H", "127.0.0.1:1,localhost:2", np=3, FAKE_DAEMON="die@1"
    )
    assert result.returncode == 1
    assert "the daemon of ranks 1-2 (host localhost) was killed by SIGKILL" in last_line(result.stderr)


def test_hosts_that_are_not_up_in_time_are_named(fusionrun) -> None:
    fusionrun.file("to", '#!/bin/sh\n[ $1 = gamma ] && exec sleep 600\nshift\nexec "$@"\n', executable=True)
    result = fusionrun.python(
        "import time; time.sleep(600)",
        *("-H", "alpha,beta,gamma", "--start-timeout", "8s", "--network-interface", "lo"),
        *("--rsh-agent", f"{fusionrun.directory}/to {{host}}"),
        np=3,
        FAKE_DAEMON="silent@1",
    )
    assert result.returncode == 1
    assert result.stderr.splitlines()[-2:] == [
        "fusionrun: host beta: its daemon did not listen within 8 s (--start-timeout)",
        "fusionrun: host gamma: it did not answer within 8 s (--start-timeout)",
    ]


def test_hosts_that_cannot_be_reached_are_named_all(fusionrun) -> None:
    fusionrun.file("to", '#!/bin/sh\necho "no route to $1" >&2\nexit 255\n', executable=True)
    how = ("-H", "alpha,beta", "--rsh-agent", f"{fusionrun.directory}/to {{host}}")
    result = fusionrun(*how, "true", TEST_SETTLE="60")  # both are waited for, however late the second one is
    assert result.returncode == 1
    assert sorted(result.stderr.splitlines()) == [
        f"fusionrun: host {host}: it cannot be reached with `{fusionrun.directory}/to {host}`: no route to {host}"
        for host in ("alpha", "beta")
    ]


def test_ssh_that_cannot_connect_is_told_in_its_own_words(fusionrun) -> None:
    result = fusionrun("-H", "no-such-host.invalid", "true")
    assert result.returncode == 1
    assert last_line(result.stderr).startswith("fusionrun: host no-such-host.invalid: it cannot be reached with `ssh ")


def test_an_agent_command_that_is_not_there_is_told(fusionrun) -> None:
    result = fusionrun("-H", "a", "--rsh-agent", "no-such-shell {host}", "true")
    assert result.returncode == 1
    assert last_line(result.stderr) == (
        "fusionrun: host a: it cannot be reached with `no-such-shell a`: no-such-shell: No such file or directory"
    )


def with_interpreter(fusionrun, body: str):
    """Runs a job whose one host has something else where Python should be."""
    fusionrun.file("python", f"#!/bin/sh\n{body}\n", executable=True)
    fusionrun.file("to", f'#!/bin/sh\nshift 4\nexec {fusionrun.directory}/python "$@"\n', executable=True)
    return fusionrun("-H", "old", "--rsh-agent", f"{fusionrun.directory}/to {{host}}", "true")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo '/usr/bin/python: No module named fusion_rt' >&2; exit 1", "the package fusion_rt is missing there"),
        ("exit 0", "its command ended with status 0 and said nothing"),
        ("echo what is this; exit 0", "`: what is this"),
        ('read job; echo \'{"type":"hello"}\'; exit 0', "its agent broke the protocol"),
        (
            'read job; printf \'{"type":"\'; yes | tr -d "\\n" | head -c 1000000; exit 0',
            "a line is longer than 262144 bytes",
        ),
        (
            'read job; echo \'{"type":"exited","slot":5,"status":0}\'; read x',
            "a message about slot 5 came from host old",
        ),
    ],
)
def test_a_host_with_something_else_installed_is_told(fusionrun, body: str, words: str) -> None:
    result = with_interpreter(fusionrun, body)
    assert result.returncode == 1
    assert words in last_line(result.stderr)


def test_a_host_with_another_python_or_package_is_told(fusionrun) -> None:
    # The same interpreter, which believes that it is another.
    code = (
        "import runpy, sys, fusion_rt; fusion_rt.__version__ = '0.0.9'; sys.version_info = (3, 9, 1); "
        "sys.argv = sys.argv[:1]; runpy.run_module('fusion_rt.runner.agent', run_name='__main__')"
    )
    result = with_interpreter(fusionrun, f'exec {sys.executable} -c "{code}"')
    python, package = result.stderr.splitlines()[-2:]
    assert result.returncode == 1
    assert python.startswith("fusionrun: host old: Python is 3.9 there (")
    assert package.startswith("fusionrun: host old: fusion_rt is version 0.0.9 there (")


def test_a_host_that_is_lost_ends_the_job(fusionrun, until) -> None:
    fusionrun.file("to", '#!/bin/sh\necho $$ > pid.$1\nshift\n"$@"\n', executable=True)
    process = fusionrun.start(
        *("-np", "2", "-H", "alpha,beta", "--network-interface", "lo"),
        *("--rsh-agent", f"{fusionrun.directory}/to {{host}}", "sh", "-c", "echo up; exec sleep 600"),
        FAKE_DAEMON="",
    )
    assert process.stdout is not None
    for _ in range(2):
        process.stdout.readline()
    pid = until(lambda: (fusionrun.directory / "pid.beta").read_text().strip(), "the way to beta")
    os.killpg(int(pid), 9)  # the connection and the agent behind it
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert last_line(err) == "fusionrun: host beta: the connection to it was lost; its agent was killed by SIGKILL"


def test_a_missing_directory_and_command_are_told_by_the_host(fusionrun) -> None:
    fusionrun.file("to", '#!/bin/sh\nshift\nrmdir work\nexec "$@"\n', executable=True)
    (fusionrun.directory / "work").mkdir()
    home, fusionrun.directory = fusionrun.directory, fusionrun.directory / "work"
    (home / "to").write_text(f'#!/bin/sh\nshift\nrmdir {fusionrun.directory}\nexec "$@"\n')
    result = fusionrun("-H", "a", "--rsh-agent", f"{home}/to {{host}}", "no-such-command")
    assert result.returncode == 1
    directory, command = result.stderr.splitlines()
    assert directory.startswith(f"fusionrun: host a: the working directory {fusionrun.directory} cannot be entered")
    assert command.startswith("fusionrun: host a: the command 'no-such-command' is not there")


def test_an_interface_that_is_not_there_is_told(fusionrun) -> None:
    result = fusionrun("-H", "127.0.0.1,localhost", "--network-interface", "none0", "true")
    assert result.returncode == 1
    assert "host localhost: no network interface none0 with an address; there are lo" in result.stderr


def test_a_program_that_the_kernel_cannot_run_is_told(fusionrun) -> None:
    fusionrun.file("broken", "\0\1\2 no program", executable=True)
    result = fusionrun("-np", "2", "./broken")
    assert result.returncode == 1
    assert (
        last_line(result.stderr) == "fusionrun: host localhost: the command './broken' cannot be run: Exec format error"
    )
