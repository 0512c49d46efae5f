"""Options of an optimizer's exchanges, and where daemons keep their part of its state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fusion_rt import algorithms, codecs, wire
from fusion_rt.torch.autotune.replanning import Replanning
from fusion_rt.torch.core.process_sets import ProcessSet
from fusion_rt.torch.core.runtime import Runtime
from fusion_rt.torch.ops.signatures import id_of
from fusion_rt.torch.sync.update_rule import UpdateRule


@dataclass(frozen=True)
class Options:
    """Fixed options of an optimizer's exchanges.

    Attributes:
        reduction: how the ranks' contributions are combined.
        process_set: the ranks that take part.
        rule: the value sent of each parameter, and the use of the answer.
        compressor: a script's own, applied to each gradient before and after; None if there is none.
        sparse_as_dense: sparse gradients are reduced as dense ones.
        replanning: makes the object that replaces plans by others; None: plans are never replaced.
        go_on: has the optimizer, which it is called with, go on by another algorithm, its text, at the end of a step;
            to be called on all ranks. None: that is not possible.
    """

    reduction: wire.Reduction
    process_set: ProcessSet
    rule: UpdateRule
    compressor: Any = None
    sparse_as_dense: bool = False
    replanning: Callable[[], Replanning] | None = None
    go_on: Callable[[Any, str], None] | None = None

    @property
    def algorithm(self) -> algorithms.Algorithm:
        """The algorithm by which the ranks' work becomes one model."""
        return algorithms.parse(self.reduction.algorithm)

    def check(self, ranks: int) -> None:
        """Raises `AlgorithmError`, or `MixingError`, if so many ranks cannot do this."""
        algorithms.check_use(self.algorithm, codecs.parse(self.reduction.codec), self.reduction.op, ranks)


@dataclass(frozen=True)
class Where:
    """Place of an optimizer's state in the daemons.

    Attributes:
        here: this worker's membership.
        ranks: the process set that takes part.
        group: name of the plans.
        plan: the active one; None if there is none.
    """

    here: Runtime
    ranks: ProcessSet
    group: str
    plan: wire.Plan | None

    @property
    def process_set(self) -> int:
        """Id of the process set. Raises as `id_of`."""
        return id_of(self.here, self.ranks, "allreduce")

    def nodes(self) -> dict[int, list[int]]:
        """Returns the ranks that take part, by node."""
        found: dict[int, list[int]] = {}
        for rank in self.here.client.process_sets[self.process_set].ranks:
            found.setdefault(self.here.client.topology.node_of(rank), []).append(rank)
        return found

    @property
    def is_first_of_node(self) -> bool:
        """True if this worker is the first of those on its node."""
        return self.here.rank == self.nodes()[self.here.client.welcome.node][0]
