"""A communication hook for DDP that exchanges gradients by a codec.

DDP decides in which of its buckets a gradient is, and changes its mind after the first step. Here gradients are
exchanged by a plan of their own, which stays as it is: from each of DDP's buckets they are copied into the plan's, and
results back. So residuals belong to parameters.

A hook waits for nothing, and no thread waits for results. When autograd has run the whole graph, it calls what was
queued: first here, where results are awaited and futures completed, and then DDP, which finds them complete.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from fusion_rt.c10d.hooks.exchanged import ExchangedGradients
from fusion_rt.c10d.hooks.sets import check_job, process_set_of
from fusion_rt.torch.core.process_sets import takes_part
from fusion_rt.torch.sync.handed import HandedSlot, stand_in
from fusion_rt.torch.sync.parameters import Named
from fusion_rt.torch.sync.slots import slots_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

_Arrived = tuple[torch.Tensor, torch.Tensor]  # a parameter, and its gradient in DDP's bucket, 1-D


class DDPGradients(ExchangedGradients):
    """Gradients of one DDP module, exchanged by a codec: the state of the communication hook.

    Args:
        codec: a codec's text, such as "topk(density=0.01)", or a compressor of fusion_rt.torch.
        named_parameters: the model's, for names in checkpoints and messages; None: they are numbered.
        process_group: DDP's; None stands for the default group, which there may be later. If it is only a part of the
            ranks, all ranks of the job have to make their hooks at the same place.
        optimizer: steps with the gradients. If it is given, residuals are rescaled when its learning rates change.

    Raises:
        ValueError: the codec, or something that it is to be used with, cannot be used.
    """

    def __init__(
        self,
        codec: Any = "dense",
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        process_group: dist.ProcessGroup | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        super().__init__(codec, None if process_group is None else process_set_of(process_group), optimizer)
        self._group = process_group
        self._names = None if named_parameters is None else {id(p): name for name, p in named_parameters}
        self._arrived: list[_Arrived] = []  # of the first step, until all of it is there
        self._results: list[tuple[_Result, torch.Tensor]] = []  # of this step, with DDP's buffers
        self._slots: dict[int, HandedSlot] = {}  # by id of the parameter
        self._parameters: list[torch.Tensor] = []  # kept alive, so that nothing else has their ids

    def take(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Starts to exchange one of DDP's buckets. Returns a future of its buffer, which has the mean of all ranks'
        gradients then.

        Raises:
            ValueError: the gradients are of another module, or will be differentiated.
            RuntimeError: the backward pass before has failed.
            HorovodInternalError: the job has failed.
        """
        buffer = bucket.buffer()
        future = _Result(bucket.index(), buffer.device)
        if not takes_part(self.process_set):
            future.set_result(buffer)
            return future
        self._check(bucket)
        rows: torch.futures.Future[torch.Tensor] | None = None
        if buffer.layout is not torch.strided:  # as DDP has it without a hook: nothing is left to select from
            rows = allreduce_hook(self._group, bucket)  # type: ignore[arg-type]  # None is the default group
        else:
            self._results.append((future, buffer))
            self._give(_elements(bucket, buffer))
        if bucket.is_last():
            if self.exchange is None:
                self._learn()
            # No node runs when DDP stands in for a rank that has joined, or in the first step of a static graph, where
            # it gives out all buckets after the graph has run: it waits for futures right after this.
            if torch._C._current_autograd_node() is None:
                self._end()
            else:
                torch.autograd.Variable._execution_engine.queue_callback(self._end)
        return future if rows is None else rows

    def _give(self, arrived: list[_Arrived]) -> None:
        if self.exchange is None:
            self._arrived += reversed(arrived)
        else:
            self.exchange.give([(self._slot_of(parameter), gradient) for parameter, gradient in arrived])

    def _check(self, bucket: GradBucket) -> None:
        if torch.is_grad_enabled() and torch._C._current_autograd_node() is not None:
            raise ValueError(
                "backward(create_graph=True) makes gradients that can be differentiated again, and those that DDP's "
                "hook exchanges by a codec cannot; use torch.autograd.grad outside of DDP for that"
            )
        if bucket.index() == 0 and self._results:
            raise RuntimeError(
                "a backward pass of this DDP module did not end, and its gradients are still being exchanged; the job "
                "has to be started anew from a checkpoint"
            )

    def _learn(self) -> None:
        """Learns from the first step which parameters there are, in the reverse of their order in the model: about that
        in which gradients arrive, and the same after a restart."""
        arrived, self._arrived = self._arrived, []
        named = []
        for number, (parameter, gradient) in zip(itertools.count(len(arrived) - 1, -1), arrived, strict=False):
            name = f"parameter.{number}" if self._names is None else self._names.get(id(parameter))
            if name is None:
                raise ValueError(
                    f"named_parameters lacks a parameter of shape {list(parameter.shape)} that DDP reduces; give "
                    "model.named_parameters() of the module that is in DDP"
                )
            _check_reduced_once(name, parameter)
            named.append(Named(name, stand_in(parameter, gradient.dtype)))
        self._parameters = [parameter for parameter, _ in arrived]
        exchange, slots = self._begin(named, self._parameters)
        self._slots = {id(parameter): slot for parameter, slot in zip(self._parameters, slots, strict=True)}
        exchange.give([(self._slots[id(parameter)], gradient) for parameter, gradient in arrived])
        exchange.sync.propose()

    def _slot_of(self, parameter: torch.Tensor) -> HandedSlot:
        slot = self._slots.get(id(parameter))
        if slot is None:
            raise ValueError(
                f"a parameter of shape {list(parameter.shape)} comes to a hook that was made for another DDP module; "
                "make a hook for each, and a new one when DDP is made anew"
            )
        return slot

    def _end(self) -> None:
        """Waits for the results of a step. Raises `HorovodInternalError` if an exchange failed, on all ranks."""
        assert self.exchange is not None
        results, self._results = self._results, []
        try:
            self.exchange.end()
        except Exception as error:
            for future, _ in results:
                future.set_exception(error)  # type: ignore[arg-type]  # as torch says itself
            raise
        for future, buffer in results:
            future.set_result(buffer)


class _Result(torch.futures.Future[torch.Tensor]):
    """A future of a bucket, which is complete when autograd has run the whole graph, and not before."""

    def __init__(self, index: int, device: torch.device) -> None:
        super().__init__(devices=None if device.type == "cpu" else [device])
        self._index = index

    def wait(self) -> torch.Tensor:
        """Returns the bucket's buffer. Raises `RuntimeError` where that would be waited for for ever."""
        if not self.done():
            raise RuntimeError(
                f"bucket {self._index} was waited for while the backward pass runs, which has to end first; a hook "
                "that does something with the result does that in future.then(...)"
            )
        return super().wait()


def exchange_gradients(state: DDPGradients, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Exchanges a bucket of DDP: the communication hook."""
    return state.take(bucket)


exchange_gradients.__annotations__ = {}  # DDP compares them with classes, and here they are texts


def ddp_hook(
    codec: Any = "dense",
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    process_group: dist.ProcessGroup | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> tuple[DDPGradients, Callable[[DDPGradients, GradBucket], torch.futures.Future[torch.Tensor]]]:
    """Makes a communication hook for DDP: `ddp.register_comm_hook(*ddp_hook("topk(density=0.01)"))`.

    Returns:
        The state, whose `state_dict` belongs into checkpoints, and the hook.

    Args and errors are those of `DDPGradients`.
    """
    return DDPGradients(codec, named_parameters, process_group, optimizer), exchange_gradients


def compress(ddp: DistributedDataParallel, codec: Any, optimizer: torch.optim.Optimizer | None = None) -> DDPGradients:
    """Has a DDP module exchange its gradients by a codec from now on: `compress(ddp, "topk(density=0.01)")`.

    Args:
        ddp: the module.
        codec, optimizer: see `DDPGradients`.

    Returns:
        The state, whose `state_dict` belongs into checkpoints.
    """
    check_job()
    state, hook = ddp_hook(codec, ddp.module.named_parameters(), ddp.process_group, optimizer)
    ddp.register_comm_hook(state, hook)
    return state


def _elements(bucket: GradBucket, buffer: torch.Tensor) -> list[_Arrived]:
    """Returns the bucket's parameters, each with its gradient as it lies there."""
    parameters = bucket.parameters()
    return list(zip(parameters, torch.split(buffer, [parameter.numel() for parameter in parameters]), strict=True))


def _check_reduced_once(name: str, parameter: torch.Tensor) -> None:
    """Raises `ValueError` if a distributed optimizer reduces the parameter's gradient, too."""
    for slot in slots_of(parameter):
        if slot.owner.sync.options.algorithm.sums_gradients:  # type: ignore[attr-defined]
            raise ValueError(
                f"the gradient of {name!r} would be reduced twice: by DDP's hook, and by hvd.DistributedOptimizer; "
                "with DDP use the optimizer as it is, or one with local_sgd or diloco"
            )
