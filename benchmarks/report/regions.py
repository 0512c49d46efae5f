"""The generated regions of documents, between `<!-- table: NAME -->` and `<!-- end -->`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

_REGION = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_MARK = re.compile(r"<!-- (table: .*?|end) -->")


class DocumentError(Exception):
    """A document's marks do not match; the text says where."""


def fill(text: str, make: Callable[[str], str], name: str = "the document") -> str:
    """Replaces the contents of every region in a text; `make` returns them by the region's name.

    Raises:
        DocumentError: a mark has no counterpart.
    """
    marks = [match[1] for match in _MARK.finditer(text)]
    if len(marks) % 2 or any((mark == "end") != bool(index % 2) for index, mark in enumerate(marks)):
        raise DocumentError(f"In {name}, not each `<!-- table: NAME -->` has its `<!-- end -->`.")
    # Blank lines, because a comment would otherwise swallow the table that follows it.
    return _REGION.sub(lambda match: f"{match[1]}\n{make(match[2])}\n\n{match[4]}", text)


def names(text: str) -> list[str]:
    """Returns the names of the regions in a text."""
    return [match[2] for match in _REGION.finditer(text)]


def documents(root: Path) -> list[Path]:
    """Returns the documents of a repository that may have regions."""
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").glob("*.md"))]
