"""An operation that a worker has submitted, and the terms of its part of a planned bucket."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fusion_rt import wire
from fusion_rt.host.arena import Segment


class Terms(NamedTuple):
    """Terms of a worker's part of a planned bucket, which go with `wire.Ready`.

    Attributes:
        rescale: factor by which the residual of each tensor is multiplied first, if learning rates have changed.
        rates: learning rate of each parameter group, where a home applies gradients.
        samples: how many samples it comes from; 0: it has no gradient, and only counts as a contribution.
        urgency: the less, the sooner it is needed.
        kind, tray, share, passes, gives_up: see `wire.Ready`.
    """

    rescale: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()
    samples: int = 1
    kind: wire.PostKind = "post"
    urgency: int = 0
    tray: int = 0
    share: int = wire.OWN
    passes: int = 0
    gives_up: str = ""


class Operation:
    """An operation under way.

    Attributes:
        name: the tensor's name, for messages to people.
        done: whether it has ended, with a result or an error.
        error: why it failed, or None.
        inline: the result, when it is small.
        output: private copy-on-write mapping of the result, when the daemon has sent one (allgather, alltoall).
        sizes: rows received from each rank (allgather, alltoall), or the answer of an operation without data.
        missing: of one whose time was up: the ranks that had not submitted it.
        plan: the answer to a proposal.
        release: called when it ends, by the thread that reads its answer, when all but `done` is set.
        keeps: owns memory that the daemon reads and writes until it has ended.
        about: the name, clock and plan under which it is recorded.
    """

    done = False
    error: str | None = None
    inline: bytes | None = None
    output: Segment | None = None
    sizes: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    plan: wire.Plan | None = None
    release: Callable[[Operation], None] | None = None
    keeps: object = None

    def __init__(self, handle: int, name: str) -> None:
        self.handle = handle
        self.name = name
        self.about = (name, 0, 0)
