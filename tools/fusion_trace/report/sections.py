"""The sections of a report: sentences, charts and tables. Texts are plain here; `html_page` escapes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusion_rt.core.wording import counted
from fusion_trace.analyse import critical_path
from fusion_trace.analyse.bucket_times import repeated
from fusion_trace.analyse.link_figures import LinkFigures
from fusion_trace.analyse.overlap import PARTS
from fusion_trace.report import charts, overlap_page, runs, stragglers_page, summary_page, timeline
from fusion_trace.report.charts import Chart
from fusion_trace.report.curves import RATES
from fusion_trace.report.figures import MOST_USED, Report
from fusion_trace.report.findings import Told, findings
from fusion_trace.report.runs import Run
from fusion_trace.report.wording import Table, duration, interval, share, size

MOST_ROWS = 64
LEAST_SHARE = 0.001  # of a step; activities on the path that are shorter are told together
DOUBTFUL = 0.05  # of the recorded steps, that their walk is off; beyond that the sentence about it is a warning


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        id: of the element, and before the names of its charts.
        title: above it.
        told: the findings.
        about: how to read it; a paragraph each.
        charts: below each other, or, if there is room, `beside` each other.
        tables: below them.
    """

    id: str
    title: str
    told: tuple[Told, ...] = ()
    about: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    beside: bool = False
    tables: tuple[Table, ...] = ()


def sections(report: Report, beside: Sequence[Run] = ()) -> tuple[Section, ...]:
    """Returns all sections, in order.

    Args:
        beside: other jobs.

    Raises:
        ChoiceError: one of them has too few steps to be compared.
    """
    if not report.ranks:
        return (_overview(report),)
    return (
        _overview(report),
        _ranks(report),
        *([_beside(report, beside)] if beside else []),
        _overlap(report),
        _stragglers(report),
        _links(report),
        _path(report),
        _timeline(report),
        _usage(report),
        _whatif(report),
    )


def _overview(report: Report) -> Section:
    found, trace = report.summary, report.trace
    facts = [
        ("job", found.job),
        ("begun", summary_page.begun(trace)),
        ("ranks", f"{len(trace.workers)} on {counted(len(trace.hosts), 'node')}"),
        ("recorded", f"{found.seconds:.1f} s, {found.records} records, {found.overwritten} of them overwritten"),
    ]
    if found.overlap is not None:
        steps = f"{found.overlap.steps} of all ranks together, numbers {min(rank.first for rank in found.ranks)} to "
        facts += [
            ("steps", steps + f"{max(rank.last for rank in found.ranks)}"),
            ("a step, median", duration(found.overlap.ns)),
            ("steps a second", f"{found.steps_per_second:.2f}"),
            ("handed over by a rank in a step", size(found.handed_over)),
            ("between hosts, all links together", f"{size(found.link_rate)} a second"),
            ("of communication hidden", share(found.overlap.hidden) or "there was none"),
        ]
    tables = [Table("", ("", ""), tuple(facts), left=2)]
    if found.ranks:
        tables.append(shortened(summary_page.step_times(trace, found.ranks[:MOST_ROWS]), len(found.ranks)))
    if found.odd:
        tables.append(
            shortened(Table("What is odd", ("",), tuple((each,) for each in found.odd[:MOST_ROWS])), len(found.odd))
        )
    return Section("overview", "Overview", told=findings(report), tables=tuple(tables))


def _ranks(report: Report) -> Section:
    rows = tuple(
        (f"rank {rank.rank}", str(rank.steps), duration(rank.ns), *(duration(rank.mean[part]) for part in PARTS),
         share(rank.hidden))
        for rank in report.ranks[:MOST_ROWS]
    )  # fmt: skip
    about = [
        "Compute: the script runs, and nothing is communicated for it. Overlapped: it runs, and communication is under "
        "way, which costs nothing. Exposed: it waits for communication. Waiting: it waits for other ranks. Idle: it is "
        "outside of forward, backward and step(). The five add up to the step."
    ]
    per = max((column.last - column.first + 1 for column in report.columns), default=1)
    if per > 1:
        about.append(
            f"In charts of single steps, each column is the mean of up to {per} that follow each other, and marks "
            "are the longest and the shortest of these."
        )
    about.append("A click on a step makes the page's address one of that step, for others to open.")
    if len(report.ranks) > charts.MOST_TO_CHOOSE:
        about.append(f"Single steps are drawn of the first {charts.MOST_TO_CHOOSE} ranks.")
    return Section(
        "ranks",
        "Where the time of a step goes",
        about=tuple(about),
        charts=(
            charts.rank_bars(report.ranks),
            charts.step_bars(report.columns, [rank.rank for rank in report.ranks]),
            charts.length_bars(report.lengths),
        ),
        tables=(
            shortened(Table("Means over steps", ("", "steps", "step", *PARTS, "hidden"), rows), len(report.ranks)),
            replace(overlap_page.single_steps(report.slowest), title="The slowest steps"),
        ),
    )


def _beside(report: Report, others: Sequence[Run]) -> Section:
    every = [runs.run_of(report.trace, report.chosen), *others]
    told = runs.verdicts(every[0], others)
    return Section(
        "beside",
        "Beside other jobs",
        told=tuple(Told(what, "", slower) for what, slower in told),
        about=(
            "Steps are the means over ranks. Of many that follow each other the longest is drawn. `fusion-trace diff` "
            "has the intervals of all differences between two jobs.",
        ),
        charts=runs.charts_of(every),
        tables=(runs.table(every),),
    )


def _overlap(report: Report) -> Section:
    overlapped = sum(rank.mean["overlapped"] for rank in report.ranks)
    exposed = sum(rank.mean["exposed"] for rank in report.ranks)
    told = Told("There was no communication in these steps.", "", False)
    if overlapped + exposed:
        hidden = overlapped / (overlapped + exposed)
        told = Told(f"{share(hidden)} of all communication is hidden behind computation.", "", False)
    often = repeated(report.buckets)
    once = len(report.buckets) - len(often)
    shown = often[: charts.MOST_BUCKETS]
    phases = ("fill", "run", "queue", "wire", "wait", "apply")
    rows = tuple(
        (
            bucket.name, str(bucket.plan or ""), size(bucket.nbytes), str(bucket.tensors), str(bucket.times),
            ", ".join(f"{reason} {times}" for reason, times in bucket.flushes.items()),
            *(duration(bucket.phases.get(phase)) for phase in phases),
        )
        for bucket in shown
    )  # fmt: skip
    head = ("bucket", "plan", "size", "tensors", "times", "handed over because", *phases)
    return Section(
        "overlap",
        "Overlap, step by step and bucket by bucket",
        told=(told,),
        about=(
            "A bucket whose exchange takes long and causes no wait is hidden; the last ones seldom are."
            + (
                f" Not listed: {counted(once, 'tensor')} exchanged only once, which `fusion-trace buckets` has."
                if once
                else ""
            ),
        ),
        charts=(charts.hidden_line(report.columns), charts.bucket_bars(often)),
        tables=(shortened(Table("Buckets (medians)", head, rows), len(often)),),
    )


def _stragglers(report: Report) -> Section:
    found = report.summary.stragglers
    steps = len({number for column in report.columns for number in range(column.first, column.last + 1)})
    told = tuple(Told(stragglers_page.sentence(report.trace, each) + ".", "", True) for each in found[:MOST_ROWS])
    what, well = stragglers_page.none_stands_out(report.trace, steps)
    nobody = Told(what[0].upper() + what[1:] + ".", "", not well)
    table = shortened(stragglers_page.rows_of(report.trace, found[:MOST_ROWS]), len(found))
    return Section(
        "stragglers",
        "Who is slower than the others",
        told=told or (nobody,),
        about=(
            "Red: in this step the rank's own work took longer than that of the median rank; blue: less long. "
            "`fusion-trace stragglers --json` has all steps in which a process is slow.",
        ),
        charts=(charts.slower_map(report.columns, [rank.rank for rank in report.ranks]),),
        tables=(table,) if found else (),
    )


def _links(report: Report) -> Section:
    links, trace = report.links, report.trace
    title = "Links between hosts"
    if not links:
        what = "no chunk was recorded" if len(trace.hosts) > 1 else "all ranks are on one node"
        return Section("links", title, about=(f"There is nothing to show: {what}.",))
    busiest = max(links, key=lambda link: link.busy)
    told = Told(
        f"The link from {trace.link_of(busiest.source, busiest.target)} is the busiest: something is on it in "
        f"{share(busiest.busy)} of the time.",
        "",
        False,
    )
    rows = tuple(
        (
            trace.host_of(link.source), trace.host_of(link.target), size(link.nbytes), str(link.chunks),
            share(link.busy),
            bandwidth(link),
            _latency(link),
            "not known" if link.clock_error < 0 else duration(link.clock_error),
        )
        for link in sorted(links, key=lambda link: -link.nbytes)[:MOST_ROWS]
    )  # fmt: skip
    payloads = [link.nbytes / 2**20 for link in links]
    head = ("from", "to", "payload", "chunks", "busy", "bandwidth", "latency", "clocks' error")
    return Section(
        "links",
        title,
        told=(told,),
        about=(
            "Bandwidth is that of payload while chunks follow each other without a gap, latency what else a chunk "
            "takes; neither is known of links that carried small chunks only. Links that share a network card share "
            "its bandwidth. It is a range where clocks are not known well, or where what passes after a pause may be "
            "a burst that is faster than the link. Latencies are not known better than the clocks.",
        ),
        beside=True,
        charts=(
            charts.link_matrix(
                trace, links, "payload, MiB", [(mib, f"{mib:,.{0 if mib >= 100 else 2}f}") for mib in payloads]
            ),
            charts.link_matrix(
                trace,
                links,
                "bandwidth, Mbit/s",
                [
                    (None if link.bandwidth is None else link.bandwidth * 8e-6, _in_cell(bandwidth(link), " Mbit/s"))
                    for link in links
                ],
            ),
            charts.link_matrix(trace, links, "latency, us", [_latency_cell(link) for link in links]),
        ),
        tables=(shortened(Table("Links", head, rows, 2), len(links)),),
    )


def bandwidth(link: LinkFigures) -> str:
    """Says how fast a link is, or may be; "" if that is not known."""
    if link.bandwidth is None or link.between is None:
        return ""
    low, high = (rate * 8e-6 for rate in link.between)
    return f"{link.bandwidth * 8e-6:,.0f} Mbit/s" if high < 1.1 * low else f"{low:,.0f} to {high:,.0f} Mbit/s"


def _latency(link: LinkFigures) -> str:
    if link.latency is None:
        return ""
    ns = link.latency * 1e9
    return f"below {duration(link.clock_error)}" if ns < link.clock_error else duration(ns)


def _latency_cell(link: LinkFigures) -> tuple[float | None, str]:
    """Returns the latency of a link in us, or the most that it may be, and how a matrix says it."""
    if link.latency is None:
        return None, ""
    us, error = link.latency * 1e6, link.clock_error / 1e3
    return (error, f"below<br>{error:,.0f}") if us < error else (us, f"{us:,.0f}")


def _in_cell(told: str, unit: str) -> str:
    """Returns a figure or range as a cell of a matrix has room for it."""
    return told.removesuffix(unit).replace(" to ", " to<br>")


def _path(report: Report) -> Section:
    path, longest, trace = report.path, report.longest, report.trace
    assert path is not None  # there are whole steps
    assert longest is not None
    whole = sum(each.step.ns for each in report.paths)
    sums = critical_path.totals(report.paths)
    (activity, place), most = next(iter(sums.items()))
    told = Told(
        f"Of {_of_steps(report)}, {activity} at {place.named(trace)} is {duration(most / len(report.paths))} of each "
        f"({share(most / whole)}), more than anything else.",
        "",
        False,
    )
    of_one, of_longest = critical_path.totals([path]), critical_path.totals([longest])
    every = dict.fromkeys([*sums, *of_one, *of_longest])
    columns = (sums, whole), (of_one, path.ns), (of_longest, longest.ns)
    shown = [what for what in every if any(its.get(what, 0) >= LEAST_SHARE * ns for its, ns in columns)][:MOST_ROWS]
    rest = [sum(ns for what, ns in its.items() if what not in shown) for its, _ in columns]
    rows = [
        (
            *(what[0], what[1].named(trace)),
            *(duration(sums.get(what, 0) / len(report.paths)), share(sums.get(what, 0) / whole)),
            *(duration(its[what]) if what in its else "" for its in (of_one, of_longest)),
        )
        for what in shown
    ]
    if len(shown) < len(every):
        less = (duration(rest[0] / len(report.paths)), share(rest[0] / whole), *(duration(ns) for ns in rest[1:]))
        rows.append((f"{len(every) - len(shown)} others", "", *less))
    head = ("mean of a step", "share", f"step {path.step.number}", f"step {longest.step.number}, the longest")
    table = Table("On the path", ("activity", "where", *head), tuple(rows), 2)
    sum_of = ("all of it", "", duration(whole / len(report.paths)), share(1.0), duration(path.ns), duration(longest.ns))
    drawn = {path.step.number: (path, "of median length"), longest.step.number: (longest, "the longest")}
    return Section(
        "critical-path",
        "Critical path",
        told=(told,),
        about=(
            "The path goes back from the moment when the last rank ends the step: who was busy then, what that had "
            "waited for, who was busy with it, and so on. To shorten the step, make an activity on the path faster. "
            "`fusion-trace critical-path --steps A --beside B` shows any two steps beside each other.",
        ),
        charts=tuple(
            charts.path_chart(trace, each.segments, each.step.begin, f"{number}, {why} ({duration(each.ns)})")
            for number, (each, why) in drawn.items()
        ),
        tables=(Table(table.title, table.columns, (*table.rows, sum_of), table.left),),
    )


def _of_steps(report: Report) -> str:
    """Returns which steps' paths are summed."""
    steps = len({number for column in report.columns for number in range(column.first, column.last + 1)})
    paths = len(report.paths)
    return f"{paths} steps spread over all" if paths < steps else counted(paths, "step")


def _usage(report: Report) -> Section:
    trace = report.trace
    about = [
        "Processors: how many were busy for a process, between the ends of two of a worker's steps, or of a daemon's "
        "operations. Memory is resident memory, with the shared memory that workers and their daemon both have.",
    ]
    if len(trace.workers) > MOST_USED:
        about.append(f"Drawn are the first {MOST_USED} ranks, and the daemons of their nodes.")
    kinds = (
        ("busy processors", [(used, used.processors) for used in report.used], 1.0),
        ("memory, GiB", [(used, used.memory) for used in report.used], 2.0**30),
        ("memory on GPUs, GiB", [(used, used.on_gpus) for used in report.used], 2.0**30),
    )
    shown = [(title, [each for each in curves if len(each[1].values)], unit) for title, curves, unit in kinds]
    shown = [each for each in shown if each[1]]
    if not shown:
        return Section("usage", "Processors and memory", about=("Nothing of it was recorded.",))
    rows = tuple(
        (
            trace.name_of(used.process),
            *("" if value is None else f"{value:.2f}" for value in (used.mean, used.processors.most)),
            *("" if not len(used.memory.values) else size(float(used.memory.values[end])) for end in (0, -1)),
            *("" if curve.most is None else size(curve.most) for curve in (used.memory, used.on_gpus)),
        )
        for used in report.used
    )
    head = ("", "busy processors", "at most", "memory at first", "at last", "at most", "on GPUs, at most")
    return Section(
        "usage",
        "Processors and memory",
        about=tuple(about),
        charts=tuple(charts.usage_lines(trace, curves, title, unit) for title, curves, unit in shown),
        tables=(Table("In all", head, rows),),
    )


def _timeline(report: Report) -> Section:
    ranks = max(len({part.rank for part in report.ranks}), 1)
    about = [
        "The whole recording of a step; the menu has others, and --timeline A:B draws those you name. Turn the "
        "wheel, spread two fingers, press + and -, or use the buttons to look closer; drag, or press the arrow "
        "keys, to move; press 0 for the whole step.",
    ]
    if ranks > timeline.MOST_RANKS:
        about.append(f"Drawn are the first {timeline.MOST_RANKS} ranks, and the daemons of their nodes.")
    if any(step.left_out for step in report.drawn):
        most = max(report.drawn, key=lambda step: step.left_out)
        about.append(f"The shortest activities are left out: {most.left_out} of step {most.number}, for example.")
    return Section("timeline", "Timeline of single steps", about=tuple(about), charts=(charts.timeline(report.drawn),))


def _whatif(report: Report) -> Section:
    curves = report.curves
    title = "What if links were faster, or slower"
    if not curves.curves:
        return Section("whatif", title, about=(f"Left out: {curves.why_not}.",))
    told = Told(
        f"The model's walk through the recorded steps is {share(abs(curves.error))} too "
        f"{'long' if curves.error > 0 else 'short'}.",
        "",
        abs(curves.error) > DOUBTFUL,
    )
    about = (
        f"Steps {curves.steps[0]} to {curves.steps[1]}, predicted with every link of that rate; latencies as recorded. "
        "Bands and parentheses are ranges, whose reasons `fusion-trace whatif` tells; the cross is the recording. The "
        "costs of other codecs were measured on the machine that wrote this page.",
        *(f"Note: {problem}." for problem in curves.problems),
    )
    rows = tuple(
        (charts.rate_of(rate), *(interval(curve.steps[place]) for curve in curves.curves))
        for place, rate in enumerate(RATES)
    )
    head = ("every link", *(curve.title for curve in curves.curves))
    return Section(
        "whatif",
        title,
        told=(told,),
        about=about,
        charts=(charts.curve_chart(curves),),
        tables=(Table("A step", head, rows),),
    )


def shortened(table: Table, of: int) -> Table:
    """Adds a row to a table that says how many of all `of` rows it has not, if any."""
    missing = of - len(table.rows)
    more = (f"and {missing} more", *[""] * (len(table.columns) - 1))
    return replace(table, rows=(*table.rows, more)) if missing > 0 else table
