"""A sampler that records how much of an epoch is done, so that the rest can be dealt anew after a change of ranks."""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

import torch.utils.data

from fusion_rt.torch.core.runtime import rank, size


class Standing(NamedTuple):
    """How far a rank has come with the samples that were dealt to it last.

    Attributes:
        rank: that they were dealt to.
        recorded: the number of those that are done.
        fetched: the number of those that a loader has; some of them may lie in its queue.
        is_exhausted: the loader was told that there are no more, and will not ask again.
    """

    rank: int
    recorded: int
    fetched: int
    is_exhausted: bool


class _EpochPass:
    """One iteration over a rank's samples, from which a loader fetches ahead of the training."""

    def __init__(self, indices: list[int]) -> None:
        self.indices = indices
        self.fetched = 0
        self.is_exhausted = False

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.fetched == len(self.indices):
            self.is_exhausted = True
            raise StopIteration
        self.fetched += 1
        return self.indices[self.fetched - 1]


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Deals the samples of a dataset to the ranks, as `DistributedSampler` does, and the rest of an epoch anew.

    All ranks have the same order of samples in an epoch. Those that are done are its first `processed_num`; of the rest
    each rank gets every `size`-th, starting at its own. So all ranks have to record alike, after each step for example.

    When ranks are lost in the middle of an epoch and the others stay in their loops, `follow` deals the rest anew. Each
    keeps the samples that its loader has fetched already. The others, with the undone ones of the lost ranks, are dealt
    so that all remaining ranks have equally many batches. Where other loaders have fetched their last batch before
    that, the
    samples of the lost ranks are *late*: they belong to the next epoch.

    Usage:

    1. Put it into the `TorchState`, which keeps the record and brings it to all ranks.
    2. Call `record_batch` when a batch is done, before the state is committed.
    3. Call `set_epoch` at the end of each epoch, not at its beginning: it forgets the processed samples.

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
        self._dealt: list[int] | None = None  # the order of this epoch, where it is not the one that the seed gives
        self._late: list[int] = []  # of this epoch, for the next one
        self._carried: list[int] = []  # late ones of the epoch before, which are in this one once more
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, of which nothing is done."""
        self.epoch = epoch
        self.processed_num = 0
        self._dealt = None
        self._carried, self._late = self._late, []
        if self._carried:
            self._dealt = [*self._order(), *self._carried]
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
        """Returns the state for `load_state_dict`: `epoch` and `processed_num`.

        After `follow` there are also the `order` of the epoch, and samples that are `late` or were in the epoch before.
        """
        state: dict[str, Any] = {"epoch": self.epoch, "processed_num": self.processed_num}
        if self._dealt is not None:
            state |= {"order": list(self._dealt), "late": list(self._late), "carried": list(self._carried)}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a sampler's state, and deals the rest of its epoch among the present ranks."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self._dealt = state_dict.get("order")
        self._late = list(state_dict.get("late", ()))
        self._carried = list(state_dict.get("carried", ()))
        self.reset()

    def reset(self) -> None:
        """Deals the rest of the epoch among the present ranks."""
        if self._dealt is not None:  # without samples that were repeated so that other ranks got as many
            done = self._dealt[: self.processed_num]
            self._dealt = [*done, *self._undone(self._dealt[self.processed_num :], done)]
        self._deal()

    def _deal(self) -> None:
        self.num_replicas = size()
        self.rank = rank()
        self.remaining_indices = self._order()[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        self.indices = self._dealt_to_all()[self.rank]
        self._recorded = 0
        self._pass = _EpochPass(self.indices)

    def standing(self) -> Standing:
        """Returns how far this rank has come since samples were dealt last, which the others need for `follow`."""
        recorded = min(self._recorded, len(self.indices))  # scripts record a short last batch as a whole one
        return Standing(self.rank, recorded, self._pass.fetched, self._pass.is_exhausted)

    def follow(self, standings: Sequence[Standing]) -> bool:
        """Deals the rest of the epoch anew in the middle of an iteration, to ranks that stay in their loops.

        The batch under way is the loader's, and the script will record it. Ranks that have recorded less than others
        are at an earlier step, in which they have done as much.

        Args:
            standings: of the ranks that are left, in the order of their new ranks; the same on all of them.

        Returns:
            Whether it could. If not, nothing has changed: the script has recorded more than its loader has fetched, or
            loaders that will not ask again have different numbers of batches left.
        """
        place = standings.index(self.standing())
        most = max(standing.recorded for standing in standings)
        lag = most - standings[place].recorded  # a step that others have taken, which the script has yet to record
        if min(standing.recorded for standing in standings) < 0:
            return False  # and another rank is lost before it has
        standings = [standing._replace(recorded=most) for standing in standings]
        queued = [standing.fetched - standing.recorded for standing in standings]
        limits = {count for count, standing in zip(queued, standings, strict=True) if standing.is_exhausted}
        if min(queued) < 0 or len(limits) > 1 or (limits and max(queued) > min(limits)):
            return False
        before = self._dealt_to_all()
        # A step counts with the samples of all ranks, so the lost have done as much as the first of the others.
        done = dict.fromkeys(range(self.num_replicas), most)
        kept = [before[standing.rank][standing.recorded : standing.fetched] for standing in standings]
        order = self._order()
        finished = order[: len(order) - len(self.remaining_indices)]
        finished += chain(*(before[rank][:count] for rank, count in done.items()))
        pool = deque(self._undone(self.remaining_indices, [*finished, *chain(*kept)]))
        each = min(limits) if limits else max(-(-(len(pool) + sum(queued)) // len(standings)), *queued)
        for mine in kept:
            while pool and len(mine) < each:
                mine.append(pool.popleft())
        repeated = cycle(list(chain(*kept)))
        rows = zip(*(_filled(mine, each, repeated) for mine in kept), strict=True)
        self._dealt = [*finished, *chain(*rows)]
        self._late += pool
        self.processed_num = len(finished)
        underway = self._pass
        self._deal()
        self._recorded -= lag
        self.processed_num -= lag * self.num_replicas
        underway.indices, underway.fetched, self._pass = self.indices, queued[place], underway
        return True

    def deal_late(self) -> bool:
        """Deals samples that are late still in this epoch, whose other samples all loaders have had. Returns whether
        there are any; the same on all ranks."""
        if not self._late:
            return False
        self._dealt, self._late = [*self._order(), *self._late], []
        self.reset()
        return True

    def __iter__(self) -> Iterator[int]:
        self._pass = _EpochPass(self.indices)
        return self._pass

    def __len__(self) -> int:
        return self.num_samples

    def _dealt_to_all(self) -> list[list[int]]:
        """Returns the samples of each rank since the last reset; some are repeated so that all ranks get as many."""
        missing = self.total_size - len(self.remaining_indices)
        padded = self.remaining_indices + (self.remaining_indices * missing)[:missing]
        return [padded[rank :: self.num_replicas] for rank in range(self.num_replicas)]

    def _undone(self, indices: Iterable[int], done: Iterable[int]) -> list[int]:
        """Returns those of the indices that the epoch needs once more, in their order, when others are done."""
        often, carried = Counter(done), Counter(self._carried)
        found = []
        for index in indices:
            if often[index] <= carried[index]:
                often[index] += 1
                found.append(index)
        return found

    def _record(self, number: int) -> None:
        """Counts `number` samples on each rank; samples that were repeated at the end of the epoch do not count."""
        most = len(self.dataset) if self._dealt is None else len(self._dealt)
        self.processed_num = min(self.processed_num + number * self.num_replicas, most)
        self._recorded += number

    def _order(self) -> list[int]:
        """Returns all samples in the order of this epoch, the same on all ranks."""
        if self._dealt is not None:
            return self._dealt
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        return indices


def _filled(indices: list[int], length: int, repeated: Iterator[int]) -> list[int]:
    """Returns the indices, with repeated ones at the end as far as they are not as many as wanted."""
    return [*indices, *islice(repeated, length - len(indices))]
