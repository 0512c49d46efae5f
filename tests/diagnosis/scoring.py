"""What the tools say of a case, and whether that is right."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from fusion_trace.analyse import endings, stragglers
from fusion_trace.analyse.gaps import unseen
from fusion_trace.analyse.stragglers import Finding
from tests.diagnosis.cases import Case
from tests.diagnosis.generator import Fault, make

MATERIAL = 0.04  # of the time of all steps: what costs less may be told, and need not be


@dataclass(frozen=True)
class Verdict:
    """What was said of a case.

    Attributes:
        right, wrong: how many of the findings are about the fault, and how many are not.
        asked: whether the fault has to be said.
        found: whether it was.
        error: of its cost, as a share of the true one; None if it was not found, or has none.
        regular: whether the period is told rightly; None if there is none.
        told: the findings in short.
    """

    case: Case
    right: int
    wrong: int
    asked: bool
    found: bool
    error: float | None
    regular: bool | None
    told: str


def judge(case: Case) -> Verdict:
    """Makes a case's job, has it explained, and compares."""
    made = make(case.shape, case.injected, case.hidden)
    findings = stragglers.find(made.trace)
    told = ", ".join(
        f"{each.cause} {_place(each)} {each.lost / 1e6:.1f} ms {each.share:.1%} {len(each.steps)}/{each.of}"
        f" p={each.chance:.3f}"
        for each in findings
    )
    fault = case.injected
    if fault is None:
        return Verdict(case, 0, len(findings), False, False, None, None, told)
    if case.fault.startswith("killed"):
        dead = endings.find(made.trace).dead
        named = {(each.what, each.number) for each in dead}
        truth = {("rank", rank) for rank in fault.ranks} | {("node", node) for node in fault.nodes}
        told += f"; dead: {sorted(named)}"
        return Verdict(
            case, len(named & truth), len(findings) + len(named - truth), True, truth <= named, None, None, told
        )
    if case.hidden:
        said = set(unseen(made.trace).hosts) == case.hidden
        return Verdict(case, int(said), len(findings), True, said, None, None, told)
    right = [each for each in findings if is_right(each, fault, case)]
    material = made.cost >= MATERIAL * made.took
    cost = sum(each.lost for each in right)
    error = abs(cost - made.cost) / made.cost if right and material else None
    regular = None
    if right and case.every and sum(case.injected.when if case.injected else ()) >= 3:
        regular = any(each.every == case.every for each in right)
    told += f"; truth {made.cost / 1e6:.1f} ms {made.cost / made.took:.1%}"
    return Verdict(case, len(right), len(findings) - len(right), material, bool(right), error, regular, told)


def _place(finding: Finding) -> str:
    if finding.rank is not None:
        return f"rank {finding.rank}"
    return f"node {finding.node}" if finding.node is not None else f"link {finding.link}"


def is_right(finding: Finding, fault: Fault, case: Case) -> bool:
    """Says whether a finding is about the fault."""
    if fault.what == "link":
        if finding.cause != "wire":
            return False
        return finding.link in fault.links or (bool(fault.nodes) and finding.node in fault.nodes)
    if fault.what in ("daemon", "negotiation"):
        return finding.cause == fault.what and finding.node in fault.nodes
    if case.fault == "host":
        return finding.cause == "compute" and (finding.node in fault.nodes or finding.rank in fault.ranks)
    return finding.cause == "compute" and finding.rank in fault.ranks


@dataclass(frozen=True)
class Score:
    """Of many cases: shares, and the median error of the cost."""

    cases: int
    precision: float
    recall: float
    error: float
    regular: float


def score(verdicts: Iterable[Verdict]) -> Score:
    """Adds verdicts on faulty jobs up."""
    its = list(verdicts)
    right, wrong = sum(each.right for each in its), sum(each.wrong for each in its)
    asked = [each for each in its if each.asked]
    errors = [each.error for each in its if each.error is not None]
    regular = [each.regular for each in its if each.regular is not None]
    return Score(
        len(its),
        right / max(1, right + wrong),
        sum(each.found for each in asked) / max(1, len(asked)),
        float(np.median(errors)) if errors else 0.0,
        sum(regular) / max(1, len(regular)),
    )


def rows(verdicts: Iterable[Verdict], by: str) -> Iterator[tuple[str, Score]]:
    """Yields the score of each kind of case: by `fault` or `pattern`."""
    groups: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        groups.setdefault(getattr(verdict.case, by), []).append(verdict)
    for name, its in groups.items():
        yield name, score(its)
