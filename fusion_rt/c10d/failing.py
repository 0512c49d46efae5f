"""The error of operations of a process group, and waits for other ranks that end when the job has failed.

In an elastic job of `fusionrun` the job that fails is one membership of it, and another one follows, in which the
script makes its groups anew. Errors say so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import DistNetworkError

from fusion_rt.client import Client
from fusion_rt.client.channel import Channel
from fusion_rt.client.client import LEFT
from fusion_rt.core.errors import HorovodInternalError

_LOOK = 0.05  # seconds between two looks at whether the job has failed
_PATIENCE = 10.0  # seconds for the daemons to say that the rank which served the store is gone
_ANEW = (
    "process groups of torch.distributed have the ranks of one membership of an elastic job, and that of this one is "
    "over: make it anew in the function of hvd.elastic.run, or in a step of hvd.elastic.Manager "
    "(fusion_rt.c10d.renew_process_group(), or destroy_process_group() and init_process_group()), and DDP modules with "
    "it (docs/torch-distributed.md)"
)

Answer = TypeVar("Answer")


class CollectiveError(HorovodInternalError, dist.DistBackendError):
    """An operation of a process group has failed; the text says why, and on which rank."""


def explained(channel: Channel, why: str) -> str:
    """Returns why an operation has failed, and the remedy where the membership is over."""
    if channel.failure is None or not channel.is_elastic:
        return why
    return f"{'ranks have come or are to go' if why == LEFT else why}\n{_ANEW}"


def heed(client: Client, ask: Callable[[], Answer]) -> Answer:
    """Calls a function that asks torch's store, and waits there for other ranks, on a thread; returns its result, or
    gives it up when the job has failed.

    Raises:
        CollectiveError: it has, or the store is gone.
        What the function raises.
    """
    channel = client.channel
    answer: Future[Answer] = Future()

    def call() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=call, name="fusion-store", daemon=True).start()
    deadline = None
    while channel.failure is None:
        wait([answer], _LOOK)
        if answer.done():
            error = answer.exception()
            if not isinstance(error, DistNetworkError):
                return answer.result()
            if deadline is None:  # the process that served the store is gone, and another will say why
                deadline = time.monotonic() + _PATIENCE
            if time.monotonic() >= deadline:
                raise CollectiveError(f"the store in which the ranks meet is gone: {error}") from None
            time.sleep(_LOOK)
        channel.read_available()
    raise CollectiveError(explained(channel, channel.failure))
