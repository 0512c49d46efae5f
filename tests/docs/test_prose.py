"""A small linter of prose: patterns of English that readers have stumbled over, in pages and docstrings.

It finds what can be found by a pattern. The rules are in CONTRIBUTING.md; a finding says where, and what to write.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIRST_HOUR = [
    ROOT / "README.md",
    ROOT / "docs/from-ddp.md",
    ROOT / "docs/migration.md",
    *sorted(ROOT.glob("docs/start/*.md")),
]
HOW_TO = [
    ROOT / "CONTRIBUTING.md",
    *(
        ROOT / "docs" / f"{name}.md"
        for name in (
            "autotune",
            "elastic",
            "frameworks",
            "kubernetes",
            "large-batch",
            "launchers",
            "live",
            "overlap",
            "slow-training",
            "slurm",
            "status",
            "torch-distributed",
            "training-scripts",
            "troubleshooting",
        )
    ),
]
PAGES = sorted({*FIRST_HOUR, *HOW_TO, ROOT / "SECURITY.md", *ROOT.glob("docs/**/*.md")})
CODE = [path for name in ("fusion_rt", "daemon", "tools", "benchmarks") for path in sorted((ROOT / name).rglob("*.py"))]
MOST_WORDS = 25  # in a sentence of a page of the first hour
WORDS = {  # found in any page; what to write
    r"\bin force\b": "active",
    r"\blaid down\b": "recorded",
    r"\bstands? in\b": "substitutes",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bforgiven?\b": "tolerated",
    r"\bnot even that\b": "nothing",
    r"\bfor ever\b": "forever",
    r"\b(is|are|was|were|be|been) given up\b": "declared dead, or abandoned",
    r"\bhas it that\b": "says",
}
HEADLESS = re.compile(r"(What|Of|Whether|Whose|Which)\b(?!-)")


def prose_of(page: Path) -> Iterator[tuple[int, str]]:
    """Yields the number of its first line and the text of each paragraph or item: no code, tables or headings."""
    text = page.read_text(encoding="utf-8")
    for block in (r"^( *)```.*?^\1```$", r"<!--.*?-->"):
        text = re.sub(block, lambda match: "\n" * match[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(\||#|!\[).*$", "", text, flags=re.MULTILINE)
    start = 0
    for match in re.finditer(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\Z", text):
        words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text[start : match.start()])
        if words.strip():
            skipped = len(text[start:]) - len(text[start:].lstrip())
            yield text.count("\n", 0, start + skipped) + 1, re.sub(r"^([-*]|\d+\.) ", "", " ".join(words.split()))
        start = match.end()


def sentences_of(page: Path) -> Iterator[tuple[int, str]]:
    for line, text in prose_of(page):
        for sentence in re.split(r"(?<=[.!?:])\s+(?=[A-Z`*\"(])", text):
            yield line, sentence.strip("*")


def report(found: list[str]) -> None:
    if found:
        pytest.fail("\n".join(found), pytrace=False)


def test_pages_use_the_words_of_the_field() -> None:
    report(
        [
            f"{page.relative_to(ROOT)}:{line}: {match[0]!r}: write {better}: {text[match.start() : match.end() + 30]}"
            for page in PAGES
            for line, text in prose_of(page)
            for pattern, better in WORDS.items()
            if (match := re.search(pattern, text, re.IGNORECASE))
        ]
    )


def test_sentences_of_the_first_hour_are_short() -> None:
    report(
        [
            f"{page.relative_to(ROOT)}:{line}: {len(sentence.split())} words: {sentence}"
            for page in FIRST_HOUR
            for line, sentence in sentences_of(page)
            if len(sentence.split()) > MOST_WORDS
        ]
    )


def test_sentences_of_guides_begin_with_their_subject() -> None:
    report(
        [
            f"{page.relative_to(ROOT)}:{line}: name the subject: {sentence}"
            for page in (*FIRST_HOUR, *HOW_TO)
            for line, sentence in sentences_of(page)
            if HEADLESS.match(sentence) and not sentence.endswith("?")
        ]
    )


def test_docstrings_begin_with_their_subject() -> None:
    opening = re.compile(rf'^ *"""{HEADLESS.pattern}.*', re.MULTILINE)
    report(
        [
            f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: name the subject: {match[0][:70]}"
            for path in CODE
            for text in [path.read_text(encoding="utf-8")]
            for match in opening.finditer(text)
        ]
    )
