"""LARS and LAMB as the papers write them, on one tensor, in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Lars:
    """arXiv 1708.03888, algorithm 1 with equation 6."""

    def __init__(self, lr: float, momentum: float, decay: float, trust: float, eps: float, nesterov: bool) -> None:
        self.lr, self.momentum, self.decay, self.trust, self.eps = lr, momentum, decay, trust, eps
        self.nesterov = nesterov
        self.v: Any = 0.0

    def step(self, w: Array, g: Array, adapted: bool) -> Array:
        decay, ratio = (self.decay, 1.0) if adapted else (0.0, 1.0)
        norm_w, norm_g = np.sqrt((w**2).sum()), np.sqrt((g**2).sum())
        if adapted and norm_w > 0 and norm_g > 0:
            ratio = self.trust * norm_w / (norm_g + decay * norm_w + self.eps)
        change = self.lr * ratio * (g + decay * w)
        self.v = self.momentum * self.v + change
        after: Array = w - (self.momentum * self.v + change if self.nesterov else self.v)
        return after


class Lamb:
    """arXiv 1904.00962, algorithm 2."""

    def __init__(
        self, lr: float, betas: tuple[float, float], eps: float, decay: float, corrected: bool, clip: Any
    ) -> None:
        self.lr, self.betas, self.eps, self.decay, self.corrected, self.clip = lr, betas, eps, decay, corrected, clip
        self.m: Any = 0.0
        self.v: Any = 0.0
        self.t = 0

    def step(self, w: Array, g: Array, adapted: bool) -> Array:
        one, two = self.betas
        self.t += 1
        self.m = one * self.m + (1 - one) * g
        self.v = two * self.v + (1 - two) * g**2
        m = self.m / (1 - one**self.t) if self.corrected else self.m
        v = self.v / (1 - two**self.t) if self.corrected else self.v
        update: Array = m / (np.sqrt(v) + self.eps)
        if not adapted:
            return w - self.lr * update
        update = update + self.decay * w
        length, norm = np.sqrt((w**2).sum()), np.sqrt((update**2).sum())
        if self.clip is not None:
            length = min(max(length, self.clip[0]), self.clip[1])
        ratio = length / norm if length > 0 and norm > 0 else 1.0
        return w - self.lr * ratio * update
