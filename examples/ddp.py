"""A script for `DistributedDataParallel`: one word lets fusion_rt move its gradients, and one line compresses them.

    torchrun --nproc-per-node 2 examples/ddp.py --backend gloo
    torchrun --nproc-per-node 2 examples/ddp.py
    fusionrun -np 2 -H host1:1,host2:1 python examples/ddp.py --codec "topk(density=0.01)"

The lines that differ from a script for gloo are marked with an arrow. Clipping, checkpoints and evaluation are those of
any script for DDP.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fusion_rt.c10d import compress  # -> only for --codec

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--backend", default="fusion", choices=("fusion", "gloo"), help="(default: %(default)s)")
parser.add_argument("--codec", default="", help="codec of the gradients between hosts (default: none)")
parser.add_argument("--epochs", type=int, default=5, help="(default: %(default)s)")
parser.add_argument("--batch-size", type=int, default=32, help="images of a step on each rank (default: %(default)s)")
parser.add_argument("--checkpoint", default="", help="file for the parameters after each epoch (default: none)")


def main() -> None:
    options = parser.parse_args()
    dist.init_process_group(options.backend)  # -> "fusion", where it was "gloo"
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    train, test = TensorDataset(images[:1500], labels[:1500]), (images[1500:], labels[1500:])
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(train, size, rank)
    loader = DataLoader(train, options.batch_size, sampler=sampler)

    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3 * size)
    if options.codec:
        compress(ddp, options.codec, optimizer)  # -> gradients between hosts go by this codec

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(ddp(inputs), targets).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
        if rank == 0:
            with torch.no_grad():
                accuracy = (model(test[0]).argmax(1) == test[1]).float().mean().item()
            print(f"epoch {epoch + 1}: {accuracy:.2%} of the test images are read", flush=True)
            if options.checkpoint:
                torch.save(model.state_dict(), options.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
