"""The page that `fusion-trace buckets` shows."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from fusion_rt.core.wording import counted
from fusion_trace.analyse.bucket_times import PHASES, BucketTimes, Plan, repeated
from fusion_trace.read.job import JobTrace
from fusion_trace.report.wording import console, duration, problems, size, table

MOST = 60  # that are shown


_ABOUT = (
    "run: from when a daemon has all parts until the results are there; kernels, queue, wire and take are within it. "
    "Queue, wire and take are of a single chunk: several are under way one after the other, and beside each other. "
    "Queue: it waits for credit, or for those before it on its link; wire: its link carries it"
)


def _shown(name: str) -> str:
    """Returns the name of a bucket or tensor for people; an operation without a name is called by its kind."""
    return name.removesuffix(".noname")


def show(trace: JobTrace, plans: Sequence[Plan], found: Sequence[BucketTimes]) -> None:
    """Prints the page."""
    out = console()
    out.print(Text(f"job {trace.job}: buckets, and where their time goes (medians)", "bold"))
    for plan in plans:
        about = f"{counted(len(plan.buckets), 'bucket')}, {size(plan.nbytes)}"
        out.print(f"plan {plan.number}: {about}, {duration(plan.at - trace.span[0])} after the first record")
    often = repeated(found)
    once, found = len(found) - len(often), often
    if not found:
        out.print("nothing was exchanged")
    else:
        rows = table("", "plan", "size", "tensors", "times", "handed over because", left=1)
        for bucket in found[:MOST]:
            reasons = ", ".join(f"{reason} {number}" for reason, number in bucket.flushes.items())
            rows.add_row(
                _shown(bucket.name),
                str(bucket.plan or ""),
                size(bucket.nbytes),
                str(bucket.tensors),
                str(bucket.times),
                reasons,
            )
        out.print(rows)
        out.print()
        shown = [phase for phase in PHASES if any(phase in bucket.phases for bucket in found)]
        # Two tables, since one of all phases is wider than most windows.
        for some in (shown[: (len(shown) + 1) // 2], shown[(len(shown) + 1) // 2 :]):
            rows = table("", *some)
            for bucket in found[:MOST]:
                rows.add_row(_shown(bucket.name), *(duration(bucket.phases.get(phase)) for phase in some))
            out.print(rows)
            out.print()
        out.print(_ABOUT, soft_wrap=True)
        if found[MOST:]:
            out.print(f"and {len(found) - MOST} more (--json has them all)")
        if once:
            out.print(f"and {counted(once, 'tensor')} exchanged only once (--json has them)")
    problems(out, trace.problems)
