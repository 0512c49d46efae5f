"""The worker's access to the state that daemons keep for one optimizer: to save it, to load it, and to carry it from
one membership epoch to the next.

This state is what codecs have not sent, and what homes have of shards; `units` knows in which units. What this worker
itself owes to the others because its node's daemon cannot have it (`carried`) goes along with its next gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any, Protocol

import numpy as np
import torch

from fusion_rt import codecs, wire
from fusion_rt.codecs.error_feedback import NODE_TENSORS
from fusion_rt.core.errors import WireError
from fusion_rt.core.topology import GLOBAL_SET
from fusion_rt.local.saved_state import Array, State, StateOwner, by_owner
from fusion_rt.torch.ops.broadcast import barrier
from fusion_rt.torch.ops.objects import allgather_object, broadcast_object
from fusion_rt.torch.ops.reduce import allreduce
from fusion_rt.torch.ops.signatures import Sum
from fusion_rt.torch.sync import carried
from fusion_rt.torch.sync.carried import CarriedState
from fusion_rt.torch.sync.gpu_selection import Selections
from fusion_rt.torch.sync.options import Options, Where
from fusion_rt.torch.sync.parameters import Trained
from fusion_rt.torch.sync.scales import loss_scales
from fusion_rt.torch.sync.scales.conversion import Meant, Units, meant_in
from fusion_rt.torch.sync.slots import Slot

KEY = "fusion_rt"
"""Key in a distributed optimizer's `state_dict`; torch's own optimizers ignore it."""


class Source(Protocol):
    """Knows where daemons keep an optimizer's state."""

    selections: Selections

    @property
    def slots(self) -> Iterable[Slot]:
        """Slots of all parameters that are exchanged."""

    def where(self) -> Where | None:
        """Returns where it is; None if there is none, or this worker is in no job. Raises `ValueError` if gradients are
        under way."""


class Checkpoint:
    """State that daemons keep for one optimizer.

    Args:
        source: asked where it is.
        options: how the optimizer's parameters are exchanged.
        trained: the parameters, and their learning rates.
        mirrors_updates: shards are to outlive losses, where that is possible.

    Attributes:
        remembers: daemons keep something.
        codec: of the exchange.
        units: in which that is.
        converts: daemons are told of units, since residuals are applied later.
        outlives: shards outlive the loss of a rank or a node, as of their last update; the same on all ranks.
    """

    def __init__(self, source: Source, options: Options, trained: Trained, mirrors_updates: bool = False) -> None:
        self._source = source
        self._trained = trained
        self.codec = options.reduction.codec
        self._homes = not options.algorithm.sums_gradients
        self._at_homes = options.algorithm.at_homes
        self._at_shards = options.algorithm.at_shards
        self._is_global = options.process_set.process_set_id == GLOBAL_SET
        self._owed: carried.Arrays = {}  # gradients to be sent with this worker's next ones, flat, by name
        self._arriving: tuple[CarriedState, CarriedState, bool] | None = None  # until there is a plan
        self.units = Units(trained, options.reduction, options.process_set)
        self._homes_are_loaded = False  # with a checkpoint's state, since there was no plan
        self._begin_to_convert()
        self._planned: wire.Plan | None = None  # whose homes have carried state, or begin with a seed
        why = why_only_at_commits(options) if mirrors_updates and self._at_shards else ""
        self.outlives = mirrors_updates and self._at_shards and not why
        if why and options.process_set.rank() == 0:
            warnings.warn(f"FUSION_MIRROR_SHARDS=update mirrors shards at commits alone here: {why}", stacklevel=2)

    def use(self, codec: str) -> None:
        """Switches to a codec; daemons keep the memory of another one."""
        if codec == self.codec:
            return
        before, self.codec = self.converts, codec
        self._begin_to_convert()
        if self.converts:
            self.units.resume(self.units.meant if before else Meant())
            self.units.begin()

    def _begin_to_convert(self) -> None:
        self.converts = codecs.parse(self.codec).stateful
        self.remembers = self._homes or self.converts
        if self.converts:
            loss_scales.watch()

    # --- plans --------------------------------------------------------------------------------------------------------

    def pay(self, name: str) -> Array | None:
        """Removes and returns a parameter's owed gradient, flat, for sending now; None if nothing is owed."""
        return self._owed.pop(name, None)

    def move(self) -> None:
        """Carries homes, and their workers' residuals, over to the next plan, which has other buckets. An
        operation on all ranks, when nothing is under way."""
        if not self._at_shards:
            return
        where = self._source.where()
        assert where is not None
        barrier(process_set=where.ranks)  # no rank posts to these homes any more
        mine = self.carry() or CarriedState()
        homes = carried.united(allgather_object(mine.homes, process_set=where.ranks))
        kept = CarriedState(homes=homes, meant=self.units.meant)
        self._arriving = kept, replace(mine, homes={}), where.is_first_of_node

    def begin_homes(self, state: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        """Has the homes of the next plan begin with the state that the script's optimizer has on the first rank: it was
        loaded, or is from steps before the optimizer was wrapped. An operation on all ranks.

        Raises:
            ValueError: homes cannot have it.
        """
        where = self._source.where()
        if where is None or self._arriving is not None:
            return
        if self._homes_are_loaded:
            state, self._homes_are_loaded = {}, False
        has_any = torch.tensor(any(state.values()), dtype=torch.int32)
        if not int(allreduce(has_any, name=f"{where.group}.state", op=Sum, process_set=where.ranks)):
            return
        first = where.here.client.process_sets[where.process_set].ranks[0]
        mine = {slot.name: _entries(slot, state.get(slot.parameter, {})) for slot in self._source.slots}
        homes = broadcast_object(mine, first, f"{where.group}.state", where.ranks)
        self._arriving = CarriedState(homes=homes, meant=self.units.meant), CarriedState(), where.is_first_of_node

    def planned(self, where: Where, plan: wire.Plan, slots: Mapping[str, Slot]) -> None:
        """Gives homes and senders of a new plan of these slots what was carried, before anything comes to them, and
        before the homes' seed."""
        self._planned = plan
        if self._arriving is None:
            return
        common, mine, loads = self._arriving
        here, state = where.here, dict[str, Any]()
        self.units.resume(common.meant)
        sizes = self.sizes()
        owed = {name: value for name, value in mine.residuals.items() if sizes.get(name) == value.size}
        values = {name: _flat(slot) for name, slot in slots.items()} if loads else {}
        ranks = len(here.client.process_sets[plan.process_set].ranks)
        for bucket, home in zip(plan.buckets, plan.homes, strict=True):
            if home != here.client.welcome.node:
                state |= carried.sender_state(bucket, here.rank, owed, mine.velocities)
                owed = {name: value for name, value in owed.items() if name not in {t.name for t in bucket.tensors}}
            elif loads:
                state |= carried.home_state(bucket, ranks, common.homes, values)
        if state:
            with here.allocating:
                here.client.load_state(plan.process_set, where.group, state)
        barrier(process_set=where.ranks)
        self._owed, self._arriving = owed, None

    # --- in checkpoints -----------------------------------------------------------------------------------------------

    def codec_state(self) -> dict[str, Any] | None:
        """Returns this node's part of a checkpoint: tensors, numbers and texts; None if there is nothing.

        Raises:
            ValueError: gradients are under way.
            HorovodInternalError: gradients of other ranks of this node are.
        """
        where = self._source.where()
        if where is None:
            return None
        state = self._source.selections.saved(where)
        return {
            "codec": self.codec,
            "node": where.here.client.welcome.node,
            **asdict(self.units.meant),
            "state": {key: torch.from_numpy(value) for key, value in state.items()},
        }

    def load_codec_state(self, saved: Mapping[str, Any]) -> None:
        """Loads a `codec_state`; without such a codec does nothing. Warns of another node's residuals, and leaves
        them out.

        Raises:
            ValueError: it is nothing that `codec_state` returned, or of other parameters; or as for `codec_state`.
            HorovodInternalError: the daemon cannot use it.
        """
        where, at_homes = self._source.where(), any(":optimizer/" in key for key in saved.get("state", ()))
        if at_homes and not self._at_homes:
            warnings.warn(
                "this checkpoint's momenta, and other state of the optimizer, are those of parameter shards; this "
                "optimizer's algorithm has no shards, and begins without them",
                stacklevel=4,
            )
        self._homes_are_loaded = at_homes
        if where is None:
            return
        here, selections = where.here, self._source.selections
        selections.lay_down(where)
        try:
            node, meant = int(saved["node"]), meant_in(saved)
            state = {str(key): value.detach().cpu().contiguous().numpy() for key, value in saved["state"].items()}
            owned = by_owner(state)
        except (KeyError, TypeError, ValueError, AttributeError, WireError) as error:
            raise ValueError(
                f"the entry {KEY!r} of the checkpoint is no state of a distributed optimizer: {error!r}"
            ) from None
        self._check(owned)
        state = self._converted(owned, meant)
        own = here.client.welcome.node
        if node != own and here.local_rank == 0 and own == (0 if node else 1):
            warnings.warn(
                f"this checkpoint has the residuals of the codec {saved.get('codec')} on node {node} only; the other "
                "nodes start with none. To keep all, save optimizer.state_dict() on one rank of each node (where "
                "hvd.local_rank() == 0) to a file of its own, and load each node's own file",
                stacklevel=4,
            )
        if not selections.led:
            with here.allocating:
                here.client.load_state(where.process_set, where.group, state, common=node != own)
        self.units.resume(meant)

    def _converted(self, owned: Mapping[StateOwner, State], meant: Meant) -> State:
        """Returns a saved state with the memory of an all-reduce's codecs in today's unit."""
        factor = np.float32(1.0 if self._homes else self.units.conversion(meant))
        kinds = tuple(f"{kind}/" for kind in NODE_TENSORS)
        state: State = {}
        for owner, entries in owned.items():
            scales = factor != 1.0 and owner.kind == "codec"
            state |= owner.keyed(
                {key: value * factor if scales and key.startswith(kinds) else value for key, value in entries.items()}
            )
        return state

    def _check(self, owned: Mapping[StateOwner, State]) -> None:
        """Raises `ValueError` if codecs have state of other parameters. Homes are the daemon's to check."""
        sizes = self.sizes()
        of_codecs = [entries for owner, entries in owned.items() if owner.kind == "codec"]
        for key, value in (entry for entries in of_codecs for entry in entries.items()):
            kind, slash, name = key.partition("/")
            if slash and name not in sizes:
                raise ValueError(
                    f"the checkpoint has compression state of a parameter {name!r}, which this optimizer does not "
                    f"train; load it with the model, and the names of parameters, that it was written with"
                )
            if slash and kind == "residual" and value.size != sizes[name]:
                raise ValueError(
                    f"the parameter {name!r} has {sizes[name]} elements, and {value.size} in the checkpoint's "
                    f"compression state"
                )

    def common_codec_state(self) -> dict[str, Any]:
        """Returns the codec's state that is the same on all nodes, such as the number of steps."""
        where = self._source.where()
        return {} if where is None else where.here.client.save_state(where.process_set, where.group, common=True)

    def load_common_codec_state(self, state: dict[str, Any]) -> None:
        """Loads a `common_codec_state`. Residuals stay if this node is at that step already; else they are dropped."""
        where = self._source.where()
        if where is not None and not self._source.selections.led:
            self._source.selections.lay_down(where)
            with where.here.allocating:
                where.here.client.load_state(where.process_set, where.group, state, common=True)

    # --- from one membership epoch to the next ------------------------------------------------------------------------

    @property
    def carries(self) -> bool:
        """True if there is state to carry to another membership epoch; the same on all ranks."""
        return self.remembers and bool(list(self._source.slots)) and self._is_global

    @property
    def is_lost_with_daemon(self) -> bool:
        """True if the daemon has some of the state, which is gone if it ends."""
        at_homes = self._at_homes and not self.outlives
        return self.carries and (at_homes or codecs.parse(self.codec).stateful)

    @property
    def puts_back(self) -> bool:
        """True if the daemon has a codec's memory as it was before a step that was not complete here, without asking
        whether that counts elsewhere."""
        return self.is_lost_with_daemon and not self.outlives

    @property
    def has_shards(self) -> bool:
        """True if there is state to carry that shards have; the same on all ranks."""
        return self.carries and self._at_shards

    @property
    def is_arriving(self) -> bool:
        """True while all that shards are to have is kept by workers of all nodes, until there is a plan."""
        return self._arriving is not None

    def sizes(self) -> dict[str, int]:
        """Elements of each tensor, by name."""
        return self._trained.sizes()

    def carry(self) -> CarriedState | None:
        """Returns this node's state to carry; None on all but one of its ranks, and where there is nothing.

        Raises:
            ValueError: gradients are under way.
            HorovodInternalError: gradients of other ranks of this node are.
        """
        where = self._source.where()
        if where is None or not self.carries:
            return None
        waiting = self._still_carried()
        if waiting is None and where.is_first_of_node:
            waiting = carried.collect(self._source.selections.saved(where), where.plan, self.units.meant)
        if waiting is None and not self._owed:
            return None
        waiting = waiting or CarriedState(meant=self.units.meant)
        return replace(waiting, residuals=carried.add(waiting.residuals, self._owed))

    def recall(self, epoch: int, clock: int) -> tuple[CarriedState, dict[str, carried.Arrays]]:
        """Returns what the shards on this node had when the membership before ended, with what its workers had not sent
        to shards elsewhere; and what those shards had whose mirrors it has, by tensor (`CarriedState.homes`). Nothing
        on all ranks but one of a node.

        Args:
            epoch: the membership epoch of the plan whose shards these are.
            clock: how many contributions of a rank count in them.

        Raises:
            HorovodInternalError: a rank is gone.
        """
        where = self._source.where()
        if where is None or self._planned is None:
            return CarriedState(), {}
        if self._arriving is not None:  # recalled before, and not given to homes yet
            common, mine, loads = self._arriving
            return replace(mine, homes=dict(common.homes) if loads else {}), {}
        if not where.is_first_of_node:
            return CarriedState(), {}
        ended = wire.EndedPlan(epoch, self._planned.id, clock)
        state = where.here.client.save_state(where.process_set, where.group, ended=ended)
        mirrored = carried.collect(state, self._planned, shards="mirror").homes
        return carried.collect(state, self._planned), mirrored

    def resume(self, homes: Mapping[str, carried.Arrays], mine: CarriedState) -> list[str]:
        """Goes on from the state of shards, in a new membership epoch. To be called on all ranks.

        Args:
            homes: of all tensors, the same on all ranks.
            mine: the state that this rank has recalled.

        Returns:
            Names of tensors that are missing. If there are any, nothing is done.
        """
        where = self._source.where()
        assert where is not None
        if missing := sorted(self.sizes().keys() - homes.keys()):
            return missing
        loads = where.is_first_of_node
        owed = replace(mine, homes={}, residuals=carried.add(mine.residuals, self._owed))
        self.settle(CarriedState(homes=dict(homes) if loads else {}, meant=self.units.meant), owed, loads)
        return []

    def settle(self, common: CarriedState, mine: CarriedState, loads: bool) -> None:
        """Goes on, in a new membership epoch, from carried state. To be called on all ranks.

        Args:
            common: the state that is the same on all of them: `common`, `buckets`, `homes` and `meant` count.
            mine: residuals and velocities that are this worker's to send.
            loads: this worker of its node gives the daemon what is to be loaded; alone on its node if it is.

        Raises:
            HorovodInternalError: the daemon cannot use it.
        """
        if self._at_shards:  # waits for a plan, which says where the homes are
            self._arriving, self._owed = (common, mine, loads), {}
            return
        where = self._source.where()
        if where is None:
            return
        factor = self.units.conversion(common.meant)
        residuals, velocities = carried.scaled(mine.residuals, factor), carried.scaled(mine.velocities, factor)
        self.units.resume(common.meant)
        sizes = self.sizes()
        if loads and len(where.nodes()) > 1 and common.buckets:
            self._source.selections.lay_down(where)
            state = carried.codec_state(common, residuals, velocities, sizes)
            with where.here.allocating:
                where.here.client.load_state(where.process_set, where.group, state)
            return
        self._owed = {name: value for name, value in residuals.items() if sizes.get(name) == value.size}
        if loads:
            _forget(where)

    def forget(self) -> None:
        """Begins a membership epoch without anything that daemons have kept. To be called on all ranks."""
        where = self._source.where()
        if where is not None and where.is_first_of_node:
            _forget(where)

    def forget_unsent(self) -> None:
        """Has daemons, and this worker, forget what codecs have not sent. To be called on all ranks, when nothing is
        under way.

        Raises:
            HorovodInternalError: a rank is gone.
        """
        self._owed = {}
        if self._arriving is not None:
            common, _, loads = self._arriving
            self._arriving = common, CarriedState(meant=common.meant), loads
        where = self._source.where()
        if where is None or not self.converts:
            return
        self._source.selections.lay_down(where)
        barrier(process_set=where.ranks)  # no rank posts any more
        if where.is_first_of_node:
            _forget(where)
        barrier(process_set=where.ranks)

    def _still_carried(self) -> CarriedState | None:
        """Returns the state that was carried here and waits for a plan."""
        if self._arriving is None:
            return None
        common, mine, loads = self._arriving
        return replace(mine, homes=common.homes, meant=common.meant) if loads else mine


def why_only_at_commits(options: Options) -> str:
    """Returns why an optimizer's shards cannot be mirrored at each update; empty if they can."""
    if not options.algorithm.is_replicable:
        return f"a mirror cannot follow the shards of the algorithm {options.algorithm}, which is not replicable"
    if options.process_set.process_set_id != GLOBAL_SET:
        return f"the optimizer is that of process set {options.process_set.process_set_id}, which ends with a loss"
    return ""


def _forget(where: Where) -> None:
    """Has this node's daemon forget the memory of its codecs: it belongs to steps that are taken again."""
    with where.here.allocating:
        where.here.client.load_state(where.process_set, where.group, {})


def _entries(slot: Slot, state: Mapping[str, Any]) -> carried.Arrays:
    """Returns the state of a parameter in the script's optimizer as its home has it, with the parameter's value."""
    if not state:
        return {}
    found = {"value": _flat(slot)}
    for key, given in state.items():
        if given is not None:
            found[f"optimizer/{key}"] = torch.as_tensor(given).detach().cpu().contiguous().numpy()
    return found


def _flat(slot: Slot) -> Array:
    """Returns what a slot's home begins with (1-D): where its parameter was at the last exchange, if that counts, or
    the parameter."""
    flat = slot.first_value().contiguous().view(-1).cpu()
    return (flat if flat.dtype in (torch.float32, torch.float64) else flat.float()).numpy()
