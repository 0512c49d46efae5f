"""The hooks that tell of a module that is about to use, save or load its parameters, and their listeners.

`DistributedOptimizer` gets parameters and not modules, so torch's hook on *all* modules' forward passes is used, and
only while somebody waits for one. What modules keep of this are functions of this module: a hook that is a method would
be copied with the module by `copy.deepcopy`, with the optimizer and its connection.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from fusion_rt.torch.core.runtime import before_leaving


class Watcher(Protocol):
    """An object that is told when a module is about to use, save or load its parameters."""

    serial: int

    def before_forward(self, module: torch.nn.Module) -> None:
        """Called when a module's forward pass begins."""

    def before_saving(self, module: torch.nn.Module) -> None:
        """Called before a module's `state_dict` is made."""

    def before_loading(self, module: torch.nn.Module) -> None:
        """Called before a module's own parameters are overwritten."""

    def finish(self) -> None:
        """Applies the waiting update. Raises `HorovodInternalError` if its reduction failed."""

    def finish_or_drop(self) -> None:
        """Applies the waiting update, or warns that its reduction failed."""


_watchers: dict[int, Watcher] = {}  # by serial number, so that all ranks have them in one order
_handle: RemovableHandle | None = None


def watch(watcher: Watcher) -> None:
    """Adds a watcher, and keeps it alive."""
    global _handle
    _watchers[watcher.serial] = watcher
    if _handle is None:
        _handle = register_module_forward_pre_hook(_before_forward)


def unwatch(watcher: Watcher) -> None:
    """Removes a watcher."""
    global _handle
    _watchers.pop(watcher.serial, None)
    if not _watchers and _handle is not None:
        _handle.remove()
        _handle = None


def hook(modules: Iterable[torch.nn.Module]) -> list[RemovableHandle]:
    """Has these modules tell when they are about to be saved or loaded. Returns the handles that remove the hooks."""
    handles: list[RemovableHandle] = []
    for module in modules:
        handles.append(module.register_state_dict_pre_hook(_before_saving))  # type: ignore[no-untyped-call]
        handles.append(module._register_load_state_dict_pre_hook(_before_loading, with_module=True))  # type: ignore[no-untyped-call]  # public from torch 2.5 on
    return handles


def synchronize_parameters(*optimizers: Any) -> None:
    """Applies the updates that wait for a forward pass; parameters are then the same as without overlap.

    Call it between `step()` and code that reads parameters without a module's forward pass or `state_dict`. One rank
    may call it alone: gradients are on their way already.

    Args:
        optimizers: distributed optimizers; by default all that there are. Those without overlap have nothing to apply.

    Raises:
        HorovodInternalError: a reduction failed, on all ranks.
    """
    for watcher in _chosen(optimizers):
        watcher.finish()


def finish_before_leaving() -> None:
    """Applies waiting updates of a worker that is about to leave the job. Only warns of a reduction that failed, which
    must not keep anybody in it."""
    for watcher in _chosen(()):
        watcher.finish_or_drop()


def _chosen(optimizers: Iterable[Any]) -> list[Watcher]:
    wanted = {optimizer._schedule.serial for optimizer in optimizers}
    return [watcher for serial, watcher in sorted(_watchers.items()) if not wanted or serial in wanted]


def _before_forward(module: torch.nn.Module, arguments: Any) -> None:
    for watcher in tuple(_watchers.values()):
        watcher.before_forward(module)


_before_forward._torchdynamo_disable = True  # type: ignore[attr-defined]  # as torch.compiler.disable does, which imports it


def _before_saving(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
    for watcher in tuple(_watchers.values()):
        watcher.before_saving(module)


def _before_loading(module: torch.nn.Module, *arguments: Any) -> None:
    for watcher in tuple(_watchers.values()):
        watcher.before_loading(module)


before_leaving.append(finish_before_leaving)
