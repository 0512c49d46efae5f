"""The stage of buckets that the ranks of a node combine before one contribution of the node goes to its daemon."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from fusion_rt import wire
from fusion_rt.core.errors import HorovodInternalError, failure_of
from fusion_rt.torch.core import device
from fusion_rt.torch.node.reduction import BucketStaging, Combining, NodeGathering, NodeReduction
from fusion_rt.torch.sync.buckets import Bucket, Stage
from fusion_rt.torch.sync.gpu_selection import BucketSelector
from fusion_rt.torch.sync.on_device import OnDevice
from fusion_rt.torch.sync.slots import Slot


class InNode(Stage):
    """The part of one bucket in the reduction of its plan within the node.

    Args:
        node: that reduction.
        selector: selects from the node's sum, if this worker does.
        copies: the stage for steps in which the daemon combines gradients; None: they are in this process's memory.
    """

    def __init__(self, node: NodeReduction, selector: BucketSelector | None, copies: OnDevice | None) -> None:
        self._node, self._selector, self._copies = node, selector, copies
        self._share = wire.OWN
        self._staging: BucketStaging | None = None
        self._combining: Combining | None = None  # until the bucket is submitted
        self._why = ""  # the reduction has failed, so that the daemon fails the bucket
        self._gathering: NodeGathering | None = None

    def is_due(self) -> bool:
        return self._node.reduces

    def start(self, bucket: Bucket, values: bool = True) -> Combining:
        """Starts to combine this step's values, or (without `values`) takes part without changing the sum."""
        if self._copies is not None:
            self._copies.follow_gradients(bucket)
        views = [slot.view for slot in bucket.slots]
        staging = self._staging = self._node.staging(self._staging, bucket.flat, views, bucket.slots[0].parameter)  # type: ignore[arg-type]
        if values:
            bucket.put(staging.places)
        else:
            self._node.fill_with_nothing(staging)
        bucket.add_owed(staging.values)
        self._combining = self._node.reduce(staging, partial(self._follow, bucket))
        self._share = self._node.share()
        return self._combining

    def _follow(self, bucket: Bucket, values: torch.Tensor) -> device.Copying:
        """Starts to copy this rank's part of the node's sum (1-D) to the arena, or to select from it."""
        if self._selector is not None and self._selector.is_due():
            return self._selector.follow(bucket, values)
        place = self._node.mine(bucket.flat)
        return device.layer.copy([place], [values[: len(place)].to(place.dtype)])

    def submit(self, bucket: Bucket) -> None:
        assert self._combining is not None
        self._why, self._combining = self._combining.why, None
        if self._why:
            self._share = wire.ELSEWHERE  # of all ranks of the node, so that the daemon fails it everywhere at once
            if self._selector is not None:
                self._selector.withdraw(self._node, self._why)
        else:
            bucket.owed.clear()
        said = None if self._selector is None else self._selector.terms()
        bucket.announce(said, self._share, self._gathers)

    def give_up(self, why: str) -> None:
        if self._node.reduces:
            self._node.give_up(why)

    def failed(self, error: HorovodInternalError) -> None:
        """Tells the ranks of the node that wait for this one. Raises `HorovodInternalError` if more is known here."""
        self._node.give_up(str(error))
        if self._why:
            raise failure_of(f"{error}: {self._why}") from error

    @property
    def _gathers(self) -> bool:
        """True if this rank gets a part of this step's result, and the rest from other ranks of its node."""
        return self._share == wire.PART and self._node.way.gathers

    def gather(self, bucket: Bucket) -> None:
        if self._gathers:
            assert self._staging is not None
            self._gathering = self._node.gather(self._staging, bucket.flat)

    def await_gathered(self, bucket: Bucket) -> None:
        gathering, self._gathering = self._gathering, None
        if gathering is not None:
            gathering.wait()
            if self._copies is None:
                assert self._staging is not None
                bucket.flat.copy_(self._staging.result[: len(bucket.flat)])

    def results(self, bucket: Bucket, slots: Sequence[Slot]) -> list[torch.Tensor]:
        if self._copies is None:
            return super().results(bucket, slots)
        places = self._staging.result_places if self._gathers and self._staging is not None else ()
        return self._copies.bring(bucket, slots, places)


def stand_in(bucket: Bucket) -> None:
    """Takes part in a reduction within the node without changing its result, for a rank that has joined."""
    for stage in bucket.stages:
        if isinstance(stage, InNode):
            with torch.no_grad():
                bucket.stage, bucket.copying = stage, stage.start(bucket, values=False)
            bucket.sent = True
