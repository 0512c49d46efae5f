"""K-FAC written down plainly in numpy: explicit loops over patches, and the whole Kronecker product, solved."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Array = np.ndarray


class NumpyKFAC:
    """For layers whose inputs and gradients are given as [examples, locations, size].

    Args as those of `fusion_rt.torch.kfac.KFAC`.
    """

    def __init__(
        self,
        lr: float,
        damping: float = 0.001,
        decay: float = 0.95,
        clip: float | None = 0.001,
        factor_every: int = 1,
        inverse_every: int = 1,
    ) -> None:
        self.lr, self.damping, self.decay, self.clip = lr, damping, decay, clip
        self.factor_every, self.inverse_every = factor_every, inverse_every
        self.steps = self.updates = 0
        self.factors: list[tuple[Array, Array]] = []
        self.used: list[tuple[Array, Array]] = []

    def step(self, inputs: Sequence[Array], outputs: Sequence[Array], gradients: Sequence[Array]) -> list[Array]:
        """Preconditioned gradients.

        Args:
            inputs: of each layer, [examples, locations, a_size], with the 1 for the bias.
            outputs: gradients of the examples' own losses by the layers' outputs, [examples, locations, g_size].
            gradients: of the mean loss, [g_size, a_size].
        """
        if self.steps % self.factor_every == 0:
            self._update(inputs, outputs)
        if self.steps % self.inverse_every == 0:
            self.used = list(self.factors)
        self.steps += 1
        results = [self._solve(*used, gradient) for used, gradient in zip(self.used, gradients, strict=True)]
        if self.clip is None:
            return results
        total = sum(float((g * p).sum()) for g, p in zip(gradients, results, strict=True)) * self.lr**2
        return [min(1.0, math.sqrt(self.clip / abs(total))) * result for result in results]

    def _update(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        self.updates += 1
        new = [
            (
                np.mean([np.mean([np.outer(row, row) for row in example], axis=0) for example in own_inputs], axis=0),
                np.mean([np.sum([np.outer(row, row) for row in example], axis=0) for example in own_outputs], axis=0),
            )
            for own_inputs, own_outputs in zip(inputs, outputs, strict=True)
        ]
        keep = min(1 - 1 / self.updates, self.decay)
        old = self.factors or new
        self.factors = [
            (keep * a + (1 - keep) * new_a, keep * g + (1 - keep) * new_g)
            for (a, g), (new_a, new_g) in zip(old, new, strict=True)
        ]

    def _solve(self, a: Array, g: Array, gradient: Array) -> Array:
        """(G ⊗ A + damping) x = the gradient's rows, one after the other."""
        whole = np.kron(g, a) + self.damping * np.eye(gradient.size)
        return np.linalg.solve(whole, gradient.reshape(-1)).reshape(gradient.shape)


def with_ones(rows: Array) -> Array:
    return np.concatenate([rows, np.ones((*rows.shape[:-1], 1))], axis=-1)


def patches(
    images: Array, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int]
) -> Array:
    """[N, C, height, width] as [N, locations, C · kernel], pixel by pixel."""
    images = np.pad(images, ((0, 0), (0, 0), (padding[0],) * 2, (padding[1],) * 2))
    count, _, height, width = images.shape
    reach = [dilation[i] * (kernel[i] - 1) + 1 for i in range(2)]
    return np.array(
        [
            [
                [
                    images[n, c, top + i * dilation[0], left + j * dilation[1]]
                    for c in range(images.shape[1])
                    for i in range(kernel[0])
                    for j in range(kernel[1])
                ]
                for top in range(0, height - reach[0] + 1, stride[0])
                for left in range(0, width - reach[1] + 1, stride[1])
            ]
            for n in range(count)
        ]
    )


def softmax_minus(outputs: Array, labels: Array) -> Array:
    """Gradients [N, classes] of the examples' cross-entropies by the outputs."""
    odds = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    return odds / odds.sum(axis=1, keepdims=True) - np.eye(outputs.shape[1])[labels]
