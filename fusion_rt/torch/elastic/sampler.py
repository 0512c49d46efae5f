"""A sampler that knows what of an epoch is done, so the rest can be dealt anew: after an error, or to other ranks."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sized
from typing import Any

import torch.utils.data

from fusion_rt.torch.core.runtime import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Deals the samples of a dataset to the ranks, as `DistributedSampler` does, and again what is left of an epoch.

    All ranks have the same order of samples in an epoch. Those that are done are its first `processed_num`; of the rest
    each rank gets every `size`-th, starting at its own. So that is right as long as all ranks record alike: after each
    step, say. To be used so:

    1. Put it into the `TorchState`, which keeps what is recorded and brings it to all ranks.
    2. Call `record_batch` when a batch is done, before the state is committed.
    3. Call `set_epoch` at the end of each epoch, not at its beginning: what is done of an epoch is forgotten then.

    Args:
        dataset: what has a length, the same on all ranks and in all epochs.
        shuffle: whether each epoch has an order of its own.
        seed: what that order depends on besides the epoch; the same on all ranks.

    Attributes:
        epoch: number of the epoch.
        processed_num: samples of this epoch that are done, on all ranks together.
        num_replicas, rank: among whom the rest was dealt, and who of them this is.
        remaining_indices: indices of the rest of the epoch, of all ranks.
        indices: of them, those of this rank; some are repeated so that all ranks get as many.
        num_samples: their number.
        total_size: that of all ranks together.

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
        """Goes to an epoch of which nothing is done."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Notes that all ranks have done a batch.

        Args:
            batch_idx: Horovod's; not needed.
            batch_size: samples of it on one rank.
        """
        self._record(batch_size)

    def record_indices(self, indices: Sized) -> None:
        """Notes that all ranks have done as many samples as these are. As in earlier versions of Horovod."""
        self._record(len(indices))

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """The samples of one of this rank's batches since the last reset. As in earlier versions of Horovod."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    @property
    def processed_indices(self) -> set[int]:
        """Indices of the samples of this epoch that are done, on any rank."""
        return set(self._order()[: self.processed_num])

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes: `epoch` and `processed_num`."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes to where another sampler was, and deals the rest among the ranks that there are now."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deals what is left of the epoch among the ranks that there are now."""
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
        """Counts what each rank has done; samples that were repeated at the end of the epoch do not count."""
        self.processed_num = min(self.processed_num + number * self.num_replicas, len(self.dataset))

    def _order(self) -> list[int]:
        """All samples in the order of this epoch, the same on all ranks."""
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        return indices
