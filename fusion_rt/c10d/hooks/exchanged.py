"""Gradients of one model of torch's data parallelism, exchanged by a codec: the common part of its hooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from fusion_rt import codecs
from fusion_rt.c10d.hooks.sets import check_fixed, process_set_of
from fusion_rt.torch.core.process_sets import ProcessSet
from fusion_rt.torch.optimizer import check_codec
from fusion_rt.torch.sync.handed import (
    HandedOver,
    HandedSlot,
    HandedTensors,
    codec_text,
    handed_over,
    options_for,
)
from fusion_rt.torch.sync.parameters import Named
from fusion_rt.torch.sync.scales import loss_scales
from fusion_rt.torch.sync.scales.conversion import checked_scale
from fusion_rt.torch.sync.synchroniser import OptimizerStatistics


class ExchangedGradients:
    """Gradients that are exchanged once the first step has shown which there are.

    Args:
        codec: a codec's text, such as "topk(density=0.01)", or a compressor of fusion_rt.torch.
        process_set: the ranks that exchange; None: all of the job that this worker is in then.
        optimizer: steps with the gradients. If it is given, residuals are rescaled when its learning rates change.

    Attributes:
        exchange: does it; None before the first step.

    Raises:
        ValueError: the codec cannot be used, or the job is elastic.
    """

    def __init__(self, codec: Any, process_set: ProcessSet | None, optimizer: Optimizer | None) -> None:
        check_fixed()
        self.exchange: HandedOver | None = None
        self._codec, self._process_set = codec_text(codec), process_set
        self._optimizer = optimizer
        if optimizer is not None:
            check_codec(optimizer, self._codec, "average")
        self._loaded: Mapping[str, Any] | None = None  # waits for the first step
        self._loss_scale: float | None = None
        if codecs.parse(self._codec).stateful:
            loss_scales.watch()

    @property
    def loss_scale(self) -> float | None:
        """By which the script multiplies its loss itself, the same on all ranks, so that codecs remember gradients
        without it; None, the default: as a `GradScaler` does. Raises `ValueError` if it is set to a number that is no
        scale."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float | None) -> None:
        self._loss_scale = checked_scale(scale)
        if self.exchange is not None:
            self.exchange.sync.checkpoint.units.said = self._loss_scale

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that exchange. Raises `ValueError` if this worker is in no job."""
        if self._process_set is None:
            self._process_set = process_set_of(None)
        return self._process_set

    def _begin(self, named: list[Named], parameters: list[torch.Tensor]) -> tuple[HandedOver, list[HandedSlot]]:
        """Begins with stand-ins of these parameters, in an order that is the same on all ranks. Returns what exchanges
        them, and their slots."""
        groups = {} if self._optimizer is None else _groups(self._optimizer, named, parameters)
        tensors = HandedTensors(named, self.process_set, self._optimizer, groups)
        exchange = self.exchange = handed_over(options_for(self._codec, self.process_set), tensors, self)
        slots = {id(slot.parameter): slot for slot in exchange.sync.slots if isinstance(slot, HandedSlot)}
        exchange.sync.checkpoint.units.said = self._loss_scale
        if self._loaded is not None:
            loaded, self._loaded = self._loaded, None
            exchange.sync.checkpoint.load_codec_state(loaded)
        return exchange, [slots[id(one.parameter)] for one in named]

    def state_dict(self) -> dict[str, Any]:
        """Returns the memory of the codecs on this node: tensors, numbers and texts. It is the node's:
        where the process set has several ranks of a node, one of them saves it, each node to a file of its own.

        Raises:
            ValueError: gradients are under way.
            HorovodInternalError: gradients of other ranks of this node are.
        """
        if self.exchange is None:
            return dict(self._loaded or {})
        return self.exchange.sync.checkpoint.codec_state() or {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a `state_dict` of this node; before the first step, in the first step.

        Raises:
            ValueError: it is nothing that `state_dict` returned, or of other parameters; or as for that.
            HorovodInternalError: the daemon cannot use it.
        """
        if self.exchange is None:
            self._loaded = state or None
        elif state:
            self.exchange.sync.checkpoint.load_codec_state(state)

    def statistics(self) -> OptimizerStatistics:
        """Returns the cost of communication so far."""
        if self.exchange is None:
            return OptimizerStatistics(0, 0, 0, 0, 0.0, 0.0)
        return self.exchange.sync.statistics()


def _groups(optimizer: Optimizer, named: list[Named], parameters: list[torch.Tensor]) -> dict[str, int]:
    """Returns the index of each parameter's group in the optimizer, by name."""
    found = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    pairs = zip(named, parameters, strict=True)
    return {one.name: found[id(parameter)] for one, parameter in pairs if id(parameter) in found}
