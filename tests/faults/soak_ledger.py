"""All that the workers of the elastic soak have told, compared with what a single process would make of the same steps.

Where all go back to a commit, steps are taken again by other ranks: a *lineage* is a sequence of steps without that,
and has the number of the membership epoch that began it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.faults import survivor
from tests.faults.jobs import Array, total

SLOTS = (2, 1, 2, 1)  # of each host
SIZE = sum(SLOTS)


@dataclass
class WorkerState:
    """Describes a worker by its own notes.

    Attributes:
        place: host and slot.
        counted: when steps of it ended that count.
        rank, size, epoch: of the last of them.
        ended: it has told that it ends.
    """

    pid: int
    place: str
    counted: list[float] = field(default_factory=list)
    rank: int = -1
    size: int = 0
    epoch: int = 0
    ended: bool = False


class Ledger:
    """All that workers have told of their steps.

    Attributes:
        problems: what was wrong.
        size: by lineage and step: the number of ranks that it is of.
        starts: by lineage: the step from which it goes on.
        rollbacks: how often all went back to a commit, and `repeated_steps`, of how many steps.
        void: steps that only ranks which were lost have taken, and the others have left out.
        epochs: by epoch of the data: samples that did not count, and those that counted again.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.starts: dict[int, int] = {}
        self.size: dict[tuple[int, int], int] = {}
        self.rollbacks = self.repeated_steps = self.left_out = self.checked = self.void = 0
        self.epochs: dict[int, tuple[int, int]] = {}
        self._digests: dict[tuple[int, int], tuple[int, str]] = {}  # and the last epoch that says so
        self._last: dict[int, int] = {}  # step of a lineage
        self._models: list[tuple[int, list[float], str]] = []

    @property
    def steps(self) -> int:
        """Number of steps that the model has in it."""
        return self._last.get(max(self.starts, default=0), 0)

    def take(self, note: dict[str, Any]) -> None:
        """Takes a note, in order of time."""
        who = f"the worker {note['place']} (process {note['pid']}) in membership epoch {note['epoch']}"
        if note.get("wrong"):
            self.problems.append(f"{who}: {note['wrong']}")
        what = note["what"]
        if what == "synced":
            self._begin(note, who)
        elif what == "step" and note["counts"]:
            self._count(note, who)
        elif what == "step":
            self.left_out += 1
        elif what == "epoch":
            self.epochs[note["done"]] = note["lost"], note["repeated"]
        elif what == "ends":
            self._models.append((note["step"], note["sums"], note["digest"]))
            if not note["periodic"]:
                self.problems.append(f"{who}: sums that should be equal differ")

    def _begin(self, note: dict[str, Any], who: str) -> None:
        epoch, step = note["epoch"], note["step"]
        if epoch not in self.starts:
            before, lost = self._of(epoch), self.steps - step
            self.rollbacks += lost > 0
            self.repeated_steps += max(lost, 0)
            self.starts[epoch] = step
            if (before, step) in self._digests:
                self._digests[epoch, step] = epoch, self._digests[before, step][1]
        if self.starts[epoch] != step:
            self.problems.append(f"{who}: it begins at step {step}, and others do at {self.starts[epoch]}")
        self._compare(epoch, note, who)

    def _count(self, note: dict[str, Any], who: str) -> None:
        lineage, step, size = self._of(note["epoch"]), note["step"], note["size"]
        if self._compare(lineage, note, who) and self.size.setdefault((lineage, step), size) != size:
            self.problems.append(f"{who}: step {step} is of {size} ranks, and others say {self.size[lineage, step]}")

    def _compare(self, lineage: int, note: dict[str, Any], who: str) -> bool:
        """Compares parameters with those of other ranks after the same step; returns whether the step counts.

        A rank that is cut off may have the results of a step that all others leave out: they take it without that rank,
        in a later membership epoch. Digests are of all steps so far, so that a rank which had it and is still there
        would differ from then on.
        """
        self.checked += 1
        key, epoch, digest = (lineage, note["step"]), note["epoch"], note["digest"]
        known = self._digests.setdefault(key, (epoch, digest))
        self._last[lineage] = max(note["step"], self._last.get(lineage, 0))
        if known[1] == digest:
            self._digests[key] = max(known[0], epoch), digest
            return True
        if known[0] == epoch:
            self.problems.append(f"{who}: parameters after step {note['step']} are not those of other ranks")
            return False
        self.void += 1
        if epoch < known[0]:
            return False
        self._digests[key] = epoch, digest
        self.size.pop(key, None)
        return True

    def _of(self, epoch: int) -> int:
        """Returns the lineage in a membership epoch."""
        return max((one for one in self.starts if one <= epoch), default=0)

    def check_end(self) -> None:
        """Compares the models of the end with that of a single process."""
        if len(self._models) != SIZE:
            self.problems.append(f"{len(self._models)} workers of {SIZE} have told their model in the end")
        if len({(step, digest) for step, _, digest in self._models}) > 1:
            self.problems.append("models differ in the end")
        found = self.reference(self.steps)
        if found is None:
            self.problems.append("there are steps of which no rank has told the size")
            return
        for step, sums, _ in self._models:
            if step != self.steps or not np.array_equal(np.array(sums), found):
                self.problems.append(f"the model after {step} steps is not what a single process makes of {self.steps}")

    def reference(self, until: int) -> Array | None:
        """Returns what a single process would have after so many steps; None if the size of one is not known."""
        made = np.zeros(survivor.PERIOD, np.int64)
        for its in sorted(self.starts):
            ends = min([until, *(start for later, start in self.starts.items() if later > its)])
            for step in range(self.starts[its] + 1, ends + 1):
                if (its, step) not in self.size:
                    return None
                made += total(range(self.size[its, step]), step - 1, survivor.PERIOD)
        return made

    def check_samples(self) -> tuple[int, int]:
        """Returns the samples that did not count in their epoch, and those that counted again; notes what is wrong.

        At the end of an epoch, fewer samples than there are ranks are repeated, so that all get equally many; and once
        more if samples of lost ranks came late.
        """
        for epoch, (lost, repeated) in self.epochs.items():
            if lost or repeated > 2 * (SIZE - 1):
                self.problems.append(f"in epoch {epoch} {lost} samples were lost, and {repeated} repeated")
        return sum(lost for lost, _ in self.epochs.values()), sum(repeated for _, repeated in self.epochs.values())
