"""The steps of a trace that a person chooses."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fusion_rt.core.errors import FusionError


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


def parse_steps(text: str) -> StepRange:
    """Reads `A:B`, as in Python; `A` alone is that step.

    Raises:
        ChoiceError: it is something else, or no step is in it.
    """
    match = re.fullmatch(r"\s*([0-9]{0,18})\s*(:?)\s*([0-9]{0,18})\s*", text, re.ASCII)
    if match is None or (text.strip() and not match[2] and match[3]):
        raise ChoiceError(f"--steps {text!r} is not a range of steps such as 10:20, 10: or :20")
    first = int(match[1]) if match[1] else None
    stop = int(match[3]) if match[3] else None
    if first is not None and not match[2]:
        stop = first + 1
    if first is not None and stop is not None and stop <= first:
        raise ChoiceError(f"--steps {text!r} has no step in it")
    return StepRange(first, stop)
