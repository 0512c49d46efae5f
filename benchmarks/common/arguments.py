"""Common parts of the command lines of all benchmarks."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Makes the parser of `python -m benchmarks.NAME`; `description`: the module's docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_out(commands: argparse.ArgumentParser, default: Path | None = None) -> None:
    """Adds `--out`, the file for raw results."""
    kept = "(%(default)s)" if default else "(nowhere)"
    commands.add_argument("--out", type=Path, default=default, metavar="FILE", help=f"for raw results {kept}")


def add_table(commands: argparse.ArgumentParser) -> None:
    """Adds `--table`, which shows results and measures nothing."""
    commands.add_argument("--table", action="store_true", help="only show the results in the file")


def add_worker(commands: argparse.ArgumentParser) -> None:
    """Adds `--worker`, with which a benchmark starts its own workers."""
    commands.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)


def numbers(text: str) -> list[int]:
    """Parses a list of numbers such as 1,2,4."""
    return [int(part) for part in text.split(",")]


def chosen(
    commands: argparse.ArgumentParser, kind: str, asked: Iterable[str], known: Mapping[str, object], between: str = ", "
) -> list[str]:
    """Returns the names that were asked for; exits with status 2 and a sentence if one is not known."""
    names = list(asked)
    for name in names:
        if name not in known:
            commands.error(f"there is no {kind} {name!r}; there are {between.join(known)}")
    return names
