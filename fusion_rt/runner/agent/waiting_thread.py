"""A thread for what waits, such as for a name server, while the agent's event loop goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


async def in_thread(wait: Callable[[], _T]) -> _T:
    """Runs a function in a thread of its own; returns its result, or raises what it raises.

    Nobody waits for the thread when the agent ends: a name server may take minutes. (Those of `asyncio.to_thread` are
    joined at the end of the loop.) Where no thread can be started, the loop waits.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[_T] = loop.create_future()

    def set_result(found: _T | None, error: BaseException | None) -> None:
        if result.done():  # it was cancelled meanwhile
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(found)  # type: ignore[arg-type]

    def run() -> None:
        found, error = None, None
        try:
            found = wait()
        except Exception as failure:  # raised where the result is awaited
            error = failure
        if not loop.is_closed():
            loop.call_soon_threadsafe(set_result, found, error)

    try:
        threading.Thread(target=run, name="waiting", daemon=True).start()
    except RuntimeError:  # the limit of processes
        return wait()
    return await result
