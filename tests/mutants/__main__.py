"""Changes one operator or constant at a time, and tells which changes no test finds.

    python -m tests.mutants                            a sample of 300, on all cores; goes on where it was interrupted
    python -m tests.mutants --sample 40 --group codecs --seed 7
    python -m tests.mutants --list                     the sample, without trying it
    python -m tests.mutants --again                    tries those that survived once more, with the tests of today
    python -m tests.mutants --again 1f2e3d4c5b6a       one of them, and shows what pytest printed
    python -m tests.mutants --fresh                    forgets all that was done

Work lies in build/mutants: Cosmic Ray's database, which lines each test runs, and copies of the tree. The tree itself
is left alone. tests/mutants/results.json has what was found, harmless.json why nothing depends on a survivor.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.mutants import changes
from tests.mutants.changes import Change
from tests.mutants.choice import Watched, watch
from tests.mutants.places import GROUPS, shares
from tests.mutants.trial import Copy, Verdict, copy_tree

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "mutants"
TREE = FOLDER / "tree"  # as it was when the command began: whoever edits it meanwhile changes nothing
RESULTS = Path(__file__).with_name("results.json")
HARMLESS = Path(__file__).with_name("harmless.json")
WANTED = 0.9  # of the sample has to be found, but for what is harmless


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=300, help="changes")
    parser.add_argument("--seed", type=int, default=37)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="changes that are tried at a time")
    parser.add_argument("--group", choices=GROUPS, action="append", help="only these folders")
    parser.add_argument("--list", action="store_true", help="show the sample")
    parser.add_argument(
        "--most", type=float, default=20.0, help="seconds of tests in a first round; those left get all"
    )
    parser.add_argument("--quick", action="store_true", help="leave all further tests of survivors for later")
    parser.add_argument("--again", nargs="*", metavar="NAME", help="try survivors once more")
    parser.add_argument("--fresh", action="store_true", help="forget earlier work")
    parser.add_argument("--report", action="store_true", help="only write results.json")
    choices = parser.parse_args()
    if choices.fresh:
        shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    copy_tree(ROOT, TREE)
    drawn = draw(choices.group or list(GROUPS), choices.sample, choices.seed)
    if choices.list:
        for group, change in drawn:
            print(f"{group:16} {change.name} {change.module}:{change.start[0]} {change.operator[5:]}: {change.line}")
        return 0
    work = Work(FOLDER / "work.sqlite")
    if choices.again is not None:
        pending = [(group, change) for group, change in drawn if work.survived(change)]
        if choices.again:
            pending = [(group, change) for group, change in drawn if change.name in choices.again]
    else:
        pending = [(group, change) for group, change in drawn if work.result(change) is None]
    if not choices.report:
        work.remember(drawn)
        if choices.again is None:
            attempt_all(pending, work, choices.jobs, choices.most)
            known = json.loads(HARMLESS.read_text(encoding="utf-8"))
            left = [(group, change) for group, change in drawn if work.survived(change, some=True)]
            pending = [each for each in left if not choices.quick and each[1].name not in known]
        attempt_all(pending, work, choices.jobs, math.inf, talkative=bool(choices.again))
    return report(drawn, work, choices)


def draw(groups: Sequence[str], total: int, seed: int) -> list[tuple[str, Change]]:
    """Draws the sample: from each group its share. Those of all groups are mixed, so that any beginning is a sample."""
    found = {
        group: changes.sample(
            [change for module in GROUPS[group].modules(TREE) for change in changes.of_module(TREE, module)], seed
        )
        for group in groups
    }
    given = shares({group: len(each) for group, each in found.items()}, total)
    drawn = [(group, change) for group, each in found.items() for change in each[: given[group]]]
    return sorted(drawn, key=lambda each: changes.lot(seed, each[1]))


class Work:
    """What was done, in Cosmic Ray's database: a work item for each change, named as the change is."""

    def __init__(self, path: Path) -> None:
        from cosmic_ray.work_db import WorkDB

        self._db = WorkDB(str(path), WorkDB.Mode.create)
        self._lock = threading.Lock()
        self._results: dict[str, dict[str, Any]] = {name: json.loads(each.output) for name, each in self._db.results}

    def remember(self, drawn: Sequence[tuple[str, Change]]) -> None:
        """Adds the changes that are not in it."""
        from cosmic_ray.work_item import MutationSpec, WorkItem

        there = {item.job_id for item in self._db.work_items}
        self._db.add_work_items(
            WorkItem.single(
                change.name,
                MutationSpec(
                    Path(change.module),
                    change.operator,
                    change.occurrence,
                    change.start,
                    change.end,
                    definition_name=change.definition,
                ),
            )
            for _, change in drawn
            if change.name not in there
        )

    def result(self, change: Change) -> dict[str, Any] | None:
        """Returns the last verdict on a change, or nothing."""
        return self._results.get(change.name)

    def survived(self, change: Change, some: bool = False) -> bool:
        """Says whether no test found a change so far; with `some`, whether only some tests were tried."""
        result = self.result(change)
        return result is not None and result["outcome"] == "survived" and (not some or result.get("some", False))

    def record(self, change: Change, verdict: Verdict, some: bool) -> None:
        """Keeps a verdict of all tests, or some, and what the first one was."""
        from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkResult

        before = self._results.get(change.name, {})
        outcome = {
            "outcome": verdict.outcome,
            "first": verdict.outcome if before.get("some", True) else before["first"],
            "some": some,
            "by": verdict.by,
            "seconds": round(verdict.seconds, 1),
        }
        killed = TestOutcome.SURVIVED if verdict.outcome == "survived" else TestOutcome.KILLED
        with self._lock:
            self._results[change.name] = outcome
            self._db.set_result(change.name, WorkResult(WorkerOutcome.NORMAL, json.dumps(outcome), killed))


def attempt_all(
    pending: Sequence[tuple[str, Change]], work: Work, jobs: int, most: float, talkative: bool = False
) -> None:
    """Tries changes, some at a time."""
    if not pending:
        return
    watched: dict[str, Watched] = {}
    for group in GROUPS:
        if any(group == each for each, _ in pending):
            watched[group] = watch(TREE, FOLDER / "watched" / group, GROUPS[group].tests)
    todo: queue.SimpleQueue[tuple[str, Change]] = queue.SimpleQueue()
    for each in pending:
        todo.put(each)
    done = Counter[str]()
    began = time.monotonic()

    def work_on(copy: Copy) -> None:
        try:
            while True:
                group, change = todo.get_nowait()
                verdict = attempt(copy, watched[group], change, most)
                work.record(change, verdict, most < math.inf)
                done[verdict.outcome] += 1
                progress = f"[{done.total()}/{len(pending)} {time.monotonic() - began:.0f} s]"
                place = f"{change.module}:{change.start[0]} {change.operator[5:]}"
                print(progress, verdict.outcome, change.name, place, f"{verdict.seconds:.1f} s", verdict.by, flush=True)
                if talkative:
                    print(verdict.output)
        except queue.Empty:
            pass
        finally:
            copy.close()

    copies = [Copy(TREE, FOLDER / f"copy-{number}") for number in range(min(jobs, len(pending)))]
    with ThreadPoolExecutor(len(copies)) as threads:
        for future in [threads.submit(work_on, copy) for copy in copies]:
            future.result()


def attempt(copy: Copy, watched: Watched, change: Change, most: float) -> Verdict:
    """Tries one change."""
    source = (TREE / change.module).read_text(encoding="utf-8")
    code = changes.mutated(source, change.operator, change.occurrence)
    tests = watched.tests_of(source, change, most)
    spent, known = 0.0, list(watched.tests) if most == math.inf else ()  # new tests can wait
    for files, some in watched.rounds(TREE, tests, most < math.inf):
        while True:
            verdict = copy.attempt(change.module, code, files, some, known, watched.limit(some))
            spent += verdict.seconds
            if "::" not in verdict.by or verdict.by in watched.tests:
                break
            # The test has come since tests were watched. Does it pass without the change?
            file = verdict.by.partition("::")[0]
            again = copy.attempt(change.module, source, [file], [verdict.by], (), watched.limit(some))
            watched.meet(verdict.by, again.outcome != "survived", again.seconds)
            if again.outcome == "survived":
                break
        if verdict.outcome != "survived":
            break
    return verdict._replace(seconds=spent)


def report(drawn: Sequence[tuple[str, Change]], work: Work, choices: argparse.Namespace) -> int:
    """Writes and prints what became of the sample. Fails when too few were found, or a survivor was not looked at."""
    harmless = json.loads(HARMLESS.read_text(encoding="utf-8"))
    entries = []
    for group, change in drawn:
        result = work.result(change)
        outcome = result["outcome"] if result else "not tried"
        if result and result["first"] == "survived" and outcome != "survived":
            outcome = "mended"
        elif outcome == "survived" and change.name in harmless:
            outcome = "harmless"
        entries.append(
            {
                "name": change.name,
                "group": group,
                "outcome": outcome,
                "module": change.module,
                "in": change.definition,
                "line": change.line,
                "becomes": changes.line_of(TREE, change),
                "by": result["by"] if result else "",
                "seconds": result["seconds"] if result else 0.0,
            }
        )
    counts = Counter(str(entry["outcome"]) for entry in entries)
    by_group = {
        group: dict(Counter(str(entry["outcome"]) for entry in entries if entry["group"] == group)) for group in GROUPS
    }
    tried = counts.total() - counts["not tried"]
    first = counts["found"] + counts["timeout"]
    summary = {"seed": choices.seed, "tried": tried, **counts, "groups": {k: v for k, v in by_group.items() if v}}
    if (not choices.group and choices.again is None) or choices.report:
        RESULTS.write_text(json.dumps({"summary": summary, "changes": entries}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary, indent=1))
    for entry in entries:
        if entry["outcome"] == "survived":
            print(
                f"survived: {entry['name']} {entry['module']}, {entry['in']}:\n  {entry['line']}\n  {entry['becomes']}"
            )
    found, matter = first + counts["mended"], tried - counts["harmless"]
    print(f"{first} of {tried} were found at first ({first / max(tried, 1):.0%})")
    print(f"{found} of {matter} that are not harmless are found by now ({found / max(matter, 1):.0%})")
    return 0 if found >= WANTED * matter and not counts["survived"] else 1


if __name__ == "__main__":
    sys.exit(main())
