"""The coroutines of an agent, which run beside each other; the launcher is told of the first that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from fusion_rt.core.errors import FusionError
from fusion_rt.runner.protocol.agent_messages import Refused
from fusion_rt.runner.protocol.pipes import LineWriter, Pump, settle


class Tasks:
    """All of them.

    Args:
        channel: the launcher's.
    """

    def __init__(self, channel: LineWriter) -> None:
        self._channel = channel
        self._running: set[asyncio.Task[None]] = set()
        self._pumps: list[Pump] = []

    def start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a coroutine beside the others."""
        task = asyncio.create_task(self._reporting(coroutine))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def pump(self, pump: Pump) -> None:
        """Passes on the output of a process."""
        self._pumps = [*(one for one in self._pumps if not one.done), pump]
        self.start(pump.run())

    async def refuse(self, *reasons: str) -> None:
        """Tells the launcher that the job cannot run here, or not any more."""
        await self._channel.send(Refused(reasons))

    async def settle(self) -> None:
        """Waits until all output of processes that have ended is passed on."""
        await settle(self._pumps, self._channel)

    def cancel(self) -> None:
        """Ends them all."""
        for task in self._running:
            task.cancel()

    async def _reporting(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Tells the launcher of the exception that ends the coroutine; the launcher then ends the job."""
        try:
            await coroutine
        except FusionError as error:
            await self.refuse(str(error))
        except Exception as error:
            await self.refuse(f"the agent failed: {type(error).__name__}: {error}")
            raise
