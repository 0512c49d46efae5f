"""`fusion-trace hang` asks the daemons of this host for the waits between ranks in their jobs, and where those
processes are.

Each daemon of a job passes the question on to all others, so one that answers is enough; all that are on this host are
asked, and those that do not answer are looked at from outside: their state in /proc, and their own stack, which they
write on a signal as workers do.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import msgspec

from fusion_rt import wire
from fusion_rt.core.errors import FusionError
from fusion_rt.host.private_files import open_private
from fusion_rt.host.process_stat import process_state
from fusion_rt.host.stacks import STACK_BYTES, STACK_SIGNAL, is_handled
from fusion_rt.local import stack_text
from fusion_rt.local.daemons import OWN_STACKS, FoundDaemon, NoAnswer, ask, find

_PATIENCE = 1.0  # seconds for a daemon to write its own stack
_LOOK = 0.03  # seconds between looks at it


@dataclass(frozen=True)
class Daemon:
    """A daemon of this host. `told`: its answer, or None, and then `why_not`."""

    found: FoundDaemon
    pid: int
    told: dict[str, Any] | None
    why_not: str
    state: str
    stack: wire.Stack


def look(root: str, job: str, everyone: bool, timeout: float) -> Iterator[dict[str, Any]]:
    """Yields the waits of each job with daemons on this host, as JSON types.

    Args:
        root: FUSION_RUNTIME_DIR.
        job: only this one; "": all.
        everyone: also where the ranks are that are not waited for.
        timeout: seconds for a daemon to answer; it waits for the others itself.

    Raises:
        FusionError: a directory is not this user's alone.
    """
    for name, group in groupby(find(root, job), key=lambda found: found.job):
        found = [each for each in group if os.path.exists(each.socket_path)]
        if found:
            with ThreadPoolExecutor(len(found)) as pool:
                daemons = list(pool.map(lambda each: _look_at(each, everyone, timeout), found))
            if any(daemon.pid for daemon in daemons):  # else they are all dead, and only their sockets are left
                yield _document(name, daemons)


def _look_at(found: FoundDaemon, everyone: bool, timeout: float) -> Daemon:
    why_not, told = "", None
    try:
        pid, told = ask(found, wire.HangRequest(everyone), timeout)
    except NoAnswer as error:
        pid, why_not = error.pid, str(error)
    state = process_state(pid) if pid else ""
    stack = _stack(found, pid) if state not in ("", "T", "t", "Z", "X") else wire.Stack()
    return Daemon(found, pid, told, why_not, stack_text.state_in_words(state), stack)


def _document(job: str, daemons: Sequence[Daemon]) -> dict[str, Any]:
    """Joins the first daemon's answer about the job with the observations of all daemons here."""
    told = next((daemon.told for daemon in daemons if daemon.told is not None), None)
    document: dict[str, Any] = {"job": job, "answered": told is not None, **(told or {})}
    known = {each["node"]: each for each in document.get("daemons", [])}
    for daemon in daemons:
        entry = known.setdefault(daemon.found.node, {"node": daemon.found.node, "host": os.uname().nodename})
        entry.update(
            pid=daemon.pid or entry.get("pid"),
            answered=daemon.told is not None,
            why_not=daemon.why_not,
            state=daemon.state,
            stack={"frames": [msgspec.structs.asdict(f) for f in daemon.stack.frames], "more": daemon.stack.more},
        )
    document["daemons"] = [known[node] for node in sorted(known)]
    return document


def _stack(found: FoundDaemon, pid: int) -> wire.Stack:
    """Returns the stack of a daemon's main thread; an empty one if the daemon does not write it."""
    path = os.path.join(found.directory, OWN_STACKS)
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return wire.Stack()
    try:
        if not os.path.exists(path) or os.stat(f"/proc/{pid}").st_uid != os.getuid():
            return wire.Stack()
        if not is_handled(pid, STACK_SIGNAL):  # it would be its end
            return wire.Stack()
        os.close(open_private(path))
        signal.pidfd_send_signal(process, STACK_SIGNAL)
        return stack_text.with_sources(stack_text.parse(_written(path)))
    except (FileNotFoundError, ProcessLookupError):
        return wire.Stack()  # it has ended meanwhile
    finally:
        os.close(process)


def _written(path: str) -> str:
    """Returns the contents of a file once it has stopped growing; "" if nothing comes."""
    deadline = time.monotonic() + _PATIENCE
    sizes = [0, 0, 0]
    while time.monotonic() < deadline and not (sizes[0] and sizes[0] == sizes[1] == sizes[2]):
        time.sleep(_LOOK)
        sizes = [*sizes[1:], os.path.getsize(path)]
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(STACK_BYTES)


def not_there(root: str, job: str) -> FusionError:
    """Returns the error that says why there is nothing to tell."""
    which = f" of job {job!r}" if job else ""
    return FusionError(f"no daemon{which} of this user runs on this host (in {root})")
