"""Everything that reads bytes or texts of somebody else, as targets of the fuzzer."""

from __future__ import annotations

from tests.fuzz import between_ranks, channel, coded, engines, messages, rings, saved, texts
from tests.fuzz.engine import Target


def all_targets(torch: bool = True) -> list[Target]:
    """In an order that stays. `torch`: also those that have to import it."""
    return [
        *messages.targets(),
        *channel.targets(),
        *coded.targets(),
        *saved.targets(torch),
        *engines.targets(),
        *between_ranks.targets(),
        *texts.targets(),
        *rings.targets(),
    ]
