"""A script as people write it for `torch.distributed`, without a word of this project but the backend's name.

It prints what its rank found, as a line of JSON. Arguments are words for what it does besides.
"""

import json
import os
import sys

import torch
import torch.distributed as dist

words = sys.argv[1:]
found: dict[str, object] = {}


def total() -> float:
    """The sum of all ranks and their number."""
    tensor = torch.ones(5000) * (dist.get_rank() + 1)
    dist.all_reduce(tensor)
    return tensor[-1].item()


if "hvd-first" in words:
    import fusion_rt.torch as hvd

    hvd.init()
by_hand = next((word for word in words if word.startswith("file://")), None)
if by_hand is None:
    dist.init_process_group(next((word[8:] for word in words if word.startswith("backend=")), "fusion"))
else:
    dist.init_process_group(
        "fusion", init_method=by_hand, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )
found["rank"], found["total"] = dist.get_rank(), total()
if "listens" in words:
    import psutil

    mine = psutil.Process().net_connections(kind="inet")
    found["master"] = os.environ["MASTER_ADDR"]
    found["listens"] = sorted({each.laddr.ip for each in mine if each.status == psutil.CONN_LISTEN})
if "loader" in words:
    loader = torch.utils.data.DataLoader(torch.arange(8), batch_size=4, num_workers=2)
    found["loaded"] = sum(int(batch.sum()) for batch in loader)
if "again" in words:
    dist.destroy_process_group()
    dist.init_process_group("fusion")
    found["again"] = total()
if "hvd" in words or "hvd-first" in words:
    import fusion_rt.torch as hvd

    hvd.init()
    found["hvd"] = hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), hvd.size(), hvd.cross_size(), total()
if "fails" in words and dist.get_rank() == 1:
    raise ValueError("the script of rank 1 fails")
if "fails" in words:
    total()
if "leaves" not in words:
    dist.destroy_process_group()
print(json.dumps(found), flush=True)
