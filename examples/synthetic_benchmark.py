"""Horovod's synthetic benchmark: images a second in the training of a residual net, on each rank and on all.

    fusionrun -np 2 python examples/synthetic_benchmark.py
    fusionrun -np 2 python examples/synthetic_benchmark.py --width 64 --blocks 2 --image-size 64 --fp16-allreduce

Only the import that is marked differs from a script for Horovod.
"""

from __future__ import annotations

import argparse
import timeit

import numpy as np
import torch
import torch.nn.functional as F
from resnet import ResNet
from torch import nn

import fusion_rt.torch as hvd  # <- import horovod.torch as hvd

parser = argparse.ArgumentParser(
    description="Synthetic benchmark", formatter_class=argparse.ArgumentDefaultsHelpFormatter
)
parser.add_argument("--fp16-allreduce", action="store_true", help="halve gradients on their way between hosts")
parser.add_argument("--width", type=int, default=16, help="channels of the net's first stage")
parser.add_argument("--blocks", type=int, default=1, help="residual blocks in each of the net's three stages")
parser.add_argument("--image-size", type=int, default=32, help="height and width of the images")
parser.add_argument("--sync-batch-norm", action="store_true", help="normalise over the batches of all ranks")
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--num-warmup-batches", type=int, default=5, help="batches that do not count")
parser.add_argument("--num-batches-per-iter", type=int, default=5, help="batches of an iteration")
parser.add_argument("--num-iters", type=int, default=5, help="iterations that are measured")
parser.add_argument("--no-cuda", action="store_true", help="train on the CPU even where there is a GPU")
parser.add_argument("--use-adasum", action="store_true", help="combine gradients by Adasum instead of averaging them")


def log(line: str) -> None:
    if hvd.rank() == 0:
        print(line, flush=True)


def main() -> None:
    args = parser.parse_args()
    cuda = not args.no_cuda and torch.cuda.is_available()
    hvd.init()
    if cuda:
        # Horovod: pin GPU to local rank.
        torch.cuda.set_device(hvd.local_rank())
    else:
        # Horovod: limit # of CPU threads to be used per worker.
        torch.set_num_threads(1)
    device = torch.device("cuda" if cuda else "cpu")

    norm_layer = hvd.SyncBatchNorm if args.sync_batch_norm else nn.BatchNorm2d
    model = ResNet(args.width, args.blocks, channels=3, norm_layer=norm_layer).to(device)
    # Horovod: scale learning rate by the number of ranks; Adasum does not need it.
    scale = hvd.size()
    if args.use_adasum:
        scale = hvd.local_size() if cuda and hvd.nccl_built() else 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * scale)
    # Horovod: wrap optimizer with DistributedOptimizer.
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )
    # Horovod: broadcast parameters & optimizer state.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    # Set up fixed fake data.
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
    labels = torch.randint(10, (args.batch_size,), device=device)

    def benchmark_step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    kind = "GPU" if cuda else "CPU"
    log(f"Model: ResNet of width {args.width}, {sum(p.numel() for p in model.parameters()):,} parameters")
    log(f"Batch size: {args.batch_size}")
    log(f"Number of {kind}s: {hvd.size()}")
    log("Running warmup...")
    timeit.timeit(benchmark_step, number=args.num_warmup_batches)
    log("Running benchmark...")
    rates = []
    for iteration in range(args.num_iters):
        seconds = timeit.timeit(benchmark_step, number=args.num_batches_per_iter)
        rates.append(args.batch_size * args.num_batches_per_iter / seconds)
        log(f"Iter #{iteration}: {rates[-1]:.1f} img/sec per {kind}")

    mean, deviation = float(np.mean(rates)), 1.96 * float(np.std(rates))
    log(f"Img/sec per {kind}: {mean:.1f} +-{deviation:.1f}")
    log(f"Total img/sec on {hvd.size()} {kind}(s): {hvd.size() * mean:.1f} +-{hvd.size() * deviation:.1f}")


if __name__ == "__main__":
    main()
