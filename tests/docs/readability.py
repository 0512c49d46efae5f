"""Counts words a sentence and clauses without a subject, in the pages of a commit or of the working tree.

    python -m tests.docs.readability [COMMIT ...]

A headless clause is in a sentence that begins with What, Of, Whether, Whose or Which, or that has a "what" without a
noun in it: "what is sent", "of what", "that what". Code, tables and headings do not count.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.docs.test_prose import HEADLESS, INSIDE, MOST_WORDS, ROOT, sentences_of

_PATHS = ("README.md", "SECURITY.md", "CONTRIBUTING.md", "docs")


class Counts(NamedTuple):
    """The counts of some pages. `headless`: sentences with such a clause."""

    sentences: int
    mean: float
    median: float
    long: int
    headless: int

    def __str__(self) -> str:
        return (
            f"{self.mean:.1f} words on average, {self.median:g} in the median; of {self.sentences} sentences "
            f"{self.long / self.sentences:.1%} have more than {MOST_WORDS}, and "
            f"{self.headless / self.sentences:.1%} a headless clause"
        )


def count(pages: list[Path]) -> Counts:
    """Counts the sentences of pages."""
    sentences = [sentence for page in pages for _, sentence in sentences_of(page) if len(sentence.split()) > 2]
    words = [len(sentence.split()) for sentence in sentences]
    headless = sum(bool(HEADLESS.match(each) or INSIDE.search(each)) for each in sentences)
    return Counts(
        len(words), statistics.mean(words), statistics.median(words), sum(n > MOST_WORDS for n in words), headless
    )


def pages_below(root: Path) -> list[Path]:
    """Returns the pages of a tree."""
    return sorted(
        page for name in _PATHS for page in ([root / name] if name.endswith(".md") else (root / name).rglob("*.md"))
    )


def main(commits: list[str]) -> None:
    for commit in commits:
        with tempfile.TemporaryDirectory() as folder:
            tree = subprocess.run(["git", "archive", commit, *_PATHS], cwd=ROOT, capture_output=True, check=True).stdout
            subprocess.run(["tar", "-x", "-C", folder], input=tree, check=True)
            _show(commit, Path(folder))
    _show("here", ROOT)


def _show(name: str, root: Path) -> None:
    print(f"{name}: {count(pages_below(root))}")
    print(f"{name}, README alone: {count([root / 'README.md'])}")


if __name__ == "__main__":
    main(sys.argv[1:])
