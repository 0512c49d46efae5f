"""A worker of an elastic job without torch: counts steps with the others until there is a file `stop` in its directory.

Its state is the number of steps, which rank 0 brings to all at the beginning of each epoch. What it prints then says
where it is, and what the state was.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

from fusion_rt.client import Client
from fusion_rt.core.errors import FusionError
from fusion_rt.local.elastic import AgentConnection, Removed
from fusion_rt.wire import Signature

PACE_S = 0.01


def add(client: Client, name: str, *numbers: int) -> np.ndarray:
    """The sum of all ranks' numbers."""
    signature = Signature("allreduce", "int64", (len(numbers),))
    answer = client.wait(client.submit(name, signature, inline=np.array(numbers, np.int64).tobytes()))
    assert answer.inline is not None
    return np.frombuffer(answer.inline, np.int64)


def of_rank_0(client: Client, number: int) -> int:
    """Rank 0's number."""
    return int(add(client, "state", number if client.rank == 0 else 0)[0])


def train(client: Client, agent: AgentConnection, step: list[int], stop: Path) -> bool:
    """Steps until the hosts change (False) or it is time to stop (True); says after the first where it began."""
    begun, said = step[0], False
    while True:
        count, changes, stops = add(client, "step", 1, len(agent.changes()), stop.exists())
        assert count == client.topology.size
        step[0] += 1
        if not said:  # a test that has read it may break this epoch, and step counts of epochs then differ
            where = f"rank {client.rank} of {client.topology.size}"
            print(f"epoch {agent.epoch} {where} step {begun} pid {os.getpid()}", flush=True)
            said = True
        if stops:
            return True
        if changes:
            return False
        time.sleep(PACE_S)


def main() -> None:
    directory = Path(sys.argv[1])
    agent = AgentConnection(os.environ)
    step = [0]
    while agent.expected is not None and (directory / "hold").exists():  # new workers come after what a test waits for
        time.sleep(PACE_S)
    while agent.expected is not None:  # the others are in an epoch
        answer = agent.rejoin()
        assert not isinstance(answer, Removed)
        os.environ.update(answer.environment)
    while True:
        error, client = "", None
        try:
            where = os.environ["FUSION_SOCKET"], os.environ["FUSION_JOB_ID"], int(os.environ["HOROVOD_RANK"])
            client = Client(*where, 60, formation=agent.epoch)
            step[0] = of_rank_0(client, step[0])
            if train(client, agent, step, directory / "stop"):
                client.close()
                print(f"done at step {step[0]}", flush=True)
                return
        except FusionError as failure:
            error = str(failure)
        if client is not None:
            client.close()
        answer = agent.rejoin(error)
        if isinstance(answer, Removed):
            print(f"removed: {answer.reason}", flush=True)
            return
        os.environ.update(answer.environment)


main()
