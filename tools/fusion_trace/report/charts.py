"""Figures as plotly's charts: dicts of `data` and `layout`, as plotly.js takes them.

Times in ms. Texts of a trace go through `plain`, since plotly takes a part of HTML in its texts.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from fusion_rt.tracing.format import Role
from fusion_trace.analyse.bucket_times import BucketTimes
from fusion_trace.analyse.critical_path import Segment
from fusion_trace.analyse.link_figures import LinkFigures
from fusion_trace.analyse.overlap import PARTS
from fusion_trace.analyse.usage import Usage, UsageCurve
from fusion_trace.read.job import JobTrace
from fusion_trace.report.curves import RATES, Curves
from fusion_trace.report.figures import Column, RankTimes
from fusion_trace.report.timeline import Bar, DrawnStep
from fusion_trace.report.wording import duration, interval

Chart = dict[str, Any]

MOST_RANKS = 64  # rows of a chart
MOST_TO_CHOOSE = 16  # ranks whose single steps are drawn
MOST_BUCKETS = 40
MANY_STEPS = 50  # of one length, beside which one would not be seen
MOST_WITH_TEXT = 5  # nodes, up to which a matrix has room for its figures
COLOURS = {"compute": "#3f8f5f", "overlapped": "#67a9cf", "exposed": "#d6453d", "waiting": "#f0b429", "idle": "#c3c7cf"}
_ACTIVITIES = {
    "forward": "#2f7d4f", "backward": "#5aa877", "step": "#8cc7a1", "copy": "#b7dcc4", "apply": "#14532d",
    "wake-up": "#8a93a3", "other": "#c3c7cf", "hand-over": "#5b6474", "daemon": "#3d4451", "reduce": "#2b6ca3",
    "encode": "#5b9bd0", "decode": "#9cc4e4", "negotiation": "#8e5bb5", "queue": "#f0b429", "wire": "#d6453d",
    "unrecorded": "#e7e9ed",
}  # fmt: skip
_HAPPENINGS = {
    "forward": _ACTIVITIES["forward"], "backward": _ACTIVITIES["backward"], "step()": _ACTIVITIES["step"],
    "wait": COLOURS["exposed"], "copy": _ACTIVITIES["copy"], "apply": _ACTIVITIES["apply"], "handed over": "#d9dce2",
    "operation": "#8a93a3", "reduce": _ACTIVITIES["reduce"], "encode": _ACTIVITIES["encode"],
    "decode": _ACTIVITIES["decode"], "sending": "#f0b429", "receiving": "#c98a10", "blocked": "#1f2430",
}  # fmt: skip
LINES = (("#2b6ca3", "solid"), ("#3f8f5f", "dot"), ("#f0b429", "solid"), ("#d6453d", "solid"))
_SEQUENTIAL = [[0, "#f4f8fc"], [1, "#1c5a92"]]
_DIVERGING = [[0, "#2b6ca3"], [0.5, "#ffffff"], [1, "#c2281f"]]


def plain(text: str) -> str:
    """Escapes a text, so that plotly shows it as it is."""
    return html.escape(text, quote=False)


def ms(ns: float) -> float:
    return round(ns / 1e6, 5)


def layout(height: int, **more: object) -> Chart:
    """Returns the layout of all charts, with `more`."""
    return {
        "height": height,
        "margin": {"l": 70, "r": 20, "t": 30, "b": 50},
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#1f2430"},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        **more,
    }


def axis(title: str, **more: object) -> Chart:
    """Returns the layout of all axes, with `more`."""
    return {"title": {"text": title}, "gridcolor": "#e7e9ed", "zerolinecolor": "#c3c7cf", "automargin": True, **more}


def rank_bars(ranks: Sequence[RankTimes]) -> Chart:
    """Draws the mean step of each rank, in parts."""
    shown = ranks[:MOST_RANKS]
    rows = [f"rank {rank.rank}" for rank in shown]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": part,
            "y": rows,
            "x": [ms(rank.mean[part]) for rank in shown],
            "marker": {"color": COLOURS[part]},
            "hovertemplate": f"%{{y}}: {part} %{{x:.3f}} ms<extra></extra>",
        }
        for part in PARTS
    ]
    axes = {"xaxis": axis("mean of a step, ms"), "yaxis": axis("", autorange="reversed", type="category")}
    return {"data": data, "layout": layout(150 + 30 * len(shown), barmode="stack", **axes)}


def step_bars(columns: Sequence[Column], ranks: Sequence[int]) -> Chart:
    """Draws each step in parts, of the rank that is chosen in a menu."""
    shown = list(ranks)[:MOST_TO_CHOOSE]
    data, buttons = [], []
    for place, rank in enumerate(shown):
        its = [column for column in columns if rank in column.parts]
        data += [
            {
                "type": "bar",
                "name": part,
                "visible": not place,
                "x": [column.first for column in its],
                "y": [ms(column.parts[rank][part]) for column in its],
                "marker": {"color": COLOURS[part], "line": {"width": 0}},
                "hovertemplate": f"step %{{x}}: {part} %{{y:.3f}} ms<extra>rank {rank}</extra>",
            }
            for part in PARTS
        ]
        if any(column.last > column.first for column in its):
            data += [_extremes(its, rank, turn, not place) for turn in ("longest", "shortest")]
        each = len(data) // (place + 1)
        visible = [index // each == place for index in range(len(shown) * each)]
        buttons.append({"label": f"rank {rank}", "method": "update", "args": [{"visible": visible}]})
    whole = layout(
        380,
        barmode="stack",
        bargap=0,
        xaxis=axis("step"),
        yaxis=axis("ms"),
        updatemenus=[{"buttons": buttons, "x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom"}],
    )
    return {"data": data, "layout": whole}


def _extremes(columns: Sequence[Column], rank: int, which: str, visible: bool) -> Chart:
    """Draws the longest or shortest of the steps of each column as marks over its bar."""
    place = 1 if which == "longest" else 2
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"{which} of these",
        "visible": visible,
        "x": [column.first for column in columns],
        "y": [ms(column.longest[rank][place]) for column in columns],
        "text": [f"step {column.longest[rank][0]}" if place == 1 else "" for column in columns],
        "marker": {"color": "#1f2430" if place == 1 else "#8a93a3", "size": 4},
        "hovertemplate": f"{which}: %{{y:.3f}} ms %{{text}}<extra>rank {rank}</extra>",
    }


def length_bars(lengths: tuple[Sequence[float], Sequence[int]]) -> Chart:
    """Draws how many steps of all ranks are how long; few are seen beside many, for which the axis is logarithmic."""
    edges, counts = lengths
    data = [
        {
            "type": "bar",
            "x": [ms((a + b) / 2) for a, b in pairwise(edges)],
            "y": [count or None for count in counts],
            "width": [ms(b - a) for a, b in pairwise(edges)],
            "text": [f"{ms(a):.2f} to {ms(b):.2f} ms" for a, b in pairwise(edges)],
            "textposition": "none",
            "marker": {"color": COLOURS["overlapped"], "line": {"width": 0}},
            "hovertemplate": "%{text}: %{y} steps<extra></extra>",
        }
    ]
    most = max(counts, default=0)
    many = {"type": "log", "dtick": 1, "range": [-0.3, math.log10(max(most, 1)) + 0.1]}  # one step is to be seen, too
    height = many if most >= MANY_STEPS else {"rangemode": "tozero"}
    axes = {"xaxis": axis("a step, ms"), "yaxis": axis("steps of all ranks", **height)}
    return {"data": data, "layout": layout(300, showlegend=False, bargap=0, **axes)}


def hidden_line(columns: Sequence[Column]) -> Chart:
    """Draws how much of communication is overlapped, by step."""
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "hidden",
            "x": [column.first for column in columns],
            "y": [None if column.hidden is None else round(100 * column.hidden, 2) for column in columns],
            "line": {"color": COLOURS["overlapped"], "width": 2},
            "hovertemplate": "step %{x}: %{y:.1f} %<extra></extra>",
        }
    ]
    axes = {"xaxis": axis("step"), "yaxis": axis("hidden, %", range=[0, 103])}
    return {"data": data, "layout": layout(260, showlegend=False, **axes)}


def bucket_bars(buckets: Sequence[BucketTimes]) -> Chart:
    """Draws how long the exchange of each bucket takes, and how long scripts wait for it."""
    exchanged = [bucket for bucket in buckets if "run" in bucket.phases]
    shown = exchanged[:MOST_BUCKETS]
    rows = [plain(bucket.name) for bucket in shown]
    colours = {"run": COLOURS["overlapped"], "wait": COLOURS["exposed"]}
    titles = {"run": "exchange, from the daemon's start to its end", "wait": "scripts wait for it"}
    data = [
        {
            "type": "bar",
            "name": titles[phase],
            "x": rows,
            "y": [ms(bucket.phases[phase]) if phase in bucket.phases else None for bucket in shown],
            "marker": {"color": colours[phase]},
            "hovertemplate": "%{x}: %{y:.3f} ms<extra></extra>",
        }
        for phase in titles
    ]
    axes = {"xaxis": axis("", type="category"), "yaxis": axis("median, ms")}
    return {"data": data, "layout": layout(320, barmode="group", **axes)}


def slower_map(columns: Sequence[Column], ranks: Sequence[int]) -> Chart:
    """Draws by how much each rank's own work takes longer than the median rank's, by step."""
    shown = list(ranks)[:MOST_RANKS]
    rows = [[ms(column.slower[rank]) if rank in column.slower else None for column in columns] for rank in shown]
    most = max((abs(value) for row in rows for value in row if value is not None), default=0.0)
    data = [
        {
            "type": "heatmap",
            "x": [column.first for column in columns],
            "y": [f"rank {rank}" for rank in shown],
            "z": rows,
            "zmin": -max(most, 1e-3),
            "zmax": max(most, 1e-3),
            "colorscale": _DIVERGING,
            "colorbar": {"title": {"text": "ms longer"}},
            "hovertemplate": "%{y}, step %{x}: %{z:.3f} ms<extra></extra>",
        }
    ]
    axes = {"xaxis": axis("step"), "yaxis": axis("", autorange="reversed", type="category")}
    return {"data": data, "layout": layout(150 + 30 * len(shown), **axes)}


def link_matrix(
    trace: JobTrace, links: Sequence[LinkFigures], title: str, figures: Sequence[tuple[float | None, str]]
) -> Chart:
    """Draws one figure of each link, which has a text: rows send, columns receive."""
    nodes = sorted({node for link in links for node in (link.source, link.target)})
    of_link = {(link.source, link.target): figure for link, figure in zip(links, figures, strict=True)}
    names = [plain(trace.host_of(node)) for node in nodes]
    cells = [[of_link.get((source, target), (None, "")) for target in nodes] for source in nodes]
    drawn: Chart = {
        "type": "heatmap",
        "x": names,
        "y": names,
        "z": [[value for value, _ in row] for row in cells],
        "text": [[text for _, text in row] for row in cells],
        "zmin": 0,
        "zmax": max((value for value, _ in figures if value is not None), default=1.0) or 1.0,
        "colorscale": _SEQUENTIAL,
        "colorbar": {"thickness": 12},
        "xgap": 1,
        "ygap": 1,
        "hovertemplate": "from %{y} to %{x}: %{text}<extra></extra>",
    }
    if len(nodes) <= MOST_WITH_TEXT:
        drawn["texttemplate"] = "%{text}"
        drawn["textfont"] = {"size": 11}
    axes = {
        "xaxis": axis("to", type="category"),
        "yaxis": axis("from", autorange="reversed", type="category"),
        "title": {"text": title, "font": {"size": 14}},
    }
    return {"data": [drawn], "layout": layout(340, **{**axes, "margin": {"l": 70, "r": 10, "t": 50, "b": 50}})}


def path_chart(trace: JobTrace, segments: Sequence[Segment], begin: int, title: str) -> Chart:
    """Draws the path through one step: a row for each rank, daemon and link, in the order in which it comes to them."""
    rows = list(dict.fromkeys(segment.place.named(trace) for segment in segments))
    data = []
    for activity in dict.fromkeys(segment.activity for segment in segments):
        its = [segment for segment in segments if segment.activity == activity]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": activity,
                "y": [segment.place.named(trace) for segment in its],
                "base": [ms(segment.begin - begin) for segment in its],
                "x": [ms(segment.ns) for segment in its],
                "width": 0.7,
                "marker": {"color": _ACTIVITIES[activity], "line": {"width": 0}},
                "text": [plain(segment.what) for segment in its],
                "textposition": "none",
                "hovertemplate": f"%{{y}}: {activity} %{{text}}, %{{x:.4f}} ms from %{{base:.3f}} ms on<extra></extra>",
            }
        )
    axes = {
        "xaxis": axis(f"ms of step {title}"),
        "yaxis": axis("", type="category", categoryorder="array", categoryarray=rows, autorange="reversed"),
    }
    return {"data": data, "layout": layout(190 + 30 * len(rows), barmode="overlay", **axes)}


def usage_lines(trace: JobTrace, curves: Sequence[tuple[Usage, UsageCurve]], title: str, unit: float) -> Chart:
    """Draws a curve of each process: workers' are solid, daemons' dotted. `unit`: of 1 on the axis."""
    begin = trace.span[0]
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers" if len(curve.values) < 2 else "lines",
            "name": plain(trace.name_of(used.process)),
            "x": [round((time - begin) / 1e9, 3) for time in curve.times.tolist()],
            "y": [float(f"{value / unit:.4g}") for value in curve.values.tolist()],
            "line": {"dash": "solid" if used.process.role == Role.WORKER else "dot", "width": 1.5},
            "hovertemplate": "%{x:.1f} s: %{y:.4~r}",
        }
        for used, curve in curves
    ]
    axes = {"xaxis": axis("seconds since the first record"), "yaxis": axis(title, rangemode="tozero")}
    return {"data": data, "layout": layout(300, showlegend=True, **axes)}


def timeline(steps: Sequence[DrawnStep]) -> Chart:
    """Draws the step that is chosen in a menu: a row for each track of a process."""
    kinds = [kind for kind in _HAPPENINGS if any(bar.kind == kind for step in steps for bar in step.bars)]
    data, buttons = [], []
    for place, step in enumerate(steps):
        data += [_activity(step, kind, visible=not place) for kind in kinds]
        visible = [index // len(kinds) == place for index in range(len(steps) * len(kinds))]
        title = f"step {step.number}: {duration(step.longest)}" + (f", {step.why}" if step.why else "")
        buttons.append({"label": title, "method": "update", "args": [{"visible": visible}, _timeline_axes(step)]})
    first = _timeline_axes(steps[0])
    whole = layout(
        first["height"],
        barmode="overlay",
        dragmode="pan",
        meta={"zoom": True, "steps": [step.number for step in steps]},
        xaxis=axis("ms since the step began", range=first["xaxis.range"]),
        yaxis=axis("", type="category", categoryorder="array", tickfont={"size": 11}, fixedrange=True)
        | {name.removeprefix("yaxis."): value for name, value in first.items() if name.startswith("yaxis.")},
        updatemenus=[{"buttons": buttons, "x": 1, "xanchor": "right", "y": 1, "yanchor": "bottom", "pad": {"b": 6}}],
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
    )
    return {"data": data, "layout": whole}


def _activity(step: DrawnStep, kind: str, visible: bool) -> Chart:
    its = [bar for bar in step.bars if bar.kind == kind]
    return {
        "type": "bar",
        "orientation": "h",
        "name": kind,
        "visible": visible,
        "y": [_row(bar) for bar in its],
        "base": [ms(bar.begin) for bar in its],
        "x": [ms(bar.ns) for bar in its],
        "width": 0.8,
        "marker": {"color": _HAPPENINGS[kind], "line": {"width": 0}},
        "text": [plain(bar.what) for bar in its],
        "textposition": "none",
        "hovertemplate": "%{y}: %{text}, %{x:.4f} ms from %{base:.4f} ms on<extra></extra>",
    }


def _row(bar: Bar) -> str:
    return plain(f"{bar.process}: {bar.track}")


def _timeline_axes(step: DrawnStep) -> Chart:
    """Returns how the layout shows a step: its length, and its rows, of which the first of a process has its name."""
    rows = {_row(bar): bar for bar in step.bars}
    named: set[str] = set()
    labels = []
    for bar in rows.values():
        track = "" if bar.track.endswith(")") else bar.track  # a further row of a track
        labels.append(plain(track if bar.process in named else f"{bar.process}: {bar.track}"))
        named.add(bar.process)
    return {
        "xaxis.range": [0, ms(step.ns)],
        "yaxis.categoryarray": [*rows],
        "yaxis.tickvals": [*rows],
        "yaxis.ticktext": labels,
        "yaxis.range": [len(rows) - 0.5, -0.5],
        "height": 200 + 18 * len(rows),
    }


def rate_of(bits: float) -> str:
    """Returns a bandwidth as links are sold."""
    return f"{bits / 1e9:g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:g} Mbit/s"


def curve_chart(curves: Curves) -> Chart:
    """Draws a step's length by the rate of links, each with its range as a band, and the recorded one."""
    rates = [rate / 1e6 for rate in RATES]
    data: list[Chart] = []
    for curve, (colour, dash) in zip(curves.curves, LINES, strict=False):
        low, high = ([ms(getattr(step, side) * 1e9) for step in curve.steps] for side in ("low", "high"))
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "fill": "toself",
                "x": [*rates, *rates[::-1]],
                "y": [*low, *high[::-1]],
                "line": {"color": colour, "width": 0.5},
                "opacity": 0.25,
                "legendgroup": curve.title,
                "showlegend": False,
                "hoverinfo": "skip",
            }
        )
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": curve.title,
                "legendgroup": curve.title,
                "x": rates,
                "y": [ms(figure.value * 1e9) for figure in curve.steps],
                "text": [interval(figure) for figure in curve.steps],
                "line": {"color": colour, "dash": dash, "width": 2},
                "hovertemplate": "%{x:,.0f} Mbit/s: %{text}<extra>" + curve.title + "</extra>",
            }
        )
    assert curves.step is not None  # there are curves
    data.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "recorded",
            "x": [round(curves.rate / 1e6, 3)],
            "y": [ms(curves.step.value * 1e9)],
            "text": [interval(curves.step)],
            "error_y": {
                "type": "data",
                "symmetric": False,
                "array": [ms((curves.step.high - curves.step.value) * 1e9)],
                "arrayminus": [ms((curves.step.value - curves.step.low) * 1e9)],
            },
            "marker": {"color": "#1f2430", "size": 10, "symbol": "x"},
            "hovertemplate": "recorded: %{x:,.0f} Mbit/s, %{text}<extra></extra>",
        }
    )
    ticks = [rate_of(rate) for rate in RATES]
    axes = {
        "xaxis": axis("rate of every link", type="log", tickvals=rates, ticktext=ticks),
        "yaxis": axis("a step, ms", rangemode="tozero"),
    }
    return {"data": data, "layout": layout(400, **axes)}
