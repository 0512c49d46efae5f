"""The host discovery script, run again and again beside everything else."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fusion_rt.core.errors import SettingError
from fusion_rt.runner.decisions.host_list import Host
from fusion_rt.runner.launch import discovery
from fusion_rt.runner.launch.discovery import Discovery
from fusion_rt.runner.protocol.child_processes import Children

pytestmark = pytest.mark.multiprocess


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "PERIOD_S", 0.01)


def run(script: str, until: Callable[[list[tuple[Host, ...]], list[str]], object], timeout: float = 30.0) -> None:
    """Runs a script until what was found, and the warnings, satisfy a condition."""
    found: list[tuple[Host, ...]] = []
    warnings: list[str] = []

    async def body() -> None:
        children = Children()
        task = asyncio.create_task(
            Discovery(script, 3, timeout).follow(children, found.append, warnings.append),
        )
        while not until(found, warnings):
            assert not task.done(), task.exception()
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.wait([task])
        await asyncio.gather(*(ended for _, ended in children._running.values()))  # also one that has just begun

    asyncio.run(asyncio.wait_for(body(), 30))


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(body: str, head: str = "#!/bin/sh\n") -> str:
        path = tmp_path / "hosts.sh"
        path.write_text(head + body + "\n")
        path.chmod(0o755)
        return str(path)

    return write


def test_the_hosts_are_found_as_they_change(script: Callable[[str], str], tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a:1\nb\n")

    def change(found: list[tuple[Host, ...]], warnings: list[str]) -> bool:
        if found and found[-1] == (Host("a", 1), Host("b", 3)):
            hosts.write_text("")
        return bool(found) and found[-1] == ()

    run(script(f"cat {hosts}"), change)


def test_a_script_that_fails_is_warned_about_once_until_it_works_again(
    script: Callable[[str], str], tmp_path: Path
) -> None:
    bad = tmp_path / "bad"
    bad.touch()
    path = script(f"echo run >> {tmp_path}/log; [ -e {bad} ] && echo the grid is down >&2 && exit 4; echo a:1")
    rounds: list[int] = []

    def turn(found: list[tuple[Host, ...]], warnings: list[str]) -> bool:
        log = tmp_path / "log"
        runs = len(log.read_text().split()) if log.exists() else 0
        if not rounds and runs >= 3:
            assert len(warnings) == 1
            assert "failed with status 4; it said:\n  the grid is down" in warnings[0]
            bad.unlink()
            rounds.append(len(found))
        if len(rounds) == 1 and len(found) > rounds[0]:
            bad.touch()
            rounds.append(len(found))
        return len(warnings) == 2

    run(path, turn)


def test_a_script_that_hangs_is_ended(script: Callable[[str], str]) -> None:
    run(script("exec sleep 600"), lambda found, warnings: warnings and "did not end within 0.1 s" in warnings[0], 0.1)


def test_a_script_without_an_interpreter_and_one_that_is_gone(
    script: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(script("echo a:1", head=""), lambda found, warnings: found == [(Host("a", 1),)])
    os.unlink(tmp_path / "hosts.sh")
    gone = str(tmp_path / "hosts.sh")
    run(gone, lambda found, warnings: warnings and "cannot be run: No such file or directory" in warnings[0])


def test_what_is_no_command_line_is_refused() -> None:
    with pytest.raises(SettingError, match="is not a command line"):
        run("it's", lambda found, warnings: True)
