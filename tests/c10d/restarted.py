"""A script that torchrun restarts.

Arguments: `dist` or `hvd`, a directory for what its attempts leave for each other, and which rank dies; behind them
`agent`, if the agent that has started that rank dies first, as both do with their host.

In the first attempt the other ranks add up tensors meanwhile. In the next one each rank prints what it found, as a line
of JSON.
"""

import json
import os
import select
import signal
import socket
import struct
import sys
from pathlib import Path

import torch

how, directory, dies = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
ranks = f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}"
first = not (directory / "died").exists()
if how == "dist":
    import torch.distributed as dist

    dist.init_process_group("fusion")
    rank, size, add = dist.get_rank(), dist.get_world_size(), dist.all_reduce
else:
    import fusion_rt.torch as hvd

    hvd.init()
    rank, size, add = hvd.rank(), hvd.size(), lambda tensor: hvd.allreduce_(tensor, op=hvd.Sum)

from fusion_rt.torch.core.runtime import runtime  # noqa: E402

credentials = runtime().client.channel.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
daemon = struct.unpack("3i", credentials)[0]
tensor = torch.ones(100_000)
add(tensor)
if first:
    (directory / f"rank-{rank}").write_text(f"{os.getpid()} {daemon}")
    tensor = torch.ones(100_000)
    add(tensor)  # all have written
    if rank == dies:
        (directory / "died").touch()
        for process in [os.getppid(), os.getpid()] if "agent" in sys.argv else [os.getpid()]:
            os.kill(process, signal.SIGKILL)
    while True:
        add(tensor)
before = [int((directory / name).read_text().split()[1]) for name in os.listdir(directory) if name.startswith("rank-")]
gone = []
for pid in set(before):
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        gone.append(True)
    else:
        gone.append(bool(select.select([handle], [], [], 60)[0]))
found = {"rank": rank, "ranks": ranks, "total": tensor[-1].item(), "other": daemon not in before, "gone": all(gone)}
if how == "dist":
    dist.destroy_process_group()
print(json.dumps(found), flush=True)
