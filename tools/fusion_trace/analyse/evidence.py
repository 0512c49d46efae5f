"""Excesses that are more than chance: levels and spikes of a series, and the confidence that they are a process's own.

Noise of machines is neither normal nor even, so that all of this goes by medians and ranks: a level is a running
median that is far from zero for what the series scatters; a spike is far from the level; and who has levels and spikes
more often than chance would give them is found by dealing them anew.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from fusion_trace.analyse.columns_of_spans import Floats, Ints

WINDOW = 21  # steps of a running median
FAR = 3.5  # standard deviations
SMALL = 0.02  # of a step: less is never told from noise
_DRAWS = 1999
_MOST_BLOCKS = 1000
_TO_SIGMA = 1.4826
_OF_MEDIAN = 1.2533  # standard error of a median, in those of a mean


def signals(excess: Floats, lengths: Floats) -> Floats:
    """Returns the part of each excess that is no chance: at least 0, of shape (steps, columns) as `excess` is.

    Args:
        excess: ns by which each was slower than the others, in each step.
        lengths: of the steps, ns.
    """
    count, width = excess.shape
    found = np.zeros(excess.shape)
    if count < 4 or not width:
        return found
    typical = float(np.median(lengths))
    levels = np.stack([_running_median(excess[:, column]) for column in range(width)], 1)
    # From one step to the next a level seldom changes, and spikes are seldom side by side: the lower one is the noise.
    changes = np.median(np.abs(np.diff(excess, axis=0)), 0) / np.sqrt(2)
    scatter = _TO_SIGMA * np.minimum(np.median(np.abs(excess - levels), 0), changes) * (1 + 4 / count)
    scatter = np.maximum(np.maximum(scatter, 0.5 * np.median(scatter)), 1e-5 * typical)
    window = _window(count)
    for column in range(width):
        its, level, sigma = excess[:, column], levels[:, column], scatter[column]
        middle = float(np.median(its))
        always = middle > max(FAR * _OF_MEDIAN * sigma / np.sqrt(count), 0.01 * typical)
        base = middle if always else 0.0
        raised = level > max(base, 0.0) + max(FAR * _OF_MEDIAN * sigma / np.sqrt(window), 0.5 * SMALL * typical)
        lowered = always & (level < base - FAR * _OF_MEDIAN * sigma / np.sqrt(window))
        found[:, column] = np.maximum(np.where(raised | lowered, level, base), 0)
        centre = np.where(raised | lowered, level, middle)
        over = its - centre
        spikes = over > max(FAR * sigma, SMALL * typical)
        found[spikes, column] = np.maximum(its[spikes] - min(middle, 0.0 if not always else middle), 0)
        rhythm = _rhythm(np.where(spikes, 0.0, over), sigma, SMALL * typical)
        if rhythm is not None:
            period, phase, more = rhythm
            beats = np.arange(count) % period == phase
            found[beats & ~spikes, column] += more
    bounded: Floats = np.clip(found, 0, np.maximum(excess + 2 * scatter, 0))
    return bounded


def _window(count: int) -> int:
    return min(WINDOW, count - 1 + count % 2)


def _running_median(values: Floats) -> Floats:
    window = _window(len(values))
    padded = np.pad(values, window // 2, "reflect" if len(values) > window // 2 else "edge")
    middle: Floats = np.median(sliding_window_view(padded, window), axis=1)
    return middle


def _rhythm(over: Floats, sigma: float, least: float) -> tuple[int, int, float] | None:
    """Returns the period, phase and mean excess of steps that come again and again and are slower than the others, but
    not so much that a single one would stand out."""
    count = len(over)
    best: tuple[float, int, int, float] | None = None
    calm = np.clip(over, -3 * sigma, 6 * sigma)
    for period in range(2, min(64, count // 4) + 1):
        whole = count // period * period
        means = calm[:whole].reshape(-1, period).mean(0)
        phase = int(means.argmax())
        repeats = count // period
        rest = float(np.delete(means, phase).mean())
        score = (means[phase] - rest) / (sigma / np.sqrt(repeats))
        # Of all periods and phases the best one was taken.
        if score > 5.5 and means[phase] - rest > least and (best is None or score > best[0]):
            best = float(score), period, phase, float(means[phase] - rest)
    return None if best is None else best[1:]


def chance(signal: Floats, column: int) -> float:
    """Returns how likely a column would have at least its sum by chance, if whoever is slow in a run of steps were
    drawn anew each time.

    Runs are as long as those of the others usually are: a machine that is busy for a while makes one rank slow in many
    steps that follow each other.
    """
    count, width = signal.shape
    if width < 2 or not signal[:, column].any():
        return 1.0
    others = np.delete(signal, column, 1) > 0
    starts = (others & ~np.vstack([np.zeros((1, width - 1), bool), others[:-1]])).sum(0)
    runs = np.sort(np.where(starts > 0, others.sum(0) / np.maximum(starts, 1), 1.0))
    size = min(max(round(float(runs[(width - 2) // 2])), -(-count // _MOST_BLOCKS)), count)
    blocks = np.add.reduceat(signal, np.arange(0, count, size), axis=0)
    blocks = blocks[blocks.any(1)]
    drawn = np.random.default_rng(0).integers(0, width, (_DRAWS, len(blocks)))
    sums = blocks[np.arange(len(blocks)), drawn].sum(1)
    return float((1 + (sums >= blocks[:, column].sum() * (1 - 1e-9)).sum()) / (_DRAWS + 1))


def period_of(steps: Ints) -> int:
    """Returns n if these increasing numbers are every n-th, but for a few; 0 if they are not."""
    if len(steps) < 3:
        return 0
    apart = np.diff(steps)
    values, counts = np.unique(apart, return_counts=True)
    period = int(values[counts.argmax()])
    regular = counts.max() >= 0.6 * len(apart) and (apart % period == 0).mean() >= 0.85
    return period if period > 1 and regular else 0
