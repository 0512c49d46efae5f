"""Docstrings as the site shows them.

A block of code is introduced by `::` in the source, and by a colon or nothing on a page. A page that is named by its
file, `docs/elastic.md`, is a link with its title.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

DOCS = Path(__file__).resolve().parents[1] / "docs"


class Pages(griffe.Extension):
    """Replaces `::` at the end of a docstring's line, and the names of pages."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(r"^::\n", "", obj.docstring.value, flags=re.MULTILINE)
            text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"\bdocs/([\w/-]+)\.md", _link, text)


def _link(match: re.Match[str]) -> str:
    """Returns a link from a page of reference/ to another page."""
    title = (DOCS / f"{match[1]}.md").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    return f"[{title}](../../{match[1]}/)"
