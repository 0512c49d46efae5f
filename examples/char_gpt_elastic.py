"""The small GPT of `char_gpt.py`, in a job whose workers come and go.

    fusionrun --min-np 1 --host-discovery-script ./hosts.sh python examples/char_gpt_elastic.py
    fusionrun -np 2 --min-np 1 python examples/char_gpt_elastic.py
    python examples/char_gpt_elastic.py --samples 2000

An epoch is a number of pieces of text, drawn by a seed; the elastic sampler deals them to the workers that there are,
so that each is trained on once, however often the membership changes. The lines for workers that come and go are marked
with an arrow. When one dies, the others go on from the last commit; one that comes begins with the state of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import fusion_rt.torch as hvd

sys.path.insert(0, str(Path(__file__).resolve().parent))
import char_gpt  # type: ignore[import-not-found]


def main() -> None:
    parser = argparse.ArgumentParser(description="A small GPT learns while workers come and go.")
    parser.add_argument("--samples", type=int, default=12_000, help="pieces of text to train on (%(default)s)")
    parser.add_argument(
        "--batch-size", type=int, default=16, help="pieces of text in a step, on each rank (%(default)s)"
    )
    parser.add_argument("--global-batch", type=int, default=0, help="or on all ranks together, however many there are")
    parser.add_argument("--commit-every", type=int, default=5, help="steps between commits (%(default)s)")
    parser.add_argument("--context", type=int, default=64, help="characters in a piece (%(default)s)")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--lr", type=float, default=1e-3, help="of one rank; grows with the root of the batch (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait in each step, to watch it")
    parser.add_argument("--record", default="", help="a file to which each worker adds a line of JSON for what it does")
    options = parser.parse_args()

    hvd.init()
    char_gpt.share_cores()
    torch.manual_seed(options.seed)
    text, held_out = char_gpt.load()
    generator = torch.Generator().manual_seed(options.seed)
    starts = torch.randint(len(text) - options.context, (options.samples,), generator=generator)
    model = char_gpt.Gpt(options.context, options.width, options.layers, heads=4)
    optimizer = torch.optim.AdamW(model.parameters(), options.lr, betas=(0.9, 0.99), weight_decay=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    # -> The sampler knows what is done, and deals the rest anew. There is nothing to broadcast: the state does that.
    sampler = hvd.elastic.ElasticSampler(range(options.samples), seed=options.seed)
    state: Any = hvd.elastic.TorchState(model, optimizer, sampler=sampler, steps=0)
    log = Log(options.record)

    # -> All collective operations are inside of this function: a worker that comes begins with it.
    @hvd.elastic.run
    def train(state: Any) -> float:
        log.note("begins", steps=state.steps, done=sampler.processed_num)
        batch, batch_size = 0, options.global_batch // hvd.size() or options.batch_size
        rate = options.lr * (batch_size * hvd.size() / options.batch_size) ** 0.5
        while batch * batch_size < len(sampler):
            mine = torch.tensor(sampler.get_indices(batch, batch_size))
            places = starts[mine, None] + torch.arange(options.context)
            for group in optimizer.param_groups:  # -> the rate depends on the samples done, not on steps
                group["lr"] = rate * char_gpt.schedule(sampler.processed_num, options.samples)
            optimizer.zero_grad()
            loss = char_gpt.loss_of(model, (text[places], text[places + 1]))
            loss.backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), char_gpt.MAX_NORM)
            with optimizer.skip_synchronize():
                optimizer.step()
            time.sleep(options.pause)
            sampler.record_batch(batch, len(mine))  # -> before the commit
            batch += 1
            state.steps += 1
            log.note("step", steps=state.steps, done=sampler.processed_num, loss=loss.item())
            if batch % options.commit_every == 0:
                if hvd.rank() == 0:
                    done = f"{sampler.processed_num:6d} of {options.samples}"
                    print(f"{done} samples done by {hvd.size()} workers, loss {loss.item():.3f}", flush=True)
                log.note("commits", steps=state.steps, done=sampler.processed_num)
                state.commit()  # -> an error leads back to this state from now on; hosts may have changed
        with torch.no_grad():
            pieces = char_gpt.draw(held_out, 256, options.context, torch.Generator().manual_seed(options.seed))
            return float(char_gpt.loss_of(model, pieces))

    loss = train(state)
    log.note("ends", steps=state.steps, done=sampler.processed_num, held_out=loss)
    if hvd.rank() == 0:
        print(f"held out       loss {loss:.3f} after {state.steps} steps, now on {hvd.size()} workers")


class Log:
    """A log of a worker's events, with time, rank and size: a line of JSON each."""

    def __init__(self, path: str) -> None:
        self._path = path

    def note(self, what: str, **values: float) -> None:
        """Adds a line."""
        if self._path:
            where = {"pid": os.getpid(), "rank": hvd.rank(), "size": hvd.size()}
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"what": what, "at": time.time(), **where, **values}) + "\n")


if __name__ == "__main__":
    main()
