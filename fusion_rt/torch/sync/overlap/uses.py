"""Records, in the first step, which module's forward pass is the first to need each parameter, and in which order.

Most parameters are used by the module that has them. Some are used by another one, and the forward pass of the module
that has them never runs: `torch.nn.MultiheadAttention` uses the weight of its `out_proj`, a model those of its
`ParameterList`. Those are taken to be needed by the innermost module around them whose forward pass does run. No
use can be seen of a parameter without such a module, nor of one of a scripted module, which takes no hooks, and whose
parameters can be used outside of its forward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch.utils.hooks import RemovableHandle

from fusion_rt.torch.core import watching


class Uses:
    """Uses of one optimizer's parameters by forward passes.

    Attributes:
        recording: forward passes are being noted.
        unseen: ids of parameters of which no use was seen.
        needed_at: by id of each of the others, when it was first needed: the number of the forward pass of a module.
    """

    def __init__(self) -> None:
        self.recording = True
        self.unseen: set[int] = set()
        self.needed_at: dict[int, int] = {}
        self._called: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        self._beneath: weakref.WeakKeyDictionary[torch.nn.Module, tuple[int, ...]] = weakref.WeakKeyDictionary()
        self._hooks: list[RemovableHandle] = []
        self._late = False

    def restart(self) -> None:
        """Records anew: parameters have changed, and the forward passes that used them were not noted."""
        self.recording = self._late = True

    def called(self, module: torch.nn.Module) -> None:
        """Notes that a module's forward pass runs."""
        self._called.setdefault(module, len(self._called))

    def conclude(self, parameters: Sequence[torch.Tensor]) -> None:
        """Ends the record of a step in which these parameters may have been used."""
        ids = {id(parameter) for parameter in parameters}
        if not ids:
            return
        self.recording = self._late
        if self._late:
            self._late = False
            self.unseen = ids
            self.needed_at = {}
            return
        called = dict(self._called)
        modules = list(called)
        self._hook(modules, ids)
        contents = {module: [id(parameter) for parameter in module.parameters()] for module in modules}
        own = {id(parameter) for module in modules for parameter in module._parameters.values()}
        missing = ids - own
        self._beneath.clear()
        for module in sorted(modules, key=lambda module: len(contents[module])):
            found = tuple(key for key in contents[module] if key in missing)
            if found:
                self._beneath[module] = found
                missing.difference_update(found)
        self.unseen = missing | {id(p) for module in modules if _is_scripted(module) for p in module.parameters()} & ids
        self.needed_at = {}
        for module, number in sorted(called.items(), key=lambda item: item[1]):
            for key in (*(id(parameter) for parameter in module._parameters.values()), *self.beneath(module)):
                if key in ids:
                    self.needed_at.setdefault(key, number)
        self._called.clear()

    def beneath(self, module: torch.nn.Module) -> tuple[int, ...]:
        """Ids of parameters that are not the module's own, and needed by its forward pass."""
        return self._beneath.get(module, ())

    def release(self) -> None:
        """Takes the hooks off the modules."""
        for handle in self._hooks:
            handle.remove()
        self._hooks = []

    def _hook(self, modules: Sequence[torch.nn.Module], ids: set[int]) -> None:
        """Has the modules that have the parameters tell of being saved and loaded."""
        self.release()
        owners = {
            id(inner): inner
            for module in modules
            for inner in module.modules()
            if not _is_scripted(inner) and any(id(parameter) in ids for parameter in inner._parameters.values())
        }
        self._hooks = watching.hook(owners.values())


def _is_scripted(module: torch.nn.Module) -> bool:
    """Tells whether a module takes no hooks for being saved or loaded."""
    return isinstance(module, torch.jit.ScriptModule)
