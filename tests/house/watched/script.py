"""Trains on two nodes, and puts the flag up for ten steps. By then nothing is done for the first time."""

import os
import time

import torch

import fusion_rt.torch as hvd

FIRST, END = 30, 40  # as in tests.house.steady_step

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(1000, 100)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01),
    model.named_parameters(),
    algorithm=os.environ["FUSION_TEST_ALGORITHM"],
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
with open(os.path.join(os.environ["FUSION_TEST_WATCHED"], "flag"), "r+b", buffering=0) as flag:
    for step in range(END + 5):
        if hvd.rank() == 0 and step in (FIRST, END):
            flag.seek(0)
            flag.write(b"1" if step == FIRST else b"2")
        optimizer.zero_grad()
        model(torch.randn(8, 1000)).square().mean().backward()
        optimizer.step()
        time.sleep(0.02)  # so that daemons come to rest between steps, as beside a backward pass
