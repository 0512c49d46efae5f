"""`fusion_rt.run`: functions go out to the workers of a job, results come back, and nothing is left of it."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import fusion_rt
from fusion_rt.core.errors import JobError, SettingError
from fusion_rt.run_function import RunAnswer, RunRequest
from fusion_rt.runner.command.function_launcher import make_request_plan
from tests.for_each import for_each

TIMEOUT_S = 120.0
SCRIPT = """
import os, sys, time
import fusion_rt
import beside

def work(rank_to_wait):
    rank = int(os.environ["HOROVOD_RANK"])
    print("pid", os.getpid(), flush=True)
    if rank == rank_to_wait:
        time.sleep(60)
    return beside.square(rank)

if __name__ == "__main__":
    print(fusion_rt.run(work, (int(sys.argv[1]),), np=2))
"""

pytestmark = pytest.mark.usefixtures("runtime_dir")


def test_importing_the_package_is_light() -> None:
    code = "import sys, fusion_rt; sys.exit(any(name in sys.modules for name in ('torch', 'asyncio', 'msgspec')))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=TIMEOUT_S)
    assert fusion_rt.run is fusion_rt.run
    with pytest.raises(AttributeError, match="no attribute 'runs'"):
        fusion_rt.runs  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.multiprocess
def test_results_come_back_in_the_order_of_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    data = random.Random(0).randbytes(3_000_000)  # more than any pipe holds

    def work(prefix: str, *, turn: Callable[[bytes], bytes]) -> tuple[str, str, str, bytes]:
        environ = os.environ
        print("rank", environ["HOROVOD_RANK"])
        return prefix + environ["HOROVOD_RANK"], environ["HOROVOD_CROSS_RANK"], os.getcwd(), turn(data)

    hosts = "localhost:1,127.0.0.1:2"
    results = fusion_rt.run(work, ("rank ",), {"turn": lambda whole: whole[::-1]}, np=3, hosts=hosts)
    assert [result[0] for result in results] == ["rank 0", "rank 1", "rank 2"]
    assert [result[1] for result in results] == ["0", "1", "0"]
    assert all(result[2] == os.getcwd() and result[3] == data[::-1] for result in results)
    printed = capfd.readouterr()
    assert sorted(printed.out.splitlines()) == [f"[{rank}]<stdout>:rank {rank}" for rank in range(3)]
    assert printed.err == ""


@pytest.mark.multiprocess
def test_a_failure_is_raised_with_the_traceback_of_the_worker(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        if os.environ["HOROVOD_RANK"] == "1":
            raise KeyError("boom")
        time.sleep(60)

    with pytest.raises(JobError) as caught:
        fusion_rt.run(work, num_proc=2)
    assert isinstance(caught.value, RuntimeError)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("Horovod detected that one or more processes exited with non-zero status")
    assert lines[-1] == "fusionrun: rank 1 on host localhost failed first: KeyError: 'boom'"
    assert f'File "{__file__}"' in lines[3]  # the first frame is that of the function
    assert lines[3].endswith("in work")
    assert "[1]<stderr>:KeyError: 'boom'" in capfd.readouterr().err


@pytest.mark.multiprocess
def test_results_that_cannot_be_sent_are_failures_of_their_rank(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(JobError, match="the function's result, a lock, cannot be sent back"):
        fusion_rt.run(threading.Lock)
    with pytest.raises(JobError, match=r"^rank 0 \(host localhost\) ended without a result$"):
        fusion_rt.run(sys.exit)


def test_what_cannot_be_sent_to_workers_is_refused_before_anything_starts() -> None:
    with pytest.raises(TypeError, match=r"the function or its arguments cannot be sent to the workers: .*lock"):
        fusion_rt.run(print, (threading.Lock(),))


@pytest.mark.multiprocess
def test_arguments_that_make_no_sense_are_refused() -> None:
    with pytest.raises(SettingError, match="'a b' is not a host"):
        fusion_rt.run(print, hosts="a b")


@for_each(
    ("words", "sentence"),
    [
        (["--num-proc=0"], "-np"),
        (["--num-proc=2", "--hosts=a:1"], "more processes than the 1 slots of a:1"),
        (["--hosts=a", "--hostfile=b"], "cannot be given together"),
        (["--nonsense"], "no command to run|unrecognized|nonsense"),
    ],
)
def test_the_launcher_refuses_what_fusionrun_refuses(words: list[str], sentence: str) -> None:
    request = RunRequest((*words, "python"), os.fsencode(os.getcwd()), 1)
    with pytest.raises(SettingError, match=sentence):
        make_request_plan(request, b"x")


def test_every_argument_becomes_its_flag(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[str] = []

    def launch(arguments: list[str], function: bytes) -> tuple[RunAnswer, list[bytes]]:
        seen.extend(arguments)
        return RunAnswer(), []

    monkeypatch.setattr("fusion_rt.run_function._launch", launch)
    key = tmp_path / "key"
    key.touch()
    fusion_rt.run(
        print, np=2, min_np=1, max_np=3, slots=4, reset_limit=5, cooldown_range=(6, 7), hosts="localhost:2",
        start_timeout=8, ssh_port=9, ssh_identity_file=str(key), disable_cache=True, output_filename="out", verbose=2,
        use_gloo=True, mpi_args="--tag-output", network_interfaces=["lo", "eth0"], executable="python3",
    )  # fmt: skip
    plan = make_request_plan(RunRequest(tuple(seen), os.fsencode(os.getcwd()), 1), b"x")
    assert plan.command[:2] == (b"python3", b"-c")
    assert plan.places.size == 2
    assert plan.settings.start_timeout == 8
    assert (plan.ssh_port, plan.ssh_identity_file) == (9, str(key))
    assert (plan.output_directory, plan.verbose, plan.interfaces) == ("out", True, ("lo", "eth0"))
    assert plan.function == b"x"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("def square(x):\n    return x * x\n")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.multiprocess
def test_a_script_calls_functions_of_its_own(script: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(script), "-1"], capture_output=True, text=True, timeout=TIMEOUT_S, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[0, 1]"


@pytest.mark.multiprocess
def test_modules_in_the_current_directory_are_not_run_by_workers(script: Path, tmp_path: Path) -> None:
    """It may be /tmp, where any user of the host can leave some."""
    planted = tmp_path / "planted"
    planted.mkdir()
    for module in ("fusion_rt", "cloudpickle", "pickle", "mmap", "beside"):
        (planted / f"{module}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    done = subprocess.run(
        [sys.executable, str(script), "-1"], capture_output=True, text=True, timeout=TIMEOUT_S, cwd=planted
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.multiprocess
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_the_program_is_interrupted_or_killed(number: int, script: Path) -> None:
    with subprocess.Popen(
        [sys.executable, str(script), "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        pids = [int(re.findall(r"pid (\d+)", program.stdout.readline())[0]) for _ in range(2)]
        program.send_signal(number)
        _, errors = program.communicate(timeout=TIMEOUT_S)
    assert program.returncode == -number
    if number == signal.SIGINT:
        assert errors.rstrip().endswith("KeyboardInterrupt")
        assert not any(psutil.pid_exists(pid) for pid in pids)  # else the leak check gives them a moment
