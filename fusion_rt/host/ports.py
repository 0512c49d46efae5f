"""Ports to listen on: any that is free, or the first free one of the range that FUSION_PORTS names."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TypeVar

from fusion_rt.core.errors import FusionError

T = TypeVar("T")


def listen_in(ports: range, listen: Callable[[int], T]) -> T:
    """Returns the result of `listen` with the first port of a range that is free.

    Args:
        ports: the range; empty: `listen` is called with 0, for any port.
        listen: listens on a port. An exception whose `errno` is EADDRINUSE says that another process does.

    Raises:
        FusionError: all ports of the range are taken.
        whatever `listen` raises for another reason.
    """
    if not ports:
        return listen(0)
    for port in ports:
        try:
            return listen(port)
        except Exception as error:
            if getattr(error, "errno", None) != errno.EADDRINUSE:
                raise
    raise FusionError(f"all ports of FUSION_PORTS={ports[0]}-{ports[-1]} are taken on this host; a "
                      "daemon needs two, so that jobs side by side need a larger range")  # fmt: skip
