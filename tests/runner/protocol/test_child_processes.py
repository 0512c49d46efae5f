"""How children are started, and how descendants are ended, where the process table is the test's."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from fusion_rt.runner.protocol import child_processes

CHILD, GRANDCHILD, OTHER = 1000001, 1000002, 1000003
EXITING = 0x40404C  # flags that a process had while the kernel freed its memory
RUNNING = 0x400040


class Table:
    """A process table, in which nobody ends before it is said.

    Attributes:
        states: of processes, by id: the state and the flags.
        signals: that were sent.
    """

    def __init__(self) -> None:
        self.parents = {CHILD: os.getpid(), GRANDCHILD: CHILD, OTHER: 1}
        self.states = dict.fromkeys(self.parents, ("S", RUNNING))
        self.signals: list[tuple[int, int]] = []
        self.on_signal: Callable[[int, int], object] = lambda pid, number: None

    def stat(self, pid: int) -> list[str]:
        if pid not in self.states:
            return []
        state, flags = self.states[pid]
        return [state, *(str(number) for number in (self.parents[pid], 0, 0, 0, -1, flags, 0))]

    def kill(self, pid: int, number: int) -> None:
        self.signals.append((pid, number))
        self.on_signal(pid, number)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    table = Table()
    monkeypatch.setattr(child_processes, "stat_fields", table.stat)
    monkeypatch.setattr(os, "listdir", lambda path: ["self", *map(str, table.states)])
    monkeypatch.setattr(os, "kill", table.kill)
    monkeypatch.setattr(child_processes, "_KILL_S", 0.05)
    return table


def end(grace: float = 0.0, *keep: int) -> list[int]:
    """Who is left."""
    return asyncio.run(child_processes.end_descendants(keep, grace, asyncio.Event()))


def test_descendants_that_end_when_they_are_told_to_are_not_killed(table: Table) -> None:
    table.on_signal = lambda pid, number: table.states.update({pid: ("Z", EXITING)})
    assert end(grace=60.0) == []
    assert table.signals == [(CHILD, signal.SIGTERM), (GRANDCHILD, signal.SIGTERM)]


def test_those_that_do_not_end_are_killed(table: Table) -> None:
    def obey(pid: int, number: int) -> None:
        if number == signal.SIGKILL:
            del table.states[pid]

    table.on_signal = obey
    assert end(grace=0.05) == []
    assert set(table.signals) == {(pid, n) for pid in (CHILD, GRANDCHILD) for n in (signal.SIGTERM, signal.SIGKILL)}


def test_those_that_are_kept_are_left_alone_with_all_below_them(table: Table) -> None:
    assert end(0.0, CHILD) == []
    assert table.signals == []


def test_those_that_the_kernel_does_not_end_are_named(table: Table) -> None:
    table.states[CHILD] = ("D", RUNNING)
    table.on_signal = lambda pid, number: table.states.pop(pid) if pid == GRANDCHILD else None
    assert end() == [CHILD]


def test_one_whose_memory_the_kernel_still_frees_is_not_named(table: Table) -> None:
    table.on_signal = lambda pid, number: table.states.update({pid: ("R", EXITING)})
    assert end() == []


def test_the_flags_are_those_of_this_kernel() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    try:
        assert child_processes._is_exiting(pid)
        assert not child_processes._is_exiting(os.getpid())
    finally:
        os.waitpid(pid, 0)
    assert child_processes._is_exiting(pid), "it is gone"


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_a_start_that_is_cancelled_leaves_no_child_and_no_pipe() -> None:
    async def body(turns: int) -> bool:
        """Cancels the start after so many turns of the loop; whether it had not ended by then."""
        children = child_processes.Children()
        before = descriptors()
        command = ["sh", "-c", "sleep 600 & exec sleep 600"]
        start = asyncio.create_task(children.start(command, os.environb, b"/", has_input=True))
        for _ in range(turns):
            await asyncio.sleep(0)
        start.cancel()
        await asyncio.wait([start])
        if start.cancelled():
            assert not children._running
        else:
            child = start.result()
            child.signal(signal.SIGKILL)
            child.close()
        while children._running:
            await asyncio.sleep(0.002)
        await asyncio.sleep(0)  # in which the loop closes what was aborted
        assert descriptors() == before
        return start.cancelled()

    was_cancelled = [asyncio.run(asyncio.wait_for(body(turns), 60)) for turns in range(30)]
    assert was_cancelled[1]
    assert not was_cancelled[-1]


def test_a_program_that_cannot_be_run_leaves_no_pipe() -> None:
    async def body() -> None:
        children = child_processes.Children()
        before = descriptors()
        with pytest.raises(FileNotFoundError):
            await children.start(["/no/such/program"], os.environb, b"/", has_input=True)
        await asyncio.sleep(0)
        assert descriptors() == before

    asyncio.run(asyncio.wait_for(body(), 60))


def test_whoever_starts_a_child_has_noted_it_before_anything_else_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is quick may have connected to its agent by then, which has to know that it is one of its own."""
    events: list[str] = []

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            asyncio.get_running_loop().call_soon(events.append, "something else")

    monkeypatch.setattr(subprocess, "Popen", Popen)

    async def body() -> None:
        child = await child_processes.Children().start(["true"], os.environb, b"/", has_input=True)
        events.append("noted")
        assert await child.exit == 0
        child.close()

    asyncio.run(asyncio.wait_for(body(), 60))
    assert events == ["noted", "something else"]
