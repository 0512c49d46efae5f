"""The commands of the documents: each is one that its program understands, and those that can run here do.

A fence without a language, or one of `console` (behind `$`), has commands for a shell. `<!-- not run: REASON -->` in
front of it says why `-m long` does not run them; readers of the site do not see that.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import typer

import fusion_trace.cli
import fusiond.app.cli
from fusion_rt.runner.command.cli import make_plan
from fusion_rt.runner.command.flags import make_parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
FENCE = re.compile(r"(?:^<!-- not run: ([^\n]*) -->\n)?^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Hosts that pages name, and addresses of this one: daemons of their own, and no ssh. Names of this one stay.
HOSTS = {
    "host1": "127.0.0.1",
    "host2": "localhost",
    "a": "127.0.0.1",
    "b": "localhost",
    "c": "127.0.0.2",
    "d": "127.0.0.3",
}
COLLECT = """
if hvd.rank() == 0:
    import subprocess
    subprocess.run(["fusion-trace", "collect", "--out", "before"], check=True)
hvd.barrier()
"""
TRACES = ("before", "loaded", "after", "JOB")
LIMIT_S = 240.0


class Block(NamedTuple):
    """The commands of a fence."""

    page: Path
    line: int
    reason: str  # why they are not run, or nothing
    commands: tuple[str, ...]


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        reason, language, body = match.groups()
        if language not in ("", "console"):
            continue
        lines = body.replace("\\\n", " ").splitlines()
        if language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        commands = tuple(line for line in lines if shlex.split(line, comments=True))
        yield Block(page, text.count("\n", 0, match.start()) + 1, reason or "", commands)


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
RUN = [block for block in BLOCKS if not block.reason]


def name_of(block: Block) -> str:
    return f"{block.page.relative_to(ROOT)}:{block.line}"


@functools.cache
def group_of(program: str) -> typer.core.TyperGroup:
    group = typer.main.get_command(fusion_trace.cli.app if program == "fusion-trace" else fusiond.app.cli.app)
    assert isinstance(group, typer.core.TyperGroup)
    return group


def understood(words: list[str]) -> None:
    """Has the program's own parser read a command. Raises what that raises."""
    program, *arguments = words
    if program == "fusionrun":
        parsed = make_parser().parse_args(arguments)
        if not parsed.check_build:
            make_plan(parsed)
    elif program in ("fusion-trace", "fusiond"):
        group = group_of(program)
        context = group.make_context(program, arguments[:1])
        name, command, rest = group.resolve_command(context, arguments)
        assert command is not None
        command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS}), ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_and_arguments_in_a_page_exist(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    for block in BLOCKS:
        for command in block.commands if block.page == page else ():
            words = shlex.split(command, comments=True)
            try:
                understood(words)
            except (SystemExit, Exception) as error:
                pytest.fail(f"{name_of(block)}: {command}\n{error!r} {capsys.readouterr().err}")


def prepare(folder: Path) -> None:
    """Puts the files there that pages name."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    script = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert script is not None
    (folder / "train.py").write_text(script[1], encoding="utf-8")
    (folder / "job.yaml").write_text("verbose: true\n", encoding="utf-8")
    (folder / "hosts.txt").write_text("127.0.0.1 slots=4\nlocalhost slots=4\n", encoding="utf-8")


def local(command: str) -> str:
    """Returns a command with this host's addresses for the hosts and the network interface of a page."""

    def addressed(match: re.Match[str]) -> str:
        hosts = (host.partition(":") for host in match[1].split(","))
        return "-H " + ",".join(HOSTS.get(name, name) + colon + slots for name, colon, slots in hosts)

    for page, here in (
        ("--network-interface eth0", "--network-interface lo"),
        ("torchrun ", "python -m torch.distributed.run "),
    ):
        command = command.replace(page, here)
    return re.sub(r"-H (\S+)", addressed, command)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A directory with the script of the README, and with traces of a job of it on two nodes."""
    with tempfile.TemporaryDirectory(prefix="frt", dir="/tmp") as name:  # short, for sockets
        folder = Path(name)
        prepare(folder)
        script = folder / "train.py"
        kept = script.read_text(encoding="utf-8")
        script.write_text(kept + COLLECT, encoding="utf-8")
        shell(folder, "fusionrun -np 2 -H 127.0.0.1:1,localhost:1 python train.py")
        script.write_text(kept, encoding="utf-8")
        for copy in TRACES[1:]:
            shutil.copytree(folder / "before", folder / copy)
        yield folder


def shell(folder: Path, command: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FUSION_TRACE")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment |= {"TMPDIR": str(folder), "HOME": str(folder), "HOROVOD_START_TIMEOUT": "120"}
    environment.pop("XDG_RUNTIME_DIR", None)
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("block", RUN, ids=name_of)
def test_commands_of_a_page_run(block: Block, folder: Path) -> None:
    for command in block.commands:
        shell(folder, local(command))
