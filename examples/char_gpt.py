"""A small GPT learns the text of Python's standard library, character by character, and then writes some.

    python examples/char_gpt.py --steps 100
    fusionrun -np 2 python examples/char_gpt.py
    fusionrun -H host1:2,host2:2 python examples/char_gpt.py
    fusionrun -np 2 python examples/char_gpt.py --device cuda

The script is the same on one process and on many hosts: each rank draws its own batches, and the optimizer averages the
gradients of all ranks before each step. The lines for that are marked with an arrow. The default run takes a minute or
two on two workers with a core each.
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

import fusion_rt.torch as hvd

VOCABULARY = 128  # ASCII; other characters are left out of the text
MAX_TEXT = 4_000_000  # characters
HELD_OUT = 0.05  # share of the text that is not trained on
WARM_UP = 0.1  # share of the steps in which the learning rate rises
MAX_NORM = 1.0  # of all gradients together
REPORT_EVERY = 20  # steps


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the training text and the held-out text, each int64 of one dimension, below `VOCABULARY`."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = b""
    for path in sorted(library.glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="ignore").encode("ascii", errors="ignore")
    data = torch.frombuffer(bytearray(text[:MAX_TEXT]), dtype=torch.uint8).long()
    cut = int(len(data) * (1 - HELD_OUT))
    return data[:cut], data[cut:]


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each behind a layer norm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        result: torch.Tensor = x + self.feed_forward(self.norm2(x))
        return result


class Gpt(nn.Module):
    """A GPT that maps characters (batch, length) to logits of the next ones (batch, length, `VOCABULARY`)."""

    def __init__(self, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.context = context
        self.characters, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        nn.init.normal_(self.characters.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.characters(text) + self.places.weight[: text.shape[1]]
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits

    @torch.no_grad()
    def write(self, start: str, length: int, generator: torch.Generator, temperature: float = 0.7) -> str:
        """Returns `start`, followed by `length` characters that the model draws."""
        text = torch.tensor([list(start.encode("ascii"))])
        for _ in range(length):
            seen = text[:, -self.context :].to(self.places.weight.device)
            logits = self(seen)[:, -1].cpu() / temperature
            text = torch.cat([text, torch.multinomial(logits.softmax(-1), 1, generator=generator)], dim=1)
        return bytes(text[0].tolist()).decode("ascii")


def draw(
    text: torch.Tensor, batch_size: int, context: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws random pieces of the text (batch, context), and the same shifted by one character, on its device."""
    starts = torch.randint(len(text) - context, (batch_size, 1), generator=generator)
    places = (starts + torch.arange(context)).to(text.device)
    return text[places], text[places + 1]


def loss_of(model: Gpt, pieces: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Returns the mean cross entropy of the next character, in nats."""
    return F.cross_entropy(model(pieces[0]).flatten(0, 1), pieces[1].flatten())


def schedule(step: int, steps: int) -> float:
    """Returns the factor of the learning rate, which rises linearly, and falls along half a cosine to a tenth."""
    warm_up = max(1, int(steps * WARM_UP))
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))


def share_cores() -> None:
    """Gives each rank its part of the host's cores, unless `OMP_NUM_THREADS` says how many threads a process has."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))


def device_of(name: str) -> torch.device:
    """Returns the device of this rank. The ranks of a host take its GPUs in turns."""
    if name != "cuda":
        return torch.device(name)
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU on this host; leave out --device cuda")
    device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def main() -> None:
    parser = argparse.ArgumentParser(description="A small GPT learns the text of Python's standard library.")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument(
        "--batch-size", type=int, default=16, help="pieces of text in a step, on each rank (%(default)s)"
    )
    parser.add_argument("--context", type=int, default=64, help="characters in a piece (%(default)s)")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(%(default)s)")
    options = parser.parse_args()

    hvd.init()  # ->
    share_cores()  # ->
    device = device_of(options.device)  # ->
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed + hvd.rank())  # -> each rank draws its own pieces
    text, held_out = (part.to(device) for part in load())
    model = Gpt(options.context, options.width, options.layers, heads=4).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), options.lr, betas=(0.9, 0.99), weight_decay=0.1)
    # -> Gradients are averaged over all ranks, and all ranks start from rank 0's parameters and state.
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, options.steps))

    bar = progress_bar()
    task = bar.add_task("", total=options.steps, loss="")
    began, waited, total = time.perf_counter(), 0.0, torch.zeros((), device=device)
    with bar:
        for step in range(1, options.steps + 1):
            optimizer.zero_grad()
            loss = loss_of(model, draw(text, options.batch_size, options.context, generator))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.synchronize()  # -> from here on gradients are averages, so that the norm is the same on all ranks
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            with optimizer.skip_synchronize():
                optimizer.step()
            scheduler.step()
            total += loss.detach()
            if step == 1:  # it has also made the plan, and so its time does not count
                began, waited = time.perf_counter(), optimizer.statistics().waited_seconds
            bar.update(task, advance=1)
            if step % REPORT_EVERY == 0:
                average = hvd.allreduce(total / REPORT_EVERY, name="loss")  # -> over all ranks
                total.zero_()
                bar.update(task, loss=f"loss {average.item():.3f}")
                show(bar)
    seconds = (time.perf_counter() - began) / max(options.steps - 1, 1)
    statistics = optimizer.statistics()
    waited = (statistics.waited_seconds - waited) / max(options.steps - 1, 1)

    with torch.no_grad():  # -> every rank draws its own pieces of the text that is held out, too
        losses = [loss_of(model, draw(held_out, options.batch_size, options.context, generator)) for _ in range(4)]
    average = hvd.allreduce(torch.stack(losses).mean(), name="held out")
    if hvd.rank() == 0:
        speed = options.batch_size * options.context * hvd.size() / seconds
        print(f"held out       loss {average.item():.3f}, where guessing has {math.log(VOCABULARY):.3f}")
        print(f"speed          {speed:,.0f} characters/s on {hvd.size()} ranks")
        print(
            f"communication  {waited * 1e3:.1f} ms of each step of {seconds * 1e3:.1f} ms ({waited / seconds:.1%}): "
            f"{statistics.nbytes / 1e6:.1f} MB of gradients, "
            f"{statistics.buckets} message{'' if statistics.buckets == 1 else 's'}"
        )
        print("sample\n" + model.write("def ", 300, torch.Generator().manual_seed(options.seed)))


def progress_bar() -> Progress:
    """Makes a progress bar, which is shown on rank 0 only."""
    console = Console()
    return Progress(
        TextColumn("step {task.completed:4.0f} of {task.total}"),
        BarColumn(24),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        console=console,
        auto_refresh=console.is_terminal,
        transient=not console.is_terminal,
        disable=hvd.rank() != 0,
    )


def show(bar: Progress) -> None:
    """Prints the bar on a new line where the output is no terminal (under fusionrun), and it cannot be redrawn."""
    if not bar.disable and not bar.console.is_terminal:
        bar.console.print(bar.get_renderable())


if __name__ == "__main__":
    main()
