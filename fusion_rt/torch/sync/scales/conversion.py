"""The units in which daemons keep the residuals of one optimizer's gradients, and the conversion between
these and the script's. docs/design/algorithms.md, "Units of what is remembered", has the table.

A *residual* and a *velocity* are sums of gradients. The script changes the meaning of such a number:

- the *loss scale*: gradients leave in `backward()` times that. Codecs divide by it when a gradient comes, and multiply
  results by it (`wire.Ready.loss_scale`), so that residuals never have one. It would be as well to multiply all
  that is remembered when the scale changes; but then thresholds and bounds (`clip`) would have to be, too, wherever
  there are some, and those of all ranks at the same time. For powers of two, which a `GradScaler` has, neither rounds.
- the *learning rate*: a residual will be applied with the rate of then, so it is multiplied by old / new
  (`wire.Ready.rescale`), as in BytePS. A velocity stays, as that of torch's optimizers does.
- the *weight* of a rank's gradient in the result, one part in the number of ranks: it changes with their number,
  between two memberships or in a checkpoint that other ranks load, and with `gradient_predivide_factor`. What was
  remembered is multiplied by old / new where it is loaded.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fusion_rt import wire
from fusion_rt.torch.core.process_sets import ProcessSet
from fusion_rt.torch.sync.scales import loss_scales

LEAST_RATE = 0.01
"""The least share of a parameter's highest learning rate that is counted with; lower rates count as this.

Schedules end with rates of nearly nothing, and old / new has no bound. A residual would come as a gradient that is
longer by as much. With plain SGD that is the step that was meant. But a script that clips by norms, or an optimizer
whose second moments remember it for a thousand steps, then hardly takes any other. With this bound a fall to a
hundredth, as schedules with steps have it, is followed exactly. A residual that meets a still lower rate is applied at
less than a hundredth of the highest one."""


@dataclass(frozen=True)
class Meant:
    """The learning rates and the number of ranks that remembered gradients are meant for.

    Attributes:
        rates: the learning rate of each parameter when it was last above 0, at least `LEAST_RATE` of its highest.
        peaks: the highest learning rate of each parameter.
        weight: of a rank's gradient in the result; 0: unknown.
    """

    rates: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    weight: float = 0.0


class WithRates(Protocol):
    """Parameters of an optimizer."""

    def group_rates(self) -> list[float]:
        """Returns the learning rates of the optimizer's groups; 0 where there is none."""

    def rates(self) -> dict[str, float]:
        """Returns the parameters' learning rates, by name."""


class WithName(Protocol):
    """A parameter with a name."""

    name: str


class Units:
    """The units of one optimizer's gradients, and of their residuals.

    Args:
        trained: the parameters, and their learning rates.
        reduction: how gradients are combined.
        process_set: the ranks that do.

    Attributes:
        said: the loss scale that the script has said itself; None: as `GradScaler`s have it.
        loss_scale: of the gradients of this step.
    """

    def __init__(self, trained: WithRates, reduction: wire.Reduction, process_set: ProcessSet) -> None:
        self._trained, self._reduction, self._process_set = trained, reduction, process_set
        self._meant = Meant()
        self._seen: Sequence[float] | None = None  # the learning rate of each group
        self._factors: dict[str, float] = {}  # of residuals, not told yet
        self.said: float | None = None
        self._scaler: weakref.ref[Any] | None = None  # of the last backward pass
        self.loss_scale = 1.0

    def begin(self) -> None:
        """Begins a step: notes its loss scale, and the factors by which residuals are to be multiplied."""
        self.loss_scale = self.said if self.said is not None else self._observed()
        if (seen := self._trained.group_rates()) == self._seen:
            return
        self._seen = seen
        rates, peaks = dict(self._meant.rates), dict(self._meant.peaks)
        for name, rate in self._trained.rates().items():
            if not 0 < rate < math.inf:
                continue
            peaks[name] = max(rate, peaks.get(name, 0.0))
            counted = max(rate, LEAST_RATE * peaks[name])
            factor = self._factors.get(name, 1.0) * rates.get(name, counted) / counted
            rates[name] = counted
            if 0 < factor < math.inf:
                self._factors[name] = factor
        self._meant = Meant(rates, peaks, self._weight())

    def factors(self, slots: Sequence[WithName]) -> tuple[float, ...]:
        """Returns the factors of these slots' residuals, once; empty when no rate has changed."""
        if not self._factors:
            return ()
        factors = tuple(self._factors.pop(slot.name, 1.0) for slot in slots)
        return factors if any(factor != 1.0 for factor in factors) else ()

    def _observed(self) -> float:
        """Returns the loss scale of the backward pass that runs. Without one, gradients are the script's own, or this
        rank has none: then it is that of its last pass's scaler, since the other ranks have the same."""
        loss = loss_scales.of_this_pass()
        if loss is not None:
            self._scaler = loss.scaler
            return loss.scale()
        if loss_scales.in_backward():
            self._scaler = None
        scaler = None if self._scaler is None else self._scaler()
        return 1.0 if scaler is None else loss_scales.now(scaler)

    # --- in checkpoints, and from one membership epoch to the next ----------------------------------------------------

    @property
    def meant(self) -> Meant:
        """The learning rates and the number of ranks that the daemons' memory is meant for."""
        return self._meant

    def resume(self, meant: Meant) -> None:
        """Sets the units of remembered values; the next step compares learning rates with these."""
        self._seen, self._factors = None, {}
        self._meant = Meant(dict(meant.rates), dict(meant.peaks), meant.weight)

    def conversion(self, meant: Meant) -> float:
        """Returns the factor of values remembered with a rank's weight of then."""
        return meant.weight / self._weight() if meant.weight else 1.0

    def _weight(self) -> float:
        return self._reduction.weight(self._process_set.size() or 1)


def checked_scale(scale: float | None) -> float | None:
    """Returns a loss scale that a script has said. Raises `ValueError` if it is none."""
    if scale is not None and not 0 < float(scale) < math.inf:
        raise ValueError(f"a loss scale is a finite number above 0, by which the loss is multiplied, not {scale}")
    return None if scale is None else float(scale)


def meant_in(saved: Mapping[str, Any]) -> Meant:
    """Returns the units of the state in a checkpoint. Earlier versions saved rates only. Raises `KeyError`,
    `TypeError`, `ValueError` or `AttributeError` where it is no such state."""
    rates, peaks = saved["rates"], saved.get("peaks", {})
    return Meant(
        {str(name): float(rate) for name, rate in rates.items()},
        {str(name): float(rate) for name, rate in {**rates, **peaks}.items()},
        float(saved.get("weight", 0.0)),
    )
