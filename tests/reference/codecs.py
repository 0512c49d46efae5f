"""Every codec in plain NumPy, from its paper: what receivers get of values, in at most forty lines each.

A function is given the values of a bucket (float32, one dimension) that a step is about, which are the gradient with
what was not sent before (`added`), and returns what receivers get of them. The difference is what `remembered` keeps.
Nothing here packs, and nothing is imported from the project.

`ranges` are those elements [low, high) of the bucket that the codec encodes; all others are always sent as they are.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Range: TypeAlias = tuple[int, int]
Rounding: TypeAlias = Callable[[Array], Array]
F32 = np.float32


# --- memory -----------------------------------------------------------------------------------------------------------


def added(residual: Array, gradient: Array, decay: float = 1.0) -> Array:
    """Error feedback (Seide et al. 2014; Karimireddy et al. 2019, algorithm 2; `decay`: Sarfi et al. 2025): the values
    that a step sends from."""
    values: Array = residual * F32(decay) + gradient
    return values


def corrected(velocity: Array, gradient: Array, momentum: float, nesterov: bool) -> tuple[Array, Array]:
    """Momentum correction (Lin et al. 1712.01887, eq. 4): u = m u + g is accumulated in place of g; by Nesterov's rule
    u = m (u + g), and u + g is. Returns u, and what is accumulated."""
    if nesterov:
        velocity = F32(momentum) * (velocity + gradient)
        return velocity, velocity + gradient
    velocity = F32(momentum) * velocity + gradient
    return velocity, velocity


def remembered(values: Array, sent: Array) -> Array:
    """The residual: values - sent (Karimireddy et al. 2019, algorithm 2)."""
    rest: Array = values - sent
    return rest


def in_node_order(parts: Sequence[Array]) -> Array:
    """The sum of what nodes send, one after the other in float32."""
    total = parts[0].copy()
    for part in parts[1:]:
        total = total + part
    return total


def squeezed_twice(
    parts: Sequence[Array],
    residuals: Sequence[Array],
    bounds: Sequence[int],
    encode: Callable[[Array, int, int], Array],
) -> tuple[Array, list[Array]]:
    """DoubleSqueeze (Tang et al. 1905.05957, algorithm 1, a server for each range): the owner sums what nodes
    send of [bounds[n], bounds[n + 1]), sends that by the codec again, and keeps what is left.

    `encode(values, low, high)`: what receivers get of the sum of a range. Returns the sum that all get, and residuals.
    """
    total, sent = in_node_order(parts), np.zeros_like(parts[0])
    kept = [residual.copy() for residual in residuals]
    for node in range(len(bounds) - 1):
        low, high = bounds[node], bounds[node + 1]
        sent[low:high] = encode(total[low:high], low, high)
        kept[node][low:high] += total[low:high] - sent[low:high]
    return sent, kept


# --- formats of values ------------------------------------------------------------------------------------------------


def dense(values: Array) -> Array:
    """All elements as they are."""
    return values.copy()


def fp16(values: Array) -> Array:
    """IEEE 754 half precision, to the nearest, ties to even."""
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(F32)


def bf16(values: Array) -> Array:
    """The upper half of a float32, to the nearest, ties to even."""
    bits = values.astype(F32).view(np.uint32).astype(np.uint64)
    upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return upper.astype(np.uint32).view(F32)


def scaled_fp16(values: Array) -> Array:
    """fp16 times the power of two with which the largest is in (2^14, 2^15]."""
    largest = np.abs(values).max(initial=0)
    if largest == 0:
        return values.copy()
    power = F32(2.0 ** (15 - np.ceil(np.log2(np.float64(largest)))))
    rounded: Array = (values * power).astype(np.float16).astype(F32) / power
    return rounded


# --- selection --------------------------------------------------------------------------------------------------------


def places(ranges: Sequence[Range]) -> Array:
    """The indices of the elements of some ranges."""
    return np.concatenate([np.empty(0, np.int64), *(np.arange(low, high) for low, high in ranges)])


def only(values: Array, chosen: Array, ranges: Sequence[Range], rounding: Rounding = dense) -> Array:
    """The chosen elements of `values`, and those that are in none of the ranges; zeros elsewhere. Both kinds are
    rounded, each by itself."""
    sent = values.copy()
    sent[places(ranges)] = 0
    whole = np.ones(len(values), bool)
    whole[places(ranges)] = False
    sent[whole] = rounding(values[whole])
    sent[chosen] = rounding(values[chosen])
    return sent


def largest(values: Array, among: Array, k: int) -> Array:
    """The k indices of `among` with the largest magnitudes, of equal ones the first; none whose value is 0."""
    order = among[np.argsort(-np.abs(values[among]), kind="stable")[:k]]
    return np.sort(order[values[order] != 0])


def topk(values: Array, ranges: Sequence[Range], k: int, rounding: Rounding = dense) -> Array:
    """The k largest (Aji and Heafield 1704.05021; Stich et al. 1809.07599, definition 2.1)."""
    return only(values, largest(values, places(ranges), k), ranges, rounding)


def thresholdk(
    values: Array, ranges: Sequence[Range], k: int, threshold: float, exact: bool, rounding: Rounding = dense
) -> tuple[Array, float]:
    """Ok-Topk's reused threshold (Li and Hoefler 2201.07598, section 3.1.3): what reaches it is sent, at most k, and it
    is exact every so many steps. Returns what is sent, and the next threshold; 0: the next step is exact.

    The rules beside the paper's: it falls by 2.5 % below .8 k, rises to the smallest that is sent above 1.25 k, and is
    exact again after fewer than .5 k, and where more than 4 k reach it.
    """
    among = places(ranges)
    reach = among[np.abs(values[among]) >= threshold]
    if exact or threshold == 0 or len(reach) > 4 * k:
        chosen = largest(values, among, k)
        return only(values, chosen, ranges, rounding), float(np.abs(values[chosen]).min(initial=np.inf))
    chosen = largest(values, reach, k)
    if len(reach) > 1.25 * k:
        threshold = float(np.abs(values[chosen]).min())
    elif len(reach) < 0.5 * k:
        threshold = 0.0
    elif len(reach) < 0.8 * k:
        threshold = float(F32(threshold / 1.025))
    return only(values, chosen, ranges, rounding), threshold


def gaussiank(values: Array, ranges: Sequence[Range], k: int, rounding: Rounding = dense) -> Array:
    """What a normal distribution has above its (1 - k / 2n) quantile (Shi et al. 1911.08772, algorithm 1): halved
    where fewer than 2/3 k reach that, times 1.5 where more than 4/3 k do, at most three tries; then the k largest.
    Beside the paper's rules, these are found among all if the last try was too high, or more than 8 k reach it."""
    among = places(ranges)
    x = values[among].astype(np.float64)
    threshold = float(x.mean() - statistics.NormalDist().inv_cdf(k / len(x) / 2) * x.std(ddof=1))
    reach = among
    for _ in range(3):
        reach = among[np.abs(values[among]) >= F32(threshold)]
        if len(reach) < 2 * k / 3:
            threshold *= 0.5
        elif len(reach) > 4 * k / 3:
            threshold *= 1.5
        else:
            break
    return only(values, largest(values, reach if 2 * k / 3 <= len(reach) <= 8 * k else among, k), ranges, rounding)


def randomk(values: Array, ranges: Sequence[Range], drawn: Array, rounding: Rounding = dense) -> Array:
    """Elements that all nodes draw alike (Wangni et al. 1710.09854; Stich et al. 1809.07599, definition 2.1)."""
    return only(values, drawn, ranges, rounding)


def demo(values: Array, span: Range, shape: tuple[int, int], size: int, density: float) -> Array:
    """DeMo (Peng et al. 2411.19870, algorithm 1): of each tile of a matrix the largest coefficients of its cosine
    transform, `density` of them and at least one. What is sent, as elements."""
    sent = values.copy()
    matrix = values[slice(*span)].reshape(shape).astype(np.float64)
    out = np.zeros_like(matrix)
    for top, bottom in tiles(shape[0], size):
        for left, right in tiles(shape[1], size):
            rows, columns = cosines(bottom - top), cosines(right - left)
            coefficients = (rows @ matrix[top:bottom, left:right] @ columns.T).T.ravel()
            k = max(1, round(len(coefficients) * density))
            kept = np.zeros_like(coefficients)
            chosen = largest(coefficients, np.arange(len(coefficients)), k)
            kept[chosen] = coefficients[chosen]
            out[top:bottom, left:right] = rows.T @ kept.reshape(right - left, bottom - top).T @ columns
    sent[slice(*span)] = out.ravel()
    return sent


def tiles(length: int, size: int) -> list[Range]:
    """Where tiles begin and end: of `size`, and of smaller powers of two at the end."""
    found, low = list[Range](), 0
    while low < length:
        size = min(size, 1 << (length - low).bit_length() - 1)
        found.append((low, low + size))
        low += size
    return found


def cosines(n: int) -> Array:
    """The orthonormal cosine transform (DCT-II) as a matrix."""
    k, j = np.arange(n)[:, None], np.arange(n)[None, :]
    matrix: Array = np.sqrt(np.where(k == 0, 1, 2) / n) * np.cos((2 * j + 1) * k * np.pi / (2 * n))
    return matrix


# --- fewer bits -------------------------------------------------------------------------------------------------------


def blocks(ranges: Sequence[Range], size: int) -> list[Range]:
    """The blocks of ranges: they begin with a range, and at each multiple of `size`."""
    found = list[Range]()
    for low, high in ranges:
        found += itertools.pairwise([low, *range(-(-(low + 1) // size) * size, high, size), high])
    return found


def integers(values: Array, ranges: Sequence[Range], bits: int, size: int, up: Array | None = None) -> Array:
    """int8 and int4: q s with s = max |x| / (2^(bits - 1) - 1) of a block (Alistarh et al. 1610.02132, section 3.1,
    with the largest for a norm).

    `up`: which elements are rounded up, for rounding at random; without, to the nearest, of two the one below.
    """
    sent, most = values.copy(), 2 ** (bits - 1) - 1
    for low, high in blocks(ranges, size):
        part = values[low:high]
        step = max(np.abs(part).max() / F32(most), F32(2.0**-126))
        ratio = part / step
        down = np.floor(ratio)
        above = ratio - down > 0.5 if up is None else up[low:high]
        sent[low:high] = (down + above).clip(-most, most).astype(F32) * step
    return sent


def int2(values: Array, ranges: Sequence[Range], size: int) -> Array:
    """The nearest of -1.5 s, -.5 s, .5 s and 1.5 s, with s = 1.25 mean |x| of a block: about the best uniform quantiser
    of four levels for normal numbers (Max 1960, table II)."""
    sent = values.copy()
    for low, high in blocks(ranges, size):
        part = values[low:high]
        step = F32(1.25 * np.abs(part.astype(np.float64)).mean())
        if step:
            nearest = np.ceil((part / step).clip(-3, 2) - F32(1)).clip(-2, 1)
            sent[low:high] = (nearest + F32(0.5)).astype(F32) * step
    return sent


def onebit(values: Array, ranges: Sequence[Range], size: int) -> Array:
    """The sign times the mean magnitude of a block (Seide et al. 2014; Karimireddy et al. 1901.09847, algorithm 1)."""
    sent = values.copy()
    for low, high in blocks(ranges, size):
        part = values[low:high]
        sent[low:high] = np.copysign(F32(np.abs(part.astype(np.float64)).mean()), part)
    return sent


# --- low rank ---------------------------------------------------------------------------------------------------------


def powersgd(matrices: Sequence[Array], start: Array) -> tuple[Array, list[Array], Array]:
    """PowerSGD (Vogels et al. 1905.13727, algorithm 1) on the matrices (rows, columns) of all nodes, from `start`
    (columns, rank), with orthonormal columns: P = orthonormal(sum M Q), Q = sum M' P, and sum M is about P Q'.

    Each node's own part of that, P P' M, leaves its residual (algorithm 2, with each worker's own factor, so that
    nothing is lost). Returns the sum that all get, what each node has sent, and Q, with which the next step begins.
    """
    wide = [matrix.astype(np.float64) for matrix in matrices]
    left = orthonormal(sum(matrix @ orthonormal(start) for matrix in wide))
    own = [left @ (left.T @ matrix) for matrix in wide]
    return sum(own), own, sum(matrix.T @ left for matrix in wide)


def orthonormal(columns: Array) -> Array:
    """Gram-Schmidt, from the first column on."""
    done = list[Array]()
    for column in columns.T.astype(np.float64):
        for _ in range(2):
            column = column - sum((other * (other @ column) for other in done), np.zeros(len(column)))
        done.append(column / np.linalg.norm(column))
    return np.stack(done, axis=1)
