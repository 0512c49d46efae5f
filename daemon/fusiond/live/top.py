"""The picture that `fusiond top` draws, on a screen of 80 columns and 24 lines or more.

Jobs share the lines of the screen. Lines that need a look come first in each table, and those without room are counted.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fusion_rt.core.wording import counted
from fusiond.live.client import Lookout
from fusiond.live.rates import NodeRates, RankRates, Rates
from fusiond.live.status_report import WIDTH, size

_PIPED = 64  # lines of a page that goes into a file
_LEAST = 3  # rows of a table, if it has so many
_LOOKS = 40  # that a history shows
_BARS = "▁▂▃▄▅▆▇█"


class Keys:
    """The keys that are pressed on standard input, if it is a terminal; it is one as before in the end."""

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1
        self._before: list[Any] | None = None

    def __enter__(self) -> Keys:
        if self._fd >= 0:
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd, termios.TCSANOW)  # Ctrl-C is still a signal
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._before is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def wait(self, seconds: float) -> str:
        """Returns the next key, "" if none came within so many seconds, and `q` once the terminal is gone."""
        if self._fd < 0:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([self._fd], [], [], seconds)
        return (os.read(self._fd, 1).decode(errors="replace") or "q") if ready else ""


@dataclass
class History:
    """The steps a second of each job at the last looks, the oldest first; None: not known then."""

    of_jobs: dict[str, deque[float | None]] = field(default_factory=dict)

    def note(self, rates: Sequence[Rates]) -> None:
        """Adds a look. Jobs that are gone are forgotten."""
        self.of_jobs = {job.job: deque([*self.of_jobs.get(job.job, ()), _speed(job)], maxlen=_LOOKS) for job in rates}

    def line(self, job: str, interval: float) -> str:
        """Returns a line about a job, or "" as long as there is nothing to compare."""
        looks = self.of_jobs.get(job, ())
        known = [speed for speed in looks if speed is not None]
        if len(known) < 2:
            return ""
        most = max(known) or 1.0
        bars = "".join(
            " " if speed is None else _BARS[min(int(speed / most * len(_BARS)), len(_BARS) - 1)] for speed in looks
        )
        return f"{bars} {min(known):.2f} to {max(known):.2f} steps/s in {interval * len(looks):.0f} s"


def page(
    rates: Sequence[Rates], lines: int = _PIPED, history: History | None = None, interval: float = 0.0
) -> RenderableType:
    """Makes the page of all jobs, one below the other.

    Args:
        lines: of the screen.
        history: of the jobs; interval: seconds between its looks.
    """
    share = max(lines // max(len(rates), 1), 1)
    parts: list[RenderableType] = []
    for job in rates:
        parts += _job(job, share, history.line(job.job, interval) if history is not None else "")
    return Group(*parts)


def show(rates: Sequence[Rates]) -> None:
    """Prints the page once."""
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    console.print(page(rates, console.height if console.is_terminal else _PIPED))


def watch(lookout: Lookout, interval: float) -> None:
    """Draws the page again every `interval` seconds, until `q`, Ctrl-C or until no daemon answers any more.

    Raises:
        FusionError: none answers.
    """
    console, history = Console(), History()

    def drawn() -> RenderableType:
        rates = lookout.look()
        history.note(rates)
        return page(rates, console.height - 1 if console.is_terminal else _PIPED, history, interval)

    try:
        with Keys() as keys, Live(drawn(), console=console, auto_refresh=False, screen=console.is_terminal) as live:
            live.refresh()
            while keys.wait(interval) not in ("q", "Q"):
                live.update(drawn(), refresh=True)
    except KeyboardInterrupt:
        pass


def _speed(rates: Rates) -> float | None:
    return min((rank.steps_per_second for rank in rates.ranks if rank.steps_per_second is not None), default=None)


def _job(rates: Rates, lines: int, history: str) -> list[RenderableType]:
    speed = _speed(rates)
    title = f"job {rates.job}: {counted(len(rates.nodes), 'node')}, {counted(len(rates.ranks), 'rank')}"
    if speed is not None:
        title += f", {speed:.2f} steps/s"
    said = [Text(title, style="bold", no_wrap=True)]
    if history:
        said.append(Text(history, style="cyan", no_wrap=True))
    if rates.stragglers:
        named = ", ".join(f"rank {rank}" for rank in rates.stragglers)
        said.append(Text(f"The others wait for {named}.", style="yellow", no_wrap=True, overflow="ellipsis"))
    for node in rates.slow_networks:
        said.append(Text(f"Data waits on the links of host {_host(rates, node)}.", style="yellow", no_wrap=True))
    tables = [_nodes(rates.nodes), _ranks(rates.ranks), _links(rates)]
    drawn = [rows for rows in tables if rows.rows]
    # A table has its head, and a line above it; a line that says how many rows are missing takes the place of one.
    rooms = _rooms([len(rows.rows) for rows in drawn], lines - len(said) - 2 * len(drawn))
    return [*said, *(part for rows, room in zip(drawn, rooms, strict=True) for part in rows.drawn(room))]


def _rooms(wanted: Sequence[int], lines: int) -> list[int]:
    """Deals lines to tables: to each as many as it wants, or, where that is too much, as many as to the others."""
    rooms = [min(each, _LEAST) for each in wanted]
    while sum(rooms) < lines and (short := [n for n, want in enumerate(wanted) if rooms[n] < want]):
        rooms[min(short, key=lambda n: rooms[n])] += 1
    return rooms


@dataclass
class _Rows:
    """A table that has not been cut to the screen yet; each row with its style. Empty columns are left out."""

    columns: tuple[str, ...]
    left: int
    rows: list[tuple[tuple[str, ...], str]]
    what: str

    def drawn(self, room: int) -> list[RenderableType]:
        shown = self.rows if len(self.rows) <= room else self.rows[: max(room - 1, 0)]
        kept = [place for place in range(len(self.columns)) if any(row[place] for row, _ in self.rows)]
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for place in kept:
            table.add_column(
                self.columns[place], justify="left" if place < self.left or not self.columns[place] else "right",
                no_wrap=True, overflow="ellipsis", min_width=None if place < self.left else len(self.columns[place]),
            )  # fmt: skip
        for row, style in shown:
            table.add_row(*(row[place] for place in kept), style=style)
        missing = len(self.rows) - len(shown)
        return [Text(), table, *([Text(f"and {missing} more {self.what}", style="dim")] if missing else [])]


def _first(rows: Sequence[tuple[tuple[str, ...], str]]) -> list[tuple[tuple[str, ...], str]]:
    """Returns rows with those in front that have a style, which need a look."""
    return sorted(rows, key=lambda row: not row[1])


def _nodes(nodes: Sequence[NodeRates]) -> _Rows:
    columns = "host", "state", "ops/s", "reduced/s", "CPU", "memory", "pending", "saved", "staleness"
    rows = [
        (
            (
                node.host, node.state, _number(node.operations), _size(node.nbytes),
                "" if node.cpu is None else f"{node.cpu:.0%}", size(node.memory), str(node.under_way),
                "" if node.saved is None else f"{node.saved:.1%}", _number(node.staleness),
            ),
            "red" if node.state in ("silent", "failed") else "",
        )
        for node in nodes
    ]  # fmt: skip
    return _Rows(columns, 2, _first(rows), "hosts")


def _ranks(ranks: Sequence[RankRates]) -> _Rows:
    rows = [
        (
            (
                f"rank {rank.rank}", rank.host, str(rank.steps), _number(rank.steps_per_second),
                _number(rank.late_ms), "straggler" if rank.straggles else "",
            ),
            "yellow" if rank.straggles else "",
        )
        for rank in ranks
    ]  # fmt: skip
    return _Rows(("", "host", "steps", "steps/s", "late (ms)", ""), 2, _first(rows), "ranks")


def _links(rates: Rates) -> _Rows:
    busiest = sorted(rates.links, key=lambda link: (-(link.nbytes or 0.0), link.source, link.target))
    rows = [
        (
            (
                f"{_host(rates, link.source)} to {_host(rates, link.target)}", _size(link.nbytes), size(link.waiting),
                str(link.reconnections), "lost" if link.lost else "",
            ),
            "red" if link.lost else "",
        )
        for link in busiest
    ]  # fmt: skip
    return _Rows(("link", "sent/s", "not acknowledged", "reconnections", ""), 1, _first(rows), "links")


def _host(rates: Rates, node: int) -> str:
    """Returns the name of a node: its host's, with its number where that name is another node's too."""
    host = next((each.host for each in rates.nodes if each.node == node), "")
    shared = sum(each.host == host for each in rates.nodes) > 1
    return f"{host} (node {node})" if shared else host or f"node {node}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _size(value: float | None) -> str:
    return "" if value is None else size(value)
