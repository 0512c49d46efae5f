"""Words of messages."""

from __future__ import annotations


def counted(number: int, what: str) -> str:
    """Returns a number of things in words: `1 rank`, `2 ranks`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def go_on(ranks: int) -> str:
    """Returns the number of ranks that go on, in words: `1 rank goes on`, `2 ranks go on`."""
    return f"{counted(ranks, 'rank')} {'goes' if ranks == 1 else 'go'} on"
