"""The leak check of conftest.py must find what it is there to find."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from benchmarks.netlab import preflight

CONFTEST = Path(__file__).with_name("conftest.py")
CONFIG = f"[pytest]\nmarkers = multiprocess: watched\npythonpath = {CONFTEST.parents[1]}\n"


def run_watched(pytester: pytest.Pytester, body: str) -> pytest.RunResult:
    pytester.makeini(CONFIG)
    pytester.makeconftest(CONFTEST.read_text().replace("GRACE_S = 3.0", "GRACE_S = 0.5"))
    pytester.makepyfile(f"import os, subprocess, pytest\n\n@pytest.mark.multiprocess\ndef test_it():\n    {body}\n")
    return pytester.runpytest_subprocess("-p", "no:cacheprovider")


def test_a_test_that_cleans_up_passes(pytester: pytest.Pytester) -> None:
    run_watched(pytester, "subprocess.run(['true'], check=True)").assert_outcomes(passed=1)


def test_an_orphan_in_a_session_of_its_own_is_named_and_killed(pytester: pytest.Pytester) -> None:
    result = run_watched(pytester, "subprocess.run('setsid sleep 987.125 &', shell=True, check=True)")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*test_it left behind: process *sleep 987.125*"])
    assert not [p for p in psutil.process_iter() if "987.125" in p.name() + " ".join(safe_cmdline(p))]


def test_a_leftover_descriptor_and_shared_memory_file_are_named(pytester: pytest.Pytester) -> None:
    body = "os.open('/dev/shm/leak-check-example', os.O_CREAT | os.O_RDWR)"
    result = run_watched(pytester, body)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*shared memory /dev/shm/leak-check-example; descriptor * (*leak-check-example*)*"])
    assert not Path("/dev/shm/leak-check-example").exists()


def test_a_leftover_thread_is_named(pytester: pytest.Pytester) -> None:
    result = run_watched(
        pytester, "import threading, time; threading.Thread(target=time.sleep, args=(4,), name='x').start()"
    )
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*test_it left behind: thread x (*)*"])


def test_a_leftover_socket_and_an_arena_are_descriptors(pytester: pytest.Pytester) -> None:
    body = "import socket; socket.socket(socket.AF_UNIX).detach(); os.memfd_create('arena-example')"
    result = run_watched(pytester, body)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(
        ["*test_it left behind: descriptor * (socket:*); descriptor * (/memfd:arena-example*)*"]
    )


@pytest.mark.skipif(preflight() is not None, reason=preflight() or "")
@pytest.mark.root
def test_a_leftover_lab_is_named(pytester: pytest.Pytester) -> None:
    root = str(CONFTEST.parent.parent)
    body = f"import sys; sys.path.insert(0, {root!r}); from benchmarks.netlab import Netlab; Netlab(1).__enter__()"
    result = run_watched(pytester, body)  # the lab goes with its process
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*test_it left behind: network namespaces of lab *"])


def safe_cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
