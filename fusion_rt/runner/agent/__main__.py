"""The agent's program: `python -m fusion_rt.runner.agent`, run on each host, locally or through ssh."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from fusion_rt.host.bootstrap import decode_line
from fusion_rt.runner.agent.agent import DRAIN_S, LOST_GRACE, Agent
from fusion_rt.runner.agent.preflight import check_versions
from fusion_rt.runner.protocol.agent_messages import Job, Refused, Versions
from fusion_rt.runner.protocol.child_processes import Children, adopt_orphans
from fusion_rt.runner.protocol.pipes import LineWriter, Reader
from fusion_rt.runner.protocol.relay import BeRelay, serve

_FIRST: Any = Job | BeRelay  # message to this process


async def _serve(fd: int) -> None:
    commands = await Reader.open(os.fdopen(0, "rb", buffering=0))
    channel = await LineWriter.open(os.fdopen(fd, "wb", buffering=0))
    line = await commands.line()
    if line:
        if problems := check_versions(decode_line(line, Versions)):
            await channel.send(Refused(tuple(problems)))
        else:
            await _work(decode_line(line, _FIRST), commands, channel)
    await channel.close(DRAIN_S)


async def _work(job: Job | BeRelay, commands: Reader, channel: LineWriter) -> None:
    """Serves as an agent, or starts those of other hosts."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    if isinstance(job, BeRelay):
        stopping = asyncio.Event()
        for number in signals:
            loop.add_signal_handler(number, stopping.set)
        await serve(commands, channel, Children(), stopping)
        return
    agent = Agent(job, channel)
    for number in signals:
        loop.add_signal_handler(number, agent.stop, LOST_GRACE)
    await agent.run(commands)


def main() -> None:
    """Serves one job. Output of anything here goes to standard error: standard output is for messages."""
    adopt_orphans()
    fd = os.dup(1)
    os.dup2(2, 1)
    asyncio.run(_serve(fd))


if __name__ == "__main__":
    main()
