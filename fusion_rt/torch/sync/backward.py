"""Backward passes: which exchanges take part in the one that runs, and what they do when it ends.

Autograd calls what was queued for a graph task when it has run all of it, before `backward()` returns. A backward pass
may run within a node of another one, as `torch.utils.checkpoint(use_reentrant=True)` does; it ends with the outer one.

Of a pass that raises nobody is told: autograd drops what was queued. Hence nothing else keeps a `BackwardPass` alive,
and an exchange whose pass is gone knows that it has failed.
"""

from __future__ import annotations

import functools
import time
import traceback
import weakref
from typing import TYPE_CHECKING, Any

import torch

from fusion_rt.errors import HorovodInternalError

if TYPE_CHECKING:
    from fusion_rt.torch.sync.synchroniser import GradientExchange

_POLL = 1e-3  # seconds


class BackwardPass:
    """A backward pass that is running.

    Attributes:
        exchanges: those for which it has computed gradients.
    """

    def __init__(self) -> None:
        self.exchanges: list[GradientExchange] = []

    def __call__(self) -> None:
        """Autograd has run the whole graph. Raises what `GradientExchange.synchronize` raises, out of `backward()`."""
        node: Any = torch._C._current_autograd_node()
        if node is not None:

            def node_has_run(*_: Any) -> None:
                handle.remove()
                outer = _running()
                for exchange in self.exchanges:
                    outer.add(exchange)

            handle = node.register_hook(node_has_run)
            return
        # All are sent before the first is waited for: ranks may have met them in different orders, and not all of them.
        due = [exchange for exchange in sorted(self.exchanges, key=_serial) if exchange.backward_ends()]
        eager = [exchange for exchange in due if exchange.eager]
        for exchange in eager:
            exchange.propose()
        while eager:
            planned = [exchange for exchange in eager if len(eager) == 1 or exchange.is_planned()]
            for exchange in planned:
                exchange.submit()
                eager.remove(exchange)
            if not planned:
                time.sleep(_POLL)
        errors = []
        for exchange in due:
            try:
                exchange.backward_returns()
            except HorovodInternalError as error:  # the others, too, are over when this is
                errors.append(error)
        if errors:
            raise errors[0]

    def add(self, exchange: GradientExchange) -> None:
        """Lets an exchange take part."""
        if exchange not in self.exchanges:
            self.exchanges.append(exchange)
        exchange.backward = weakref.ref(self, functools.partial(_forget, weakref.ref(exchange)))


_passes: weakref.WeakValueDictionary[int, BackwardPass] = weakref.WeakValueDictionary()  # by graph task


def enter(exchange: GradientExchange) -> None:
    """Lets an exchange take part in the backward pass that calls this from a hook."""
    _running().add(exchange)


def leaves_of_failed(error: BaseException) -> list[torch.Tensor]:
    """The leaves of the graph of the backward pass that raised this; none if it comes from elsewhere."""
    engine = torch.autograd.graph._engine_run_backward.__code__
    passes = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code is engine]
    roots = passes[0].f_locals.get("t_outputs", ()) if passes else ()
    nodes: list[Any] = [root.grad_fn for root in roots]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes.extend(following for following, _ in node.next_functions)
    return [node.variable for node in seen if hasattr(node, "variable")]


def no_pass() -> None:
    """In place of a reference to a pass, where none is running."""


def _running() -> BackwardPass:
    task = torch._C._current_graph_task_id()
    found = _passes.get(task)
    if found is None:
        found = _passes[task] = BackwardPass()
        torch.autograd.Variable._execution_engine.queue_callback(found)
    return found


def _forget(reference: weakref.ref[GradientExchange], _: Any) -> None:
    exchange = reference()
    if exchange is not None:
        exchange.pass_number = 0


def _serial(exchange: GradientExchange) -> int:
    return exchange.serial
