"""An exchange replaces its plan by another one here: when, and by which.

A plan says after how many steps its successor is due (`Tuning.steps`), so all ranks propose in the same step. A rank
that joins does not count those that the others take; so after a join all ranks propose anew, by a number that all know.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable

from fusion_rt import wire
from fusion_rt.core.cost import CostModel
from fusion_rt.settings import Settings
from fusion_rt.torch.autotune.director import Circumstances, Director, Judge, Step, tell
from fusion_rt.torch.autotune.measured import Measured
from fusion_rt.torch.autotune.predicted import Predicted
from fusion_rt.torch.autotune.search import MISSING, AutotuneError
from fusion_rt.torch.core.runtime import Runtime

_AFTER_JOINS = 1 << 47  # clocks of proposals after the n-th join; others are ids of plans, which are smaller

_FIRST = "optimizer.1"  # the plans of the first optimizer
MakeDirector = Callable[[Circumstances], Director]


class Replanning:
    """The replacing of one exchange's plans.

    Args:
        make: makes the deciding object, on the lowest rank; called once in a membership epoch.
        clock: seconds, from any origin.
    """

    def __init__(self, make: MakeDirector, clock: Callable[[], float] = time.perf_counter) -> None:
        self._make = make
        self._clock = clock
        self._director: Director | None = None
        self._here: Runtime | None = None
        self._joins = 0
        self._left: int | None = None  # exchanges that the plan has left; None: for ever
        self._then = ""  # the algorithm that follows on it; empty: the same
        self._ended = self._waited = 0.0
        self._began = 0.0  # when the first bucket of a step was sent; 0: none was

    def due(self, here: Runtime) -> bool:
        """Tells whether the active plan, if there is one, has had its time."""
        return (self._left == 0 and not self._then) or (here is self._here and here.client.joins != self._joins)

    @property
    def successor(self) -> str:
        """The algorithm by which all ranks go on after this step; empty: the same."""
        return self._then if self._left == 0 else ""

    def stay(self) -> None:
        """Forgets the successor: not all ranks are here."""
        self._then = ""

    def proposal(
        self, here: Runtime, proposal: wire.Proposal, may_be_late: bool = False, may_step_locally: bool = False
    ) -> wire.Proposal:
        """The proposal to make in its place. `Circumstances` has the permitted ones."""
        if here is not self._here:  # a new membership: other hosts, other links
            self._here, self._director, self._joins = here, None, 0
        anew = here.client.joins != self._joins
        if anew:
            self._joins = here.client.joins
        clock = _AFTER_JOINS + self._joins if anew else proposal.clock
        tuning = None
        topology = here.client.topology
        ranks = here.client.process_sets[proposal.process_set].ranks
        if here.rank == min(ranks) and len(ranks) > 1:
            if self._director is None:
                nodes = [topology.node_of(rank) for rank in ranks]
                slots = tuple(nodes.count(node) for node in dict.fromkeys(nodes))
                welcome = here.client.welcome
                between = (welcome.latency, welcome.seconds_per_byte) if len(slots) > 1 else (0.0, 0.0)
                self._director = self._make(
                    Circumstances(
                        slots, *between, welcome.fusion_threshold, proposal.group, proposal.reduction,
                        proposal.tensors, may_be_late, may_step_locally,
                        None if welcome.ring is None or len(slots) < len(topology.hosts) else CostModel(*welcome.ring),
                    )
                )  # fmt: skip
            tuning = self._director.next(proposal.reduction.algorithm)
        return wire.Proposal(
            proposal.group, proposal.process_set, clock, proposal.reduction, proposal.tensors, tuning, anew
        )

    def planned(self, plan: wire.Plan) -> None:
        """A plan has been made."""
        self._left = None if plan.tuning is None else plan.tuning.steps or None
        self._then = "" if plan.tuning is None else plan.tuning.then

    def sent(self) -> None:
        """A bucket has been sent."""
        if not self._began:
            self._began = self._clock()

    def stepped(self, waited: float, all_here: bool, steps: int = 1) -> None:
        """A step has been taken, or so many local ones and an exchange.

        Args:
            waited: seconds for which the script has been kept waiting, in all steps together.
            all_here: its gradients have come.
        """
        now = self._clock()
        if self._director is not None:
            reducing = now - self._began if self._began and all_here else 0.0
            self._director.stepped(Step((now - self._ended) / steps, (waited - self._waited) / steps, reducing))
        self._ended, self._waited, self._began = now, waited, 0.0
        if self._left:
            self._left -= 1


def replanning(settings: Settings, why_not: str, rank: int) -> Callable[[], Replanning] | None:
    """Makes the replacer of an optimizer's plans that the settings ask for; None if they ask for none.

    Args:
        why_not: its plans cannot be tuned, if so; told on rank 0.
        rank: this worker's.

    Raises:
        AutotuneError: optuna is not installed.
    """
    if not settings.autotune and settings.auto == "off":
        return None
    flag = "--autotune" if settings.autotune else "--auto"
    if why_not:
        if rank == 0:
            tell(f"{flag} leaves an optimizer as it is: {why_not}")
        return None
    if settings.autotune and importlib.util.find_spec("optuna") is None:
        raise AutotuneError(MISSING)
    return lambda: Replanning(lambda where: make_director(settings, where))


def make_director(settings: Settings, where: Circumstances) -> Director:
    """The director of one optimizer's plans, with the judge that the settings name."""
    path = settings.autotune_log_file
    if path and where.group != _FIRST:
        path = f"{path}.{where.group}"
    judge: Judge = Measured(settings, where, path) if settings.autotune else Predicted(settings, where)
    return Director(judge, settings.autotune_steps_per_sample)
