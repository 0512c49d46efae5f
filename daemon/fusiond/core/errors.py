"""Errors of the daemon that are told to a worker."""

from __future__ import annotations

from fusion_rt.core.errors import FusionError


class RequestError(FusionError):
    """A worker asked for something that cannot be done; the text says why."""
