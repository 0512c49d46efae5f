"""What a worker does for its node before it joins: others may have begun a step that they combine in the node, and so
cannot take without it. It contributes what changes nothing, as the daemon does for ranks that have joined."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fusion_rt.torch.sync.synchroniser import GradientExchange

_POLL = 1e-3  # seconds


def stand_in(exchanges: Sequence[GradientExchange]) -> None:
    """Takes part in these steps, of all exchanges at once, since others may take them in any order.

    Raises:
        HorovodInternalError: one of them failed, on all ranks.
    """
    standing = []
    for exchange in exchanges:
        if exchange.node is None:
            continue
        exchange.finish()
        if exchange.node.withdraw():
            standing.append(exchange)
            for bucket in exchange.dense:
                if not bucket.sent:
                    bucket.send_nothing()
                    exchange.copying.append(bucket)
    while any(exchange.copying for exchange in standing):
        for exchange in standing:
            while exchange.copying and exchange.copying[0].post(wait=False):
                exchange.copying.popleft()
            if exchange.node is not None:
                exchange.node.watch()
        time.sleep(_POLL)
    for exchange in standing:
        for bucket in exchange.dense:
            bucket.abandon()
        exchange.end_standing_in()
