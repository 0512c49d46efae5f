"""A worker of `recovery --samples`: it trains a small GPT on some pieces of text, and tells the loss of others."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch

import fusion_rt.torch as hvd
from benchmarks.faulted import notes
from examples import char_gpt
from fusion_rt.local import elastic

WIDTH, LAYERS, CONTEXT = 64, 2, 32
BATCH = 8
LEARNING_RATE = 2e-3
HELD_OUT = 1024  # pieces


class Pieces(torch.utils.data.Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """Pieces of a text by number, with the same shifted by one character.

    Args:
        text: all of it.
        samples: how many pieces.
        seed: of their places.
    """

    def __init__(self, text: torch.Tensor, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._text = text
        self._starts = torch.randint(len(text) - CONTEXT, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        start = int(self._starts[index])
        return index, self._text[start : start + CONTEXT], self._text[start + 1 : start + CONTEXT + 1]


def main() -> None:
    pause, commit_every, samples, seed = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    hvd.init()
    os.environ[notes.PLACE] = f"{os.environ['HOROVOD_HOSTNAME']}.{os.environ[elastic.SLOT]}"
    notebook = notes.Notebook()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    text, held_out = char_gpt.load()
    model = char_gpt.Gpt(CONTEXT, WIDTH, LAYERS, heads=4)
    # The first backward pass of a process is slow, and others would wait for a newcomer's.
    char_gpt.loss_of(model, char_gpt.draw(text, BATCH, CONTEXT, torch.Generator())).backward()  # type: ignore[no-untyped-call]
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    dataset = Pieces(text, samples, seed)
    sampler = hvd.elastic.ElasticSampler(dataset, seed=seed)
    loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    state: Any = hvd.elastic.TorchState(model, optimizer, sampler=sampler, step=0)

    def fingerprint() -> int:
        return sum(int(parameter.detach().view(torch.int32).sum()) for parameter in model.parameters())

    def epoch() -> int:
        agent = elastic.agent()
        return agent.epoch if agent is not None else 0

    with hvd.elastic.Manager(state, commit_every) as manager:
        notebook.begins()
        for numbers, *piece in manager.batches(loader):
            with manager.step() as step:
                before, given = fingerprint(), epoch()
                notebook.takes(state.step, hvd.size(), given, hvd.rank(), numbers.tolist())
                for group in optimizer.param_groups:
                    group["lr"] = LEARNING_RATE * char_gpt.schedule(sampler.processed_num, samples)
                optimizer.zero_grad()
                char_gpt.loss_of(model, (piece[0], piece[1])).backward()  # type: ignore[no-untyped-call]
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(model.parameters(), char_gpt.MAX_NORM)
                with optimizer.skip_synchronize():
                    optimizer.step()
                state.step += step.counts
                about = {"epoch": epoch(), "given": given, "done": sampler.processed_num}
                notebook.step(state.step, hvd.size(), before, fingerprint(), **about)
                time.sleep(pause)
    with torch.no_grad():
        pieces = char_gpt.draw(held_out, HELD_OUT, CONTEXT, torch.Generator().manual_seed(0))
        loss = float(char_gpt.loss_of(model, pieces))
    notebook.ends(state.step, hvd.size(), fingerprint(), loss)


if __name__ == "__main__":
    main()
