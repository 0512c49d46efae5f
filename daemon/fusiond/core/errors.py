"""Errors of the daemon that are told to a worker, and those of the system that pass."""

from __future__ import annotations

import errno

from fusion_rt.core.errors import FusionError

NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Numbers of errors that say that there are no descriptors, or is no memory, for now."""


class RequestError(FusionError):
    """A worker asked for something that cannot be done; the text says why."""
