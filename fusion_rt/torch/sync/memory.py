"""What daemons remember of one optimizer's gradients, on the side of the worker: saved, given back, and carried from
one membership epoch to the next.

That is what codecs have not sent (`feedback`), and what homes have of shards (`sharded`). What this worker itself owes
to the others because its node's daemon cannot have it (`carried`) goes along with its next gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from fusion_rt import codecs, wire
from fusion_rt.topology import GLOBAL_SET
from fusion_rt.torch.core.process_sets import ProcessSet
from fusion_rt.torch.core.runtime import Runtime
from fusion_rt.torch.ops.signatures import id_of
from fusion_rt.torch.sync import carried
from fusion_rt.torch.sync.carried import Carried
from fusion_rt.torch.sync.feedback import Feedback
from fusion_rt.torch.sync.manner import Manner
from fusion_rt.torch.sync.parameters import Trained
from fusion_rt.torch.sync.slots import Slot

if TYPE_CHECKING:
    from fusion_rt.torch.sync.synchroniser import GradientExchange


@dataclass(frozen=True)
class Place:
    """Where the daemons have it.

    Attributes:
        here: this worker's membership.
        ranks: the process set that takes part.
        group: name of the plans.
        plan: in force; None if there is none.
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
        """The ranks that take part, by node."""
        found: dict[int, list[int]] = {}
        for rank in self.here.client.process_sets[self.process_set].ranks:
            found.setdefault(self.here.client.topology.node_of(rank), []).append(rank)
        return found


class Memory:
    """Of one exchange.

    Args:
        exchange: asked where it is.
        manner: how gradients are reduced.
        trained: what is reduced.
    """

    homes: ClassVar[bool] = False
    """Whether there are homes, which are remembered even with a codec that remembers nothing."""

    def __init__(self, exchange: GradientExchange, manner: Manner, trained: Trained) -> None:
        self._exchange = exchange
        self._manner = manner
        self._trained = trained
        self._codec = manner.reduction.codec
        stateful = self.homes or codecs.parse(manner.reduction.codec).stateful
        self._feedback = Feedback(manner.reduction.codec, trained) if stateful else None
        self._owed: carried.Arrays = {}  # gradients to be sent with this worker's next ones, flat, by name

    def use(self, codec: str) -> None:
        """Gradients are compressed by this codec from now on; what another one remembered is for daemons to keep."""
        if codec == self._codec:
            return
        self._codec = codec
        if not (self.homes or codecs.parse(codec).stateful):
            self._feedback = None
            return
        rates = {} if self._feedback is None else self._feedback.rates
        self._feedback = Feedback(codec, self._trained)
        self._feedback.resume(rates)
        self._feedback.begin()

    @property
    def remembers(self) -> bool:
        """Whether there is anything to remember."""
        return self._feedback is not None

    def begin(self) -> None:
        """A step begins."""
        if self._feedback is not None:
            self._feedback.begin()

    def rescale(self, slots: Sequence[Slot]) -> tuple[float, ...]:
        """By what the residuals of these slots are to be multiplied; empty when nothing has changed. Told once."""
        return () if self._feedback is None else self._feedback.rescale([slot.name for slot in slots])

    def pay(self, name: str) -> carried.Array | None:
        """What is owed of a parameter, flat, and is to be sent now; None if nothing is."""
        return self._owed.pop(name, None)

    def planned(self, place: Place, plan: wire.Plan, slots: Mapping[str, Slot]) -> None:
        """There is a new plan of these slots, of which nothing has been sent."""

    # --- in checkpoints -----------------------------------------------------------------------------------------------

    def codec_state(self) -> dict[str, Any] | None:
        """What the codec remembers on this node, to be saved; None if there is nothing.

        Raises:
            ValueError: gradients are under way.
            HorovodInternalError: gradients of other ranks of this node are.
        """
        place = self._exchange.place()
        if place is None or self._feedback is None:
            return None
        return self._feedback.save(place.here, self._exchange.selections.saved(place))

    def load_codec_state(self, saved: Any) -> None:
        """Gives that back; does nothing without such a codec. Raises as `Feedback.load` and `codec_state` do."""
        place = self._exchange.place()
        if place is not None and self._feedback is not None:
            self._exchange.selections.lay_down(place)
            self._feedback.load(place.here, place.process_set, place.group, saved, self._exchange.selections.led)

    def common_codec_state(self) -> dict[str, Any]:
        """What the codec remembers alike on all nodes, such as the number of steps."""
        place = self._exchange.place()
        if place is None:
            return {}
        return place.here.client.save_state(place.process_set, place.group, common=True)

    def load_common_codec_state(self, state: dict[str, Any]) -> None:
        """Lets this node go on where another one is. Residuals stay if it is there already; else there are none."""
        place = self._exchange.place()
        if place is not None and not self._exchange.selections.led:
            self._exchange.selections.lay_down(place)
            with place.here.allocating:
                place.here.client.load_state(place.process_set, place.group, state, common=True)

    # --- from one membership epoch to the next ------------------------------------------------------------------------

    @property
    def carries(self) -> bool:
        """Whether there is anything to be carried to another membership epoch; the same on all ranks."""
        is_global = self._manner.process_set.process_set_id == GLOBAL_SET
        return self._feedback is not None and bool(list(self._exchange.slots)) and is_global

    def sizes(self) -> dict[str, int]:
        """Elements of each tensor, by name."""
        return self._trained.sizes()

    def carry(self) -> Carried | None:
        """What this node remembers; None on all but one of its ranks, and where there is nothing.

        Raises:
            ValueError: gradients are under way.
            HorovodInternalError: gradients of other ranks of this node are.
        """
        place = self._exchange.place()
        if place is None or self._feedback is None or not self.carries:
            return None
        waiting, here = self._still_carried(), place.here
        if waiting is None and here.rank == place.nodes()[here.client.welcome.node][0]:
            state = self._exchange.selections.saved(place)
            waiting = carried.collect(state, place.plan, self._feedback.rates)
        if waiting is None and not self._owed:
            return None
        waiting = waiting or Carried(rates=dict(self._feedback.rates))
        return replace(waiting, residuals=carried.add(waiting.residuals, self._owed))

    def settle(self, common: Carried, mine: Carried, loads: bool) -> None:
        """Goes on, in a new membership epoch, from what was carried. To be called on all ranks.

        Args:
            common: what is the same on all of them: `common`, `buckets`, `homes` and `rates` count.
            mine: residuals and velocities that are this worker's to send.
            loads: this worker of its node gives the daemon what is to be loaded; alone on its node if it is.

        Raises:
            HorovodInternalError: the daemon cannot use it.
        """
        place = self._exchange.place()
        if place is None or self._feedback is None:
            return
        self._feedback.resume(common.rates)
        sizes = self.sizes()
        if loads and len(place.nodes()) > 1 and common.buckets:
            self._exchange.selections.lay_down(place)
            state = carried.codec_state(common, mine.residuals, mine.velocities, sizes)
            with place.here.allocating:
                place.here.client.load_state(place.process_set, place.group, state)
        else:
            self._owed = {name: value for name, value in mine.residuals.items() if sizes.get(name) == value.size}

    def _still_carried(self) -> Carried | None:
        """What has been carried here and waits for a plan."""
        return None
