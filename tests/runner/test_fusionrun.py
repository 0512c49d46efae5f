"""Whole jobs that go well: ranks, hosts, environment, output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fusion_rt import as_horovod
from tests.runner.conftest import LASTING, TIMEOUT_S

pytestmark = pytest.mark.multiprocess

PRINT = "import os; print(*(os.environ['HOROVOD_' + n] for n in {names!r}))"


def printed(text: str) -> dict[int, str]:
    """One line that each rank printed to stdout."""
    return {int(rank): line for rank, line in re.findall(r"^\[(\d+)\]<stdout>:(.*)$", text, re.MULTILINE)}


def test_all_workers_run_and_their_output_is_marked(fusionrun) -> None:
    result = fusionrun.python("import os, sys; print('hello'); print('trouble', file=sys.stderr)", np=3)
    assert result.returncode == 0
    assert sorted(result.stdout.splitlines()) == [f"[{rank}]<stdout>:hello" for rank in range(3)]
    lines = sorted(line for line in result.stderr.splitlines() if "fusiond" not in line)
    assert lines[:3] == [f"[{rank}]<stderr>:trouble" for rank in range(3)]
    assert [line.partition(",")[0] for line in lines[3:]] == ["fusionrun: warning: no worker has joined the job"]


def test_two_hosts_are_two_nodes_and_uneven_slots_work(fusionrun) -> None:
    names = ["HOSTNAME", "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"]
    words = " ".join(f"$HOROVOD_{name}" for name in names)
    process = fusionrun.start("-np", "3", "-H", "127.0.0.1:2,localhost:5", "sh", "-c", f"echo {words}; {LASTING}")
    # Each daemon got the whole table of peers.
    fusionrun.until_told(process, *(f"[{host}]<fusiond>:peers: 1000 1001" for host in ("127.0.0.1", "localhost")))
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    assert printed(out) == {
        0: "127.0.0.1 0 3 0 2 0 2",
        1: "127.0.0.1 1 3 1 2 0 1",
        2: "localhost 2 3 0 1 1 2",
    }


def test_a_hostfile_says_where(fusionrun) -> None:
    hosts = fusionrun.file("hosts", "# two names of this machine\n127.0.0.1 slots=1\n\nlocalhost slots=1\n")
    result = fusionrun("-hostfile", hosts, sys.executable, "-c", PRINT.format(names=["HOSTNAME"]))
    assert printed(result.stdout) == {0: "127.0.0.1", 1: "localhost"}


def test_workers_have_the_environment_the_directory_and_no_input(fusionrun) -> None:
    code = (
        "import os, sys; e = os.environ; print(e['WORD'], 'CUDA_VISIBLE_DEVICES' in e, e['PYTHONUNBUFFERED'], "
        "e['FUSION_NODE'], e['FUSION_SOCKET'] == f\"{e['FUSION_RUNTIME_DIR']}/{e['FUSION_JOB_ID']}.0/sock\", "
        "e['HOROVOD_CONTROLLER'], e['HOROVOD_FUSION_THRESHOLD'], os.getcwd(), 'PYTHONSAFEPATH' in e, sys.stdin.read())"
    )
    result = fusionrun.python(
        code, "--fusion-threshold-mb", "1", np=1, WORD='it\'s "so"', CUDA_VISIBLE_DEVICES="0,1", OLDPWD="/"
    )
    assert printed(result.stdout) == {0: f'it\'s "so" True 1 0 True gloo 1048576 {fusionrun.directory} False '}


def test_modules_of_the_working_directory_do_not_shadow_those_of_the_launcher(fusionrun) -> None:
    for name in ("signal.py", "asyncio.py", "msgspec.py", "random.py", "fusiond.py"):
        fusionrun.file(name, "raise SystemExit('shadowed')\n")
    result = fusionrun("-np", "1", "echo", "fine")
    assert (result.returncode, result.stdout) == (0, "[0]<stdout>:fine\n")


def test_files_get_what_the_terminal_gets(fusionrun, tmp_path: Path) -> None:
    result = fusionrun.python(
        "import os, sys; print('out', os.environ['HOROVOD_RANK']); print('err', file=sys.stderr)",
        *("--output-filename", "logs/here"),
        np=2,
    )
    assert result.returncode == 0
    files = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("std*")}
    assert files == {
        f"logs/here/rank.{rank}/std{stream}": f"[{rank}]<std{stream}>:{text}\n"
        for rank in (0, 1)
        for stream, text in (("out", f"out {rank}"), ("err", "err"))
    }


def test_a_single_worker_may_have_files(fusionrun, tmp_path: Path) -> None:
    assert fusionrun("-np", "1", "--output-filename", tmp_path / "o", "echo", "x").returncode == 0
    assert (tmp_path / "o" / "rank.0" / "stdout").read_text() == "[0]<stdout>:x\n"


def test_files_that_cannot_be_made_end_the_job_before_it_starts(fusionrun) -> None:
    fusionrun.file("taken", "")
    result = fusionrun("-np", "1", "--output-filename", "taken", "echo", "x")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "fusionrun: [Errno 20] Not a directory: 'taken/rank.0'\n"


def test_output_after_the_last_newline_and_before_a_quick_exit_is_not_lost(fusionrun) -> None:
    result = fusionrun.python("import os; os.write(1, b'x' * 300_000 + b'\\nlast words')", np=2)
    lines = result.stdout.splitlines()
    whole = {f"[{rank}]<stdout>:{text}" for rank in (0, 1) for text in ("x" * 300_000, "last words")}
    assert len(lines) == 4
    assert set(lines) == whole


def test_a_reader_that_is_slow_loses_nothing(fusionrun) -> None:
    count = 200_000
    process = fusionrun.start("-np", "1", sys.executable, "-c", f"for n in range({count}): print('line', n)")
    assert process.stdout is not None
    lines = [process.stdout.readline()]
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.0)  # everything fills up meanwhile
    lines += process.stdout.readlines()
    assert process.wait() == 0
    assert lines == [f"[0]<stdout>:line {number}\n" for number in range(count)]


def test_a_reader_that_leaves_ends_the_job(fusionrun) -> None:
    process = fusionrun.start("-np", "1", sys.executable, "-c", "while True: print('more')")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(TIMEOUT_S) == 141  # as the shell calls a process that SIGPIPE ended


def test_phases_are_reported_when_asked_for(fusionrun) -> None:
    process = fusionrun.start("-np", "1", "--verbose", "sh", "-c", f"echo x; {LASTING}")
    told = fusionrun.until_told(process, "daemons listen", "first output")
    _, rest = process.communicate(timeout=TIMEOUT_S)
    phases = re.findall(r"^fusionrun: \d+\.\d\d s: (.*)$", told + rest, re.MULTILINE)
    assert phases[0] == "the launcher is up"
    assert sorted(phases[1:5]) == [
        "agents are up",
        "daemons listen",
        "first output, of rank 0",
        "workers are started",
    ]
    assert phases[5:] == ["all workers ended", "over"]
    assert "fusionrun:" not in fusionrun("-np", "1", "echo", "x").stderr


def test_a_horovodrun_line_runs_as_it_is_with_one_warning(fusionrun) -> None:
    fusionrun.file("c.yaml", "params: {fusion_threshold_mb: 2}\nlibrary_options: {thread_affinity: 3}\n")
    code = (
        "import importlib.util, os; e = os.environ; print(e['HOROVOD_FUSION_THRESHOLD'], e['HOROVOD_CYCLE_TIME'], "
        "e['HOROVOD_THREAD_AFFINITY'], e['NCCL_IB_DISABLE'], e['HOROVOD_STALL_CHECK_DISABLE'], "
        "importlib.util.find_spec('horovod').origin)"
    )
    result = fusionrun.python(
        code,
        *("--gloo", "--tcp", "--cycle-time-ms", "3.5", "--config-file", "c.yaml", "--no-stall-check", "--as-horovod"),
        np=1,
    )
    shim = os.path.join(os.path.dirname(as_horovod.__file__), "")
    words = printed(result.stdout)[0].split()
    assert (result.returncode, words[:5]) == (0, ["2097152", "3.5", "3", "1", "1"])
    assert words[5].startswith(shim)
    told = [line for line in result.stderr.splitlines() if line.startswith("fusionrun: ")]
    assert len(told) == 1
    assert told[0].startswith("fusionrun: warning: accepted as in horovodrun, but without effect here: ")
    assert all(name in told[0] for name in ("--tcp", "--cycle-time-ms", "library_options.thread_affinity in c.yaml"))


def test_times_stand_in_front_when_asked_for(fusionrun) -> None:
    result = fusionrun("-np", "1", "--prefix-output-with-timestamp", "echo", "x")
    assert re.fullmatch(r"\w{3} \w{3} .{2} \d\d:\d\d:\d\d \d{4}\[0\]<stdout>:x\n", result.stdout)


def test_what_a_worker_leaves_running_is_ended_with_the_job(fusionrun, is_alive) -> None:
    # `setsid` and a double fork: neither the session nor the parent tells any more whose child this is.
    orphan = "(setsid sh -c 'echo $$; touch told; exec sleep 600' &)"
    result = fusionrun("-np", "1", "sh", "-c", f"{orphan}; {LASTING}")
    assert result.returncode == 0
    assert not is_alive(int(printed(result.stdout)[0]))


def test_a_daemon_that_does_not_end_is_ended(fusionrun) -> None:
    result = fusionrun("-np", "1", "echo", "x", FAKE_DAEMON="stubborn")
    assert (result.returncode, result.stdout) == (0, "[0]<stdout>:x\n")


def test_no_file_is_left_in_the_runtime_directory(fusionrun) -> None:
    code = "import os; p = os.path.dirname(os.environ['FUSION_SOCKET']); os.makedirs(p); open(p + '/sock', 'w')"
    assert fusionrun.python(code, np=1).returncode == 0
    assert os.listdir(fusionrun.runtime_dir) == []


def test_hosts_behind_an_rsh_agent(fusionrun) -> None:
    fusionrun.file("to", '#!/bin/sh\necho "welcome to $1"\necho "$@" >> reached\nshift\nexec "$@"\n', executable=True)
    agent = f"{fusionrun.directory}/to {{host}}"
    result = fusionrun.python(
        PRINT.format(names=["HOSTNAME", "LOCAL_RANK"]),
        *("-H", "ann@alpha:2,beta:1", "--network-interface", "lo", "--rsh-agent", agent),
        np=3,
    )
    assert result.returncode == 0, result.stderr
    assert printed(result.stdout) == {0: "alpha 0", 1: "alpha 1", 2: "beta 0"}


def test_hosts_behind_a_shell_like_that_of_ssh(fusionrun) -> None:
    # ssh joins its words with spaces, and the login shell at the other end splits them again, in the home directory.
    fusionrun.file("ssh", '#!/bin/sh\nshift\ncd /\nexec sh -c "$*"\n', executable=True)
    result = fusionrun.python(
        "import os; print(os.getcwd(), os.environ['HOROVOD_HOSTNAME'], os.environ['WORD'])",
        *("-H", "alpha", "--rsh-agent", f"{fusionrun.directory}/ssh {{host}}"),
        np=1,
        WORD="$HOME `id` 'x'",
    )
    assert printed(result.stdout) == {0: f"{fusionrun.directory} alpha $HOME `id` 'x'"}


def test_secrets_are_on_no_command_line(fusionrun) -> None:
    code = (
        "import psutil\n"
        "for process in psutil.process_iter(['cmdline']):\n"
        "    if any('tell-no' + 'body' in word for word in process.info['cmdline'] or ()): print(process.info)\n"
        "print('looked')"
    )
    agent = "env {host}=1"  # a way to a host that leaves the command line to be seen
    result = fusionrun.python(code, "-H", "alpha", "--rsh-agent", agent, np=1, TOKEN="tell-nobody")
    assert printed(result.stdout) == {0: "looked"}


def test_neither_torch_nor_numba_nor_psutil_is_imported_by_launcher_or_agent(fusionrun) -> None:
    for module in ("command.cli", "agent.agent"):
        result = fusionrun(
            *("-np", "1", sys.executable, "-c"),
            f"import sys, fusion_rt.runner.{module}; print({{'torch', 'numba', 'numpy', 'psutil'}} & set(sys.modules))",
        )
        assert printed(result.stdout) == {0: "set()"}
