"""Writes all records of a job as CSV: a line each, on the job's axis of time."""

from __future__ import annotations

import csv
import io

from fusion_rt.tracing.format import NOBODY, Kind, Role
from fusion_trace.export.output_file import opened
from fusion_trace.read.job import JobTrace

COLUMNS = ("time_ns", "role", "rank", "node", "host", "kind", "name", "clock", "plan", "value", "extra", "peer")

_FORMULA = (
    "=",
    "+",
    "-",
    "@",
    "\t",
    "\r",
)  # the first characters of a cell that a spreadsheet evaluates (OWASP, CSV injection)


def write(path: str, trace: JobTrace) -> int:
    """Writes them to a file, process by process and by time, compressed if it ends in .gz. Returns how many there are.

    A daemon has no rank; `time_ns` is on node 0's clock. A name that a spreadsheet would take for a formula begins with
    an apostrophe.

    Raises:
        OSError: the file cannot be written.
    """
    number = 0
    with opened(path) as opened_file, io.TextIOWrapper(opened_file, encoding="utf-8", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(COLUMNS)
        for process in trace.processes:
            role = Role(process.role).name.lower()
            rank = str(process.rank) if process.role == Role.WORKER else ""
            for time, value, clock, name, plan, extra, kind, peer in process.records.tolist():
                shown = "" if peer == NOBODY else peer
                row = (time, role, rank, process.node, _cell(process.host), Kind(kind).name, _cell(trace.names[name]))
                out.writerow((*row, clock, plan, value, extra, shown))
                number += 1
    return number


def _cell(text: str) -> str:
    return f"'{text}" if text.startswith(_FORMULA) else text
