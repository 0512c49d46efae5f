"""The digits of `digits.py`, learnt in a Ray Train job.

    python examples/digits_ray.py --workers 2              # hvd, as HorovodTrainer's functions were written
    python examples/digits_ray.py --workers 2 --ddp        # TorchTrainer and DistributedDataParallel

Ray starts the workers, on the hosts that it has, and starts them anew when one fails: training then goes on from the
last checkpoint. It needs `pip install '.[ray,examples]'`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import digits
import ray
import ray.train
import torch
import torch.nn.functional as F
from ray.train.torch import TorchConfig, TorchTrainer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import fusion_rt.torch as hvd
from fusion_rt.integrations.ray import FusionConfig, FusionTrainer


def train(config: dict[str, Any]) -> None:
    """Trains on each worker."""
    torch.manual_seed(config["seed"])
    torch.set_num_threads(1)
    context = ray.train.get_context()
    data, test = digits.load()
    sampler: DistributedSampler[Any] = DistributedSampler(
        data, context.get_world_size(), context.get_world_rank(), seed=config["seed"]
    )
    loader = DataLoader(data, config["batch_size"], sampler=sampler, drop_last=True)
    net = digits.make_model()
    optimizer = torch.optim.SGD(net.parameters(), config["lr"], momentum=0.9, nesterov=True)
    first = restore(net, optimizer)
    model: torch.nn.Module = net
    if config["ddp"]:
        model = DistributedDataParallel(net)
    else:
        hvd.init()  # TorchTrainer has done its part already
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    for epoch in range(first, config["epochs"]):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(net.parameters(), config["clip"])  # of the average of all ranks
            optimizer.step()
        if config["fail_at"] == epoch and first == 0 and context.get_world_rank() == 1:
            raise RuntimeError(f"worker 1 fails in epoch {epoch}, as it was told to")
        report(net, optimizer, epoch, accuracy_of(net, test))


def accuracy_of(net: torch.nn.Module, test: Any) -> float:
    """Returns the share of the test images that the net reads correctly."""
    images, labels = test.tensors
    with torch.no_grad():
        return float((net(images).argmax(1) == labels).float().mean())


def report(net: torch.nn.Module, optimizer: Any, epoch: int, accuracy: float) -> None:
    """Tells Ray how far training is; rank 0 leaves a checkpoint."""
    figures = {"epoch": epoch, "accuracy": accuracy, "workers": ray.train.get_context().get_world_size()}
    state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            torch.save(state, Path(directory) / "state.pt")
            checkpoint = ray.train.Checkpoint.from_directory(directory)
        ray.train.report(figures, checkpoint=checkpoint)


def restore(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads the last checkpoint, if Ray has one, and returns the epoch to go on with."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as directory:
        state = torch.load(Path(directory) / "state.pt")
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["epoch"]) + 1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Learns to read handwritten digits, in a Ray Train job.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ddp", action="store_true", help="DistributedDataParallel in place of hvd")
    parser.add_argument("--backend", default="fusion", help="of torch.distributed, with --ddp (%(default)s)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16, help="images in a step, on each rank (%(default)s)")
    parser.add_argument("--lr", type=float, default=0.06, help="learning rate, of all ranks together (%(default)s)")
    parser.add_argument("--clip", type=float, default=5.0, help="largest norm of the gradient (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compression", default="", help="a codec for what goes between hosts, with hvd")
    parser.add_argument("--fail-at", type=int, default=-1, help="epoch in which worker 1 fails, once")
    parser.add_argument("--retries", type=int, default=0, help="how often Ray starts failed workers anew (%(default)s)")
    parser.add_argument("--storage", help="directory for checkpoints, which all hosts share; default: Ray's")
    return parser


def main() -> None:
    options = make_parser().parse_args()
    arguments: dict[str, Any] = {
        "train_loop_config": vars(options),
        "scaling_config": ray.train.ScalingConfig(num_workers=options.workers),
        "run_config": ray.train.RunConfig(
            storage_path=options.storage, failure_config=ray.train.FailureConfig(max_failures=options.retries)
        ),
    }
    if options.ddp:
        trainer: Any = TorchTrainer(train, torch_config=TorchConfig(backend=options.backend), **arguments)
    else:
        variables = {"FUSION_COMPRESSION": options.compression} if options.compression else {}
        trainer = FusionTrainer(train, fusion_config=FusionConfig(variables), **arguments)
    found = trainer.fit().metrics
    assert found is not None
    print(f"accuracy {found['accuracy']:.2%} of the test images, on {found['workers']} workers")


if __name__ == "__main__":
    main()
