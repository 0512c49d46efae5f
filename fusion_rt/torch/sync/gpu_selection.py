"""Selection on a worker's GPU, instead of in its daemon: it keeps the residual of a bucket there, adds gradients to it,
and selects the elements to send, so that only those are copied to the host.

It computes what `codecs.topk` does, in the same order, so that results and residuals are the same bits (but for `clip`,
whose norm is added up in another order, and for what is left after a step that is undone, which is as near). All but
the selection itself is done with torch, on any device; see `Side`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from fusion_rt.codecs.base import Array, Layout
from fusion_rt.codecs.packing import Spans
from fusion_rt.codecs.selecting import Selecting
from fusion_rt.codecs.tensor_rules import Group
from fusion_rt.codecs.worker_selection import HEADER, SPOILED, Tray
from fusion_rt.torch.core import device
from fusion_rt.torch.core.sides import Side


class BucketSelection(device.Copying):
    """One bucket's residual on a device, and the selection from it.

    Args:
        side: the device.
        codec, layout: of the bucket.
        tray: into which it is copied.
        offset: of the tray in the plan's segment, in bytes.
        nodes: among which gradients are exchanged.
        weight: how much of a contribution the result is; see `codecs.BucketCodec`.
        where: the device, as torch calls it.

    Attributes:
        offset: as above.
    """

    def __init__(
        self,
        side: Side,
        codec: Selecting,
        layout: Layout,
        tray: Tray,
        offset: int,
        nodes: int,
        weight: float,
        where: torch.device,
    ) -> None:
        super().__init__()
        self.offset = offset
        self._side, self._codec, self._layout, self._tray = side, codec, layout, tray
        self._bound = codec.clip / math.sqrt(nodes) / weight
        self._groups: tuple[Group, ...] = codec.rules.groups(layout)
        self._step = 0
        self._under_way = False
        self._owes = False  # its daemon has told, or will tell, by what to correct the residual
        self._given: torch.Tensor | None = None  # the gradient of the step under way
        self._masked: list[Array] = []  # the words of groups in which the velocity of what is selected starts again
        always = Spans(codec.rules.dense(layout)).all_indices(0, layout.elements)
        with side.beside():
            self._residual = side.zeros(layout.elements)
            self._velocity = side.zeros(layout.elements) if codec.momentum else None
            self._always = torch.from_numpy(always).to(where)
        self._sent_always, self._verdict = torch.from_numpy(tray.dense), torch.from_numpy(tray.verdict)
        self._selector = side.selector(
            (self._residual, self._velocity), tray.shape.groups, tray.all_groups, tray.shape.rooms, codec.momentum,
            codec.nesterov,
        )  # fmt: skip

    def start(self, gradient: torch.Tensor, factors: Sequence[float], loss_scale: float = 1.0) -> None:
        """Queues a step.

        Args:
            gradient: of the whole bucket, on the device, float32, zeros between tensors; may be scaled. It stays
                as it is from then on until `correct`.
            factors: by what the residual of each tensor is multiplied first, if any.
            loss_scale: by which the gradient is multiplied, and what is remembered and selected is not.
        """
        if loss_scale != 1.0:
            gradient.mul_(1 / loss_scale)
        if self._bound:
            norm = torch.linalg.vector_norm(gradient)
            too_long = (self._bound < norm) & (norm < math.inf)
            gradient.mul_(torch.where(too_long, self._bound / norm, torch.ones_like(norm)))
        self._tray.clear()
        self._side.follow()
        self._given, self._masked = gradient, []
        with self._side.beside():
            for span, factor in zip(self._layout.spans, factors, strict=False):
                if factor != 1.0:
                    self._residual[span.start : span.end].mul_(factor)
            if len(self._always):
                self._send_always(gradient)
        ks = [group.k(self._step, self._codec.warmup) for group in self._groups]
        self._selector.start(gradient, ks, at_once=not self._codec.feedback)
        for group, k, words in zip(self._groups, ks, self._tray.groups, strict=True):
            if self._codec.masks(k, group.size):
                self._masked.append(words)
        if not self._codec.feedback:
            with self._side.beside():
                self._residual.zero_()
        self.events = self._mark(gradient).events
        self._step += 1
        self._under_way = self._owes = True

    def _send_always(self, gradient: torch.Tensor) -> None:
        """Adds gradients to the residuals of the elements that are always sent, as selectors do, and takes the sums."""
        added, before = gradient[self._always], self._residual[self._always]
        if self._velocity is None:
            finite = torch.isfinite(before + added)
        else:
            old, momentum = self._velocity[self._always], self._codec.momentum
            if self._codec.nesterov:
                speed = (old + added).mul_(momentum)
                added = speed + added
            else:
                speed = added = (old * momentum).add_(added)
            finite = torch.isfinite(before + added)
            self._velocity[self._always] = torch.where(finite, speed, old)
        self._sent_always.copy_(torch.where(finite, before + added, before), non_blocking=True)
        self._verdict.copy_((~finite).any().to(torch.int32) * SPOILED, non_blocking=True)
        self._residual[self._always] = 0

    def done(self) -> bool:
        if self._under_way and self._selector.ready():
            self.wait()
        return not self._under_way

    def wait(self) -> None:
        if self._under_way:
            self._selector.finish()
            self._under_way = False

    def correct(self) -> None:
        """Ends the step: adds what the daemon has not sent of the selection to the residual again. Where it is undone,
        residual and velocity become what they were, as exactly as float32 adds up."""
        if not self._owes:
            return
        given, self._owes, self._given = self._given, False, None
        indices, values, self._step, undone = self._tray.answered()
        with self._side.beside():
            if len(indices):
                there = [torch.from_numpy(a).to(self._residual.device, non_blocking=True) for a in (indices, values)]
                self._residual.index_add_(0, *there)
            if undone:
                assert given is not None
                self._undo(given)
            elif self._velocity is not None:
                for words in self._masked:
                    chosen = torch.from_numpy(words[HEADER : HEADER + words[0]])
                    self._velocity[chosen.to(self._velocity.device, non_blocking=True).long()] = 0
        done = self._mark(*([] if given is None else [given]))
        if undone:
            done.precede()  # what is queued for training next is the next gradient, which takes the place of this one

    def withdraw(self) -> None:
        """Ends a step of which the daemon is not told: residual and velocity become what they were, as exactly as
        float32 adds up."""
        self.wait()
        indices, values, always = self._tray.selected()
        with self._side.beside():
            self._residual[self._always] = torch.from_numpy(always).to(self._residual.device)
        self._tray.answer(indices, values, self._step - 1, undone=True)
        self.correct()

    def _mark(self, *using: torch.Tensor) -> device.Copying:
        """Keeps what is queued beside training now, and the tensors and the tray that it uses, until it is done."""
        with self._side.beside():
            marked = device.layer.mark(self._residual, using=[self._verdict, *using])
        device.layer.keep(marked)
        return marked

    def _undo(self, gradient: torch.Tensor) -> None:
        """Subtracts what selectors added; see `kernels.selection.withdraw`."""
        step = gradient
        added = torch.isfinite(gradient)
        if self._velocity is not None:
            velocity, momentum = self._velocity, self._codec.momentum
            if self._codec.nesterov:
                step, before = velocity + gradient, velocity / momentum - gradient
            else:
                step, before = velocity.clone(), (velocity - gradient) / momentum
            velocity.copy_(torch.where(added & torch.isfinite(before), before, velocity))
        if self._codec.feedback:
            before = self._residual - step
            self._residual.copy_(torch.where(added & torch.isfinite(before), before, self._residual))
        else:
            self._residual.zero_()

    # --- what it remembers, as `FeedbackBucketCodec.state_dict` has it ------------------------------------------------

    def add_to(self, state: Mapping[str, Array]) -> dict[str, Array]:
        """Returns the residual and velocity of a saved state of this bucket, with those here added."""
        found = {}
        for kind, tensor in self._memories():
            with self._side.beside():
                memory = tensor.cpu().numpy()
            for span in self._layout.spans:
                key = f"{kind}/{span.name}"
                found[key] = state[key] + memory[span.start : span.end]
        return found

    def take_from(self, state: Mapping[str, Array]) -> dict[str, Array]:
        """Goes on from a saved state of this bucket. Returns what is left there: zeros."""
        left = {}
        for kind, tensor in self._memories():
            memory = np.zeros(self._layout.elements, np.float32)
            for span in self._layout.spans:
                key = f"{kind}/{span.name}"
                memory[span.start : span.end] = state[key]
                left[key] = np.zeros_like(state[key])
            with self._side.beside():
                tensor.copy_(torch.from_numpy(memory))
        self._step = int(state["step"])
        return left

    def _memories(self) -> list[tuple[str, torch.Tensor]]:
        memories = [("residual", self._residual)]
        return memories if self._velocity is None else [*memories, ("velocity", self._velocity)]
