"""The digits of `digits.py`, learnt with Hugging Face Accelerate, on CPUs.

    torchrun --nproc-per-node 2 examples/digits_accelerate.py
    fusionrun -np 2 python examples/digits_accelerate.py

The lines that only fusion_rt needs are marked with an arrow. It needs `pip install '.[hf,examples]'`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import digits
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader

from fusion_rt.integrations import torchrun


def train(options: argparse.Namespace) -> tuple[float, float]:
    """Trains, and returns the last loss and the share of the test images that are read correctly."""
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=options.accumulate,
        mixed_precision="bf16" if options.bf16 else "no",
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),  # an epoch resumed has the same order
    )
    set_seed(options.seed)
    data, test = digits.load()
    model = digits.make_model()
    optimizer = torch.optim.SGD(model.parameters(), options.lr, momentum=0.9, nesterov=True)
    loader = DataLoader(data, options.batch_size, shuffle=True, drop_last=True)
    model, optimizer, loader, tests = accelerator.prepare(model, optimizer, loader, DataLoader(test, 64))
    first = 0
    if options.resume:
        accelerator.load_state(options.resume)
        first = int(Path(options.resume).name.removeprefix("epoch")) + 1
    loss = torch.zeros(())
    for epoch in range(first, options.epochs):
        loader.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            with accelerator.accumulate(model):  # DDP reduces gradients in the last backward pass of a step
                with accelerator.autocast():
                    loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), options.clip)
                optimizer.step()
                optimizer.zero_grad()
        if options.directory:
            accelerator.save_state(f"{options.directory}/epoch{epoch}")
    return float(accelerator.reduce(loss.detach(), "mean")), accuracy_of(accelerator, model, tests)


def accuracy_of(accelerator: Accelerator, model: torch.nn.Module, tests: DataLoader[tuple[torch.Tensor, ...]]) -> float:
    """Returns the share of the test images that are read correctly, each of them counted once."""
    model.eval()
    right, images_read = 0, 0
    for images, labels in tests:
        with torch.no_grad():
            read = model(images).argmax(1)
        read, labels = accelerator.gather_for_metrics((read, labels))
        right += int((read == labels).sum())
        images_read += len(labels)
    return right / images_read


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Learns to read handwritten digits, with Accelerate.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16, help="images in a backward pass, on each rank")
    parser.add_argument("--accumulate", type=int, default=1, help="backward passes in a step")
    parser.add_argument("--clip", type=float, default=5.0, help="largest norm of the gradient (%(default)s)")
    parser.add_argument("--bf16", action="store_true", help="mixed precision")
    parser.add_argument("--lr", type=float, default=0.06, help="learning rate, of all ranks together (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", default="", help="for a checkpoint after each epoch; default: none")
    parser.add_argument("--resume", default="", help="a checkpoint (DIRECTORY/epochN) to go on from")
    parser.add_argument("--backend", default="fusion", help="of torch.distributed (%(default)s)")
    return parser


def main() -> None:
    options = make_parser().parse_args()
    torchrun.set_variables()  # -> where fusionrun, mpirun or srun has started the workers; nothing under torchrun
    dist.init_process_group(options.backend)  # -> before the Accelerator, which would choose gloo on CPUs
    loss, accuracy = train(options)
    if dist.get_rank() == 0:
        print(f"loss {loss:.4f}, accuracy {accuracy:.2%} on {dist.get_world_size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
