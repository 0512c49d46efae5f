"""Backward passes: which optimizers' gradients the one that runs computes, and the work at its end.

Autograd runs the callbacks of a graph task when it has run all of it, before `backward()` returns. A backward pass
may run within a node of another one, as `torch.utils.checkpoint(use_reentrant=True)` does; it ends with the outer one.

A pass that raises has no notice of its end: autograd drops its callbacks. Hence nothing else keeps a `BackwardPass`
alive, and whoever took part in a pass that is gone knows that it has failed.
"""

from __future__ import annotations

import functools
import sys
import time
import traceback
import weakref
from typing import Any

import torch

from fusion_rt.core.errors import HorovodInternalError
from fusion_rt.torch.sync.exchanges import exchanges
from fusion_rt.torch.sync.step_schedule import Schedule

_POLL = 1e-3  # seconds


class BackwardPass:
    """A backward pass that is running.

    Attributes:
        participants: those for which it has computed gradients.
    """

    def __init__(self) -> None:
        self.participants: list[Schedule] = []

    def __call__(self) -> None:
        """Called when autograd has run the whole graph. Raises exceptions of participants, out of `backward()`."""
        node: Any = torch._C._current_autograd_node()
        if node is not None:
            self._end_with_outer(node)
            return
        due = [participant for participant in self.participants if participant.backward_ends()]
        if len(due) == 1:
            due[0].backward_returns()
        elif due:
            _return_all(due)

    def _end_with_outer(self, node: Any) -> None:
        """Has the pass end with the one that runs this node, of which it is a part."""

        def node_has_run(*_: Any) -> None:
            handle.remove()
            outer = running()
            for participant in self.participants:
                outer.add(participant)

        handle = node.register_hook(node_has_run)

    def add(self, participant: Schedule) -> None:
        """Adds a participant."""
        if participant not in self.participants:
            self.participants.append(participant)
        participant.backward = weakref.ref(self, functools.partial(_forget, weakref.ref(participant)))


def _return_all(due: list[Schedule]) -> None:
    due.sort(key=lambda participant: participant.serial)
    together = functools.partial(_return_together, due)
    if any(participant.delays for participant in due):
        together()
    else:
        exchanges.run(due, together)


def _return_together(due: list[Schedule]) -> None:
    """Sends all before it waits for the first: ranks may have met them in different orders, and not all of them."""
    eager = [participant for participant in due if participant.eager]
    for participant in eager:
        participant.sync.propose()
    while eager:
        planned = [participant for participant in eager if len(eager) == 1 or participant.sync.is_planned()]
        for participant in planned:
            participant.sync.submit()
            eager.remove(participant)
        if not planned:
            time.sleep(_POLL)
    errors = []
    for participant in due:
        try:
            participant.backward_returns()
        except HorovodInternalError as error:  # the others, too, are over when this is
            errors.append(error)
    if errors:
        raise errors[0]


_passes: weakref.WeakValueDictionary[int, BackwardPass] = weakref.WeakValueDictionary()  # by graph task


def leaves_of_failed(error: BaseException) -> list[torch.Tensor]:
    """Returns the leaves of the graph of the backward pass that raised this; none if it comes from elsewhere."""
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


def running() -> BackwardPass:
    """Returns the backward pass that calls this from a hook. Raises `ValueError` if its end would go unnoticed."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if getattr(compiled, "in_compiled_autograd_region", False):
        raise ValueError(
            "compiled autograd runs this backward pass, which then ends without a word, so that gradients cannot be "
            "reduced in it; leave torch._dynamo.config.compiled_autograd off, or take an algorithm that exchanges at "
            "step(), such as bsp or local_sgd"
        )
    task = torch._C._current_graph_task_id()
    found = _passes.get(task)
    if found is None:
        found = _passes[task] = BackwardPass()
        torch.autograd.Variable._execution_engine.queue_callback(found)
    return found


def _forget(reference: weakref.ref[Schedule], _: Any) -> None:
    participant = reference()
    if participant is not None:
        participant.pass_is_gone()
