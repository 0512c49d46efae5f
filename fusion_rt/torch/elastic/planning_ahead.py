"""Plans in a new membership that are asked for before there are gradients, so that the first step need not wait for
them."""

from __future__ import annotations

from fusion_rt.torch.core.process_sets import global_process_set
from fusion_rt.torch.sync.slots import in_order
from fusion_rt.torch.sync.synchroniser import Synchroniser


def can_plan_ahead(sync: Synchroniser, is_new: bool) -> bool:
    """Tells whether the plan of an optimizer can be asked for before there are gradients. They say which ones are
    sparse, and what a script's compressor makes of them; and codecs and homes get their state before.

    Args:
        sync: the optimizer's.
        is_new: this rank has been in no membership that has plans; others have.
    """
    options, named = sync.options, {slot.name for slot in sync.slots}
    is_global = options.process_set is global_process_set
    is_plain = options.compressor is None and sync.replanning is None and not sync.checkpoint.remembers
    return is_global and is_plain and bool(named) and (is_new or named == set(sync.plan.order))


def plan_ahead(sync: Synchroniser) -> None:
    """Asks for a plan, in the order of the one before, and does not wait for it. To be called on all ranks.

    Raises:
        HorovodInternalError: a rank is gone.
    """
    by_name = {slot.name: slot for slot in sync.slots}
    order = in_order([*(by_name[name] for name in sync.plan.order if name in by_name), *sync.slots])
    sync.plan.propose({slot.name: slot for slot in order}, sync.when.reduction(), ahead=True)
