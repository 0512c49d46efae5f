"""Selections that a local worker has made from a bucket itself, on its GPU: see `fusion_rt.codecs.worker_selection`."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import cast

from fusion_rt.codecs import BucketCodec, CodecError
from fusion_rt.codecs.packing import Selection
from fusion_rt.codecs.worker_selection import ALIGNMENT, Tray, WorkerSelectedBucketCodec
from fusiond.collectives.base import Array
from fusiond.core.errors import RequestError


@dataclass(frozen=True, slots=True)
class Selected:
    """A part of a run, in place of a gradient.

    Attributes:
        whose: the worker and the bucket, for people.
    """

    whose: str
    codec: WorkerSelectedBucketCodec
    tray: Tray

    def contribute(self) -> Selection:
        """The node's contribution. Raises `RequestError` when it cannot be one; nothing has changed then."""
        try:
            return self.codec.adopt(self.tray)
        except CodecError as error:
            raise RequestError(f"{self.whose} was selected wrongly by its worker: {error}") from None

    def correct(self, undone: bool) -> None:
        """The operation is over: the worker is told the corrections of its residual."""
        self.codec.correct(self.tray, undone)

    def disown(self) -> None:
        """The operation has failed before it began: the selection goes back, with the next corrections."""
        with contextlib.suppress(CodecError):  # data that is no selection cannot go back
            self.codec.disown(self.tray)


def selected(whose: str, codec: BucketCodec, memory: Array, offset: int, least: int) -> Selected:
    """Checks and returns the selection that a worker tells of.

    Args:
        whose: see `Selected`.
        codec: of the bucket.
        memory: the plan's segment (uint8), in which the tray is.
        offset: where the tray begins.
        least: where the plan's buckets end.

    Raises:
        RequestError: the codec selects itself, or no tray can be there.
    """
    try:
        shape = codec.tray()
    except CodecError as error:
        raise RequestError(f"{whose} was selected by its worker: {error}") from None
    if shape is None:
        raise RequestError(f"{whose} was selected by its worker, but its codec here takes whole gradients only")
    if offset % ALIGNMENT or not least <= offset <= len(memory) - shape.nbytes:
        raise RequestError(
            f"{whose} was selected by its worker into byte {offset} of a segment of {len(memory)} bytes, of which the "
            f"first {least} have the plan's buckets; a tray takes {shape.nbytes} bytes, and begins at a multiple of "
            f"{ALIGNMENT}"
        )
    return Selected(whose, cast(WorkerSelectedBucketCodec, codec), Tray(shape, memory[offset:]))
