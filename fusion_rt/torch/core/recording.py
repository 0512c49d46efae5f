"""Records when a worker's model runs forward and backward, and when its optimizer steps.

A distributed optimizer gets parameters and not modules, and hooks that stay on a script's modules would be copied,
pickled and compiled with them. So after each step one hook waits for the next forward pass of any module: the first
that runs is the model, or an outermost part of it. The hook is taken away, and another one put on that module until its
forward pass has ended. That takes a few microseconds for each forward pass of the whole, and nothing for the modules
inside.

Scripts that use torch's data parallelism, and of this project only the backend, have optimizers of torch's own: hooks
for all of these note their steps.

Nothing of a forward pass is noticed before the first step, without gradients, and once `torch.compile` has been called:
a compiler would take the hook for part of the model, and a compiled module warns of any hook on all modules. So that
the hook is gone before a module that is compiled later runs, another one, of which no module warns, waits for modules
to get parts, as the compiled one gets the script's.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook, register_module_module_registration_hook
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from fusion_rt.tracing import processors, resident_memory
from fusion_rt.tracing.format import Kind
from fusion_rt.tracing.recorder import NULL, Instrument

_COMPILED = "_orig_mod"  # name of the script's module in the one that torch.compile returns


class _Passes:
    """Forward and backward passes of this process: a single instance, since modules know nothing of optimizers.

    Attributes:
        trace, step: where they are recorded, and as part of which step.
        recorder: returns the recorder of the latest step, while it lives.
    """

    def __init__(self) -> None:
        self.recorder: Callable[[], Steps | None] = lambda: None
        self.trace: Instrument = NULL
        self.step = 0
        self._waiting: list[RemovableHandle] = []
        self._ending: RemovableHandle | None = None
        self._backward = False

    def watch(self) -> None:
        """Waits for the next forward pass."""
        if not self._waiting and self.trace is not NULL and not _compiles():
            self._waiting = [
                register_module_forward_pre_hook(self.forward_begins),
                register_module_module_registration_hook(self.part_is_added),
            ]

    def unwatch(self) -> None:
        """Does not wait for a forward pass any more."""
        waiting, self._waiting = self._waiting, []
        for handle in waiting:
            handle.remove()

    def part_is_added(self, module: torch.nn.Module, name: str, part: torch.nn.Module | None) -> None:
        if name == _COMPILED:
            self.unwatch()

    def forward_begins(self, module: torch.nn.Module, arguments: Any) -> None:
        if not self._waiting:
            return
        self.unwatch()
        self._backward = False
        if torch.is_grad_enabled() and not isinstance(module, torch.jit.ScriptModule):
            self._ending = module.register_forward_hook(_forward_ends, always_call=True)
            self.trace.record(Kind.FORWARD_BEGIN, "", 0, self.step)

    def forward_ends(self, output: Any) -> None:
        self.trace.record(Kind.FORWARD_END, "", 0, self.step)
        if self._ending is not None:
            self._ending.remove()
            self._ending = None
        if isinstance(output, Mapping):
            output = list(output.values())
        for part in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(part, torch.Tensor) and part.grad_fn is not None:  # the end of the graph, where easily found
                part.grad_fn.register_prehook(self.backward_begins)
                break
        self.watch()

    def backward_begins(self, gradients: Any = None) -> None:
        """Records the beginning of a backward pass, of which a part runs."""
        if self._backward:
            return
        self._backward = True
        self.unwatch()
        self.trace.record(Kind.BACKWARD_BEGIN, "", 0, self.step)
        torch.autograd.Variable._execution_engine.queue_callback(self.backward_ends)

    def backward_ends(self) -> None:
        self._backward = False
        self.trace.record(Kind.BACKWARD_END, "", 0, self.step)
        self.watch()


_passes = _Passes()


class Steps:
    """The steps of one optimizer.

    Attributes:
        trace: where they are recorded.
        number: of the step that is under way, from 0.
    """

    def __init__(self, trace: Instrument) -> None:
        self.trace = trace
        self.number = 0
        self._memory_due = 0  # time, ns
        self._reference = weakref.ref(self)

    def first_gradient(self) -> None:
        """Notes the first gradient of a step, or the request for its reduction without any."""
        if torch._C._current_graph_task_id() != -1:
            _passes.trace, _passes.step = self.trace, self.number
            _passes.backward_begins()

    def begin(self) -> None:
        """Records that `step()` was called."""
        _passes.recorder = self._reference
        self.trace.record(Kind.STEP_BEGIN, "", 0, self.number)

    def end(self) -> None:
        """Records that `step()` is about to return."""
        _passes.recorder = self._reference
        self.trace.record(Kind.STEP_END, "", time.process_time_ns(), self.number, 0, processors.waited())
        if time.monotonic_ns() >= self._memory_due:
            self._record_memory()
        self.number += 1
        _passes.trace, _passes.step = self.trace, self.number
        _passes.watch()

    def _record_memory(self) -> None:
        self._memory_due = time.monotonic_ns() + resident_memory.EVERY_NS
        self.trace.record(Kind.MEMORY, "", resident_memory.nbytes(), 0, 0, _on_gpus() >> 10)


class ScriptSteps:
    """The steps of a script's own optimizers, for scripts that use torch's data parallelism and nothing of ours but
    the backend. As soon as others record steps (a distributed optimizer, a hook with a codec), this leaves it to them.

    A step ends when an optimizer steps that has stepped since the last end. So one step has a step of each of several
    optimizers that take turns.

    Args:
        trace: where they are recorded.
    """

    def __init__(self, trace: Instrument) -> None:
        self._steps = Steps(trace)
        self._stepped: set[int] = set()  # since the last end, by id
        self._hooks: list[RemovableHandle] = []
        if trace is not NULL:
            self._hooks = [
                register_optimizer_step_pre_hook(self._begins),
                register_optimizer_step_post_hook(self._ended),
            ]

    def close(self) -> None:
        """Records no more."""
        for hook in self._hooks:
            hook.remove()

    def _is_ours(self) -> bool:
        return not torch.compiler.is_compiling() and _passes.recorder() in (None, self._steps)

    def _begins(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        if self._is_ours():
            self._steps.trace.record(Kind.APPLY_BEGIN, "", 0, self._steps.number)

    def _ended(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        if not self._is_ours():
            return
        self._steps.trace.record(Kind.APPLY_END, "", 0, self._steps.number)
        if not self._stepped or id(optimizer) in self._stepped:
            self._stepped.clear()
            self._steps.end()
        self._stepped.add(id(optimizer))


def _on_gpus() -> int:
    """Returns the bytes that torch's allocator holds on GPUs, out of others' reach, in use or not."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    return sum(torch.cuda.memory_reserved(device) for device in range(torch.cuda.device_count()))


def forget(trace: Instrument) -> None:
    """Ends recording passes there."""
    if _passes.trace is trace:
        _passes.unwatch()
        _passes.trace, _passes.step = NULL, 0


def _forward_ends(module: torch.nn.Module, arguments: Any, output: Any) -> None:
    _passes.forward_ends(output)


_Passes.forward_begins._torchdynamo_disable = True  # type: ignore[attr-defined]  # should something be compiled meanwhile


def _compiles() -> bool:
    """Tells whether torch has compiled anything in this process, or is about to."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    compiled = bool(counters and counters.get("frames", {}).get("total", 0))
    return compiled or any(backend is not None for backend in tuple(backends.values()))
