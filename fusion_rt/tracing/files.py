"""The files of rings of recorded events: their names, and the removal of old ones.

A job's rings on a host are in one directory with the job's name, `rank-3.ring` of a worker and `node-0.ring` of a
daemon; each membership epoch of an elastic job is a job of its own. A ring is locked (`flock`) as long as its writer
lives, so the kernel knows which jobs run. Of the others the latest few are kept.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from contextlib import ExitStack, suppress

KEPT = 5  # jobs on a host
_JOB = re.compile(r"[A-Za-z0-9_-]{1,32}")
_RING = re.compile(r"(?:rank|node)-[0-9]{1,9}\.ring(?:\.[0-9]{1,9}\.new)?")


def directory_of(root: str, job: str) -> str:
    """Returns the directory of a job's rings."""
    return os.path.join(root, job)


def ring_name(kind: str, number: int) -> str:
    """Returns the name of a ring's file. `kind`: rank or node."""
    return f"{kind}-{number}.ring"


def begin_job(root: str, job: str, keep: int = KEPT) -> list[str]:
    """Makes room for a job that is about to begin on this host.

    Removes the rings of an earlier job of that name, and of the other jobs that do not run any more all but the latest.

    Args:
        root: the directory of the jobs' directories.
        keep: how many jobs there may be, with this one.

    Returns: the paths of the directories that are gone.
    """
    own = directory_of(root, job)
    if _is_own_directory(own):
        _remove_rings(own)
    return _remove_jobs([path for path in _by_age(root) if path != own][max(keep - 1, 0) :])


def remove_dead(root: str) -> list[str]:
    """Removes the rings of all jobs that do not run any more. Returns the paths of the directories that are gone."""
    return _remove_jobs(_by_age(root))


def _by_age(root: str) -> list[str]:
    """Returns the directories of jobs, the latest first."""
    try:
        paths = [os.path.join(root, name) for name in os.listdir(root) if _JOB.fullmatch(name)]
    except FileNotFoundError:
        return []
    own = [path for path in paths if _is_own_directory(path) and _has_rings_only(path)]
    return sorted(own, key=lambda path: (os.lstat(path).st_mtime_ns, path), reverse=True)


def _remove_jobs(paths: list[str]) -> list[str]:
    gone = []
    for path in paths:
        if _remove_rings(path):
            try:
                os.rmdir(path)
            except OSError:  # another process has just begun to use it
                continue
            gone.append(path)
    return gone


def _remove_rings(path: str) -> bool:
    """Removes the rings of writers that are gone, if all are. Returns whether none is left."""
    rings = [os.path.join(path, name) for name in os.listdir(path) if _RING.fullmatch(name)]
    with ExitStack() as locks:
        try:
            for ring in rings:
                _lock(ring, locks)
        except BlockingIOError:
            return False
        for ring in rings:  # while they are locked: a writer that has opened one meanwhile finds that it is gone
            with suppress(FileNotFoundError):  # another daemon of this host does the same
                os.unlink(ring)
    return True


def _lock(ring: str, locks: ExitStack) -> None:
    """Locks a ring until `locks` ends. Raises `BlockingIOError` if it has a writer."""
    with suppress(FileNotFoundError):
        fd = os.open(ring, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        locks.callback(os.close, fd)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _has_rings_only(path: str) -> bool:
    """Returns whether a directory has rings and nothing else: the user may have chosen one with other files in it."""
    names = os.listdir(path)
    return bool(names) and all(_RING.fullmatch(name) for name in names)


def _is_own_directory(path: str) -> bool:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
