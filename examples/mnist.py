"""Horovod's MNIST example: a small convolutional net, on one process or on many.

    fusionrun -np 2 python examples/mnist.py
    fusionrun -np 2 python examples/mnist.py --fp16-allreduce
    fusionrun -np 2 python examples/mnist.py --use-adasum

Only the import that is marked differs from a script for Horovod. With `import horovod.torch as hvd` in its place, start
it with `fusionrun --as-horovod`. Nothing is downloaded: the digits are the 1797 images of 8 x 8 pixels that come with
scikit-learn.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import fusion_rt.torch as hvd  # <- import horovod.torch as hvd

parser = argparse.ArgumentParser(
    description="MNIST-style training", formatter_class=argparse.ArgumentDefaultsHelpFormatter
)
parser.add_argument("--batch-size", type=int, default=32, help="images in a step, on each rank")
parser.add_argument("--test-batch-size", type=int, default=200, help="images at a time when testing")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--lr", type=float, default=0.05, help="learning rate for one rank")
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--no-cuda", action="store_true", help="train on the CPU even where there is a GPU")
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--log-interval", type=int, default=10, help="batches from one line to the next")
parser.add_argument("--fp16-allreduce", action="store_true", help="halve gradients on their way between hosts")
parser.add_argument("--use-adasum", action="store_true", help="combine gradients by Adasum instead of averaging them")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.dropout = nn.Dropout2d(0.1)
        self.fc1 = nn.Linear(128, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.dropout(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


def load(train: bool) -> TensorDataset:
    """Returns four fifths of the digits to train on, or the rest to test on."""
    digits = load_digits()
    chosen = (torch.arange(len(digits.target)) % 5 != 0) == train
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return TensorDataset(images[chosen], torch.tensor(digits.target)[chosen])


def metric_average(value: float, name: str) -> float:
    """Returns the mean over all ranks."""
    return float(hvd.allreduce(torch.tensor(value), name=name))


def main() -> None:
    args = parser.parse_args()
    cuda = not args.no_cuda and torch.cuda.is_available()

    # Horovod: initialize library, and pin GPU to local rank.
    hvd.init()
    torch.manual_seed(args.seed)
    if cuda:
        torch.cuda.set_device(hvd.local_rank())
    device = torch.device("cuda" if cuda else "cpu")
    # Horovod: limit # of CPU threads to be used per worker.
    torch.set_num_threads(1)

    # Horovod: use DistributedSampler to partition the data.
    train_data, test_data = load(train=True), load(train=False)
    train_sampler = DistributedSampler(train_data, num_replicas=hvd.size(), rank=hvd.rank())
    test_sampler = DistributedSampler(test_data, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(train_data, args.batch_size, sampler=train_sampler, pin_memory=cuda)
    test_loader = DataLoader(test_data, args.test_batch_size, sampler=test_sampler, pin_memory=cuda)

    model = Net().to(device)
    # Horovod: scale learning rate by the number of ranks; Adasum does not need it (on GPUs, by those of the host).
    scale = hvd.size()
    if args.use_adasum:
        scale = hvd.local_size() if cuda and hvd.nccl_built() else 1
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * scale, momentum=args.momentum)

    # Horovod: broadcast parameters & optimizer state.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    # Horovod: wrap optimizer with DistributedOptimizer.
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )

    for epoch in range(1, args.epochs + 1):
        model.train()
        # Horovod: set epoch to sampler for shuffling.
        train_sampler.set_epoch(epoch)
        for batch, (images, labels) in enumerate(train_loader):
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels)
            loss.backward()
            optimizer.step()
            if batch % args.log_interval == 0:
                # Horovod: use train_sampler to determine the number of examples in this worker's partition.
                done = batch * args.batch_size
                print(f"Train Epoch: {epoch} [{done}/{len(train_sampler)}]  Loss: {loss.item():.6f}")

        model.eval()
        test_loss = test_accuracy = 0.0
        with torch.no_grad():
            for images, labels in test_loader:
                images, labels = images.to(device), labels.to(device)
                output = model(images)
                test_loss += F.nll_loss(output, labels, reduction="sum").item()
                test_accuracy += (output.argmax(1) == labels).sum().item()
        # Horovod: average metric values across workers, and print them on the first one.
        test_loss = metric_average(test_loss / len(test_sampler), "avg_loss")
        test_accuracy = metric_average(test_accuracy / len(test_sampler), "avg_accuracy")
        if hvd.rank() == 0:
            print(f"Test set: Average loss: {test_loss:.4f}, Accuracy: {test_accuracy:.2%}")


if __name__ == "__main__":
    main()
