"""A sampler that records how much of an epoch is done, so that the rest can be dealt anew after a change of ranks."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sized
from typing import Any

import torch.utils.data

from fusion_rt.torch.core.runtime import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Deals the samples of a dataset to the ranks, as `DistributedSampler` does, and again the rest of an epoch.

    All ranks have the same order of samples in an epoch. Those that are done are its first `processed_num`; of the rest
    each rank gets every `size`-th, starting at its own. All ranks have to record alike for that: after each step, say.
    Usage:

    1. Put it into the `TorchState`, which keeps what is recorded and brings it to all ranks.
    2. Call `record_batch` when a batch is done, before the state is committed.
    3. Call `set_epoch` at the end of each epoch, not at its beginning: it forgets what is done.

    Args:
        dataset: has a length, the same on all ranks and in all epochs.
        shuffle: whether each epoch has an order of its own.
        seed: of that order, together with the epoch; the same on all ranks.

    Attributes:
        epoch: number of the epoch.
        processed_num: samples of this epoch that are done, on all ranks together.
        num_replicas, rank: number of ranks among which the rest was dealt, and this one.
        remaining_indices: indices of the rest of the epoch, of all ranks.
        indices: of them, those of this rank; some are repeated so that all ranks get as many.
        num_samples: number of this rank's indices.
        total_size: number of all ranks' indices.

    Raises:
        ValueError: before `hvd.init()`.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, of which nothing is done."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Notes that all ranks have done a batch.

        Args:
            batch_idx: accepted for Horovod's sake, and ignored.
            batch_size: number of samples of the batch on one rank.
        """
        self._record(batch_size)

    def record_indices(self, indices: Sized) -> None:
        """Notes that each rank has done `len(indices)` samples. As in earlier versions of Horovod."""
        self._record(len(indices))

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Returns the samples of one of this rank's batches since the last reset. As in earlier versions of Horovod."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    @property
    def processed_indices(self) -> set[int]:
        """Indices of the samples of this epoch that are done, on any rank."""
        return set(self._order()[: self.processed_num])

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for `load_state_dict`: `epoch` and `processed_num`."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a sampler's state, and deals the rest of its epoch among the present ranks."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deals the rest of the epoch among the present ranks."""
        self.num_replicas = size()
        self.rank = rank()
        self.remaining_indices = self._order()[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        missing = self.total_size - len(self.remaining_indices)
        padded = self.remaining_indices + (self.remaining_indices * missing)[:missing]
        self.indices = padded[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples

    def _record(self, number: int) -> None:
        """Counts `number` samples on each rank; samples that were repeated at the end of the epoch do not count."""
        self.processed_num = min(self.processed_num + number * self.num_replicas, len(self.dataset))

    def _order(self) -> list[int]:
        """Returns all samples in the order of this epoch, the same on all ranks."""
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        return indices
