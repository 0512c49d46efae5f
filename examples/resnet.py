"""Horovod's ImageNet example: a residual net, with gradient accumulation, learning rate warm-up, and checkpoints.

    fusionrun -np 2 python examples/resnet.py
    fusionrun -np 2 python examples/resnet.py --batches-per-allreduce 2 --fp16-allreduce
    fusionrun -np 2 python examples/resnet.py --epochs 8          # goes on where the checkpoints end
    fusionrun -np 8 -H host1:4,host2:4 python examples/resnet.py --epochs 90 --base-lr 0.0125 --warmup-epochs 5 \
        --train-dir imagenet/train --val-dir imagenet/val         # real images, and a ResNet-18

Only the import that is marked differs from a script for Horovod. Without directories, net and images are small, so that
an epoch takes a second: a ResNet of nine layers, and the digits of scikit-learn instead of ImageNet.
"""

from __future__ import annotations

import argparse
import math
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import fusion_rt.torch as hvd  # <- import horovod.torch as hvd

parser = argparse.ArgumentParser(
    description="ImageNet-style training", formatter_class=argparse.ArgumentDefaultsHelpFormatter
)
parser.add_argument("--train-dir", help="a folder of images for each class, to train a ResNet-18 on")
parser.add_argument("--val-dir", help="the same classes, to validate on")
parser.add_argument("--image-size", type=int, default=224, help="pixels of a side, of images from directories")
parser.add_argument("--workers", type=int, default=4, help="processes of each rank that read images from directories")
parser.add_argument("--checkpoint-format", default="./checkpoint-{epoch}.pth.tar", help="name of the checkpoints")
parser.add_argument("--fp16-allreduce", action="store_true", help="halve gradients on their way between hosts")
parser.add_argument(
    "--batches-per-allreduce",
    type=int,
    default=1,
    help="batches whose gradients are accumulated locally before they are reduced; it multiplies the total batch size",
)
parser.add_argument("--use-adasum", action="store_true", help="combine gradients by Adasum instead of averaging them")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
parser.add_argument("--batch-size", type=int, default=32, help="images of a pass, on each rank")
parser.add_argument("--val-batch-size", type=int, default=64, help="images at a time when validating")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--base-lr", type=float, default=0.05, help="learning rate for one rank")
parser.add_argument("--warmup-epochs", type=float, default=2, help="in which the learning rate grows to that of all")
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--wd", type=float, default=0.00005, help="weight decay")
parser.add_argument("--no-cuda", action="store_true", help="train on the CPU even where there is a GPU")
parser.add_argument("--seed", type=int, default=42)


class Block(nn.Module):
    """Two convolutions, added to their input."""

    def __init__(self, channels_in: int, channels: int, stride: int, norm_layer: type[nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = norm_layer(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = norm_layer(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride, bias=False), norm_layer(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A residual net as in He et al., "Deep Residual Learning for Image Recognition" (2015).

    `ResNet(64, 2, 3, stages=4, classes=1000, large=True)` is that paper's ResNet-18.

    Args:
        width: channels of the first stage; each of the others doubles them and halves the image.
        blocks: of each stage.
        channels: of the images.
        norm_layer: makes a batch normalisation of so many channels.
        stages: how many there are.
        classes: of images.
        large: whether the images are, and are made a quarter as wide before the first stage.
    """

    def __init__(
        self,
        width: int = 16,
        blocks: int = 1,
        channels: int = 1,
        norm_layer: type[nn.Module] = nn.BatchNorm2d,
        stages: int = 3,
        classes: int = 10,
        large: bool = False,
    ) -> None:
        super().__init__()
        stem = nn.Conv2d(channels, width, 7, 2, padding=3, bias=False) if large else None
        layers: list[nn.Module] = [stem or nn.Conv2d(channels, width, 3, padding=1, bias=False)]
        layers += [norm_layer(width), nn.ReLU()]
        if large:
            layers.append(nn.MaxPool2d(3, 2, padding=1))
        channels = width
        for stage in range(stages):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                layers.append(Block(channels, width << stage, stride, norm_layer))
                channels = width << stage
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


class Metric:
    """Horovod: average metrics from distributed training."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sum = torch.tensor(0.0)
        self.n = 0

    def update(self, value: torch.Tensor) -> None:
        self.sum += hvd.allreduce(value.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def average(self) -> float:
        return self.sum.item() / self.n


def load(train: bool) -> TensorDataset:
    """Returns four fifths of the digits to train on, or the rest to validate on."""
    from sklearn.datasets import load_digits  # here, because the synthetic benchmark imports this module, too

    digits = load_digits()
    chosen = (torch.arange(len(digits.target)) % 5 != 0) == train
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return TensorDataset(images[chosen], torch.tensor(digits.target)[chosen])


class Folder(Dataset[tuple[torch.Tensor, int]]):
    """Images in a folder for each class, as torchvision's `ImageFolder` reads them.

    Training images are cropped at random and mirrored, as He et al. do; of others the middle is taken.

    Attributes:
        classes: names of their folders.
    """

    def __init__(self, directory: str, size: int, train: bool) -> None:
        self.classes = sorted(entry.name for entry in os.scandir(directory) if entry.is_dir())
        self._files = [
            (os.path.join(directory, name, file), label)
            for label, name in enumerate(self.classes)
            for file in sorted(os.listdir(os.path.join(directory, name)))
        ]
        self._size, self._train = size, train

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        import numpy as np
        from PIL import Image

        path, label = self._files[index]
        with Image.open(path) as file:
            image = file.convert("RGB")
        # A square that has 8 to 100 % of the largest one's area, or the middle of the image.
        side = min(image.size) * (math.sqrt(0.08 + 0.92 * torch.rand(()).item()) if self._train else 0.875)
        where = torch.rand(3).tolist() if self._train else (0.5, 0.5, 1.0)
        left, top = (int((length - side) * share) for length, share in zip(image.size, where, strict=False))
        box = (left, top, left + int(side), top + int(side))
        image = image.resize((self._size, self._size), Image.Resampling.BILINEAR, box)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        pixels = (pixels - torch.tensor([0.485, 0.456, 0.406])[:, None, None]) / 0.225
        return (pixels.flip(2) if where[2] < 0.5 else pixels), label


def accuracy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == labels).float().mean()


def learning_rate_factor(epoch: int, done: float, args: argparse.Namespace) -> float:
    """Returns the factor of the learning rate of all ranks together, when the share `done` of an epoch is done.

    Horovod: using `lr = base_lr * hvd.size()` from the very beginning leads to worse final accuracy. It grows from
    `base_lr` to that in the first epochs (https://arxiv.org/abs/1706.02677), and falls to a tenth three times after.
    """
    if epoch < args.warmup_epochs:
        return ((epoch + done) * (hvd.size() - 1) / args.warmup_epochs + 1) / hvd.size()
    share = epoch / args.epochs
    return 1.0 if share < 1 / 2 else 0.1 if share < 3 / 4 else 0.01 if share < 9 / 10 else 0.001


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

    # Horovod: broadcast resume_from_epoch from rank 0 (which has the checkpoints) to the other ranks.
    epochs_saved = [
        epoch for epoch in range(1, args.epochs + 1) if os.path.exists(args.checkpoint_format.format(epoch=epoch))
    ]
    resume_from_epoch = int(
        hvd.broadcast(torch.tensor(max(epochs_saved, default=0)), root_rank=0, name="resume_from_epoch")
    )

    # Horovod: use DistributedSampler to partition data among workers.
    if bool(args.train_dir) != bool(args.val_dir):
        parser.error("--train-dir and --val-dir are given together")
    data: list[Dataset[tuple[torch.Tensor, int]]]
    if args.train_dir:
        folders = [Folder(args.train_dir, args.image_size, True), Folder(args.val_dir, args.image_size, False)]
        if folders[0].classes != folders[1].classes:
            parser.error(f"{args.train_dir} and {args.val_dir} do not have the same classes")
        data, model = [*folders], ResNet(64, 2, 3, stages=4, classes=len(folders[0].classes), large=True)
    else:
        data, model = [load(train=True), load(train=False)], ResNet()
    train_data, val_data = data
    workers = args.workers if args.train_dir else 0
    train_sampler = DistributedSampler(train_data, num_replicas=hvd.size(), rank=hvd.rank())
    val_sampler = DistributedSampler(val_data, num_replicas=hvd.size(), rank=hvd.rank())
    allreduce_batch_size = args.batch_size * args.batches_per_allreduce
    train_loader = DataLoader(
        train_data, allreduce_batch_size, sampler=train_sampler, num_workers=workers, pin_memory=cuda
    )
    val_loader = DataLoader(val_data, args.val_batch_size, sampler=val_sampler, num_workers=workers, pin_memory=cuda)

    model = model.to(device)
    # Horovod: scale learning rate by the number of ranks and of batches; Adasum does not need it.
    scale = args.batches_per_allreduce * hvd.size()
    if args.use_adasum:
        scale = args.batches_per_allreduce * hvd.local_size() if cuda and hvd.nccl_built() else 1
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.base_lr * scale, momentum=args.momentum, weight_decay=args.wd
    )
    # Horovod: wrap optimizer with DistributedOptimizer.
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        backward_passes_per_step=args.batches_per_allreduce,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )

    # Horovod: restore on the first worker, which broadcasts parameters & optimizer state to the others.
    if resume_from_epoch > 0 and hvd.rank() == 0:
        checkpoint = torch.load(args.checkpoint_format.format(epoch=resume_from_epoch))
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(resume_from_epoch, args.epochs):
        model.train()
        train_sampler.set_epoch(epoch)
        train_loss, train_accuracy = Metric("train_loss"), Metric("train_accuracy")
        for batch, (images, labels) in enumerate(train_loader):
            factor = learning_rate_factor(epoch, (batch + 1) / len(train_loader), args)
            for group in optimizer.param_groups:
                group["lr"] = args.base_lr * scale * factor
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            # Split data into sub-batches of size batch_size.
            for start in range(0, len(images), args.batch_size):
                chosen = slice(start, start + args.batch_size)
                output = model(images[chosen])
                train_accuracy.update(accuracy(output, labels[chosen]))
                loss = F.cross_entropy(output, labels[chosen])
                train_loss.update(loss)
                # Average gradients among sub-batches.
                loss /= math.ceil(len(images) / args.batch_size)
                loss.backward()
            # Gradient is applied across all ranks.
            optimizer.step()

        model.eval()
        val_loss, val_accuracy = Metric("val_loss"), Metric("val_accuracy")
        with torch.no_grad():
            for images, labels in val_loader:
                images, labels = images.to(device), labels.to(device)
                output = model(images)
                val_loss.update(F.cross_entropy(output, labels))
                val_accuracy.update(accuracy(output, labels))

        # Horovod: print and save on the first worker.
        if hvd.rank() == 0:
            print(
                f"Epoch {epoch + 1}: lr {optimizer.param_groups[0]['lr']:.4f}, "
                f"train loss {train_loss.average:.4f}, accuracy {train_accuracy.average:.2%}; "
                f"validation loss {val_loss.average:.4f}, accuracy {val_accuracy.average:.2%}"
            )
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, args.checkpoint_format.format(epoch=epoch + 1))


if __name__ == "__main__":
    main()
