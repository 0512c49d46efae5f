"""Buckets of parameters whose gradients are sparse: every rank gets the rows of all, as in Horovod."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fusion_rt import wire
from fusion_rt.torch.core.process_sets import ProcessSet
from fusion_rt.torch.core.runtime import Runtime
from fusion_rt.torch.ops.sparse import sparse_allreduce_async
from fusion_rt.torch.sync.buckets import Bucket, BucketIO
from fusion_rt.torch.sync.slots import Slot, follow_streams


class SparseBucket(Bucket):
    """A bucket of one parameter, whose gradient is an operation of its own, and has no place in the arena.

    Args:
        here: this worker's membership.
        name: of the operation.
        slot: its parameter.
        io: see `Bucket`.
        dims: number of sparse dimensions of the gradient.
        op: how the ranks' values are combined.
        process_set: the ranks that take part.
    """

    sparse = True

    def __init__(
        self, here: Runtime, name: str, slot: Slot, io: BucketIO, dims: int, op: wire.Op, process_set: ProcessSet
    ) -> None:
        super().__init__(here, (name, 0, 0), [slot], io, torch.empty(0))
        self._name, self._dims, self._op, self._process_set = name, dims, op, process_set
        self._wait: Callable[[], torch.Tensor] | None = None  # for the result
        self._rows_of_all: torch.Tensor | None = None

    def rewind(self) -> None:
        super().rewind()
        self._wait = self._rows_of_all = None

    def note_full(self) -> None:
        """Records nothing: the operation records its outcome."""

    def fill(self) -> None:
        follow_streams(self.slots)

    def submit(self) -> None:
        gradient, like = self.slots[0].parameter.grad, self.slots[0].parameter
        if gradient is None:
            shape = list(like.shape)
            indices = torch.empty((self._dims, 0), dtype=torch.int64, device=like.device)
            values = torch.empty([0, *shape[self._dims :]], dtype=like.dtype, device=like.device)
            gradient = torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
        elif not gradient.is_sparse:
            gradient = gradient.detach().to_sparse(self._dims)
        self._wait = sparse_allreduce_async(
            gradient.coalesce(), name=self._name, op=self._op, process_set=self._process_set
        )

    def give_up(self, why: str) -> None:
        """Takes part all the same: the step fails by the other buckets."""
        self.send()

    def await_result(self) -> None:
        if self._wait is not None:
            self._rows_of_all, self._wait = self._wait(), None

    def receive(self, share: float = 1.0) -> None:
        self.await_result()
        if self._rows_of_all is not None:
            self.slots[0].take(self._rows_of_all)
