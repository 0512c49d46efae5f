"""A sentence that promises a number or an equality names the test that holds it.

The name is in a comment of the page's source, behind the paragraph, list or table:

    <!-- held by: tests/codecs/test_topk.py::test_one_thing, tests/torch/test_optimizer.py::test_another -->

It holds the sentences before it, back to the comment before or to the beginning of the paragraph. Tables that a
benchmark writes hold themselves: their numbers come from benchmarks/results. Where such numbers are in the text,
`<!-- measured: FILE -->` names the results.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusion_rt.runner.decisions.limits import ElasticLimits
from fusion_rt.settings import KNOBS, Settings

ROOT = Path(__file__).parents[2]
PAGES = (
    "SECURITY.md",
    "docs/algorithms.md",
    "docs/compression.md",
    "docs/ddp-hooks.md",
    "docs/faults.md",
    "docs/migration.md",
    "docs/start/from-pytorch.md",
    "docs/training-scripts.md",
)
CLAIM = re.compile(
    r"\b(?:bit by bit|to the bit|same bits|exactly|exact|never|always|nothing is lost|no rank)\b"
    r"|\b(?:is|are|stay|stays) equal\b|\bthe same (?:numbers|results?|loss|parameters after)\b"
    r"|\b(?:are|is|gives|has|does|shows|makes them|and) the same\b"
    r"|(?<![\w.-])\d*\.?\d+ ?(?:%|s|ms|µs|bytes?|[kKMGT]i?B|MiB|[kmg]bit)(?![\w-])"
)
HELD = re.compile(r"<!-- held by:\s+(.*?)\s+-->", re.DOTALL)
MEASURED = re.compile(r"<!-- measured:\s+(.*?)\s+-->", re.DOTALL)
GENERATED = re.compile(r"<!-- (?:table|what works with what).*?<!-- .*?end -->", re.DOTALL)


def blocks_of(page: Path) -> Iterator[tuple[int, str]]:
    """Yields the paragraphs, lists and tables of a page with the numbers of their lines: no code, headings, or what a
    benchmark writes. A comment behind an empty line belongs to the block before it."""
    text = page.read_text(encoding="utf-8")
    for skipped in (re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL), GENERATED):
        text = skipped.sub(lambda match: "\n" * match[0].count("\n"), text)
    text = re.sub(r"^(#|!\[).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\n[ \t]*\n(?=\s*<!-- (?:held|measured))", "\n", text)
    line = 1
    for block in re.split(r"(\n[ \t]*\n)", text):
        if block.strip():
            yield line + len(re.match(r"\n*", block)[0]), block  # type: ignore[index]
        line += block.count("\n")


def claims_of(page: Path) -> Iterator[tuple[int, str, str]]:
    """Yields each sentence, item or row that claims something: its block's line, its text, and the comment that holds
    it, or nothing."""
    for line, block in blocks_of(page):
        comments = [*re.finditer(r"<!--.*?-->", block, re.DOTALL)]
        ends = [*(comment.start() for comment in comments), len(block)]
        start = 0
        for number, end in enumerate(ends):
            comment = comments[number] if number < len(comments) else None
            held = comment[0] if comment and (HELD.match(comment[0]) or MEASURED.match(comment[0])) else ""
            for sentence in sentences_of(block[start:end]):
                if CLAIM.search(sentence):
                    yield line, sentence, held
            start = comment.end() if comment else end


def sentences_of(text: str) -> Iterator[str]:
    for part in re.split(r"\n(?=\s*(?:[-*]|\d+\.) )|\n(?=\|)", text):
        joined = " ".join(part.split())
        if joined.startswith("|"):
            yield joined
        else:
            yield from re.split(r"(?<=[.!?:])\s+(?=[A-Z`*\"(])", joined)


def names_in(path: Path) -> set[str]:
    """The names of a file's tests."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_each_named_test_exists() -> None:
    missing = []
    for page in PAGES:
        for comment in HELD.finditer((ROOT / page).read_text(encoding="utf-8")):
            for name in " ".join(comment[1].split()).split(", "):
                file, _, test = name.partition("::")
                if not (ROOT / file).is_file() or test not in names_in(ROOT / file):
                    missing.append(f"{page} names {name}, which is no test")
        for comment in MEASURED.finditer((ROOT / page).read_text(encoding="utf-8")):
            missing += [f"{page} names {name}" for name in comment[1].split(", ") if not (ROOT / name).is_file()]
    assert not missing, "\n".join(missing)


def test_each_claim_names_the_test_that_holds_it() -> None:
    unheld = [
        f"{page}:{line}: {sentence}" for page in PAGES for line, sentence, held in claims_of(ROOT / page) if not held
    ]
    if unheld:
        pytest.fail("these claims name no test that holds them:\n" + "\n".join(unheld), pytrace=False)


def test_pages_tell_the_defaults_of_the_settings() -> None:
    settings, leave = Settings(), ElasticLimits(1, 1).leave
    least, most = next(str(knob.default) for knob in KNOBS if knob.name == "blacklist_cooldown_range").split()
    warned, failed = f"{settings.stall_warning_time:g} s", f"{settings.operation_timeout:g} s"
    told = {
        "docs/migration.md": (
            f"a warning after {warned}, an error on all ranks after {failed}",
            f"fusion threshold | {settings.fusion_threshold >> 20} MiB instead of 128 MiB",
            f"an operation fails when ranks keep it waiting for {failed}",
            f"are left out for {least} to {most} s by default",
            f"is killed after {leave:g} s, and the others go on",
        ),
        "docs/start/from-pytorch.md": (f"After {warned} a warning names them, and after {failed} an error does.",),
        "docs/training-scripts.md": (f"after every {settings.check_parameters} (`FUSION_CHECK_PARAMETERS`",),
    }
    for page, phrases in told.items():
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        for phrase in phrases:
            assert phrase in text, f"{page} does not say: {phrase}"
