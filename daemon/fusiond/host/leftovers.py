"""Files that killed daemons, and agents of elastic jobs, have left behind, found by their locks: the kernel frees a
lock with its process.

A directory whose lock is free has no daemon. Its socket and lock are removed, and its log as well when it is empty or
old, or when somebody asks for it. A daemon looks when it starts, so that nothing piles up; `fusiond clean` does too.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import stat
import time

from fusion_rt.host import bootstrap
from fusion_rt.local.daemons import OWN_STACKS

# Of a daemon's directory, as `bootstrap.job_directory` has it, or of an agent's (`fusion_rt.runner.agent.agent`).
_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}\.(agent)?[0-9]{1,9}")
_OLD = 7 * 24 * 3600.0  # seconds for which the log of a daemon that is gone is kept
_STARTING = 600.0  # seconds in which a daemon takes its lock after its directory was made
_log = logging.getLogger("fusiond")


def remove_dead(root: str, keep: str = "", logs: bool = False) -> list[str]:
    """Removes what dead daemons have left in `root`.

    Args:
        root: FUSION_RUNTIME_DIR.
        keep: the path of a directory that is left alone.
        logs: their logs go, too, even if they have something in them and are new.

    Returns: the paths of the directories of which something was removed.
    """
    found = []
    for name in sorted(os.listdir(root)) if os.path.isdir(root) else []:
        path = os.path.join(root, name)
        if _NAME.fullmatch(name) and path != keep:
            try:
                if _is_own(path) and _remove(path, logs):
                    found.append(path)
            except FileNotFoundError:
                _log.debug("%s is removed by another daemon that starts", path)
            except OSError as error:
                _log.warning("leftovers of a dead daemon in %s cannot be removed: %s", path, error.strerror)
    return found


def _is_own(path: str) -> bool:
    status = os.lstat(path)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _remove(path: str, logs: bool) -> bool:
    """Returns whether anything was removed."""
    lock = -1
    try:
        try:
            lock = os.open(os.path.join(path, "lock"), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_size == 0 and _age(path) < _STARTING:
                return False  # its daemon has made it, and is about to take it
        except BlockingIOError:
            return False  # its daemon lives
        except FileNotFoundError:
            if _age(path) < _STARTING:
                return False  # its daemon may be about to make the lock
        removed = _unlink(path, "sock") | _unlink(path, "workers") | _unlink(path, OWN_STACKS)
        if os.path.lexists(ranks := os.path.join(path, bootstrap.RANKS_DIRECTORY)):
            shutil.rmtree(ranks)
            removed = True
        log = os.path.join(path, "log")
        if os.path.lexists(log) and (logs or os.lstat(log).st_size == 0 or _age(log) > _OLD):
            removed |= _unlink(path, "log")
        removed |= _unlink(path, "lock")  # last: whoever opens it until now finds it taken
        if not os.listdir(path):
            os.rmdir(path)
            removed = True
        return removed
    finally:
        if lock >= 0:
            os.close(lock)


def _age(path: str) -> float:
    return time.time() - os.lstat(path).st_mtime


def _unlink(path: str, name: str) -> bool:
    try:
        os.unlink(os.path.join(path, name))
    except FileNotFoundError:
        return False
    return True
