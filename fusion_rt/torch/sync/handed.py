"""Gradients that others hand over: hooks of torch's own data parallelism, which has them in buffers of its own.

They go through the synchroniser's plan, buckets and checkpoints like an optimizer's. Whose buffer a gradient is in, and
how those are cut, does not count: elements belong to a slot, and with them what a codec has not sent of them.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch

from fusion_rt import codecs, wire
from fusion_rt.core.errors import HorovodInternalError
from fusion_rt.torch.core.compressors import codec_of
from fusion_rt.torch.core.process_sets import ProcessSet, takes_part
from fusion_rt.torch.sync.options import Options
from fusion_rt.torch.sync.parameters import Mark, Named, Trained
from fusion_rt.torch.sync.slots import GradientHooks, Slot, memory_order
from fusion_rt.torch.sync.step_schedule import Schedule
from fusion_rt.torch.sync.update_rule import UpdateRule
from fusion_rt.tracing.format import Kind

_GRADIENT = int(Kind.GRADIENT)


class HandedSlot(Slot):
    """A gradient that is handed over, step after step.

    Attributes:
        given: the present one, 1-D, which the result replaces; None if there is none.
    """

    __slots__ = ("given",)

    def __init__(self, owner: GradientHooks, named: Named) -> None:
        super().__init__(owner, named)
        self.given: torch.Tensor | None = None

    def place(self, bucket: Any, flat: torch.Tensor, direct: bool) -> None:
        self.bucket, self.direct, self.view = bucket, direct, flat


class GivenGradients(UpdateRule):
    """Sends the handed gradients, and the answer replaces them."""

    def value(self, slot: Slot) -> torch.Tensor | None:
        return cast(HandedSlot, slot).given

    def take(self, slots: Sequence[Slot], results: Sequence[torch.Tensor], added: bool) -> None:
        pairs = [(cast(HandedSlot, slot).given, result) for slot, result in zip(slots, results, strict=True)]
        given = [place for place, _ in pairs if place is not None]
        if given:
            torch._foreach_copy_(given, [result.view(-1) for place, result in pairs if place is not None])


class HandedTensors(Trained):
    """Tensors whose gradients are handed over, in an order that is the same on all ranks.

    Args:
        named: each with a stand-in for the parameter; see `stand_in`.
        process_set: the ranks that reduce them.
        optimizer: steps with them; its learning rates count for residuals. None if it is not known.
        groups: index of each tensor's group in the optimizer, by name; of those that are in it.
    """

    def __init__(
        self,
        named: Sequence[Named],
        process_set: ProcessSet,
        optimizer: torch.optim.Optimizer | None = None,
        groups: Mapping[str, int] | None = None,
    ) -> None:
        reference: Any = (lambda: None) if optimizer is None else weakref.ref(optimizer)
        super().__init__(reference, {}, process_set)
        self._named = list(named) if takes_part(process_set) else []
        self._groups = groups or {}

    def named(self) -> list[Named]:
        return self._named

    def has_changed(self, marks: list[Mark]) -> bool:
        return False

    def group_rates(self) -> list[float]:
        optimizer = self.optimizer()
        return [] if optimizer is None else [float(group.get("lr", 0.0)) for group in optimizer.param_groups]

    def rates(self) -> dict[str, float]:
        rates = self.group_rates()
        return {name: rates[group] for name, group in self._groups.items()} if rates else {}


class HandedOver(Schedule):
    """Exchanges gradients as they are handed over, until whoever does that says that it was the last."""

    slot_type = HandedSlot
    hears = False

    def give(self, values: Iterable[tuple[HandedSlot, torch.Tensor]]) -> None:
        """Takes gradients (1-D, as they lie in memory), and sends buckets that are complete.

        Raises:
            HorovodInternalError: the job has failed.
        """
        sync = self.sync
        if sync.idle:
            sync.begin()
        steps = sync.steps
        for slot, value in values:
            slot.given = value
            steps.trace.record(_GRADIENT, slot.name, slot.nbytes, steps.number)
            if slot.bucket is not None:
                slot.bucket.missing -= 1
                if not slot.bucket.missing:
                    sync.advance(slot.bucket)

    def end(self) -> None:
        """Sends the rest of this step, and waits until results have replaced all gradients.

        Raises:
            HorovodInternalError: an exchange failed, on all ranks.
        """
        began, sync = time.perf_counter(), self.sync
        sync.submit()
        try:
            sync.receive()
        finally:
            sync.end_step()
        sync.note_waited(began)
        sync.steps.end()

    def exchange(self, values: Sequence[tuple[HandedSlot, torch.Tensor]]) -> None:
        """Exchanges gradients that are all of their buckets, and waits for the results. Raises as `end`."""
        began, sync = time.perf_counter(), self.sync
        if sync.idle:
            sync.begin()
        if not sync.plan.made:
            sync.make_plan()
        try:
            self.give(values)
            sync.poster.finish()
            sync.receive(buckets=list(dict.fromkeys(slot.bucket for slot, _ in values)))
        except HorovodInternalError:
            sync.await_sent()
            raise
        finally:
            sync.end_step()
        sync.note_waited(began)

    def ended(self) -> None:
        for slot in self.sync.slots:
            cast(HandedSlot, slot).given = None


def stand_in(parameter: torch.Tensor, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """Makes a tensor without memory of a parameter's shape, as that lies in memory, and of the dtype of gradients.

    Args:
        device: of the gradients; None: the parameter's.
    """
    shape = [parameter.shape[dim] for dim in memory_order(parameter)]
    return torch.empty((), dtype=dtype, device=device or parameter.device).expand(shape)


def codec_text(codec: Any) -> str:
    """Returns the text of a codec for gradients of torch's data parallelism, of which all ranks get the mean.

    Args:
        codec: its text, or a compressor of fusion_rt.torch.

    Raises:
        ValueError: it cannot be used.
    """
    text = codec_of(codec)
    if text is None:
        raise ValueError(f"{codec!r} is a compressor of the script's own; gradients of torch's data parallelism need a "
                         "codec")  # fmt: skip
    codecs.parse(text).check_use("average")
    return text


def options_for(codec: str, process_set: ProcessSet) -> Options:
    """Returns the options of gradients that are handed over, of which all ranks get the mean.

    Args:
        codec: its text.
        process_set: the ranks that take part.
    """
    packages = tuple(filter(None, [codecs.CODECS.package(codecs.parse(codec).name)]))
    reduction = wire.Reduction("average", codec=codec, packages=packages)
    return Options(reduction, process_set, GivenGradients())


def handed_over(options: Options, tensors: HandedTensors, owner: object) -> HandedOver:
    """Makes the synchroniser of handed gradients.

    Args:
        options: of `options_for`.
        tensors: all that will be handed over.
        owner: hands them over; when it is gone, memory is released.
    """
    made = HandedOver(options, tensors, 1)
    weakref.finalize(owner, made.release).atexit = False
    return made
