"""How tests are run: one that hangs costs its limit and nothing else, and shows where its processes were."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import distribution

TESTS = Path(__file__).parent
CONFIG = f"[pytest]\nmarkers = multiprocess: watched\npythonpath = {TESTS.parent}\ntimeout = 2\n"
HANGING = """
import signal, subprocess, sys, threading, time
import pytest

CHILD = 'def stand_still(): print(flush=True); time.sleep(900)\\nimport time; stand_still()'


@pytest.fixture(scope="session")
def shared():
    return []


def wait_for_ever():
    time.sleep(900)


@pytest.mark.multiprocess
def test_waits_for_a_process(shared):
    shared.append("somebody was here")
    threading.Thread(target=wait_for_ever, daemon=True).start()
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        child.stdout.readline()
        child.wait()


def test_shares_the_same(shared):
    assert not shared


def test_cleans_up_for_ever(request):
    request.addfinalizer(wait_for_ever)


def test_does_not_hear_of_the_limit():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    wait_for_ever()


def test_comes_last():
    pass
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest says of these tests."""
    directory = tmp_path_factory.mktemp("hanging")
    (directory / "pytest.ini").write_text(CONFIG)
    (directory / "conftest.py").write_text((TESTS / "conftest.py").read_text() + "\ntime_limit.GRACE_S = 6.0\n")
    (directory / "test_hanging.py").write_text(HANGING)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "-n", "1", "--dist", "loadgroup"]
    environment = {**os.environ, "COLUMNS": "200"}  # so that nothing is cut off
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=180)
    return done.stdout + done.stderr


def test_a_test_that_hangs_fails_and_shows_the_stacks_of_its_threads_and_processes(said: str) -> None:
    assert re.search(r"FAILED \S+::test_waits_for_a_process - Failed: the test did not end within 2 s", said)
    thread = said.partition("thread Thread-1 (wait_for_ever) of the test:")[2].partition("\nE       process")[0]
    assert "in wait_for_ever" in thread
    shown = re.search(r"process \d+: \S+ -c def stand_still.*?in stand_still", said, re.DOTALL)
    assert shown is not None, said


def test_what_it_shared_is_made_anew(said: str) -> None:
    assert "PASSED test_hanging.py::test_shares_the_same" in said


def test_cleaning_up_has_a_limit_too(said: str) -> None:
    assert re.search(r"ERROR \S+::test_cleans_up_for_ever - Failed: the test did not end within 2 s", said)


def test_a_process_that_cannot_fail_is_replaced(said: str) -> None:
    assert re.search(r"File \S+ line \d+ in test_does_not_hear_of_the_limit", said)
    assert re.search(r"FAILED \S+::test_does_not_hear_of_the_limit", said)
    assert "PASSED test_hanging.py::test_comes_last" in said


def test_files_that_use_the_machine_are_one_group() -> None:
    for path in ("tests/benchmarks/test_netlab.py", "tests/faults/test_soak.py", "tests/launchers/test_hosts.py"):
        assert distribution.group_of(path) == "machine"
    assert distribution.group_of("tests/test_units.py") == "tests/test_units.py"
