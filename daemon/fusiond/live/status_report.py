"""The picture that `fusiond status` draws."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH = 180  # characters, where the output is no terminal


def show_status(found: list[dict[str, Any]]) -> None:
    """Prints a table with a row for each daemon, and one of compression."""
    table = Table(title="fusiond")
    columns = "job", "node", "host", "pid", "role", "state", "ranks", "operations", "reduced", "sent", "CPU", "uptime"
    for column in columns:
        table.add_column(column)
    for daemon in found:
        if "engine" not in daemon:
            table.add_row("?", "?", "?", "?", "?", str(daemon["state"]), str(daemon["failure"]))
            continue
        peers = daemon["mesh"]["peers"] if daemon["mesh"] else []
        table.add_row(
            str(daemon["job"]),
            f"{daemon['node']} of {daemon['nodes']}",
            str(daemon["host"]),
            str(daemon["pid"]),
            str(daemon["role"]),
            f"{daemon['state']}{': ' + daemon['failure'] if daemon['failure'] else ''}",
            f"{len(daemon['joined'])}/{len(daemon['ranks'])} here, {daemon['size']} in all",
            f"{daemon['engine']['completed']} done, {daemon['engine']['under_way']} under way",
            size(daemon["engine"]["bytes"]),
            size(sum(peer["sent_bytes"] for peer in peers)),
            f"{daemon['cpu_seconds']:.1f} s",
            f"{daemon['uptime_seconds']:.0f} s",
        )
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    console.print(table)
    for daemon in found:
        if daemon.get("metrics"):
            console.print(f"metrics of job {daemon['job']}, node {daemon['node']}: {daemon['metrics']}", soft_wrap=True)
    links = _links(found)
    if links.row_count:
        console.print(links)
    compressed = _compression(found)
    if compressed.row_count:
        console.print(compressed)


def _links(found: list[dict[str, Any]]) -> Table:
    """Makes the matrix of the links of each job whose hosts are joined over a distance: round trip and rate."""
    table = Table(title="links over a distance")
    for column in ("job", "between nodes", "round trip", "rate"):
        table.add_column(column)
    told = {(str(daemon["job"]), *link["nodes"]): link for daemon in found for link in daemon.get("links", [])}
    for (job, one, other), link in sorted(told.items()):
        mbit = 8e-6 * link["bytes_per_second"]
        table.add_row(job, f"{one} and {other}", f"{2e3 * link['latency_seconds']:.1f} ms", f"{mbit:.0f} Mbit/s")
    return table


def _compression(found: list[dict[str, Any]]) -> Table:
    """Makes a table with a row for each group of tensors that is compressed."""
    table = Table(title="compression")
    for column in ("job", "node", "gradients of", "dense", "sent", "saved", "selected", "time", "residual norm"):
        table.add_column(column)
    for daemon in found:
        for group, told in daemon.get("engine", {}).get("compression", {}).items():
            if group == "total" and len(daemon["engine"]["compression"]) <= 2:
                continue  # it is the sum of one group
            table.add_row(
                str(daemon["job"]),
                str(daemon["node"]),
                group,
                size(told["bytes_dense"]),
                size(told["bytes_packed"]),
                f"{told['saved']:.1%}",
                f"{told['selected']} of {told['asked']} asked for" if told["asked"] else "",
                f"{told['seconds']:.2f} s",
                f"{told['residual_norm']:.4g}",
            )
    return table


def size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.1f} {unit}" if unit != "B" else f"{nbytes:.0f} B"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
