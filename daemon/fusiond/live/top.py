"""The picture that `fusiond top` draws."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fusiond.live.client import Lookout
from fusiond.live.rates import LinkRates, NodeRates, RankRates, Rates
from fusiond.live.status_report import WIDTH, size

_MOST = 32  # rows of a table; a screen has no more


def page(rates: Sequence[Rates]) -> RenderableType:
    """Makes the page of all jobs, one below the other."""
    return Group(*(part for job in rates for part in _job(job)))


def show(rates: Sequence[Rates]) -> None:
    """Prints the page once."""
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    console.print(page(rates))


def watch(lookout: Lookout, interval: float) -> None:
    """Draws the page again every `interval` seconds, until Ctrl-C or until no daemon answers any more.

    Raises:
        FusionError: none answers.
    """
    try:
        with Live(page(lookout.look()), auto_refresh=False, screen=Console().is_terminal) as live:
            while True:
                time.sleep(interval)
                live.update(page(lookout.look()), refresh=True)
    except KeyboardInterrupt:
        pass


def _job(rates: Rates) -> list[RenderableType]:
    speeds = [rank.steps_per_second for rank in rates.ranks if rank.steps_per_second is not None]
    title = f"job {rates.job}: {len(rates.nodes)} nodes, {len(rates.ranks)} ranks"
    if speeds:
        title += f", {min(speeds):.2f} steps/s"
    parts: list[RenderableType] = [Text(title, style="bold")]
    if rates.stragglers:
        named = ", ".join(f"rank {rank}" for rank in rates.stragglers[:_MOST])
        parts.append(Text(f"The others wait for {named}.", style="yellow"))
    for node in rates.slow_networks:
        host = next(each.host for each in rates.nodes if each.node == node)
        parts.append(Text(f"Data waits on the links of host {host} (node {node}).", style="yellow"))
    parts += [_nodes(rates.nodes), _ranks(rates.ranks)]
    if rates.links:
        parts.append(_links(rates.links))
    return parts


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in ("node", "host", "state", "link", "") else "right")
    return table


def _nodes(nodes: Sequence[NodeRates]) -> Table:
    columns = "node", "host", "state", "operations/s", "reduced/s", "CPU", "memory", "queue", "saved", "staleness"
    table = _table(*columns)
    for node in nodes[:_MOST]:
        table.add_row(
            str(node.node),
            node.host,
            node.state,
            _number(node.operations),
            _size(node.nbytes),
            "" if node.cpu is None else f"{node.cpu:.0%}",
            size(node.memory),
            str(node.under_way),
            "" if node.saved is None else f"{node.saved:.1%}",
            _number(node.staleness),
            style="red" if node.state in ("silent", "failed") else "",
        )
    return _cut(table, len(nodes))


def _ranks(ranks: Sequence[RankRates]) -> Table:
    table = _table("rank", "host", "steps", "steps/s", "late (ms)", "")
    for rank in ranks[:_MOST]:
        table.add_row(
            str(rank.rank),
            rank.host,
            str(rank.steps),
            _number(rank.steps_per_second),
            _number(rank.late_ms),
            "straggler" if rank.straggles else "",
            style="yellow" if rank.straggles else "",
        )
    return _cut(table, len(ranks))


def _links(links: Sequence[LinkRates]) -> Table:
    table = _table("link", "sent/s", "not acknowledged", "reconnections", "")
    busiest = sorted(links, key=lambda link: (-(link.nbytes or 0.0), link.source, link.target))
    for link in busiest[:_MOST]:
        table.add_row(
            f"node {link.source} to {link.target}",
            _size(link.nbytes),
            size(link.waiting),
            str(link.reconnections),
            "lost" if link.lost else "",
            style="red" if link.lost else "",
        )
    return _cut(table, len(links))


def _cut(table: Table, rows: int) -> Table:
    if rows > _MOST:
        table.caption = f"and {rows - _MOST} more"
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _size(value: float | None) -> str:
    return "" if value is None else size(value)
