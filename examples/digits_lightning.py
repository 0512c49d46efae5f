"""The digits of `digits.py`, learnt with Lightning.

    python examples/digits_lightning.py --devices 2                          # Lightning starts the workers
    fusionrun -np 2 python examples/digits_lightning.py --devices 2
    fusionrun -np 2 python examples/digits_lightning.py --devices 2 --compression 'topk(density=0.05)'
    torchrun --nproc-per-node 2 examples/digits_lightning.py --devices 2 --strategy fusion_ddp

The lines that a module for one process does not have are marked with an arrow. It needs
`pip install '.[lightning,examples]'`.
"""

from __future__ import annotations

import argparse
from typing import Any

import digits
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from fusion_rt.integrations.lightning import FusionDDPStrategy, FusionStrategy  # ->


class Reader(LightningModule):
    """The net of `digits.py`, and how it is trained and tested."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = digits.make_model()
        self.lr = lr

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)  # -> the mean of all ranks
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        images, labels = batch
        right = (self.net(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True)  # ->

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), self.lr, momentum=0.9, nesterov=True)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, steps, pct_start=0.2, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Learns to read handwritten digits, with Lightning.")
    parser.add_argument("--devices", type=int, default=1, help="workers on each host (%(default)s)")
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--strategy", default="fusion", choices=["fusion", "fusion_ddp"], help="(%(default)s)")
    parser.add_argument("--compression", help="a codec for what goes between hosts (docs/compression.md)")
    parser.add_argument("--algorithm", help="a training algorithm (docs/algorithms.md)")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16, help="images in a backward pass, on each rank")
    parser.add_argument("--accumulate", type=int, default=1, help="backward passes in a step")
    parser.add_argument("--clip", type=float, help="largest norm of the gradient")
    parser.add_argument("--precision", default="32-true", choices=["32-true", "bf16-mixed"])
    parser.add_argument("--lr", type=float, default=0.06, help="learning rate, of all ranks together (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", default="lightning", help="for checkpoints (%(default)s)")
    parser.add_argument("--resume", help="a checkpoint to go on from")
    return parser


def main() -> None:
    options = make_parser().parse_args()
    seed_everything(options.seed)
    train, test = digits.load()
    if options.strategy == "fusion":
        strategy = FusionStrategy(compression=options.compression, algorithm=options.algorithm)  # ->
    else:
        strategy = FusionDDPStrategy()  # ->
    trainer = Trainer(
        accelerator="cpu",
        devices=options.devices,
        num_nodes=options.hosts,
        strategy=strategy,  # ->
        max_epochs=options.epochs,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=options.clip,
        precision=options.precision,
        default_root_dir=options.directory,
        callbacks=[ModelCheckpoint(options.directory, filename="{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Reader(options.lr),
        DataLoader(train, options.batch_size, shuffle=True, drop_last=True),  # Lightning splits it among the ranks
        DataLoader(test, 64),
        ckpt_path=options.resume,
    )
    if trainer.is_global_zero:
        found = trainer.callback_metrics
        print(f"loss {float(found['loss']):.4f}, accuracy {float(found['accuracy']):.2%} on {trainer.world_size} ranks")


if __name__ == "__main__":
    main()
