"""What the command lines of all benchmarks have in common."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Of `python -m benchmarks.NAME`, which explains itself with its module's docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_out(commands: argparse.ArgumentParser, default: Path | None = None) -> None:
    """Where raw results are kept."""
    kept = "(%(default)s)" if default else "(nowhere)"
    commands.add_argument("--out", type=Path, default=default, metavar="FILE", help=f"for raw results {kept}")


def add_table(commands: argparse.ArgumentParser) -> None:
    """A switch to measure nothing."""
    commands.add_argument("--table", action="store_true", help="only show what is in the file")


def add_worker(commands: argparse.ArgumentParser) -> None:
    """What a benchmark's own workers are started with."""
    commands.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)


def numbers(text: str) -> list[int]:
    """Of a list such as 1,2,4."""
    return [int(part) for part in text.split(",")]


def chosen(
    commands: argparse.ArgumentParser, kind: str, asked: Iterable[str], known: Mapping[str, object], between: str = ", "
) -> list[str]:
    """The names that were asked for; ends with status 2 and a sentence if there is no such thing."""
    names = list(asked)
    for name in names:
        if name not in known:
            commands.error(f"there is no {kind} {name!r}; there are {between.join(known)}")
    return names
