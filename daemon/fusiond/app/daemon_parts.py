"""The parts of a daemon that outlive its formations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fusion_rt import wire
from fusion_rt.settings import Settings
from fusiond.core.tracing import Trace
from fusiond.host.file_work import FileWork
from fusiond.host.loop import EventLoop
from fusiond.timeline.controller import TimelineController
from fusiond.transport.mesh import Mesh
from fusiond.transport.probe import LinkProbe
from fusiond.workers.stack_reader import StackReader

if TYPE_CHECKING:
    from fusiond.engine.keeper import Left
    from fusiond.host.thread_pool import KernelPool
    from fusiond.workers.connections import Workers


class Daemonic(Protocol):
    """The daemon, as its formations see it."""

    def statistics(self) -> dict[str, object]:
        """Returns the data of `fusiond status`."""

    def formation_failed(self, number: int, reason: str, unreached: Sequence[int]) -> None:
        """A formation of this number cannot go on, for this reason; `unreached`: the nodes that never came up."""


class Heard:
    """The peers' membership epochs, whatever this node's is.

    Attributes:
        epochs: of each node, as it has told.
        early: words of a formation that is not this node's yet, by the node that has said them.
    """

    def __init__(self) -> None:
        self.epochs: dict[int, int] = {}
        self.early: dict[int, list[wire.PeerMessage]] = {}

    def of(self, node: int) -> int:
        """Returns a node's epoch."""
        return self.epochs.get(node, 0)

    def forget(self, node: int) -> None:
        """Forgets a daemon that is gone; another one may come to its node."""
        self.epochs.pop(node, None)
        self.early.pop(node, None)


@dataclass
class DaemonParts:
    """The parts of a daemon that outlive its formations.

    Attributes:
        mesh: None in a job of one node that stays one.
        heard: the peers' membership epochs.
        probe: knows the links.
        began: when the daemon began (s, by the monotonic clock).
        daemon: made them.
        workers, pool: once the daemon runs.
        left: state on the way from one formation to the next.
    """

    settings: Settings
    loop: EventLoop
    trace: Trace
    mesh: Mesh | None
    stacks: StackReader
    timeline: TimelineController
    files: FileWork
    heard: Heard
    probe: LinkProbe
    began: float
    daemon: Daemonic

    def __post_init__(self) -> None:
        self.workers: Workers
        self.pool: KernelPool
        self.left: Left = {}
