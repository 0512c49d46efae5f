"""Steps as they would have been without a cause of slowness: the durations of a ledger, added up again.

With nothing taken away, every step comes out as long as it was. All variants are reckoned at once, event by event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fusion_trace.analyse.columns_of_spans import Floats
from fusion_trace.analyse.ledger import SUBMIT, WAIT, Ledger
from fusion_trace.analyse.resources import Resources


@dataclass(frozen=True, eq=False)
class Suspect:
    """Something that may be slow, and by how much in each event: ns, float64.

    Attributes:
        cause: compute, daemon, negotiation or wire.
        column: of the ledger's ranks, or of the resources' nodes or links.
        signal: its excess in each step, without chance; shape (s,).
        own, lag: of a rank, the parts of its durations that would go; shape (e,). None: it is no rank.
        took: of a daemon or link, the part of each operation's time that would go; shape (o,).
    """

    cause: str
    column: int
    signal: Floats
    own: Floats | None = None
    lag: Floats | None = None
    took: Floats | None = None


def replay(book: Ledger, used: Resources, suspects: Sequence[Suspect], without: NDArray[np.bool_]) -> Floats:
    """Returns when each step ends, the mean over ranks, in several variants.

    Args:
        without: of shape (variants, suspects): those that are not slow there.

    Returns: ns, of shape (variants, steps).
    """
    variants = len(without)
    own_of = np.zeros((variants, len(book.ranks)), bool)
    cut = np.zeros(book.own.shape)
    cut_lag = np.zeros(book.own.shape)
    for place, suspect in enumerate(suspects):
        if suspect.own is not None and suspect.lag is not None:
            own_of[:, suspect.column] = without[:, place]
            cut[:, suspect.column], cut_lag[:, suspect.column] = suspect.own, suspect.lag
    took = _took(book, used, suspects, without)
    now = np.repeat(book.start[None, :], variants, 0)
    last = np.full((len(book.took), variants), -np.inf)
    through = np.full((len(book.took), variants), -np.inf)
    ends = np.zeros((len(book.steps), variants))
    mine = own_of.astype(float)
    absent = np.where(np.isfinite(book.spread), 0.0, -np.inf)
    full: list[bool] = np.atleast_1d(np.isfinite(book.spread).all(1)).tolist()
    kinds: list[int] = book.kind.tolist()
    abouts: list[int] = book.about.tolist()
    coupled: list[bool] = book.coupled.tolist()
    before: list[int] = book.before.tolist()
    own, lag, spread = book.own, book.lag, book.spread
    submitted: dict[int, Floats] = {}
    done = 0  # operations whose end is known; they are in order of their last part
    any_cut: list[bool] = np.atleast_1d(cut.any(1)).tolist()
    any_lag: list[bool] = np.atleast_1d(cut_lag.any(1)).tolist()
    for event in range(len(kinds)):
        kind, about = kinds[event], abouts[event]
        now += own[event]
        if any_cut[event]:
            now -= mine * cut[event]
        if kind == SUBMIT:
            if not coupled[about]:
                submitted[about] = now.copy()
            last[about] = now.max(1) if full[about] else (now + absent[about]).max(1)
        elif kind == WAIT:
            if coupled[about]:
                while done <= about:
                    earlier = before[done]
                    begun = last[done] if earlier < 0 else np.maximum(last[done], through[earlier])
                    through[done] = begun + took[:, done]
                    done += 1
                ready = through[about][:, None] + spread[about]
            else:
                # The answer to one rank depends on nobody else's part.
                ready = submitted.pop(about) + book.through[about] + spread[about] - book.last[about]
            np.maximum(now, ready, out=now, where=book.there[event])
            now += lag[event]
            if any_lag[event]:
                now -= mine * cut_lag[event]
        elif about >= 0:
            ends[about] = now.mean(1)
    by_variant: Floats = ends.T
    return by_variant


def _took(book: Ledger, used: Resources, suspects: Sequence[Suspect], without: NDArray[np.bool_]) -> Floats:
    """Returns how long each operation takes in each variant; shape (variants, o).

    The saved time is at most the sum of these parts, and an operation lasts at least as long as the busiest of its
    daemons and links still is.
    """
    took = np.repeat(book.took[None, :], len(without), 0)
    slow = [(place, suspect) for place, suspect in enumerate(suspects) if suspect.took is not None]
    if not slow:
        return took
    every = {"daemon": used.daemon, "negotiation": used.negotiation, "wire": used.wire}
    for variant, gone in enumerate(without):
        if not gone.any():
            continue
        saved = np.zeros(len(book.took))
        left = {cause: times for cause, times in every.items()}
        for place, suspect in slow:
            if gone[place] and suspect.took is not None:
                saved += suspect.took
                left[suspect.cause] = left[suspect.cause].copy()
                left[suspect.cause][:, suspect.column] -= suspect.took
        busiest = np.max([times.max(1) for times in left.values() if times.shape[1]], 0)
        took[variant] = np.clip(np.maximum(book.took - saved, busiest), 0, book.took)
    return took
