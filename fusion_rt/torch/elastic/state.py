"""The state of a training function: saved by `commit`, brought back by `restore`, the same on all ranks after `sync`.

A `TorchState` treats each value by its kind (`_handler_of`): models and optimizers are broadcast by their tensors,
anything else that has a `state_dict` (samplers, LR schedulers, gradient scalers) by that, and the rest as it is. State
of distributed optimizers that is not in their `state_dict` on all ranks is handled in `distributed.py`.
"""

from __future__ import annotations

import copy
import enum
import queue
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fusion_rt.client import Operation
from fusion_rt.core.errors import HostsUpdatedInterrupt
from fusion_rt.local import elastic
from fusion_rt.torch.core.runtime import rank
from fusion_rt.torch.elastic.commits import Commits, Saver, agreed
from fusion_rt.torch.elastic.distributed import DistributedHandler
from fusion_rt.torch.elastic.donors import Donors, digest, pass_on
from fusion_rt.torch.elastic.sampler import ElasticSampler, Standing
from fusion_rt.torch.ops.broadcast import barrier
from fusion_rt.torch.ops.objects import allgather_object, broadcast_object
from fusion_rt.torch.sync.broadcasting import (
    Item,
    OptimizerState,
    Tensors,
    broadcast_items,
    load_exactly,
    named_tensors,
)
from fusion_rt.torch.sync.exchanges import exchanges
from fusion_rt.torch.sync.parameters import shard_of
from fusion_rt.torch.sync.wrapped import Wrapped


class HostUpdateResult(enum.IntFlag):
    """The changes of a job's hosts since the last check."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added

    @classmethod
    def of(cls, added: bool, removed: bool) -> HostUpdateResult:
        """Combines the two kinds of changes."""
        return (cls.added if added else cls.no_update) | (cls.removed if removed else cls.no_update)


class State:
    """State that is the same on all ranks; derive from it, or use `ObjectState` or `TorchState`.

    Args:
        bcast_object: broadcasts rank 0's object, or that of the rank in its second argument, as `hvd.broadcast_object`
            does.
        get_rank: accepted for Horovod's sake, and ignored.

    Its own values are in names that begin with `_`: all others are the script's, for values.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._commit_count = 0  # how often `commit` was called
        self._bcast_object = bcast_object
        self._host_messages: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._last_updated_timestamp = 0.0
        self._somebody_leaves = False  # as of the last news of hosts
        self._donors = Donors()  # of the values in a sync
        self._given: Sequence[Operation] = ()  # values under way from this rank since then
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Registers functions to call after each reset, in their order: to scale the learning rate, for example."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Resets the state; `elastic.run` calls it when it has been interrupted, before it syncs."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def _on_survived(self) -> None:
        """Notes that the membership has changed while this rank has stayed in its function."""
        self._host_messages = queue.SimpleQueue()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Notes that the hosts have changed; any thread may call it. Changes that the launcher knows need no call.

        Args:
            timestamp: of the change, in seconds; ignored if it is not later than the last one.
            update_res: a `HostUpdateResult`.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Saves the state, and checks whether the hosts have changed. Copies everything: too slow for each short step.

        Raises:
            HostsUpdatedInterrupt: they have, on all ranks.
            HorovodInternalError: a rank is gone.
        """
        self._begin_commit()
        self.save()
        self._commit_count += 1
        self._mirror()
        self._end_commit()
        self.check_host_updates()
        exchanges.restart()

    def check_host_updates(self) -> None:
        """Checks whether rank 0 has heard that the hosts have changed. An operation on all ranks.

        Raises:
            HostsUpdatedInterrupt: it has; on all ranks.
            HorovodInternalError: a rank is gone.
            FusionError: the launcher is gone.
        """
        agent = elastic.agent()
        for change in agent.changes() if agent is not None else ():
            self.on_hosts_updated(change.timestamp, HostUpdateResult.of(change.added, change.removed))
        before = latest = self._last_updated_timestamp
        result = int(HostUpdateResult.no_update)
        while not self._host_messages.empty():
            timestamp, update = self._host_messages.get()
            if timestamp > latest:
                latest = timestamp
                result |= update
        # All ranks have to raise, or none.
        before, self._last_updated_timestamp, result = self._bcast_object((before, latest, result))
        if self._last_updated_timestamp > before:
            self._somebody_leaves = bool(result & HostUpdateResult.removed)
            raise HostsUpdatedInterrupt(result == HostUpdateResult.removed)

    def save(self) -> None:
        """Saves the present values in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restores the values that were saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Gives all ranks rank 0's values, and saves them. An operation on all ranks."""
        raise NotImplementedError

    def reset(self) -> None:
        """Prepares values for other ranks, after a reset and before they are synced; does nothing by default."""

    def _hand_over(self) -> None:
        """Hands state over before all ranks leave a membership epoch in good order. An operation on all ranks.

        Raises:
            HorovodInternalError: a rank is gone.
        """

    def _begin_commit(self) -> None:
        """Keeps the state saved before, until all ranks have saved anew."""

    def _mirror(self) -> None:
        """Has other nodes keep the saved state that only this one has. An operation on all ranks.

        Raises:
            HorovodInternalError: a rank is gone.
        """

    def _end_commit(self) -> None:
        """Drops the state saved before, when all ranks have saved anew. An operation on all ranks.

        Raises:
            HorovodInternalError: a rank is gone.
        """

    def _level(self) -> str:
        """Returns a text that is the same on ranks that have left an epoch in good order with the same values; empty if
        nobody can tell."""
        return ""

    def _why_unfit(self) -> str:
        """Returns why as many ranks as there are cannot train this; empty if they can. The same on all ranks."""
        return ""

    def _standing(self) -> list[Standing]:
        """Returns how far this rank has come with the samples of each of its samplers, for `_follow`."""
        return []

    def _follow(self, standings: Sequence[Sequence[Standing]]) -> bool:
        """Has the samplers deal the rest of their epochs to the ranks that are left, which stay in their loops.

        Args:
            standings: the results of `_standing` on each rank, by their new ranks.

        Returns:
            Whether they could; the same on all ranks. If not, the ranks have to go on from the last commit.
        """
        return True

    def _samplers(self) -> list[ElasticSampler]:
        """Returns the samplers that are among the values."""
        return []

    def _resume(self) -> None:
        """Begins a membership epoch without `sync`, where every rank has the values already. An operation on all ranks.

        Raises:
            HorovodInternalError: a rank is gone.
        """


class ObjectState(State):
    """Python objects, each an attribute of the state::

        state = ObjectState(hvd.broadcast_object, hvd.rank, epoch=0, best=None)

    Objects are saved by reference, as in Horovod: assign new ones instead of changing them in place, or `restore` will
    not undo it.

    Args:
        bcast_object, get_rank: as in `State`.
        kwargs: names and first values; anything that can be pickled.

    Raises:
        ValueError: a name is that of a method, or of something that the state keeps for itself.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state: dict[str, Any] = {}
        self._check_names(kwargs)
        self._saved_state = kwargs
        self._set_attrs()

    def save(self) -> None:
        self._saved_state = self._values()

    def restore(self) -> None:
        self._set_attrs()

    def sync(self) -> None:
        if self._saved_state:
            self._set_saved(self._bcast_object(self._values(), *([self._donors.root] if self._donors.root else [])))

    def _check_names(self, names: Iterable[str]) -> None:
        own = {name for name in vars(self) if name.startswith("_")}
        for name in names:
            if name in own or hasattr(ObjectState, name):
                kind = type(self).__name__
                raise ValueError(f"a {kind} cannot have a value named {name!r}, which would hide {kind}.{name}; "
                                 "give it another name")  # fmt: skip

    def _set_saved(self, values: dict[str, Any]) -> None:
        self._saved_state = values
        self._set_attrs()

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}

    def _set_attrs(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)


class TorchState(ObjectState):
    """State of a training process: models, optimizers, samplers, and anything else, each an attribute::

        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0)

    Args:
        model, optimizer: the model and its optimizer; more of both may be among `kwargs`.
        kwargs: names and values. Those with a `state_dict` are saved by it, as copies; others as in `ObjectState`.

    Raises:
        ValueError: as of `ObjectState`; or a model cannot be in a state.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        kwargs = {"model": model, "optimizer": optimizer, **kwargs}
        handlers = {name: handler for name, value in kwargs.items() if (handler := _handler_of(value))}
        self._handlers: dict[str, _Handler | DistributedHandler] = {}
        self._commits, self._plain = Commits(), _PlainValues(self)
        plain = {name: value for name, value in kwargs.items() if name not in handlers}
        super().__init__(broadcast_object, rank, **plain)
        self._check_names(handlers)
        for name, handler in handlers.items():
            setattr(self, name, handler.value)
        self._handlers = handlers

    def save(self) -> None:
        for distributed in self._distributed():  # first, since operations under way change the parameters
            distributed.save()
        for handler in self._handlers.values():
            if not isinstance(handler, DistributedHandler):
                handler.save()
        super().save()

    def restore(self) -> None:
        if self._commits.is_open:  # and no rank has all of it
            self._take_back()
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        self._agree_about_commit()
        for distributed in self._distributed():
            distributed.prepare()
        handlers = [*self._handlers.items()]
        handlers.sort(key=lambda named: not isinstance(named[1], DistributedHandler))
        items = [item for name, handler in handlers for item in handler.items(name)]
        items.append(Item(self._values, self._set_saved))
        if self._donors.by_taker is None:
            broadcast_items(items, self._donors.root)
        else:
            self._given = pass_on(items, self._donors.by_taker)
        for distributed in self._distributed():
            distributed.deal()
        self.save()

    def reset(self) -> None:
        for sampler in self._samplers():
            sampler.reset()  # a sync that would do it may be skipped

    def _begin_commit(self) -> None:
        if self._carries:
            self._commits.begin()
            for saver in self._savers():
                saver.set_aside()
            for distributed in self._distributed():
                distributed.drain()
            barrier()  # all posts to homes are in them, on all nodes, before any of them is saved

    def _mirror(self) -> None:
        for distributed in self._distributed():
            distributed.mirror()

    def _end_commit(self) -> None:
        if self._commits.is_open:
            self._commits.complete()
            barrier()
            self._settle(self._commits.last)

    @property
    def _carries(self) -> bool:
        """Tells whether nodes have memory that others lack; the same on all ranks."""
        return any(distributed.carries for distributed in self._distributed())

    def _agree_about_commit(self) -> None:
        """Has all ranks go on from the same commit. An operation on all ranks."""
        if not self._carries:
            return
        number = agreed(allgather_object(self._commits.held, "elastic.commits"), self._donors.root)
        if number not in self._commits.held:
            for distributed in self._distributed():
                distributed.forget()
        elif number != self._commits.last:
            self._take_back()
            self.restore()
        self._settle(number)

    def _take_back(self) -> None:
        self._commits.is_open = False
        for saver in self._savers():
            saver.take_back()

    def _settle(self, number: int) -> None:
        self._commits.settle(number)
        for saver in self._savers():
            saver.drop_aside()

    def _savers(self) -> list[Saver]:
        return [self._plain, *self._handlers.values()]

    def _hand_over(self) -> None:
        for distributed in self._distributed():
            distributed.hand_over(self._somebody_leaves)

    def _resume(self) -> None:
        for distributed in self._distributed():
            distributed.deal()
        self.save()

    def _level(self) -> str:
        kinds = (DistributedHandler, _OptimizerHandler)
        optimizers = [handler for handler in self._handlers.values() if isinstance(handler, kinds)]
        # A script's own way of training may give each rank other values.
        if not optimizers or not all(isinstance(one, DistributedHandler) and one.is_alike for one in optimizers):
            return ""
        objects = [handler.value.state_dict() for handler in self._handlers.values() if type(handler) is _Handler]
        return digest([objects, self._values()])

    def _why_unfit(self) -> str:
        return next(filter(None, (distributed.why_unfit() for distributed in self._distributed())), "")

    def _standing(self) -> list[Standing]:
        return [sampler.standing() for sampler in self._samplers()]

    def _follow(self, standings: Sequence[Sequence[Standing]]) -> bool:
        return all(
            [sampler.follow(each) for sampler, each in zip(self._samplers(), zip(*standings, strict=True), strict=True)]
        )

    def _samplers(self) -> list[ElasticSampler]:
        return [handler.value for handler in self._handlers.values() if isinstance(handler.value, ElasticSampler)]

    def _distributed(self) -> list[DistributedHandler]:
        return [handler for handler in self._handlers.values() if isinstance(handler, DistributedHandler)]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_handlers", ()):
            self._handlers[name].value = value
            self._handlers[name].save()
        super().__setattr__(name, value)


class _PlainValues(Saver):
    """Plain values, which an `ObjectState` saves by itself."""

    _saves = ("saved",)

    def __init__(self, state: ObjectState) -> None:
        self._state = state

    @property
    def saved(self) -> dict[str, Any]:
        return self._state._saved_state

    @saved.setter
    def saved(self, values: dict[str, Any]) -> None:
        self._state._saved_state = values


class _Handler(Saver):
    """Saves and restores an object that has a `state_dict`, and names the parts that all ranks are to have from one."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # A copy, because an optimizer goes on working on the very tensors that it is given.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def items(self, name: str) -> list[Item]:
        """Returns what all ranks are to have from one of them. `name`: of tensors."""
        return [Item(self.value.state_dict, self.value.load_state_dict)]


class _ModelHandler(_Handler):
    def items(self, name: str) -> list[Item]:
        return [Tensors([(f"{name}.{key}", tensor) for key, tensor in named_tensors(self.value.state_dict())])]


class _OptimizerHandler(_Handler):
    def restore(self) -> None:
        load_exactly(self.value, copy.deepcopy(self._saved))

    def items(self, name: str) -> list[Item]:
        return [OptimizerState(self.value, name)]


def _check_module(module: torch.nn.Module) -> None:
    """Raises `ValueError` if a module is not the same on all ranks, or belongs to a process group."""
    if elastic.agent() is not None and isinstance(module, torch.nn.parallel.DistributedDataParallel):
        raise ValueError(
            "a DDP module belongs to a process group, and so to one membership of an elastic job: give the state the "
            "module that is in it, and make DDP anew in the training function (docs/torch-distributed.md)"
        )
    for name, parameter in module.named_parameters():
        if shard_of(parameter) is not parameter:
            raise ValueError(
                f"the parameter {name!r} is a DTensor, of which each rank has a part, as after fully_shard; "
                "a state has to be the same on all ranks, since a lost rank takes its part with it: shard models in a "
                "job that is not elastic, and write checkpoints"
            )


def _handler_of(value: Any) -> _Handler | DistributedHandler | None:
    """Returns the handler that saves and syncs a value; None for one that is treated as a plain object."""
    if isinstance(value, Wrapped):
        return DistributedHandler(value)
    if isinstance(value, torch.nn.Module):
        _check_module(value)
        return _ModelHandler(value)
    if isinstance(value, torch.optim.Optimizer):
        return _OptimizerHandler(value)
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return _Handler(value)
    return None
