"""Hosts that come and go: the script that prints them, run again and again beside everything else."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Callable, Sequence

from fusion_rt.errors import FusionError
from fusion_rt.runner.discovery import SHELL, describe, read, split
from fusion_rt.runner.hosts import Host
from fusion_rt.runner.pipes import Reader
from fusion_rt.runner.supervise import Child, Children

PERIOD_S = 1.0  # as often as Horovod does
_MOST_OUTPUT = 1024 * 1024  # bytes


class Discovery:
    """Runs a host discovery script.

    Args:
        script: its command line.
        slots: of hosts for which it prints none.
        timeout: seconds that it may take.
        children: starts it.
        found: is given the hosts, each time.
        warn: is told why they cannot be found, once until they are found again.

    Raises:
        SettingError: the command line cannot be used.
    """

    def __init__(
        self,
        script: str,
        slots: int,
        timeout: float,
        children: Children,
        found: Callable[[tuple[Host, ...]], None],
        warn: Callable[[str], None],
    ) -> None:
        self._script = script
        self._words = split(script)
        self._slots = slots
        self._timeout = timeout
        self._children = children
        self._found = found
        self._warn = warn

    async def run(self) -> None:
        """Runs it again and again, until it is cancelled."""
        is_warned = False
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                hosts = await self._ask()
            except FusionError as error:
                if not is_warned:
                    self._warn(f"hosts are not found any more, and those found last are kept: {error}")
                is_warned = True
            else:
                is_warned = False
                self._found(hosts)

    async def _ask(self) -> tuple[Host, ...]:
        try:
            child = await self._start(self._words)
        except OSError as error:
            raise FusionError(f"{describe(self._script)} cannot be run: {error.strerror}") from None
        try:
            both = asyncio.gather(_text(child.stdout), _text(child.stderr), asyncio.shield(child.exit))
            stdout, stderr, status = await asyncio.wait_for(both, self._timeout)
        except asyncio.TimeoutError:
            raise FusionError(
                f"{describe(self._script)} did not end within {self._timeout:g} s (--start-timeout)"
            ) from None
        finally:
            child.signal(signal.SIGKILL)
            child.close()
        return read(self._script, self._slots, status, stdout, stderr)

    async def _start(self, words: Sequence[str]) -> Child:
        try:
            return await self._children.start(words, os.environb, os.fsencode(os.getcwd()))
        except OSError as error:
            if error.errno != errno.ENOEXEC or words[0] == SHELL:
                raise
            return await self._start([SHELL, *words])  # a script without a first line that names its interpreter


async def _text(reader: Reader) -> str:
    """All that comes, up to a limit beyond which nobody prints hosts."""
    data = b""
    while len(data) < _MOST_OUTPUT and (piece := await reader.read()):
        data += piece
    return data.decode(errors="replace")
