"""A script as people wrote them for Horovod, with nothing of this project in it."""

import horovod.torch as hvd
import torch
import torch.nn.functional as F

hvd.init()
torch.manual_seed(42)
model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

generator = torch.Generator().manual_seed(hvd.rank())
for _ in range(6):
    data = torch.randn(8, 10, generator=generator)
    target = torch.randint(3, (8,), generator=generator)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data), target)
    loss.backward()
    optimizer.step()

average = hvd.allreduce(loss.detach(), name="average loss")
if hvd.rank() == 0:
    print(f"final loss {average.item().hex()} of {hvd.size()} ranks", flush=True)
