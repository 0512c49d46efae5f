"""A worker's stacks: what it writes without knowing, and how that is read."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import fusion_rt
from fusion_rt import wire
from fusion_rt.host import stacks
from fusion_rt.host.process_stat import process_state
from fusion_rt.local import stack_text

PACKAGE = os.path.dirname(os.path.abspath(fusion_rt.__file__))
STACK = f"""\
Stack (most recent call first):
  File "{PACKAGE}/local.py", line 70 in receive
  File "{PACKAGE}/client.py", line 300 in wait
  File "train.py", line 3 in slow
  File "<string>", line 1 in <module>
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- written ----------------------------------------------------------------------------------------------------------


def test_the_signal_writes_the_stack_of_the_main_thread() -> None:
    offer = stacks.offer()
    begin = os.lseek(offer.fd, 0, os.SEEK_SET)
    waits = threading.Event()

    def somewhere() -> None:
        waits.wait()

    thread = threading.Thread(target=somewhere)
    thread.start()
    os.kill(os.getpid(), offer.signal)
    waits.set()
    thread.join()
    text = os.pread(offer.fd, os.lseek(offer.fd, 0, os.SEEK_CUR), begin).decode()
    os.close(offer.fd)
    stack = stack_text.parse(text)
    assert any(frame.function == "test_the_signal_writes_the_stack_of_the_main_thread" for frame in stack.frames)
    assert "in somewhere" not in text


def test_threads_that_begin_call_and_end_meanwhile_are_no_danger() -> None:
    code = (
        "import os, threading\nfrom fusion_rt.host import stacks\noffer = stacks.offer()\nended = False\n"
        "def deep(n): return deep(n - 1) if n else 0\n"
        "def work():\n    while not ended: deep(400)\n"
        "def start():\n"
        "    while not ended:\n"
        "        thread = threading.Thread(target=deep, args=(300,)); thread.start(); thread.join()\n"
        "threads = [threading.Thread(target=each) for each in (work, start)]\n"
        "for thread in threads: thread.start()\n"
        "for _ in range(1000):\n"
        "    os.lseek(offer.fd, 0, os.SEEK_SET); os.kill(os.getpid(), offer.signal); os.sched_yield()\n"
        "ended = True\n"
        "for thread in threads: thread.join()\nprint('well')"
    )
    assert run(code) == "well"


def test_a_script_that_handles_the_signal_keeps_it() -> None:
    for how in ("lambda *_: None", "signal.SIG_IGN"):
        code = (
            "import signal\nfrom fusion_rt.host import stacks\n"
            f"signal.signal(stacks.STACK_SIGNAL, {how})\nbefore = signal.getsignal(stacks.STACK_SIGNAL)\n"
            "print(stacks.offer(), signal.getsignal(stacks.STACK_SIGNAL) is before)"
        )
        assert run(code) == "Offer(fd=-1, signal=0) True"


def test_a_forked_child_does_not_write_into_what_its_parent_shows() -> None:
    code = (
        "import os\nfrom fusion_rt.host import stacks\noffer = stacks.offer()\npid = os.fork()\n"
        "if pid == 0:\n"
        "    assert not stacks.is_handled(os.getpid(), stacks.STACK_SIGNAL)\n"
        "    mine = stacks.offer()\n"  # a child that becomes a worker has its own
        "    os.kill(os.getpid(), mine.signal)\n"
        "    assert os.lseek(mine.fd, 0, os.SEEK_CUR) > 0\n"
        "    os._exit(0)\n"
        "print(os.waitpid(pid, 0)[1], os.lseek(offer.fd, 0, os.SEEK_CUR))"
    )
    assert run(code) == "0 0"


def test_a_program_that_is_started_does_not_inherit_it() -> None:
    code = (
        "import subprocess, sys\nfrom fusion_rt.host import stacks\nstacks.offer()\n"
        "subprocess.run([sys.executable, '-c', 'import os\\nfrom fusion_rt.host import stacks\\n"
        "print(stacks.is_handled(os.getpid(), stacks.STACK_SIGNAL))\\n"
        'print(any("fusion_rt-stacks" in os.readlink("/proc/self/fd/" + fd) for fd in os.listdir("/proc/self/fd") '
        'if os.path.islink("/proc/self/fd/" + fd)))\'])'
    )
    assert run(code).split() == ["False", "False"]


def test_more_than_there_is_room_for_is_lost() -> None:
    offer = stacks.offer()
    with pytest.raises(PermissionError):
        os.pwrite(offer.fd, b"x", stacks.STACK_BYTES)
    os.close(offer.fd)


# --- read -------------------------------------------------------------------------------------------------------------


def test_calls_inside_of_the_package_are_one() -> None:
    assert stack_text.parse(STACK, "/home/me").frames == (
        wire.Frame(f"{PACKAGE}/client.py", 300, "wait", "", 1),
        wire.Frame("/home/me/train.py", 3, "slow"),
        wire.Frame("<string>", 1, "<module>"),
    )


def test_of_two_answers_the_last_one_counts() -> None:
    again = STACK.replace("line 3 in slow", "line 5 in slow")
    assert [frame.line for frame in stack_text.parse(STACK + again).frames] == [300, 5, 1]


def test_what_was_cut_off_does_not_count() -> None:
    cut = STACK[: STACK.index("train.py") + 3]
    assert [frame.function for frame in stack_text.parse(cut).frames] == ["wait"]
    assert stack_text.parse("") == wire.Stack()
    assert stack_text.parse('nothing of the kind\n  File "x", line 1 in y\n') == wire.Stack()
    assert stack_text.is_whole(STACK)
    assert not stack_text.is_whole(cut)
    assert not stack_text.is_whole("")


def test_a_long_stack_is_cut_at_its_far_end() -> None:
    calls = "".join(f'  File "deep.py", line {line} in f\n' for line in range(1, 101))
    stack = stack_text.parse(f"Stack (most recent call first):\n{calls}")
    assert len(stack.frames) + stack.more == 100
    assert stack.frames[0].line == 1
    assert len(stack.frames) <= wire.MAX_FRAMES


def test_names_that_are_too_long_for_a_message_are_cut() -> None:
    text = f'Stack (most recent call first):\n  File "/{"d" * 600}/x.py", line 1 in {"f" * 600}\n'
    stack = stack_text.parse(text)
    assert stack.frames[0].file.endswith("/x.py")
    found = wire.Located(1, (wire.Whereabouts(0, 1, "sleeping (S)", "", stack),))
    assert wire.decode_peer_message(wire.encode(found)) == found


def test_lines_of_files_are_shown_where_they_can_be_read(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time\n\n    time.sleep(300)  # here\n" + "x" * 500 + "\n\xff")
    os.mkfifo(tmp_path / "pipe")
    assert stack_text.source_line(str(script), 3) == "time.sleep(300)  # here"
    assert len(stack_text.source_line(str(script), 4)) == 120
    for path, line in [(script, 0), (script, 99), (tmp_path / "nowhere", 1), (tmp_path, 1), (tmp_path / "pipe", 1)]:
        assert stack_text.source_line(str(path), line) == ""
    stack = wire.Stack((wire.Frame(str(script), 1, "f", "", 2),), 3)
    assert stack_text.with_sources(stack) == wire.Stack((wire.Frame(str(script), 1, "f", "import time", 2),), 3)


def test_where_a_worker_is_in_words() -> None:
    stack = wire.Stack((wire.Frame("/train.py", 3, "slow", "time.sleep(300)"),), 2)
    found = wire.Whereabouts(3, 4711, "sleeping (S)", "", stack)
    assert stack_text.describe(found, "b") == [
        "rank 3 (host b, pid 4711, sleeping (S)), most recent call first:",
        "    /train.py:3 in slow: time.sleep(300)",
        "    and 2 more calls",
    ]
    stopped = wire.Whereabouts(3, 4711, "stopped (T)", "no answer: the process is stopped (state T in /proc)")
    assert stack_text.describe(stopped, "b") == [
        "rank 3 (host b, pid 4711, stopped (T)): no answer: the process is stopped (state T in /proc)"
    ]


def test_the_state_of_a_process() -> None:
    assert process_state(os.getpid()) == "R"
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    assert process_state(child.pid) == ""
    assert stack_text.state_in_words("") == "gone"
    assert stack_text.state_in_words("S") == "sleeping (S)"
