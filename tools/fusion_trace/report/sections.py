"""The sections of a report: sentences, charts and tables. Texts are plain here; `html_page` escapes them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusion_trace.analyse import critical_path
from fusion_trace.analyse.link_figures import LinkFigures
from fusion_trace.analyse.overlap import PARTS
from fusion_trace.report import charts, overlap_page, stragglers_page, summary_page, timeline
from fusion_trace.report.charts import Chart
from fusion_trace.report.curves import BANDWIDTHS
from fusion_trace.report.figures import Report
from fusion_trace.report.findings import Told, findings
from fusion_trace.report.wording import Table, count, duration, share, size

MOST_ROWS = 64
DOUBTFUL = 0.05  # of a replay; beyond that the sentence about it is a warning


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        id: of the element, and before the names of its charts.
        title: above it.
        told: what was found.
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


def sections(report: Report) -> tuple[Section, ...]:
    """Returns all sections, in order."""
    if not report.ranks:
        return (_overview(report),)
    return (
        _overview(report),
        _ranks(report),
        _overlap(report),
        _stragglers(report),
        _links(report),
        _path(report),
        _timeline(report),
        _whatif(report),
    )


def _overview(report: Report) -> Section:
    found, trace = report.summary, report.trace
    facts = [
        ("job", found.job),
        ("ranks", f"{len(trace.workers)} on {count(len(trace.hosts), 'node')}"),
        ("recorded", f"{found.seconds:.1f} s, {found.records} records, {found.overwritten} of them overwritten"),
    ]
    if found.overlap is not None:
        steps = f"{found.overlap.steps} of all ranks together, numbers {min(rank.first for rank in found.ranks)} to "
        facts += [
            ("steps", steps + f"{max(rank.last for rank in found.ranks)}"),
            ("a step, median", duration(found.overlap.ns)),
            ("steps a second", f"{found.steps_per_second:.2f}"),
            ("handed over by a rank in a step", size(found.handed_over)),
            ("between hosts", f"{size(found.link_rate)} a second"),
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


def _overlap(report: Report) -> Section:
    overlapped = sum(rank.mean["overlapped"] for rank in report.ranks)
    exposed = sum(rank.mean["exposed"] for rank in report.ranks)
    told = Told("There was no communication in these steps.", "", False)
    if overlapped + exposed:
        hidden = overlapped / (overlapped + exposed)
        told = Told(f"{share(hidden)} of all communication is hidden behind computation.", "", False)
    # What a script has done once, such as a broadcast of each parameter, is no part of a step.
    often = [bucket for bucket in report.buckets if bucket.plan or bucket.times > 1] or report.buckets
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
                f" Not listed: {count(once, 'tensor')} exchanged only once, which `fusion-trace buckets` has."
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
    what, well = stragglers_page.nobody(report.trace, steps)
    nobody = Told(what[0].upper() + what[1:] + ".", "", not well)
    table = shortened(stragglers_page.rows_of(report.trace, found[:MOST_ROWS]), len(found))
    return Section(
        "stragglers",
        "Who is slower than the others",
        told=told or (nobody,),
        about=("Red: in this step the rank's own work took longer than that of the median rank; blue: less long.",),
        charts=(charts.slower_map(report.columns, [rank.rank for rank in report.ranks]),),
        tables=(table,) if found else (),
    )


def _links(report: Report) -> Section:
    links, trace = report.links, report.trace
    title = "Links between hosts"
    if not links:
        what = "no chunk was recorded" if len(trace.hosts) > 1 else "all ranks are on one node"
        return Section("links", title, told=(Told(f"There is nothing to show: {what}.", "", False),))
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
            "" if link.bandwidth is None else f"{link.bandwidth * 8e-6:,.0f} Mbit/s",
            _latency(link),
            "not known" if link.clock_error < 0 else duration(link.clock_error),
        )
        for link in sorted(links, key=lambda link: -link.nbytes)[:MOST_ROWS]
    )  # fmt: skip
    head = ("from", "to", "payload", "chunks", "busy", "bandwidth", "latency", "clocks' error")
    return Section(
        "links",
        title,
        told=(told,),
        about=(
            "Bandwidth is that of payload while chunks follow each other without a gap, latency what else a chunk "
            "takes; neither is known of links that carried small chunks only. Links that share a network card share "
            "its bandwidth. Latencies are not known better than the clocks.",
        ),
        beside=True,
        charts=(
            charts.link_matrix(trace, links, [link.nbytes / 2**20 for link in links], "payload, MiB"),
            charts.link_matrix(
                trace,
                links,
                [None if b is None else b * 8e-6 for b in (link.bandwidth for link in links)],
                "bandwidth, Mbit/s",
            ),
            charts.link_matrix(
                trace,
                links,
                [None if s is None else s * 1e6 for s in (link.latency for link in links)],
                "latency, us",
            ),
        ),
        tables=(shortened(Table("Links", head, rows, 2), len(links)),),
    )


def _latency(link: LinkFigures) -> str:
    if link.latency is None:
        return ""
    ns = link.latency * 1e9
    return f"below {duration(link.clock_error)}" if ns < link.clock_error else duration(ns)


def _path(report: Report) -> Section:
    path = report.path
    assert path is not None  # there are whole steps
    sums = [(activity, place.named(report.trace), ns) for (activity, place), ns in critical_path.totals([path]).items()]
    activity, place, most = sums[0]
    told = Told(
        f"Step {path.step.number} takes {duration(path.step.ns)}, of which {activity} at {place} is {duration(most)} "
        f"({share(most / path.step.ns)}), more than anything else.",
        "",
        False,
    )
    rows = [(activity, place, duration(ns), share(ns / path.step.ns)) for activity, place, ns in sums[:MOST_ROWS]]
    table = shortened(Table("On the path", ("activity", "where", "takes", "share"), tuple(rows), 2), len(sums))
    whole = ("all of it", "", duration(path.ns), share(1.0))
    return Section(
        "critical-path",
        f"Critical path of step {path.step.number}, which is of median length",
        told=(told,),
        about=(
            "The path goes back from the moment when the last rank ends the step: who was busy then, what that had "
            "waited for, who was busy with it, and so on. To shorten the step, make an activity on the path faster.",
        ),
        charts=(charts.path_chart(report.trace, path.segments, path.step.begin),),
        tables=(Table(table.title, table.columns, (*table.rows, whole), table.left),),
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
        return Section("whatif", title, told=(Told(f"Left out: {curves.why_not}.", "", False),))
    told = Told(
        f"The replay of the recording is {share(abs(curves.error))} too {'long' if curves.error > 0 else 'short'}: "
        "predictions may be wrong by at least as much; `fusion-trace whatif` prints the interval of each, and "
        "refuses those that the recording does not support.",
        "",
        abs(curves.error) > DOUBTFUL,
    )
    about = (
        f"Steps {curves.steps[0]} to {curves.steps[1]}, replayed by the simulator (fusion-trace whatif) with every "
        f"link of that bandwidth; latencies as recorded, codec {curves.codec}. The cross is the recording. The costs "
        "of other codecs were measured on the machine that wrote this page.",
        *(f"Note: {problem}." for problem in curves.problems),
    )
    rows = tuple(
        (f"{rate / 1e6:,.0f} Mbit/s", *(duration(curve.seconds[place] * 1e9) for curve in curves.curves))
        for place, rate in enumerate(BANDWIDTHS)
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
