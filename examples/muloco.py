"""A small GPT learns by MuLoCo: Muon takes the local steps, and DiLoCo's outer steps go through a codec of few bits.

    fusionrun -np 4 python examples/muloco.py
    fusionrun -H host1:1,host2:1 python examples/muloco.py --codec int8 --algorithm "diloco(steps=30, fragments=3, delay=4)"

After Thérien et al., "MuLoCo: Muon is a practical inner optimizer for DiLoCo" (arXiv 2505.23725). Muon is for matrices
within the model; embeddings, the head, norms and biases are AdamW's. Each of the two optimizers is distributed by
itself, and both exchange their parameters in the same steps. Muon is in torch from version 2.9 on.
"""  # noqa: E501 - a command line

from __future__ import annotations

import argparse

import char_gpt  # type: ignore[import-not-found]
import torch

import fusion_rt.torch as hvd


def optimizers(model: char_gpt.Gpt, lr: float, algorithm: str, codec: str) -> list[torch.optim.Optimizer]:
    """Makes the distributed optimizers: Muon of the blocks' matrices, AdamW of all other parameters.

    Args:
        lr: learning rate of Muon; AdamW's is a tenth.
        algorithm, codec: of what is exchanged.
    """
    inside = {f"blocks.{name}" for name, parameter in model.blocks.named_parameters() if parameter.dim() == 2}
    named = dict(model.named_parameters())
    matrices = {name: parameter for name, parameter in named.items() if name in inside}
    others = {name: parameter for name, parameter in named.items() if name not in inside}
    muon = torch.optim.Muon(matrices.values(), lr=lr, weight_decay=0.01)  # type: ignore[attr-defined,unused-ignore]
    adamw = torch.optim.AdamW(others.values(), lr=lr / 10)
    return [
        hvd.DistributedOptimizer(each, of.items(), compression=codec, algorithm=algorithm)
        for each, of in ((muon, matrices), (adamw, others))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="A small GPT learns by MuLoCo.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--batch-size", type=int, default=8, help="pieces of text in a step, on each rank (%(default)s)"
    )
    parser.add_argument("--context", type=int, default=32, help="characters in a piece (%(default)s)")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.03, help="of Muon (%(default)s)")
    parser.add_argument("--algorithm", default="diloco(steps=30, outer_rate=0.7, outer_momentum=0.6)")
    parser.add_argument("--codec", default="int8", help="of the outer differences (%(default)s)")
    options = parser.parse_args()
    if not hasattr(torch.optim, "Muon"):
        raise SystemExit(f"torch {torch.__version__} has no Muon; install torch 2.9 or newer")

    hvd.init()
    char_gpt.share_cores()
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(1 + hvd.rank())  # each rank draws its own pieces
    text, held_out = char_gpt.load()
    model = char_gpt.Gpt(options.context, options.width, options.layers, heads=4)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    both = optimizers(model, options.lr, options.algorithm, options.codec)
    for step in range(1, options.steps + 1):
        for optimizer in both:
            optimizer.zero_grad()
        loss = char_gpt.loss_of(model, char_gpt.draw(text, options.batch_size, options.context, generator))
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in both:
            optimizer.step()
        if step % 50 == 0 and hvd.rank() == 0:
            print(f"step {step}: loss {loss.item():.3f} on this rank", flush=True)
    hvd.consensus(*both, model=model)  # one model on all ranks
    with torch.no_grad():
        pieces = char_gpt.draw(held_out, 64, options.context, torch.Generator().manual_seed(hvd.rank()))
        average = hvd.allreduce(char_gpt.loss_of(model, pieces), name="held out")
    if hvd.rank() == 0:
        print(f"held out: loss {average.item():.3f}")


if __name__ == "__main__":
    main()
