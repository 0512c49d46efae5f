"""The surroundings of the parts of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from fusion_rt.core.topology import Topology
from fusion_rt.host.cores import kernel_threads
from fusion_rt.settings import Settings
from fusion_rt.tracing.recorder import NULL, Instrument
from fusiond.core.effects import Effects
from fusiond.core.participants import Participants
from fusiond.host.thread_pool import LANES_ABOVE
from fusiond.operations.admission import Room, scratch_room


@dataclass(frozen=True)
class Context:
    """One engine's surroundings.

    Attributes:
        topology, node: the places of ranks, and this node.
        settings: sizes and time-outs.
        outside: acts for the engine.
        participants: the process sets, and ranks that are away.
        trace: the recorder.
        cores: processors that this daemon may use.
        room: for all scratch memory of planned buckets.
    """

    topology: Topology
    node: int
    settings: Settings
    outside: Effects
    participants: Participants
    trace: Instrument = NULL
    cores: int = 2
    room: Room = field(default_factory=scratch_room)

    @property
    def threads(self) -> int:
        """The number of kernel threads."""
        return self.settings.kernel_threads or kernel_threads(self.cores)

    @property
    def lanes(self) -> bool:
        """True if threads do the work of long chunks: there are more of them than the event loop keeps busy itself."""
        return self.threads > LANES_ABOVE

    @property
    def host(self) -> str:
        """The name of this node's host."""
        return self.topology.hosts[self.node]

    def other_nodes(self) -> list[int]:
        """Returns all nodes but this one and those that are lost."""
        away = {self.node, *self.participants.lost_nodes}
        return [node for node in range(len(self.topology.hosts)) if node not in away]
