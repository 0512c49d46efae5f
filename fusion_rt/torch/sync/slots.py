"""Slots: a parameter's place in a bucket, what goes into it, and what comes back.

A slot whose parameter is in this process's memory, and whose gradient nobody compresses here, is *direct*: `p.grad` is
the place in the arena itself. What any other slot reduces (a gradient on a device, what the script's compressor makes
of one, the change of a parameter) is copied there before and from there after the reduction.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fusion_rt import wire
from fusion_rt.torch.core import device
from fusion_rt.torch.core.compressors import NoneCompressor
from fusion_rt.torch.core.tensors import dtype_name
from fusion_rt.trace_format import Kind

if TYPE_CHECKING:
    from fusion_rt.torch.sync.buckets import Bucket
    from fusion_rt.torch.sync.synchroniser import GradientExchange

_GRADIENT = int(Kind.GRADIENT)


class Named(NamedTuple):
    """A parameter that is to be reduced; those with the same number in `together`, if it is not 0, share a bucket."""

    name: str
    parameter: torch.Tensor
    together: int = 0


class Slot:
    """A parameter whose gradient is reduced, and its place in the plan once there is one.

    Attributes:
        name: its name, the same on all ranks.
        parameter: the parameter.
        nbytes: of its gradient, while it is dense.
        together: see `Named`.
        direct: `p.grad` may be the place in the arena itself.
        closed: what is in `p.grad` is being reduced, or has been: autograd must not add to it.
        kept: reduced gradients of earlier backward passes of this step, which the next result is added to.
        seen: number of the last backward pass that has completed its gradient.
        bucket: its bucket, or None while there is no plan.
        view: its place in the bucket, in the parameter's shape and memory order; in the compressed gradient's shape, if
            the script compresses it.
        sparse: how many sparse dimensions its gradient has; 0: it is dense, as far as is known.
        compressed, context: what the compressor made of the gradient before there was a place for it, and for its end.
    """

    __slots__ = (
        "_adds",
        "_exchange",
        "_hooks",
        "bucket",
        "closed",
        "compressed",
        "context",
        "direct",
        "kept",
        "name",
        "nbytes",
        "parameter",
        "seen",
        "sparse",
        "together",
        "view",
    )

    def __init__(self, exchange: GradientExchange, named: Named) -> None:
        self._exchange = exchange
        self.name, self.parameter, self.together = named
        self.nbytes = self.parameter.numel() * self.parameter.element_size()
        self.direct = self._is_direct()
        self.closed = False
        self.kept: torch.Tensor | None = None
        self.seen = -1
        self.bucket: Bucket | None = None
        self.view: torch.Tensor | None = None
        self.sparse = 0
        self.compressed: torch.Tensor | None = None
        self.context: Any = None
        self._take_over()
        self._adds = torch.autograd.graph.get_gradient_edge(self.parameter).node  # nobody else keeps it alive
        self._hooks = (
            self._adds.register_prehook(self.arriving),
            self.parameter.register_post_accumulate_grad_hook(self.arrived),  # type: ignore[no-untyped-call]
        )

    def arriving(self, gradients: Any) -> None:
        """The hook before: autograd is about to add to `p.grad`."""
        if self.closed:
            self._exchange.reopen(self)

    def arrived(self, parameter: torch.Tensor) -> None:
        """The hook after: autograd has added to `p.grad`."""
        exchange = self._exchange
        number = exchange.pass_number
        if number == self.seen or not number:
            if exchange.backward() is None:
                exchange.backward_begins()
            number = exchange.pass_number
            if exchange.passes_left > 1:
                return
            if number == self.seen:
                exchange.arrived_again(self)
                return
        self.seen = number
        steps = exchange.steps
        steps.trace.record(_GRADIENT, self.name, self.nbytes, steps.number)
        bucket = self.bucket
        if bucket is None:
            exchange.arrivals.append(self)
            return
        bucket.missing -= 1
        if not bucket.missing or exchange.copying:
            exchange.advance(bucket)

    def forget(self) -> None:
        """Takes the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def keep(self) -> None:
        """Sets what is in `p.grad`, and has been reduced, aside for the next result to be added to."""
        gradient, self.parameter.grad = self.parameter.grad, None
        self.closed = False
        if gradient is None or gradient.is_sparse or not self.direct or self.view is None:
            self.kept = gradient
        else:
            in_arena = gradient.data_ptr() == self.view.data_ptr()
            self.kept = gradient.detach().clone() if in_arena else gradient

    def add_kept(self) -> None:
        """Adds what has been kept to the result."""
        kept, self.kept = self.kept, None
        gradient = self.parameter.grad
        if kept is None or gradient is None:
            return
        if kept.is_sparse or gradient.is_sparse:
            self.parameter.grad = kept + gradient
        else:
            gradient.add_(kept)

    def value(self) -> torch.Tensor | None:
        """What is reduced; None stands for zeros."""
        return self.parameter.grad

    def assign(self, reduced: torch.Tensor) -> None:
        """Takes the result."""
        self.parameter.grad = reduced

    def spec(self) -> wire.TensorSpec:
        """What is proposed for the plan."""
        value = self.value()
        sparse = value.sparse_dim() if value is not None and value.is_sparse else 0
        if self._exchange.sparse_as_dense:
            sparse = 0
        if self._exchange.compressor is NoneCompressor:
            tensor = self.parameter.permute(memory_order(self.parameter))
        else:
            tensor = self._compress(value.to_dense() if value is not None and value.is_sparse else value)
        return wire.TensorSpec(self.name, dtype_name(tensor.dtype), tuple(tensor.shape), self.together, sparse)

    def place(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Gives the slot its elements of a bucket."""
        self.bucket = bucket
        self.direct = self._is_direct()
        if self.compressed is not None:
            self.view = flat.view(self.compressed.shape)
            return
        self.view = shaped(flat, self.parameter)

    def outgoing(self) -> torch.Tensor | None:
        """What is to be copied into the view; the view itself if it is there already, None for zeros."""
        value = self.value()
        if value is self.view:
            return value
        if value is not None:
            self.sparse = value.sparse_dim() if value.is_sparse else 0
            if self.sparse:
                value = value.to_dense()
        if self.direct:
            self.parameter.grad = self.view
            return value
        if self._exchange.compressor is NoneCompressor:
            return value
        return self._checked(self._compress(value) if self.compressed is None else self.compressed)

    def landing(self) -> torch.Tensor:
        """Where the reduced contents of the view have to be copied to before `take`: the view itself if nowhere."""
        assert self.view is not None
        if self._exchange.compressor is not NoneCompressor:
            return torch.empty_like(self.view, device=self.parameter.device)
        if device.layer.is_host(self.parameter):
            return self.view
        return self._buffer()

    def take(self, reduced: torch.Tensor) -> None:
        """What `landing` returned holds the result: puts it where it belongs."""
        if self._exchange.compressor is not NoneCompressor:
            reduced = torch.as_tensor(self._exchange.compressor.decompress(reduced, self.context))
        self.assign(reduced.to_sparse(self.sparse) if self.sparse else reduced)

    def _buffer(self) -> torch.Tensor:
        """A tensor like the parameter, on its device, that may be overwritten."""
        gradient = self.parameter.grad
        return torch.empty_like(self.parameter) if gradient is None or gradient.is_sparse else gradient.detach()

    def _is_direct(self) -> bool:
        return self._exchange.compressor is NoneCompressor and device.layer.is_host(self.parameter)

    def _compress(self, value: torch.Tensor | None) -> torch.Tensor:
        value = torch.zeros_like(self.parameter) if value is None else value
        compressed, self.context = self._exchange.compressor.compress(value)
        self.compressed = torch.as_tensor(compressed).detach()
        return self.compressed

    def _checked(self, compressed: torch.Tensor) -> torch.Tensor:
        assert self.view is not None
        if compressed.shape != self.view.shape or compressed.dtype != self.view.dtype:
            raise ValueError(f"the compressor made {compressed.dtype} {list(compressed.shape)} of the gradient of "
                             f"{self.name!r}, but {self.view.dtype} {list(self.view.shape)} in an earlier step; they "
                             "have to be alike")  # fmt: skip
        return compressed

    def _take_over(self) -> None:
        """A parameter belongs to the optimizer made last: the owner before is told, and objects if it is used again."""
        for hook in list((getattr(self.parameter, "_post_accumulate_grad_hooks", None) or {}).values()):
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, Slot):
                owner.forget()
                owner._exchange.lost = owner.name


def memory_order(parameter: torch.Tensor) -> list[int]:
    """A parameter's dimensions from the outermost in memory to the innermost.

    Autograd gives a gradient its parameter's memory format (channels_last, say), and the update is fastest when they
    are alike, so the place in the bucket has it, too. Ranks then have to agree about it, which is checked, because the
    shape that is proposed is the one in memory.
    """
    strides = parameter.stride()
    order = sorted(range(parameter.dim()), key=lambda dim: -strides[dim])
    return order if parameter.permute(order).is_contiguous() else list(range(parameter.dim()))


def shaped(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Elements of a bucket (1-D) in the parameter's shape and memory order; the same memory."""
    order = memory_order(parameter)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return flat.view([parameter.shape[dim] for dim in order]).permute(inverse)


def in_order(arrived: Iterable[Slot]) -> list[Slot]:
    """The slots, each once, in the order in which they are first in `arrived`; those that are wanted together where the
    last of them is, sorted by dtype."""
    once = list(dict.fromkeys(arrived))
    last = {slot.together: position for position, slot in enumerate(once) if slot.together}
    keys = {
        slot: (last[slot.together], str(slot.parameter.dtype)) if slot.together else (position, "")
        for position, slot in enumerate(once)
    }
    return sorted(once, key=keys.__getitem__)
