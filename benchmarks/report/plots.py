"""Plots as SVG, with equal bytes for equal results and the same matplotlib."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from benchmarks import allreduce, control, kfac, low_bandwidth, overlap, slow_network, step
from benchmarks.common.peers import DDP
from benchmarks.common.sampling import median, quartiles, ratio
from benchmarks.report.measured import All, in_order, records, where

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "fusion_rt",  # ids in the file are otherwise random
    "svg.fonttype": "none",  # text stays text
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
}


def allreduce_ratios(axes: Any, found: All) -> None:
    """Plots gloo's time over fusion_rt's, by size."""
    for record in in_order(records(found, "allreduce")):
        ratios = [ratio(each.samples[allreduce.GLOO], each.samples[allreduce.ARENA]) for each in record.measures]
        sizes = [int(each.name) for each in record.measures]
        (line,) = axes.plot(sizes, [each.value for each in ratios], marker="o", markersize=3)
        line.set_label(allreduce.title(record.setting))
        axes.fill_between(
            sizes, *zip(*((each.low, each.high) for each in ratios), strict=True), alpha=0.15, linewidth=0
        )
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set(xscale="log", yscale="log", xlabel="bytes of float32", ylabel="gloo's time / fusion_rt's")
    axes.set_yticks([0.5, 1, 2, 5, 10, 20], ["0.5", "1", "2", "5", "10", "20"])
    axes.minorticks_off()
    axes.legend(fontsize=7)


def step_times(axes: Any, found: All) -> None:
    """Plots a step by runtime, relative to DDP's."""
    made = in_order(records(found, "step"))
    names = [name for name in step.RUNTIMES if any(name in record.measure(step.STEP).samples for record in made)]
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        places, heights, spread = [], [], []
        for place, record in enumerate(made):
            samples = record.measure(step.STEP).samples
            if name in samples:
                found_ratio = ratio(samples[name], samples[DDP])
                places.append(place + (index - (len(names) - 1) / 2) * width)
                heights.append(found_ratio.value)
                spread.append((found_ratio.value - found_ratio.low, found_ratio.high - found_ratio.value))
        axes.bar(places, heights, width, yerr=list(zip(*spread, strict=True)), label=name, error_kw={"elinewidth": 0.8})
    axes.set_xticks(range(len(made)), [where(record) for record in made])
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set(ylabel="a step / DDP's")
    axes.legend(fontsize=7)


def exposed(axes: Any, found: All) -> None:
    """Plots the exposed communication with each way of overlap."""
    made = [overlap.of(record) for record in records(found, "overlap")]
    names = [name for name in made[0]["seconds"] if name != overlap.ALONE]
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        for place, each in enumerate(made):
            alone = each["seconds"][overlap.ALONE]
            if name in each["seconds"]:
                beyond = [1e3 * (a - b) for a, b in zip(each["seconds"][name], alone, strict=True)]
                middle = quartiles(beyond)
                bars = [[max(0.0, middle.value - middle.low)], [max(0.0, middle.high - middle.value)]]
                at = place + (index - (len(names) - 1) / 2) * width
                axes.bar([at], [median(beyond)], width, yerr=bars, color=f"C{index}", error_kw={"elinewidth": 0.8},
                         label=name if place == 0 else None)  # fmt: skip
    axes.set_xticks(
        range(len(made)),
        [f"{each['hosts']} hosts, {each['rate']}" if each["hosts"] > 1 else "one host" for each in made],
    )
    axes.set(ylabel="exposed, ms a step")
    axes.legend(fontsize=7)


def slow_network_steps(axes: Any, found: All) -> None:
    """Plots the seconds of a step on slow links, a bar for each contender."""
    record = records(found, "slow_network")[0]
    samples = record.measure(slow_network.STEP).samples
    names = sorted((name for name in samples if name != slow_network.ALONE), key=lambda name: -median(samples[name]))
    ours = [name.startswith("fusion_rt") for name in names]
    bars = axes.barh(names, [median(samples[name]) for name in names], color=["C0" if own else "C7" for own in ours])
    axes.bar_label(bars, fmt="%.2f s", padding=3)
    compute = median(samples[slow_network.ALONE])
    axes.axvline(compute, color="black", linewidth=0.8, linestyle="--", label=f"without communication: {compute:.2f} s")
    axes.set(xlabel=f"seconds a step, {record.setting['hosts']} hosts at 100 Mbit/s")
    axes.legend(fontsize=7)


def loss_by_steps(axes: Any, found: All) -> None:
    """Plots the loss of each method at its best rate by steps: the median of seeds, smoothed over three steps."""
    (record,) = records(found, "kfac")
    for method, of_method in record.details.items():
        curves = [[sum(each[at : at + 3]) / 3 for at in range(len(each) - 2)] for each in of_method["curves"]]
        middle = [median(losses) for losses in zip(*curves, strict=True)]
        axes.plot(range(3, len(middle) + 3), middle, label=f"{method}, rate {of_method['rate']}")
    axes.set(yscale="log", ylim=(1e-3, 5), xlabel=f"steps of {record.setting['batch']} images", ylabel="training loss")
    axes.axhline(kfac.LEVELS[1], color="black", linewidth=0.8, linestyle="--")
    axes.legend(fontsize=7)


SHOWN = (  # ten colours can be told apart
    "dense", "fp16", "topk 1%, momentum", "topk 0.5%, 2 bits", "PowerSGD", "DeMo", "DiLoCo", "streaming DiLoCo, int4",
    "decoupled DiLoCo", "SparseLoCo, 4 steps",
)  # fmt: skip


def low_bandwidth_losses(axes: Any, found: All) -> None:
    """Plots the loss by bytes sent, and by seconds on each network, a line for each of some methods."""
    measured = records(found, "low_bandwidth")[0].details
    networks = [name for name in low_bandwidth.NETWORKS if measured.get("times", {}).get(name)]
    figure = axes.figure
    axes.remove()
    panels = figure.subplots(1, 1 + len(networks), sharey=True, squeeze=False)[0]
    for index, name in enumerate(SHOWN):
        if not (curve := low_bandwidth.curve_of(measured, name)[1:]):
            continue
        steps, sent, loss = zip(*curve, strict=True)
        panels[0].plot([nbytes / 1e6 for nbytes in sent], loss, color=f"C{index}", label=name, linewidth=1)
        for panel, network in zip(panels[1:], networks, strict=True):
            if second := low_bandwidth.step_seconds(measured, network).get(name):
                panel.plot([count * second for count in steps], loss, color=f"C{index}", linewidth=1)
    for panel, label in zip(panels, ["MB sent", *(f"s at {name}" for name in networks)], strict=True):
        panel.set(xscale="log", xlabel=label)
    panels[0].set(ylabel="loss", ylim=(1.8, 3.2))
    figure.legend(loc="outside lower center", ncols=4, fontsize=6)


def spreads(axes: Any, found: All) -> None:
    """Plots how fast ranks come together: where all take part, and where some wait (thin)."""
    (record,) = records(found, "gossip")
    for index, (name, runs) in enumerate(record.details.items()):
        for run, width, label in ((runs["all"], 1.4, name), (runs["waits"], 0.6, None)):
            shown = [max(spread, 1e-8) for spread in run["spread"]]
            dashed = "-" if "topk" in name or "fp16" in name else "--"
            axes.plot(run["exchanges"], shown, color=f"C{index % 10}", linewidth=width, linestyle=dashed, label=label)
    axes.set(xscale="log", yscale="log", xlabel="exchanges", ylabel="spread / spread at the beginning")
    axes.legend(fontsize=6, ncols=2)


def control_by_hosts(axes: Any, found: All) -> None:
    """Plots the processor time of a daemon, and of the coordinator, in phases of a job by the number of hosts."""
    measured = records(found, "control")
    for phase in ("start", "epoch", "plan", "idle"):
        for whose, style in (("a daemon", "-"), ("the coordinator", "--")):
            figures = control.by_hosts(measured, control.DAEMONS, f"{phase}: CPU of {whose}")
            hosts, values = list(figures), [1e3 * value for value in figures.values()]
            axes.plot(hosts, values, style, marker="o", markersize=3, label=f"{phase}, {whose}")
    axes.set(xscale="log", yscale="log", xlabel="hosts", ylabel="ms of processor time")
    axes.set_xticks(control.NODES, [str(nodes) for nodes in control.NODES])
    axes.minorticks_off()
    axes.legend(fontsize=6, ncols=2)


PLOTS: dict[str, Callable[[Any, All], None]] = {
    "allreduce": allreduce_ratios,
    "step": step_times,
    "overlap": exposed,
    "slow_network": slow_network_steps,
    "gossip": spreads,
    "kfac": loss_by_steps,
    "low_bandwidth": low_bandwidth_losses,
    "control": control_by_hosts,
}


def draw(name: str, found: All) -> str:
    """Draws a plot; returns it as SVG."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with matplotlib.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(7, 3.6))
        PLOTS[name](axes, found)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
    # Trailing blanks would be the only ones in the repository.
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
