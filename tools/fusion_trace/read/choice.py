"""The steps of a trace that a person chooses."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_rt.core.errors import FusionError, SettingError
from fusion_rt.units import parse_range


class ChoiceError(FusionError, ValueError):
    """A choice cannot be meant, or is not in the trace."""


@dataclass(frozen=True)
class StepRange:
    """A range of steps. `None` on either side: no limit."""

    first: int | None = None
    stop: int | None = None

    def __contains__(self, number: int) -> bool:
        return (self.first is None or number >= self.first) and (self.stop is None or number < self.stop)


EVERY_STEP = StepRange()


def around(one: StepRange, other: StepRange) -> StepRange:
    """Returns the range from the earlier begin of two to the later end."""
    first = None if one.first is None or other.first is None else min(one.first, other.first)
    stop = None if one.stop is None or other.stop is None else max(one.stop, other.stop)
    return StepRange(first, stop)


def parse_steps(text: str, flag: str = "--steps") -> StepRange:
    """Reads `A:B`, as in Python; `A` alone is that step. `flag`: the one that it was given with.

    Raises:
        ChoiceError: it is something else, or no step is in it.
    """
    try:
        return StepRange(*parse_range(text))
    except SettingError as error:
        raise ChoiceError(f"{flag}: {error}") from None
