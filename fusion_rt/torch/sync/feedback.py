"""What the codecs of an optimizer's buckets remember on this node, as the optimizer sees it.

The daemon holds it. From here it learns that learning rates have changed, so that residuals are rescaled (as in
BytePS: what a residual holds will be applied with the new rate), and here it is saved and given back.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusion_rt.torch.core.runtime import Runtime
from fusion_rt.torch.sync.parameters import Trained

KEY = "fusion_rt"
"""Of a distributed optimizer's `state_dict`; torch's own optimizers ignore it."""


class Feedback:
    """Of one optimizer.

    Args:
        codec: its text.
        trained: the parameters, and their learning rates.
    """

    def __init__(self, codec: str, trained: Trained) -> None:
        self._codec = codec
        self._trained = trained
        self._seen: Sequence[float] | None = None  # the learning rate of each group
        self._rates: dict[str, float] = {}  # the last one above zero, by parameter
        self._factors: dict[str, float] = {}  # of residuals, not told yet

    @property
    def rates(self) -> dict[str, float]:
        """The learning rates for which residuals are meant, by parameter."""
        return self._rates

    def resume(self, rates: Mapping[str, float]) -> None:
        """Residuals were meant for these rates; the next step compares."""
        self._seen, self._rates, self._factors = None, dict(rates), {}

    def begin(self) -> None:
        """A step begins: notes by what residuals are to be multiplied."""
        seen = self._trained.group_rates()
        if seen == self._seen:
            return
        self._seen = seen
        for name, rate in self._trained.rates().items():
            if not 0 < rate < math.inf:
                continue
            factor = self._factors.get(name, 1.0) * self._rates.get(name, rate) / rate
            self._rates[name] = rate
            if 0 < factor < math.inf:
                self._factors[name] = factor

    def rescale(self, names: Sequence[str]) -> tuple[float, ...]:
        """By what the residuals of these parameters are to be multiplied; empty when nothing has changed. Told once."""
        if not self._factors:
            return ()
        factors = tuple(self._factors.pop(name, 1.0) for name in names)
        return factors if any(factor != 1.0 for factor in factors) else ()

    def save(self, here: Runtime, state: Mapping[str, Any]) -> dict[str, Any]:
        """What a checkpoint of this node has to have: tensors, numbers and texts.

        Args:
            state: what codecs remember, by name; arrays.
        """
        return {
            "codec": self._codec,
            "node": here.client.welcome.node,
            "rates": dict(self._rates),
            "state": {key: torch.from_numpy(value) for key, value in state.items()},
        }

    def load(self, here: Runtime, process_set: int, group: str, saved: Mapping[str, Any], led: bool = False) -> None:
        """Gives that back. Another node's residuals are left out, with a warning.

        Args:
            led: the daemon gets it from another worker of this node, which may have what it remembers already.

        Raises:
            ValueError: it is nothing that `save` returned, or of other parameters.
            HorovodInternalError: the daemon cannot use it.
        """
        try:
            node, rates = int(saved["node"]), {str(name): float(rate) for name, rate in saved["rates"].items()}
            state = {str(key): value.detach().cpu().contiguous().numpy() for key, value in saved["state"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"what is saved under {KEY!r} is no state of a distributed optimizer: {error!r}") from None
        self._check(state)
        own = here.client.welcome.node
        if node != own and here.local_rank == 0 and own == (0 if node else 1):
            warnings.warn(
                f"this checkpoint has what the codec {saved.get('codec')} had not sent on node {node}; on the other "
                f"nodes that is lost, and they start with none. To keep it, save optimizer.state_dict() on one rank of "
                f"each node (where hvd.local_rank() == 0) to a file of its own, and load on each node its own",
                stacklevel=5,
            )
        if not led:
            with here.allocating:
                here.client.load_state(process_set, group, state, common=node != own)
        self.resume(rates)

    def _check(self, state: Mapping[str, Any]) -> None:
        sizes = self._trained.sizes()
        for key, value in state.items():
            if key.startswith(("home:", "sender:")):
                continue  # of an algorithm; the daemon knows what it can use
            kind, slash, name = key.partition(":")[2].partition("/")
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
