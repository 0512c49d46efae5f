"""The leak check of conftest.py must find what it is there to find."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.netlab import preflight

CONFTEST = Path(__file__).with_name("conftest.py")
CONFIG = f"[pytest]\nmarkers = multiprocess: watched\npythonpath = {CONFTEST.parents[1]}\n"
BODIES = {  # of tests that are watched, which run one after the other
    "clean": "subprocess.run(['true'], check=True)",
    # A process has no environment, by which it would be known, for a moment as it becomes another program.
    "orphan": "subprocess.run('setsid sleep 987.125 & until grep -q ^sleep /proc/$!/cmdline; do sleep 0.01; done', "
    "shell=True, check=True)",
    "file": "os.open('/dev/shm/leak-check-example', os.O_CREAT | os.O_RDWR)",
    "thread": "threading.Thread(target=time.sleep, args=(8,), name='x').start()",
    "descriptors": "socket.socket(socket.AF_UNIX).detach(); os.memfd_create('arena-example')",
    "lab": "from benchmarks.netlab import Netlab; Netlab(1).__enter__()",  # which goes with its process
}
LABS = preflight() is None


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the check says of each of these tests; empty if it is content."""
    directory = tmp_path_factory.mktemp("watched")
    (directory / "pytest.ini").write_text(CONFIG)
    (directory / "conftest.py").write_text(CONFTEST.read_text().replace("GRACE_S = 10.0", "GRACE_S = 0.5"))
    tests = [
        f"@pytest.mark.multiprocess\ndef test_{name}():\n    {body}\n"
        for name, body in BODIES.items()
        if name != "lab" or LABS
    ]
    imports = "import os, socket, subprocess, threading, time\nimport pytest\n"
    (directory / "test_watched.py").write_text("\n\n".join([imports, *tests]))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA"]
    wide = {**os.environ, "COLUMNS": "1000"}  # so that nothing is cut off
    done = subprocess.run(command, cwd=directory, env=wide, capture_output=True, text=True, timeout=180)
    assert len(re.findall(r"^PASSED ", done.stdout, re.MULTILINE)) == len(tests), done.stdout + done.stderr
    complaints = re.findall(r"^ERROR .*::test_(\w+) - Failed: (.*)$", done.stdout, re.MULTILINE)
    return dict.fromkeys(BODIES, "") | dict(complaints)


def test_a_test_that_cleans_up_passes(said: dict[str, str]) -> None:
    assert said["clean"] == ""


def test_an_orphan_in_a_session_of_its_own_is_named_and_killed(said: dict[str, str]) -> None:
    assert re.fullmatch(r"test_orphan left behind: process \d+ \(\w+\): sleep 987\.125", said["orphan"])
    assert not [p for p in psutil.process_iter(["cmdline"]) if "987.125" in (p.info["cmdline"] or ())]


def test_a_leftover_descriptor_and_shared_memory_file_are_named(said: dict[str, str]) -> None:
    found = r"shared memory /dev/shm/leak-check-example; descriptor \d+ \(.*leak-check-example.*\)"
    assert re.search(found, said["file"])
    assert not Path("/dev/shm/leak-check-example").exists()


def test_a_leftover_thread_is_named(said: dict[str, str]) -> None:
    assert re.fullmatch(r"test_thread left behind: thread x \(\d+\)", said["thread"])


def test_a_leftover_socket_and_an_arena_are_descriptors(said: dict[str, str]) -> None:
    found = r"test_descriptors left behind: descriptor \d+ \(socket:.*\); descriptor \d+ \(/memfd:arena-example.*\)"
    assert re.fullmatch(found, said["descriptors"])


@pytest.mark.skipif(not LABS, reason=preflight() or "")
@pytest.mark.root
def test_a_leftover_lab_is_named(said: dict[str, str]) -> None:
    assert said["lab"].startswith("test_lab left behind: ")
    assert "network namespaces of lab " in said["lab"]  # after what tests beside this one have just made, perhaps
