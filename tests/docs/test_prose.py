"""A small linter of prose: patterns of English that readers have stumbled over, in pages and docstrings.

It finds what can be found by a pattern. The rules are in CONTRIBUTING.md; a finding says where, and what to write.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

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
MOST_IN_A_GUIDE = 45  # in one of a guide
LONG_SHARE = 0.15  # of sentences with more than MOST_WORDS, in any page
WORDS = {  # found in any page or message; what to write
    r"\bin force\b": "active",
    r"\blaid down\b": "recorded",
    r"\bstands? in\b": "substitutes",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bforgiven?\b": "tolerated",
    r"\bnot even that\b": "nothing",
    r"\bfor ever\b": "forever",
    r"\b(is|are|was|were|be|been) given up\b": "declared dead, or abandoned",
    r"\bhas it that\b": "says",
    r"\bgives? (it |this node )?up\b": "stops, or declares dead",
    r"\bwhoever\b|\bof whom\b": "the rank, host or person that",
    r", say\b(?! so)|\(say\b": "for example",
    r"\b(to|cannot|can) be had\b": "available",
    r"\bnobody waits for\b": "without waits, or no rank waits for",
    r"\bis no good\b|\bare no good\b": "does not work",
}
HEADLESS = re.compile(r"(What|Of|Whether|Whose|Which)\b(?!-)")
INSIDE = re.compile(  # a clause that has "what" in place of its subject
    r"\b(?:of|by|with|from|for|that|in|and|or|to|than|is|has|tells|says) what\b|\bwhat (?:is|are|was|has|it|they)\b"
)
ANY_WORD = re.compile("|".join([*WORDS, INSIDE.pattern]))


def prose_of(page: Path) -> Iterator[tuple[int, str]]:
    """Yields the number of its first line and the text of each paragraph or item; no code, tables, headings, quotes."""
    text = page.read_text(encoding="utf-8")
    for block in (r"^( *)```.*?^\1```$", r"<!--.*?-->"):
        text = re.sub(block, lambda match: "\n" * match[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(\||#|>|!\[).*$", "", text, flags=re.MULTILINE)
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


def cells_of(page: Path) -> Iterator[tuple[int, str]]:
    """Yields the number of its line and the text of each row of a table."""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("|"):
            yield number, re.sub(r"`[^`]*`", "", line)


def messages_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the number of its line and the text of each string of several words that is no docstring of a definition.

    Those are errors, warnings, help, lines of reports, and what is said of a field below it.
    """
    nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    definitions = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    seen = {id(each) for node in nodes if isinstance(node, ast.JoinedStr) for each in node.values}
    seen |= {id(node.body[0].value) for node in nodes if isinstance(node, definitions) if _opens(node.body)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(each.value) if isinstance(each, ast.Constant) else "…" for each in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in seen:
            text = node.value
        else:
            continue
        if len(text.split()) > 4:
            yield node.lineno, " ".join(text.split())


def _opens(body: list[ast.stmt]) -> TypeGuard[list[ast.Expr]]:
    return bool(body) and isinstance(body[0], ast.Expr)


def report(found: list[str]) -> None:
    if found:
        pytest.fail("\n".join(found), pytrace=False)


def test_pages_use_the_words_of_the_field() -> None:
    report(
        [
            f"{page.relative_to(ROOT)}:{line}: {match[0]!r}: write {better}: {text[match.start() : match.end() + 30]}"
            for page in PAGES
            for line, text in (*prose_of(page), *cells_of(page))
            for pattern, better in WORDS.items()
            if (match := re.search(pattern, text, re.IGNORECASE))
        ]
    )


def test_messages_use_the_words_of_the_field() -> None:
    report(
        [
            f"{path.relative_to(ROOT)}:{line}: {match[0]!r}: write {better}: {text}"
            for path in CODE
            for line, text in messages_of(path)
            if ANY_WORD.search(text)
            for pattern, better in (*WORDS.items(), (INSIDE.pattern, "a noun"))
            if (match := re.search(pattern, text))
        ]
    )


def test_sentences_are_short() -> None:
    limits = dict.fromkeys(HOW_TO, MOST_IN_A_GUIDE) | dict.fromkeys(FIRST_HOUR, MOST_WORDS)
    report(
        [
            f"{page.relative_to(ROOT)}:{line}: {len(sentence.split())} words: {sentence}"
            for page, most in limits.items()
            for line, sentence in sentences_of(page)
            if len(sentence.split()) > most
        ]
    )


def test_few_sentences_of_a_page_are_long() -> None:
    shares = {
        page: sum(len(sentence.split()) > MOST_WORDS for sentence in sentences) / len(sentences)
        for page in PAGES
        if (sentences := [sentence for _, sentence in sentences_of(page)])
    }
    report(
        [
            f"{page.relative_to(ROOT)}: {share:.0%} of its sentences have more than {MOST_WORDS} words"
            for page, share in shares.items()
            if share > LONG_SHARE
        ]
    )


def test_sentences_name_their_subject() -> None:
    report(
        [
            f"{page.relative_to(ROOT)}:{line}: name the subject: {sentence}"
            for page in PAGES
            for line, sentence in sentences_of(page)
            if (HEADLESS.match(sentence) or INSIDE.search(sentence)) and not sentence.endswith("?")
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
