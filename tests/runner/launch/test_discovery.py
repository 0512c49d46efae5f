"""Hosts that a script finds."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from fusion_rt.core.errors import FusionError, SettingError
from fusion_rt.runner.decisions.host_list import Host
from fusion_rt.runner.launch.discovery import Discovery


@pytest.fixture
def script(tmp_path: Path):
    def write(body: str) -> str:
        path = tmp_path / "hosts.sh"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return str(path)

    return write


def discover(script: str, slots: int, timeout: float) -> tuple[Host, ...]:
    return asyncio.run(Discovery(script, slots, timeout).first())


def test_the_hosts_are_those_that_the_script_prints(script, capsys: pytest.CaptureFixture[str]) -> None:
    found = discover(script("echo a:2; echo; echo ' ann@b '; echo '[::1]:3'; echo note >&2"), 4, 30)
    assert found == (Host("a", 2), Host("b", 4, "ann"), Host("::1", 3))
    assert capsys.readouterr().err == "note\n"


def test_a_script_without_an_interpreter_is_the_shells(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("echo a:2\n")
    path.chmod(0o755)
    assert discover(str(path), 1, 30) == (Host("a", 2),)


def test_the_script_may_have_arguments(script) -> None:
    assert discover(f"{script('echo $2:$1')} 3 'a-b'", 1, 30) == (Host("a-b", 3),)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("echo no grid >&2; echo it is over >&2; exit 7", "failed with status 7; it said:\n  no grid\n  it is over"),
        ("exit 3", "failed with status 3 and said nothing"),
        ("true", "printed no host"),
        ("echo a:two", "printed a line that is no host: 'two' slots of 'a:two' is not a number"),
        ("exec sleep 60", "did not end within 0.2 s (--start-timeout)"),
    ],
)
def test_a_script_that_fails_is_told_with_its_own_words(script, body: str, complaint: str) -> None:
    with pytest.raises(FusionError, match=re.escape(complaint)) as caught:
        discover(script(body), 1, 0.2 if "sleep" in body else 30)
    assert not isinstance(caught.value, SettingError), "the flags are right: exit status 1, not 2"


def test_a_script_that_is_there_and_cannot_be_run_is_told_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "hosts.sh"
    path.write_text("#!/no/such/interpreter\necho a\n")
    path.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    for words, why in (
        (str(path), "the interpreter that its first line names is not there"),
        ("hosts.sh", "write ./hosts.sh"),
    ):
        with pytest.raises(FusionError, match=f"cannot be run: {why}"):
            discover(words, 1, 30)


def test_what_is_no_script_is_told() -> None:
    with pytest.raises(FusionError, match="'/no/such/script' cannot be run: No such file or directory"):
        discover("/no/such/script", 1, 30)
    with pytest.raises(SettingError, match="is not a command line: No closing quotation"):
        discover("it's", 1, 30)
    with pytest.raises(SettingError, match="is empty"):
        discover(" ", 1, 30)
