"""How an optimizer's gradients are reduced, as it was asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fusion_rt import wire
from fusion_rt.torch.autotune.replanning import Replanning
from fusion_rt.torch.core.process_sets import ProcessSet
from fusion_rt.torch.sync.slots import Slot

if TYPE_CHECKING:
    from fusion_rt.torch.sync.synchroniser import GradientExchange


@dataclass(frozen=True)
class Manner:
    """How gradients are reduced.

    Attributes:
        reduction: how the ranks' gradients are combined.
        process_set: the ranks that take part.
        compressor: applied to each gradient before and after.
        sparse_as_dense: sparse gradients are reduced as dense ones.
        slot: what is reduced of a parameter.
        eager: buckets are sent as soon as they are complete, during the backward pass.
        exchange: what reduces them; None: `GradientExchange`.
        replanning: makes what replaces plans by others; None: they are for ever.
        in_backward: a backward pass reduces gradients, and what comes back is `p.grad`; else `step()` exchanges.
    """

    reduction: wire.Reduction
    process_set: ProcessSet
    compressor: Any
    sparse_as_dense: bool = False
    slot: type[Slot] = Slot
    eager: bool = True
    exchange: type[GradientExchange] | None = None
    replanning: Callable[[], Replanning] | None = None
    in_backward: bool = False
