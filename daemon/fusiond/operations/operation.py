"""The record of an operation on this node, from the first sign of it to the answers of the workers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fusion_rt import wire
from fusion_rt.wire import OpKey
from fusiond.buckets.plans import UNTUNED, BucketState, PlanState
from fusiond.buckets.recipes import Recipe
from fusiond.collectives.base import Array, Exchange
from fusiond.core.contribution import Contribution
from fusiond.core.participants import Members
from fusiond.core.tracing import About
from fusiond.operations.node_parts import NodeParts
from fusiond.operations.staging import Staging
from fusiond.transport.flow_control import FlowPort


def _nothing() -> None:
    """Substitutes for a callback."""


@dataclass(slots=True)
class Operation:
    """One operation under way on this node.

    Attributes:
        begun: when it began here (s); `since`: when it last made progress.
        about: it, as records have it.
        parts: of the local members, by rank.
        recipe: of the first part that came; None for a planned bucket.
        planned: the plan and the bucket that it is of, once the plan is active here; None for a tensor outside a plan.
        tuning: of that plan.
        asked: the coordinator has been asked.
        digest: of the signature that goes into its chunks.
        peers_digest: the one that came from peers, when nothing has come from local members.
        shared: the result that goes to workers in messages.
        answer: what workers are told about an operation without data.
        early: chunks that wait for its exchange, with their sender's node: it has not started, or works on another.
        askers: nodes that are to be told when it is reached here, since they hold chunks back.
        disputed: it cannot start here: submissions or a peer's data do not fit.
        heard: when a chunk last came from a node (s).
        taking: the exchange is taking a chunk; `over`: with that one it has finished.
        working: the kernel pool has jobs of it: its exchange is not touched meanwhile, and chunks wait in `early`.
        seconds: time-out that a local member has set, the shortest; 0: none. `until`: when it is up (s).
        failed: is called when it has failed, and its jobs have ended.
        is_here: nothing of it is in workers' own memory, which only threads may touch: it may have to be paged in.
        staging: what brings local contributions to where the exchange works on them, and results back, if they do not
            lie there: scratch memory that stands in for workers' own, or a node's parts.
    """

    key: OpKey
    members: Members
    begun: float
    since: float
    about: About
    parts: dict[int, Contribution] = field(default_factory=dict)
    recipe: Recipe | None = None
    planned: tuple[PlanState, BucketState] | None = None
    tuning: wire.Tuning = UNTUNED
    asked: bool = False
    digest: int = 0
    peers_digest: int = 0
    exchange: Exchange | None = None
    port: FlowPort | None = None
    started: bool = False
    shared: Array | None = None
    answer: tuple[int, ...] = ()
    early: deque[tuple[int, wire.Chunk, memoryview]] = field(default_factory=deque)
    askers: set[int] = field(default_factory=set)
    disputed: bool = False
    heard: dict[int, float] = field(default_factory=dict)
    taking: bool = False
    over: bool = False
    working: bool = False
    seconds: float = 0.0
    until: float = math.inf
    failed: Callable[[], None] = _nothing
    is_here: bool = True
    staging: Staging | NodeParts | None = None

    @property
    def kind(self) -> wire.Kind:
        """The collective; as far as it is known here."""
        return "allreduce" if self.recipe is None else self.recipe.signature.kind

    @property
    def what(self) -> str:
        """The operation, as it is named in messages to people."""
        return self.key.in_words

    def close(self) -> None:
        """Ends the operation, after its workers are answered: its exchange is freed with the last reference to it.

        The port's way back to the operation would close a circle. Python's garbage collector, which counts objects and
        not bytes, would leave buckets' scratch memory in it for many steps.
        """
        self.failed = _nothing
        if self.port is not None:
            self.port.close()

    def traffic(self, node: int, now: float) -> tuple[wire.Traffic, ...]:
        """Returns what has gone between this node and its peers, once the exchange is there; now in seconds."""
        if self.port is None:
            return ()
        found = []
        for position, peer in enumerate(self.members.nodes):
            if peer != node:
                sent, received, unsent = self.port.traffic(position)
                received += sum(sender == peer for sender, _, _ in self.early)
                found.append(wire.Traffic(peer, sent, received, unsent, now - self.heard.get(peer, self.begun)))
        return tuple(found)
