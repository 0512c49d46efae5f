"""Finds the hosts of a job with a script: once at the start, and in an elastic job every second from then on."""

from __future__ import annotations

import asyncio
import errno
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence

from fusion_rt.core.errors import FusionError, SettingError
from fusion_rt.runner.decisions.host_list import Host, parse_hosts
from fusion_rt.runner.protocol.child_processes import Child, Children
from fusion_rt.runner.protocol.pipes import Reader

PERIOD_S = 1.0  # as often as Horovod does
_SHELL = "/bin/sh"
_LINES = 10  # of a failing script's standard error that are shown
_KILL_S = 1.0  # seconds in which the kernel has to carry out SIGKILL
_MOST_OUTPUT = 1024 * 1024  # bytes


class Discovery:
    """Runs a host discovery script, which prints `host[:slots]` on a line for each host.

    Args:
        script: its command line.
        slots: of hosts for which it prints none.
        timeout: seconds that it may take.

    Raises:
        SettingError: the command line cannot be used.
    """

    def __init__(self, script: str, slots: int, timeout: float) -> None:
        self._name = f"the host discovery script {script!r}"
        try:
            self._words = shlex.split(script)
        except ValueError as error:
            raise SettingError(f"--host-discovery-script {script!r} is not a command line: {error}") from None
        if not self._words:
            raise SettingError("--host-discovery-script is empty")
        self._slots = slots
        self._timeout = timeout

    async def follow(
        self, children: Children, found: Callable[[tuple[Host, ...]], None], warn: Callable[[str], None]
    ) -> None:
        """Runs the script again and again, until it is cancelled.

        Args:
            children: starts it.
            found: is given the hosts, each time.
            warn: is told why they cannot be found, once until they are found again.
        """
        is_warned = False
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                hosts, _ = await self.ask(children)
            except FusionError as error:
                if not is_warned:
                    warn(f"hosts cannot be found any more, and the last ones are kept: {error}")
                is_warned = True
            else:
                is_warned = False
                found(hosts)

    async def ask(self, children: Children) -> tuple[tuple[Host, ...], str]:
        """Runs the script once.

        Returns:
            The hosts, which may be none, and the script's standard error.

        Raises:
            FusionError: it cannot be run, fails, takes too long, or prints something else.
        """
        try:
            child = await _start(children, self._words)
        except OSError as error:
            raise FusionError(f"{self._name} cannot be run: {_why(self._words[0], error)}") from None
        try:
            stdout, stderr, status = await asyncio.wait_for(_outcome(child), self._timeout)
        except asyncio.TimeoutError:
            raise FusionError(f"{self._name} did not end within {self._timeout:g} s (--start-timeout)") from None
        finally:
            child.signal(signal.SIGKILL)
            child.close()
            await asyncio.wait([child.exit], timeout=_KILL_S)
        if status != 0:
            last = [line for line in stderr.splitlines() if line.strip()][-_LINES:]
            said = "; it said:\n" + "\n".join(f"  {line}" for line in last) if last else " and said nothing"
            raise FusionError(f"{self._name} failed with status {status}{said}")
        lines = [line.strip() for line in stdout.splitlines() if line.strip()]
        try:
            return parse_hosts(",".join(lines), self._slots) if lines else (), stderr
        except SettingError as error:
            raise FusionError(f"{self._name} printed a line that is no host: {error}") from None

    async def first(self) -> tuple[Host, ...]:
        """The hosts at the start of a job; passes on the script's standard error.

        Raises:
            FusionError: as `ask`, or there is no host.
        """
        hosts, stderr = await self.ask(Children())
        sys.stderr.write(stderr)
        if not hosts:
            raise FusionError(f"{self._name} printed no host")
        return hosts


async def _start(children: Children, words: Sequence[str]) -> Child:
    try:
        return await children.start(words, os.environb, os.fsencode(os.getcwd()))
    except OSError as error:
        if error.errno != errno.ENOEXEC or words[0] == _SHELL:
            raise
        return await _start(children, [_SHELL, *words])  # a script without a first line that names its interpreter


def _why(name: str, error: OSError) -> str:
    """Says why a script cannot be run; the kernel's word for a missing interpreter is that of a missing script."""
    if error.errno == errno.ENOENT and os.path.exists(name):
        return "the interpreter that its first line names is not there" if os.sep in name else f"write ./{name}"
    return error.strerror or str(error)


async def _outcome(child: Child) -> tuple[str, str, int]:
    """Returns a script's output, and its exit status."""
    # In tasks of its own, that end with this: its canceller hears of no exception that was not retrieved.
    stdout, stderr, status = await asyncio.gather(_text(child.stdout), _text(child.stderr), asyncio.shield(child.exit))
    return stdout, stderr, status


async def _text(reader: Reader) -> str:
    """All that comes, up to a limit that no list of hosts reaches."""
    data = b""
    while len(data) < _MOST_OUTPUT and (piece := await reader.read()):
        data += piece
    return data.decode(errors="replace")
