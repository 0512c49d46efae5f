"""Targets: rings of records, as a directory that others can write to may have them, and every command that reads them.

An input is a few rings without the zeros in between: each begins with the lengths of its header, names and records.
"""

from __future__ import annotations

import atexit
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import cache, partial
from io import StringIO

from fusion_rt.core.errors import FusionError
from fusion_rt.tracing.format import HEADER_NBYTES, MAGIC, NAMES_AT, NAMES_NBYTES, RECORD
from fusion_trace.analyse import bucket_times, critical_path, diff, overlap, stragglers, summary, tensor, unfinished
from fusion_trace.analyse.recorded_steps import understand
from fusion_trace.analyse.whatif import Change, answer
from fusion_trace.cli.jobs import with_failures
from fusion_trace.export import chrome, table_file
from fusion_trace.export.picture import draw
from fusion_trace.read import job
from fusion_trace.read.job import JobTrace
from fusion_trace.report import (
    buckets_page,
    critical_path_page,
    diff_page,
    hang_page,
    overlap_page,
    stragglers_page,
    summary_page,
    tensor_page,
    whatif_page,
)
from fusion_trace.report.figures import analyse
from fusion_trace.report.findings import findings
from tests.fuzz.engine import Target
from tests.tools.synthetic import Job, cheap, simulate

_LENGTHS = struct.Struct("<HHH")
_HEADER = 320  # bytes of a header that are not zero, in seeds
_WORDS = (
    b"\xff\xff\xff\xff", b"\xff" * 8, b"\xff" * 7 + b"\x7f", b"\x00" * 7 + b"\x80", b"\x1b[2J", b"=cmd", b"\xfe\xff",
    b"bucket 0", MAGIC,
)  # fmt: skip


def targets() -> list[Target]:
    """Rings that are read, and that are shown by each command."""
    seeds = [_seed(Job(steps=3, buckets=2, tensors=1)), _seed(Job(nodes=1, ranks_per_node=2, steps=9, buckets=1))]
    return [
        Target("rings", seeds, _read, (FusionError,), words=_WORDS, cost=10),
        *(
            Target(f"rings, {name}", seeds, partial(_shown, show), (FusionError,), 64 << 20, words=_WORDS, cost=200)
            for name, show in _COMMANDS.items()
        ),
    ]


def _seed(shape: Job) -> bytes:
    return b"".join(_packed(tape.encoded()) for tape in simulate(shape).tapes.values())


def _packed(ring: bytes) -> bytes:
    names = int.from_bytes(ring[NAMES_AT : NAMES_AT + 4], "little")
    records = ring[HEADER_NBYTES + NAMES_NBYTES :].rstrip(b"\0")
    records += bytes(-len(records) % RECORD.size)
    return (
        _LENGTHS.pack(_HEADER, names, len(records))
        + ring[:_HEADER]
        + ring[HEADER_NBYTES : HEADER_NBYTES + names]
        + records
    )


@cache
def _directory() -> str:
    directory = tempfile.mkdtemp(prefix="fuzz")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def _files(data: bytes) -> Iterator[str]:
    """Makes the files of an input; yields their paths."""
    number = 0
    while len(data) >= _LENGTHS.size and number < 8:
        header, names, records = _LENGTHS.unpack_from(data)
        data = data[_LENGTHS.size :]
        path = os.path.join(_directory(), f"{number}.ring")
        with open(path, "wb") as file:
            for at, nbytes in (0, header), (HEADER_NBYTES, names), (HEADER_NBYTES + NAMES_NBYTES, records):
                file.seek(at)
                file.write(data[:nbytes])
                data = data[nbytes:]
        yield path
        number += 1


def _load(data: bytes) -> JobTrace:
    return with_failures(job.load(list(_files(data)) or [_directory()], _directory()))


def _read(data: bytes) -> bool:
    trace = _load(data)
    for text in (trace.job, trace.command, *trace.names, *trace.problems, *trace.hosts.values()):
        assert text.isprintable(), text
    return True


def _shown(show: Callable[[JobTrace], None], data: bytes) -> bool:
    trace = _load(data)
    with redirect_stdout(StringIO()) as out:
        show(trace)
    assert "\x1b" not in out.getvalue()
    return True


# --- what each command does -------------------------------------------------------------------------------------------


def _summary(trace: JobTrace) -> None:
    found = summary.find(trace)
    summary.document(found, trace)
    summary_page.show(trace, found)


def _overlap(trace: JobTrace) -> None:
    overlap.document(trace)
    overlap_page.show(trace, overlap.partitions(trace), True)


def _stragglers(trace: JobTrace) -> None:
    found = stragglers.find(trace)
    stragglers.document(trace, found)
    stragglers_page.show(trace, found, len(overlap.by_step(overlap.partitions(trace))))


def _buckets(trace: JobTrace) -> None:
    found = bucket_times.find(trace)
    bucket_times.document(trace, found)
    buckets_page.show(trace, bucket_times.plans(trace), found)


def _tensor(trace: JobTrace) -> None:
    found = tensor.find(trace, "bucket 0")
    tensor.document(trace, found)
    tensor_page.show(trace, found)


def _critical_path(trace: JobTrace) -> None:
    paths = critical_path.find(trace)
    critical_path.document(trace, paths, ())
    critical_path_page.show(trace, paths, True, None)


def _diff(trace: JobTrace) -> None:
    samples = diff.samples(trace)
    found = diff.compare(samples, samples, 0.95, 0)
    diff.document(trace, trace, found, 0.95)
    diff_page.show(trace, trace, found, 0.95)


def _hang(trace: JobTrace) -> None:
    ending = unfinished.ending(trace)
    ending.document()
    hang_page.print_lines(hang_page.ending_lines(ending))


def _whatif(trace: JobTrace) -> None:
    change = Change(rate=1e9)
    recorded = understand(trace)
    found = answer(recorded, change)
    whatif_page.as_document(trace, recorded, change, found)
    whatif_page.show(trace, recorded, change, found)


def _report(trace: JobTrace) -> None:
    findings(analyse(trace, measure=cheap))


def _convert(trace: JobTrace) -> None:
    path = os.path.join(_directory(), "out")
    chrome.write(path, chrome.lines(draw(trace)), chrome.about(trace))
    table_file.write(path, trace)


_COMMANDS: dict[str, Callable[[JobTrace], None]] = {
    "summary": _summary,
    "overlap": _overlap,
    "stragglers": _stragglers,
    "buckets": _buckets,
    "tensor": _tensor,
    "critical-path": _critical_path,
    "diff": _diff,
    "hang": _hang,
    "whatif": _whatif,
    "report": _report,
    "convert": _convert,
}
