"""The rule by which one of several stands out, for jobs that run (`fusiond top`) and their traces (`fusion-trace`)."""

from __future__ import annotations

from collections.abc import Sequence


def usual_of_others(values: Sequence[float], together: int = 1) -> list[float | None]:
    """Returns, for each value, the usual value of the others: their lower median; None where there is no other.

    The lower of two in the middle, so that of an even number the faster ones are the measure: half of all may be slow.

    Args:
        together: how many may be slow for one reason, as all links of a host are: even if these are most of all, one
            of the rest is the measure.
    """
    ordered = sorted(range(len(values)), key=lambda place: (values[place], place))
    middle = max(0, min((len(values) - 2) // 2, len(values) - 1 - together))
    usual: list[float | None] = [None] * len(values)
    if len(values) > 1:
        for order, place in enumerate(ordered):
            usual[place] = values[ordered[middle if order > middle else middle + 1]]
    return usual
