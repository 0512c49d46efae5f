"""The digits of `digits.py`, learnt with the `Trainer` of Hugging Face Transformers, on CPUs.

    torchrun --nproc-per-node 2 examples/digits_trainer.py
    fusionrun -np 2 python examples/digits_trainer.py

The lines that only fusion_rt needs are marked with an arrow. It needs `pip install '.[hf,examples]'`.
"""

from __future__ import annotations

import argparse
from typing import Any

import digits
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import Dataset, TensorDataset
from transformers import Trainer, TrainingArguments

from fusion_rt.integrations import torchrun


class Reader(torch.nn.Module):
    """The net of `digits.py`, which also computes its loss, as the `Trainer` wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = digits.make_model()

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(images)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Images(Dataset[dict[str, torch.Tensor]]):
    """Images and labels by the names that `Reader` gives them."""

    def __init__(self, data: TensorDataset) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        image, label = self._data[index]
        return {"images": image, "labels": label}


def accuracy_of(found: Any) -> dict[str, float]:
    """Returns the share of the images that are read correctly."""
    return {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Learns to read handwritten digits, with Transformers.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16, help="images in a backward pass, on each rank")
    parser.add_argument("--accumulate", type=int, default=1, help="backward passes in a step")
    parser.add_argument("--clip", type=float, default=5.0, help="largest norm of the gradient (%(default)s)")
    parser.add_argument("--bf16", action="store_true", help="mixed precision")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate, of all ranks together (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", default="trainer", help="for a checkpoint after each epoch (%(default)s)")
    parser.add_argument("--resume", help="a checkpoint (DIRECTORY/checkpoint-N) to go on from")
    parser.add_argument("--backend", default="fusion", help="of torch.distributed (%(default)s)")
    return parser


def main() -> None:
    options = make_parser().parse_args()
    torchrun.set_variables()  # -> where fusionrun, mpirun or srun has started the workers; nothing under torchrun
    dist.init_process_group(options.backend)  # -> before TrainingArguments, which would choose gloo on CPUs
    torch.manual_seed(options.seed)
    train, test = digits.load()
    trainer = Trainer(
        Reader(),
        TrainingArguments(
            options.directory,
            use_cpu=True,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=options.batch_size,
            gradient_accumulation_steps=options.accumulate,
            max_grad_norm=options.clip,
            bf16=options.bf16,
            learning_rate=options.lr,
            seed=options.seed,
            save_strategy="epoch",
            eval_strategy="epoch",
            dataloader_drop_last=True,
            ddp_find_unused_parameters=False,
            remove_unused_columns=False,
            disable_tqdm=True,
            report_to="none",
        ),
        train_dataset=Images(train),
        eval_dataset=Images(test),
        compute_metrics=accuracy_of,
    )
    loss = trainer.train(resume_from_checkpoint=options.resume).training_loss
    accuracy = trainer.evaluate()["eval_accuracy"]
    if dist.get_rank() == 0:
        print(f"loss {loss:.4f}, accuracy {accuracy:.2%} on {dist.get_world_size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
