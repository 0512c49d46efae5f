"""A language model of Hugging Face's learns from which package of Python's standard library a line of source comes.

    torchrun --nproc-per-node 2 examples/finetune.py --model distilbert-base-uncased
    fusionrun -np 2 python examples/finetune.py --model FOLDER --codec 'topk(density=0.01)'
    fusionrun -np 2 python examples/finetune.py

`--model` names a model of the Hub, which is downloaded, or a folder that `save_pretrained` has written. Without it a
small BERT starts from random weights and a vocabulary of the lines' words, which needs no network. The lines that only
fusion_rt needs are marked with an arrow. It needs `pip install '.[hf,examples]'`.
"""

from __future__ import annotations

import argparse
import random
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from fusion_rt.c10d import compress
from fusion_rt.integrations import torchrun

PACKAGES = ("asyncio", "email", "unittest", "xml")
LEAST = 20  # characters of a line, without its indentation
HELD_OUT = 0.1  # share of the lines that is not trained on
WORDS = 2000  # of the small model's vocabulary


def load(most: int, seed: int) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Returns lines to train on and held-out lines, each with its package's place in `PACKAGES`; as many of each
    package, `most` at most."""
    library = Path(sysconfig.get_paths()["stdlib"])
    chance = random.Random(seed)
    of_packages = []
    for package in PACKAGES:
        lines = set()
        for path in sorted((library / package).rglob("*.py")):
            lines |= {line.strip() for line in path.read_text(encoding="utf-8", errors="ignore").splitlines()}
        long = sorted(line for line in lines if len(line) >= LEAST)
        of_packages.append(chance.sample(long, min(most, len(long))))
    fewest = min(map(len, of_packages))
    pairs = [(line, label) for label, lines in enumerate(of_packages) for line in lines[:fewest]]
    chance.shuffle(pairs)
    cut = int(len(pairs) * (1 - HELD_OUT))
    return pairs[:cut], pairs[cut:]


def small(lines: list[str]) -> tuple[Any, Any]:
    """Makes a tokenizer of the words in these lines, and a BERT of 0.4 million parameters with random weights."""
    words = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    words.normalizer, words.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
    words.train_from_iterator(lines, trainers.WordPieceTrainer(vocab_size=WORDS, special_tokens=["[PAD]", "[UNK]"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    sizes = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 192}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=128, num_labels=len(PACKAGES), **sizes)
    return tokenizer, BertForSequenceClassification(config)


def accuracy_of(found: Any) -> dict[str, float]:
    """Returns the share of the lines whose package was told correctly."""
    return {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}


class Compressing(TrainerCallback):  # type: ignore[misc]
    """Has gradients go between hosts by a codec as soon as the `Trainer` has wrapped its model in DDP."""

    def __init__(self, trainer: Trainer, codec: str) -> None:
        self._trainer, self._codec = trainer, codec

    def on_train_begin(self, *arguments: Any, **keywords: Any) -> None:
        compress(self._trainer.model_wrapped, self._codec)  # ->


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Fine-tunes a language model to classify lines of source.")
    parser.add_argument("--model", default="", help="of the Hub, or a folder; without, a small one of random weights")
    parser.add_argument("--codec", default="", help="of gradients between hosts, as topk(density=0.01)")
    parser.add_argument("--lines", type=int, default=2000, help="of each package, at most (%(default)s)")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="lines in a step, on each rank")
    parser.add_argument("--lr", type=float, default=0.0, help="learning rate (3e-5; 2e-3 for the small model)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", default="finetuned", help="for the model and its tokenizer (%(default)s)")
    parser.add_argument("--backend", default="fusion", help="of torch.distributed (%(default)s)")
    return parser


def main() -> None:
    options = make_parser().parse_args()
    torchrun.set_variables()  # -> where fusionrun, mpirun or srun has started the workers; nothing under torchrun
    dist.init_process_group(options.backend)  # -> before TrainingArguments, which would choose gloo on CPUs
    torch.manual_seed(options.seed)
    train, test = load(options.lines, options.seed)
    if options.model:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=len(PACKAGES))
    else:
        tokenizer, model = small([line for line, _ in train])
    data = [
        [{**tokenizer(line, truncation=True, max_length=64), "labels": label} for line, label in part]
        for part in (train, test)
    ]
    trainer = Trainer(
        model,
        TrainingArguments(
            options.directory,
            use_cpu=not torch.cuda.is_available(),
            num_train_epochs=options.epochs,
            per_device_train_batch_size=options.batch_size,
            learning_rate=options.lr or (3e-5 if options.model else 2e-3),
            seed=options.seed,
            save_strategy="no",
            dataloader_drop_last=True,
            ddp_find_unused_parameters=False,
            disable_tqdm=True,
            report_to="none",
        ),
        data_collator=DataCollatorWithPadding(tokenizer),
        train_dataset=data[0],
        eval_dataset=data[1],
        processing_class=tokenizer,
        compute_metrics=accuracy_of,
    )
    if options.codec:
        trainer.add_callback(Compressing(trainer, options.codec))
    loss = trainer.train().training_loss
    accuracy = trainer.evaluate()["eval_accuracy"]
    trainer.save_model()  # on rank 0
    if dist.get_rank() == 0:
        print(f"loss {loss:.4f}, accuracy {accuracy:.2%} on {dist.get_world_size()} ranks")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
