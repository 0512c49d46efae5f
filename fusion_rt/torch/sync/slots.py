"""Slots: a parameter, its place in a bucket, and its state in a step.

A slot whose parameter is in this process's memory, and whose gradient is not compressed here, is *direct*: `p.grad` is
the place in the arena itself. What any other slot exchanges (a gradient on a device, what the script's compressor makes
of one, a parameter or its change) is copied there before and from there afterwards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from fusion_rt.torch.core import device
from fusion_rt.torch.sync.parameters import Named

_current_node = torch._C._current_autograd_node


class GradientHooks(Protocol):
    """An object that is told of gradients.

    Attributes:
        hears: autograd tells it; else gradients are handed over.
        hears_before: autograd tells it also before it adds to a gradient.
        own_gradients: `p.grad` stays this rank's own, and is not exchanged in place.
    """

    hears: bool
    hears_before: bool
    own_gradients: bool

    def arriving(self, slot: Slot, gradients: Any) -> None:
        """Called when autograd is about to add to `p.grad`."""

    def arrived(self, slot: Slot) -> None:
        """Called when autograd has added to `p.grad`, after the script's hooks."""

    def lose(self, slot: Slot) -> None:
        """Called when the parameter belongs to another optimizer from now on."""


class Slot:
    """A parameter that is exchanged, and its place in the plan once there is one.

    Args:
        owner: told of gradients.
        named: the parameter.

    Attributes:
        name: its name, the same on all ranks.
        parameter: the parameter.
        nbytes: of its gradient, while it is dense.
        together: see `Named`.
        direct: `p.grad` may be the place in the arena itself.
        closed: `p.grad` is being reduced, or has been: autograd must not add to it.
        stream: on which its gradient was completed, if that is on a device and has not been sent yet; else None.
        kept: the part of `p.grad` that has been reduced already, while autograd adds to it; the next result is added to
            that.
        seen: number of the last backward pass that has completed its gradient.
        bucket: its bucket, or None while there is no plan.
        view: its place in the bucket, in the parameter's shape, and in this `order`; in the compressed gradient's
            shape, if the script compresses it. Scripts have it as `p.grad`, where the slot is direct.
        address: of that place.
        sparse: how many sparse dimensions its gradient has; 0: it is dense, as far as is known.
        compressed, context: the compressor's output before there was a place for it, and its context for the end.
        start, velocity: where the parameter was after the last exchange, and the outer momentum, where these count.
        moved: by how much `start` has moved since, while the parameter has not; or the part that is not to be posted
            again.
        posted: where the parameter was when its change was posted that is not answered yet, while steps go on.
        guard: is in `p.grad` while the gradient is under way, where the script may touch it then.
    """

    # Hooks, and loops over all slots, read these when gradients have just gone through the caches. A dict would be
    # several more cache lines; with more than thirty attributes, all of its own.
    __slots__ = (
        "_adds", "_after", "_before", "_beside", "_heard", "_last", "_noted", "_place", "_taken", "address", "bucket",
        "closed", "compressed", "context", "direct", "guard", "kept", "moved", "name", "nbytes", "owner", "parameter",
        "posted", "seen", "sparse", "start", "stream", "together", "velocity", "view",
    )  # fmt: skip

    def __init__(self, owner: GradientHooks, named: Named) -> None:
        self.owner = owner
        self.name, self.parameter, self.together = named
        self.nbytes = self.parameter.numel() * self.parameter.element_size()
        self.direct = self.closed = False
        self.seen = -1
        self.sparse = 0
        self.bucket: Any = None
        self.view: torch.Tensor | None = None
        self._place: torch.Tensor | None = None  # the same memory; this tensor has no other user
        self.address = 0
        self.stream: torch.cuda.Stream | None = None
        self.kept: torch.Tensor | None = None
        self.compressed: torch.Tensor | None = None
        self.start: torch.Tensor | None = None
        self.velocity: torch.Tensor | None = None
        self.moved: torch.Tensor | None = None
        self.posted: torch.Tensor | None = None
        self.context: Any = None
        self.guard: Any = None
        self._taken: Callable[[], object] | None = None  # refers to the gradient that `take` has put into `p.grad`
        self._noted: tuple[torch.Tensor, int] | None = None  # `p.grad` with `kept` in it, and its version
        self._heard: Any = None
        self._last: Any = None
        self._before: Any = None
        if not owner.hears or not self.parameter.requires_grad:
            return
        self._take_over()
        self._heard = self.parameter.register_post_accumulate_grad_hook(self.accumulated)  # type: ignore[no-untyped-call]
        self._beside = self._heard.hooks_dict_ref()
        self._hear()

    def _hear(self) -> None:
        """Has autograd tell of gradients, after the script's hooks, whenever these were made: those on the parameter
        are part of the node that adds to `p.grad`, and hooks of that node follow. This slot's is the last of them. On
        the host it is only made where there is another.
        """
        node, device_is_host = self._node(), device.layer.is_host(self.parameter)
        self._adds, self._last = node, None if device_is_host else node.register_hook(partial(_arrived_on_device, self))
        empty = node.register_hook(_arrived)
        self._after = empty.hooks_dict_ref()  # the script's appear there, too
        empty.remove()
        if self.owner.hears_before:
            self._before = node.register_prehook(partial(self.owner.arriving, self))

    def accumulated(self, parameter: torch.Tensor) -> None:
        """Called by autograd among the hooks of the parameter. If there is no other, the gradient has arrived. Else it
        sees to it that the node that adds to `p.grad` now calls this slot's hook, after all others. (The parameter has
        a node of its own for each dtype and device.)
        """
        if _current_node() is not self._adds:
            self.follow()
            self.closed = False  # it is too late to tell which part of the sum has been reduced
        if self._last is None:
            if len(self._beside) == 1 and not self._after:
                self.owner.arrived(self)
                return
            self._last = self._adds.register_hook(partial(_arrived, self))
        own = self._last.id
        if len(self._after) > 1 and own in self._after:
            self._after[own] = self._after.pop(own)

    def _node(self) -> Any:
        """Returns the node of autograd that adds to `p.grad`, which has no other owner."""
        with torch.enable_grad():  # a backward pass that finds a new parameter is without; torch 2.4 needs it
            return torch.autograd.graph.get_gradient_edge(self.parameter).node

    def follow(self) -> None:
        """Follows a parameter that has become one of another dtype, or is on another device now: autograd adds to
        `p.grad` by another node then."""
        if self._heard is not None and self._node() is not self._adds:
            self._leave_node()
            self._hear()
            self.guard = None
        for name in ("start", "velocity", "moved", "posted"):
            value = getattr(self, name)
            setattr(self, name, None if value is None else value.to(self.parameter))

    def forget(self) -> None:
        """Takes the hooks off."""
        if self._heard is not None:
            self._heard.remove()
            self._leave_node()

    def _leave_node(self) -> None:
        for hook in (self._last, self._before):
            if hook is not None:
                hook.remove()

    def reopen(self) -> None:
        """Lets autograd add to a gradient that has been reduced, and remembers that, which is not to be reduced again.
        It stays in `p.grad`, where the script sees all of its gradient, and may change or drop it."""
        self.closed = False
        if self.parameter.grad is None or self.has_own():
            return
        self.kept = self.parameter.grad.detach().clone()
        if self.parameter.grad is self.view:  # all of a bucket's have one version
            self.parameter.grad = self.kept.clone()
        self._note()

    def check_kept(self, added: bool) -> None:
        """Forgets the reduced part if the script has changed `p.grad` since, which all is its own then.

        Args:
            added: autograd has added to it.
        """
        assert self._noted is not None
        (before, version), now = self._noted, self.parameter.grad
        if now is before:
            untouched = now._version == version + added
        else:  # autograd itself puts another there in some cases
            untouched = added and now is not None and (torch.is_grad_enabled() or before.is_sparse)
        if untouched:
            self._note()
        else:
            self.forget_kept()

    def _note(self) -> None:
        gradient = self.parameter.grad
        assert gradient is not None
        self._noted = gradient, gradient._version

    def forget_kept(self) -> None:
        """Forgets the reduced part."""
        self.kept = self._noted = None

    def split(self) -> None:
        """Leaves the unreduced part in `p.grad`, and sets the rest aside for the result to be added to."""
        if self.closed:
            if not self.has_own():
                reduced, self.parameter.grad = self.parameter.grad, None
                self.kept = reduced.detach().clone() if reduced is not None and reduced is self.view else reduced
        elif self.kept is not None:
            self.check_kept(added=False)
            if self.kept is not None:
                assert self.parameter.grad is not None
                self.parameter.grad = self.parameter.grad.detach() - self.kept

    def take(self, gradient: torch.Tensor) -> None:
        """Puts a reduced gradient into `p.grad`."""
        self.parameter.grad, self._taken = gradient, weakref.ref(gradient)

    def has_own(self) -> bool:
        """Tells whether the script has put another gradient where the reduced one was."""
        gradient = self.parameter.grad
        if gradient is None or gradient is self.view:
            return False
        return self._taken is None or gradient is not self._taken()

    def add_kept(self) -> None:
        """Adds the kept part to the result."""
        kept, gradient = self.kept, self.parameter.grad
        self.forget_kept()
        if kept is None or gradient is None:
            return
        if kept.is_sparse or gradient.is_sparse:
            self.take(kept + gradient)
        else:
            gradient.add_(kept)

    @property
    def order(self) -> list[int]:
        """The parameter's dimensions as they are in a bucket, from the outermost to the innermost: as in memory, where
        a result may be `p.grad` itself; else as the script sees them, since a shard's optimizer goes by them."""
        return list(range(self.parameter.dim())) if self.owner.own_gradients else memory_order(self.parameter)

    def place(self, bucket: Any, flat: torch.Tensor, direct: bool) -> None:
        """Gives the slot its elements of a bucket."""
        self.bucket, self.direct = bucket, direct
        if self.compressed is None:
            self._place = shaped(flat, self.parameter, self.order)
        else:
            self._place = flat.view(self.compressed.shape)
        self.address = self._place.data_ptr()
        self.view = self._place[...]

    def displace(self) -> None:
        """Takes its place away, since its plan is given up."""
        self.bucket = self.view = self._place = None

    def return_to_arena(self) -> torch.Tensor:
        """Makes the view anew, to which the script has given other memory (`p.grad.data = ...`), and returns it."""
        assert self._place is not None
        self.view = self._place[...]
        return self.view

    def first_value(self) -> torch.Tensor:
        """Returns the value with which a home of this parameter begins: where the parameter was after the last
        exchange, if that counts, or as it is."""
        return self.parameter.detach() if self.start is None else self.start

    def compress(self, compressor: Any, value: torch.Tensor | None) -> torch.Tensor:
        """Compresses a value, or zeros if there is none, by the script's compressor.

        Raises:
            ValueError: it is of another form than in earlier steps.
        """
        made, self.context = compressor.compress(torch.zeros_like(self.parameter) if value is None else value)
        made = self.compressed = torch.as_tensor(made).detach()
        if self.view is not None and (made.shape != self.view.shape or made.dtype != self.view.dtype):
            raise ValueError(f"the compressor made {made.dtype} {list(made.shape)} of the gradient of {self.name!r}, "
                             f"but {self.view.dtype} {list(self.view.shape)} in an earlier step; they have to be "
                             "alike")  # fmt: skip
        return made

    def decompress(self, compressor: Any, result: torch.Tensor) -> torch.Tensor:
        """Returns a result after the script's compressor, in memory other than the arena's."""
        return torch.as_tensor(compressor.decompress(result.clone() if result is self.view else result, self.context))

    def _take_over(self) -> None:
        """Takes the parameter over from an optimizer that was made before, which objects if it is used again."""
        for before in slots_of(self.parameter):
            before.forget()
            before.owner.lose(before)


def slots_of(parameter: torch.Tensor) -> list[Slot]:
    """Returns the slots to which autograd tells of a parameter's gradient, by their `accumulated` among its hooks."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return [owner for hook in hooks.values() if isinstance(owner := getattr(hook, "__self__", None), Slot)]


def _arrived(slot: Slot, results: Any, gradients: Any) -> None:
    """Called by autograd after all hooks."""
    slot.owner.arrived(slot)


def _arrived_on_device(slot: Slot, results: Any, gradients: Any) -> None:
    """Notes the stream of a gradient, which need not be that of the hook that sends its bucket, and that it arrived."""
    slot.stream = device.layer.stream_of(slot.parameter)
    slot.owner.arrived(slot)


def follow_streams(slots: Sequence[Slot]) -> None:
    """Has work that is queued from now on come after the slots' gradients, which may be computed on several streams."""
    device.layer.follow([slot.stream for slot in slots if slot.stream is not None])
    for slot in slots:
        slot.stream = None


def memory_order(parameter: torch.Tensor) -> list[int]:
    """Returns a parameter's dimensions from the outermost in memory to the innermost.

    Autograd gives a gradient its parameter's memory format (channels_last, say), and the update is fastest when they
    are alike, so the place in the bucket has it, too. Ranks then have to agree about it, which is checked, because the
    shape that is proposed is the one in memory.
    """
    strides = parameter.stride()
    order = sorted(range(parameter.dim()), key=lambda dim: -strides[dim])
    return order if parameter.permute(order).is_contiguous() else list(range(parameter.dim()))


def shaped(flat: torch.Tensor, parameter: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Elements of a bucket (1-D), which has dimensions in this order, in the parameter's shape; the same memory."""
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return flat.view([parameter.shape[dim] for dim in order]).permute(inverse)


def in_order(arrived: Iterable[Slot]) -> list[Slot]:
    """Returns the slots, each once, in the order in which they are first in `arrived`; those that are wanted together
    where the last of them is, sorted by dtype."""
    once = list(dict.fromkeys(arrived))
    last = {slot.together: position for position, slot in enumerate(once) if slot.together}
    keys = {
        slot: (last[slot.together], str(slot.parameter.dtype)) if slot.together else (position, "")
        for position, slot in enumerate(once)
    }
    return sorted(once, key=keys.__getitem__)
