"""Trains in `hvd.elastic.run` until there is a file `stop` in its directory; commits every step."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

import fusion_rt.torch as hvd

STOP, HOLD = Path(sys.argv[1]) / "stop", Path(sys.argv[1]) / "hold"

while os.environ.get("FUSION_ELASTIC_PROVISIONAL") and HOLD.exists():  # new workers come after what a test waits for
    time.sleep(0.01)

hvd.init()
torch.manual_seed(hvd.rank())  # what is equal later has been brought to all
model = torch.nn.Linear(8, 4)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
state = hvd.elastic.TorchState(model, optimizer, step=0)


def tell(state: hvd.elastic.TorchState) -> str:
    """Prints this worker's place in the epoch; returns the epoch."""
    epoch, where = os.environ["FUSION_ELASTIC_EPOCH"], f"rank {hvd.rank()} of {hvd.size()}"
    print(f"epoch {epoch} {where} step {state.step} pid {os.getpid()}", flush=True)
    return epoch


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    epoch = tell(state)
    while not float(hvd.allreduce(torch.tensor(float(STOP.exists())), name="stop")):
        optimizer.zero_grad()
        model(torch.ones(2, 8) * (hvd.rank() + 1)).square().mean().backward()
        optimizer.step()
        if os.environ["FUSION_ELASTIC_EPOCH"] != epoch:  # it has gone on in place after a loss
            epoch = tell(state)
        state.step += 1
        state.commit()
        time.sleep(0.01)
    weights = hvd.allgather_object(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert "FUSION_ALGORITHM" in os.environ or all(torch.equal(weights[0], other) for other in weights)
    print(f"done at step {state.step}", flush=True)


train(state)
