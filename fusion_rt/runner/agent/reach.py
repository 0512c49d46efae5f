"""Finds out whether this host reaches the daemons of others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fusion_rt.host.bootstrap import Endpoint

_TRY_S = 1.0  # seconds for one attempt to connect
_PAUSE_S = 0.25  # seconds between two


async def reach_all(endpoints: Sequence[Endpoint]) -> None:
    """Returns when there have been connections to all ports of these daemons; tries again until then."""
    ports = {
        (endpoint.address, port) for endpoint in endpoints for port in (endpoint.control_port, endpoint.payload_port)
    }
    await asyncio.gather(*(_reach(address, port) for address, port in ports))


async def _reach(address: str, port: int) -> None:
    while True:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(address, port), _TRY_S)
        except (OSError, asyncio.TimeoutError):
            await asyncio.sleep(_PAUSE_S)
        else:
            writer.close()
            return
