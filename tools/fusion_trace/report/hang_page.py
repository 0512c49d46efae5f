"""The page that `fusion-trace hang` shows of a job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from fusion_rt import wire
from fusion_rt.core.topology import Topology
from fusion_rt.core.wording import counted
from fusion_rt.local import stack_text
from fusion_trace.analyse.unfinished import Ending
from fusion_trace.report.wording import numbers

MOST_WAITING = 20  # operations that are shown
MOST_RANKS = 16  # stacks that are shown
_Document = Mapping[str, Any]
_Line = tuple[str, str]  # and its style


def show(documents: Iterable[_Document]) -> None:
    """Prints the page of each job."""
    for number, document in enumerate(documents):
        print_lines([("", "")] * bool(number))
        print_lines(lines(document))


def print_lines(shown: Iterable[_Line]) -> None:
    """Prints lines, each in its style."""
    console = Console(highlight=False, markup=False, soft_wrap=True)  # paths have [brackets], and are to be copied
    for line, style in shown:
        console.print(Text(line, style))


def lines(document: _Document) -> Iterator[_Line]:
    """Yields the lines about a job, each with its style."""
    if document["answered"]:
        topology = Topology(tuple(document["hosts"]), tuple(tuple(ranks) for ranks in document["ranks_of_nodes"]))
        size = f"{counted(topology.size, 'rank')} on {counted(len(topology.hosts), 'node')}"
        yield f"job {document['job']}: {document['state']}, {size}", "bold"
        yield from _operations(document, topology)
    else:
        yield f"job {document['job']}: none of its daemons on this host answers", "bold red"
    yield from _daemons(document["daemons"])


def _operations(document: _Document, topology: Topology) -> Iterator[_Line]:
    waiting = document["waiting"]
    if document["failure"]:
        yield f"  it has failed: {document['failure']}", "red"
    elif not waiting:
        yield "  nothing waits: what ranks have submitted is done", "green"
    for stall in waiting[:MOST_WAITING]:
        yield "", ""
        yield f"{stall['what']} has waited {stall['seconds']:.0f} s", "bold yellow"
        yield from _stall(stall, topology)
    if hidden := len(waiting[MOST_WAITING:]) + document["more"]:
        yield f"and {hidden} more", ""
    found = document["ranks"]
    if found:
        yield "", ""
        yield "where they are" if waiting else "where all ranks are", "bold"
    for entry in found[:MOST_RANKS]:
        for number, line in enumerate(stack_text.describe(whereabouts(entry), entry["host"])):
            yield f"  {line}", "" if number else "cyan"
    if found[MOST_RANKS:]:
        yield f"  and {len(found) - MOST_RANKS} more ranks (--json has them all)", ""


def _stall(stall: _Document, topology: Topology) -> Iterator[_Line]:
    yield f"  submitted by {topology.describe(stall['submitted'])}", ""
    if stall["missing"]:
        yield f"  waits for {topology.describe(stall['missing'])}", "red"
    for straggler in stall["stragglers"]:
        yield f"  {straggler['text']}", "red"
    for node in stall["idle"]:
        yield f"  host {topology.hosts[node]} has not begun to exchange data", "red"
    for note in stall["notes"]:
        yield f"  {note}", ""
    if not (stall["missing"] or stall["stragglers"] or stall["idle"]):
        yield "  every rank has submitted it: data is on its way, or is being worked on", ""


def _daemons(daemons: Iterable[_Document]) -> Iterator[_Line]:
    yield "", ""
    yield "daemons", "bold"
    for daemon in daemons:
        process = ", ".join(str(what) for what in (f"pid {daemon['pid']}", daemon.get("state", "")) if what)
        who = f"host {daemon['host']}{f' ({process})' if daemon['pid'] else ''}"
        stack = stack_of(daemon)
        if daemon["answered"]:
            frame = stack.frames[0] if stack.frames else None
            at = f", its main thread in {frame.function} ({frame.file}:{frame.line})" if frame else ""
            yield f"  {who} answers{at}", ""
            continue
        yield f"  {who}: {daemon.get('why_not') or 'it did not answer the others in time'}", "red"
        if daemon.get("state", "").startswith("stopped"):
            yield f"    it is stopped; `kill -CONT {daemon['pid']}` lets it go on", "red"
        elif stack.frames:
            yield "    its main thread, most recent call first:", ""
            for line in stack_text.describe_stack(stack):
                yield f"    {line}", ""


def whereabouts(entry: _Document) -> wire.Whereabouts:
    """Returns where a rank is, as it stands in the document."""
    return wire.Whereabouts(entry["rank"], entry["pid"], entry["state"], entry["why_not"], stack_of(entry))


def stack_of(entry: _Document) -> wire.Stack:
    """Returns the stack of a worker or a daemon; an empty one if there is none."""
    stack = entry.get("stack", {"frames": (), "more": 0})
    return wire.Stack(tuple(wire.Frame(**frame) for frame in stack["frames"]), stack["more"])


def ending_lines(found: Ending, most: int = 20) -> Sequence[_Line]:
    """Returns the lines about a job that is gone, each with its style."""
    shown = [(f"job {found.job}: no daemon of it runs on this host; from its records until it ended", "bold")]
    shown += [(f"  {problem}", "yellow") for problem in found.problems]
    shown += [(f"  {sentence}", "bold red") for sentence in found.died]
    if not found.waiting:
        shown.append(("  nothing waited: what ranks had submitted was done", "" if found.died else "green"))
    for each in found.waiting[:most]:
        shown += [("", ""), (f"{each.what} (clock {each.clock}) had waited {each.seconds:.1f} s", "bold yellow")]
        shown.append((f"  submitted by {_named('rank', each.submitted)}", ""))
        if each.missing:
            shown.append((f"  waited for {_named('rank', each.missing)}", "red"))
        elif each.running:
            shown.append((f"  all ranks had submitted it; it was under way on {_named('node', each.running)}", ""))
    if len(found.waiting) > most:
        shown.append((f"and {len(found.waiting) - most} more (--json has them all)", ""))
    shown += [("", ""), ("what ranks did last", "bold")]
    for last in found.ranks:
        who = f"rank {last.rank} (host {last.host}, pid {last.pid})"
        shown.append((f"  {who}: step {last.step}, {last.doing}; last heard of {last.silent:.2f} s before the end", ""))
    return shown


def _named(what: str, which: Sequence[int]) -> str:
    return f"{what}{'' if len(which) == 1 else 's'} {numbers(which)}"
