"""The table of docs/torch-distributed.md that says what torch's own tests say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tests.upstream.exceptions import EXCEPTIONS
from tests.upstream.results import Results, behind
from tests.upstream.running import Outcome, Place
from tests.upstream.suites import SUITES

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "torch-distributed.md"
BEGIN = "<!-- torch's own tests: written by `python -m tests.upstream` -->"
END = "<!-- torch's own tests: end -->"


def write(results: Results, document: Path = DOCUMENT) -> None:
    """Writes the table into the document, between its marks."""
    before, rest = document.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    document.write_text(f"{before}{BEGIN}\n{page(results)}{END}{after}", encoding="utf-8")


def page(results: Results) -> str:
    """Returns the table, and what gloo passes and fusion does not."""
    head = f"tests of torch {results.torch}", "ranks", "gloo passes", "fusion passes", "of gloo's", "skipped with both"
    lines = ["", _row(*head), _row(*["---"] * len(head))]
    missed: dict[str, list[str]] = {}
    for suite, described in SUITES.items():
        about = f": {described.about}"
        for place in sorted({place for name, place, _ in results.runs() if name == suite}, key=_order):
            gloo, fusion = (results.of(suite, place, backend) for backend in ("gloo", "fusion"))
            those_behind = behind(gloo, fusion)
            passed = _count(gloo)["pass"]
            both = sum(gloo[test].kind == "skip" == fusion[test].kind for test in gloo if test in fusion)
            counts = [passed, _count(fusion)["pass"], f"{passed - len(those_behind)} of {passed}", both]
            if not fusion:
                counts[1:] = ["not run"] * 3
            lines.append(_row(f"`{suite}`{about}", _words(place), *counts))
            about = ""
            for test in those_behind:
                missed.setdefault(test, []).append(_words(place))
    if missed:
        lines += ["", "Tests that gloo passes and fusion does not:", ""]
        lines += [
            f"- `{test}` (ranks: {', '.join(places)}): {EXCEPTIONS.get(test, '')}"
            for test, places in sorted(missed.items())
        ]
    return "\n".join([*lines, "", ""])


def _count(outcomes: Mapping[str, Outcome]) -> Counter[str]:
    return Counter(outcome.kind for outcome in outcomes.values())


def _row(*columns: object) -> str:
    return f"| {' | '.join(map(str, columns))} |"


def _order(place: str) -> tuple[int, int]:
    parsed = Place.parse(place)
    return len(parsed.nodes), parsed.ranks


def _words(place: str) -> str:
    return place.replace("x", " × ")
