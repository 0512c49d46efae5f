"""Compares training algorithms and codecs: the loss over seconds, and over the bytes that a host has sent.

    for way in "allreduce dense" "allreduce topk(density=0.01)" "diloco(steps=20) dense" "adpsgd dense"; do
        set -- $way
        for seed in 0 1 2; do
            fusionrun -np 4 -H host1:2,host2:2 --algorithm "$1" --compression "$2" \\
                python examples/compare.py --seed $seed --out curves
        done
    done
    python examples/compare.py --plot curves

Each job trains the same small net on scikit-learn's digits for some seconds, each rank at its own pace, and writes a
file with the curve of rank 0's model, which needs no exchange; the last point is of the model that all ranks agree on
(`hvd.consensus`). Ranks that take fewer steps are waited for at the end only (`hvd.join`), so that algorithms that wait
for nobody are compared fairly. `--slow 0.05` makes the last rank wait so long in each step; `--plot` needs matplotlib,
which `pip install '.[examples]'` brings.

Compare them on your own model, with a folder of curves for each model:

    fusionrun -np 4 python examples/compare.py --model mine:net --data mine:samples --batch 32 --lr 0.1 --out curves

`net()` in `mine.py` here returns a `torch.nn.Module`. `samples()` returns inputs and class numbers, two tensors with a
row a sample, alike on all ranks; without `--data` they are the digits, 64 numbers each of 10 classes. The loss is the
cross-entropy over the last dimension of the model's output, so samples may be texts and classes tokens.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import fusion_rt.torch as hvd
from fusion_rt.settings import Settings

TEST = 360  # samples that nobody trains on, but at most a quarter of all
POINTS = 40  # of a curve


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Compares training algorithms and codecs.")
    parser.add_argument("--seconds", type=float, default=10.0, help="for which each rank trains (%(default)s)")
    own = {"type": function, "metavar": "MODULE:FUNCTION"}
    parser.add_argument("--model", **own, default=net, help="returns the model (default: a net for the digits)")
    parser.add_argument("--data", **own, default=digits, help="returns inputs and classes (default: the digits)")
    parser.add_argument("--batch", type=int, default=16, help="samples a step of each rank (%(default)s)")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slow", type=float, default=0.0, help="seconds that the last rank waits in each step")
    parser.add_argument("--out", type=Path, help="folder for the curve of this job")
    parser.add_argument("--plot", type=Path, help="folder with curves: draws them, and trains nothing")
    return parser


def function(name: str) -> Callable[[], Any]:
    """Returns the function that `MODULE:FUNCTION` names, where modules of the working directory come first."""
    module, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, ValueError, AttributeError) as error:
        raise argparse.ArgumentTypeError(f"{name!r} names no function: {error}; write MODULE:FUNCTION") from error


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scikit-learn's images of digits, a row each, and their labels."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.tensor(found.data / 16, dtype=torch.float32), torch.tensor(found.target)


def net(width: int = 256) -> torch.nn.Module:
    """Returns a net for the digits."""
    return torch.nn.Sequential(
        torch.nn.Linear(64, width), torch.nn.ReLU(),
        torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 10),
    )  # fmt: skip


def cross_entropy(guess: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Returns the loss of guesses, whose last dimension is the classes; the others are those of `classes`."""
    return F.cross_entropy(guess.flatten(0, -2), classes.flatten())


def train(options: argparse.Namespace) -> list[dict[str, float]]:
    """Returns the points of the curve: step, seconds, bytes, loss and accuracy on samples that nobody trains on."""
    torch.manual_seed(options.seed)
    inputs, classes = options.data()
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    inputs, classes = inputs[order], classes[order]
    test = min(TEST, len(classes) // 4)
    mine = slice(test + hvd.rank(), None, hvd.size())
    model = options.model()
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), options.lr, momentum=0.9), model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    draw = torch.Generator().manual_seed(1000 * options.seed + hvd.rank())
    curve: list[dict[str, float]] = []

    def judge() -> None:
        point = {"step": step, "seconds": time.perf_counter() - start, "bytes": hvd.network_stats()["sent"] - sent}
        model.eval()
        with torch.no_grad():
            guess = model(inputs[:test])
            loss = cross_entropy(guess, classes[:test]).item()
            accuracy = (guess.argmax(-1) == classes[:test]).float().mean().item()
        model.train()
        curve.append({**point, "loss": loss, "accuracy": accuracy})

    step = 0
    hvd.barrier()
    start, sent = time.perf_counter(), hvd.network_stats()["sent"]
    while (seconds := time.perf_counter() - start) < options.seconds:
        if hvd.rank() == 0 and seconds >= len(curve) * options.seconds / POINTS:
            judge()
        chosen = torch.randint(len(classes[mine]), (options.batch,), generator=draw)
        optimizer.zero_grad()
        if hvd.rank() == hvd.size() - 1:
            time.sleep(options.slow)
        cross_entropy(model(inputs[mine][chosen]), classes[mine][chosen]).backward()
        optimizer.step()
        step += 1
    hvd.join()
    hvd.consensus(optimizer, model=model)
    judge()
    return curve


def plot(folder: Path) -> Path:
    """Draws all curves, those of one way in one colour: a thin line for each seed, a thick one for their median, and a
    mark for the model that all ranks agree on at the end. Returns the picture's file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves: dict[str, list[list[dict[str, float]]]] = defaultdict(list)
    for file in sorted(folder.glob("*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        curves[found["way"]].append(found["curve"])
    figure, axes = plt.subplots(1, 2, figsize=(11, 5), sharey=True, layout="constrained")
    for axis, name, scale in ((axes[0], "seconds", 1.0), (axes[1], "bytes", 1e-6)):
        for number, (way, its) in enumerate(curves.items()):
            colour = f"C{number}"
            for curve in its:
                along, losses = [point[name] * scale for point in curve], [point["loss"] for point in curve]
                axis.plot(along[:-1], losses[:-1], color=colour, linewidth=0.7, alpha=0.5)
                axis.plot(along[-1:], losses[-1:], "D", color=colour, markeredgecolor="black", markersize=6)
            middle = median([curve[:-1] for curve in its])
            along, losses = [point[name] * scale for point in middle], [point["loss"] for point in middle]
            axis.plot(along, losses, color=colour, linewidth=2, label="" if axis is axes[1] else way)
    axes[0].plot([], [], "D", color="white", markeredgecolor="black", label="model of all ranks, at the end")
    axes[0].set(xlabel="seconds", ylabel="loss on test samples", yscale="log")
    axes[1].set(xlabel="MB that host 0 has sent")
    sent = [point["bytes"] * 1e-6 for its in curves.values() for curve in its for point in curve if point["bytes"]]
    if sent:  # by several hosts
        axes[1].set(xlabel="MB that host 0 has sent (logarithmic)", xscale="log", xlim=(min(sent) / 2, max(sent) * 2))
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(folder / "curves.png", dpi=120)
    return folder / "curves.png"


def median(curves: list[list[dict[str, float]]]) -> list[dict[str, float]]:
    """Returns a curve whose points are medians: of first points, of second points, and so on, which were taken at the
    same times. It ends with the shortest one."""
    together = zip(*curves, strict=False)
    return [{name: statistics.median(point[name] for point in points) for name in points[0]} for points in together]


def lacking() -> str:
    """Returns a sentence if `--plot` cannot draw here; an empty one if it can."""
    if find_spec("matplotlib"):
        return ""
    return "--plot needs matplotlib, which is not installed: pip install '.[examples]'"


def main() -> None:
    options = make_parser().parse_args()
    if options.plot:
        if why := lacking():
            sys.exit(f"compare.py: {why}")
        print(plot(options.plot))
        return
    hvd.init()
    if options.out and hvd.rank() == 0 and (why := lacking()):  # curves may be drawn on another machine
        print(f"compare.py: {why}", file=sys.stderr, flush=True)
    torch.set_num_threads(1)
    settings = Settings.from_env()
    way = f"{settings.algorithm} {settings.compression}"
    curve = train(options)
    if hvd.rank() == 0:
        last = curve[-1]
        print(
            f"{way}: {last['seconds']:.2f} s, {last['bytes'] / 1e6:.2f} MB, loss {last['loss']:.4f}, "
            f"accuracy {last['accuracy']:.3f}"
        )
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            name = f"{way}-{options.seed}.json".replace(" ", "-").replace("/", "_")
            (options.out / name).write_text(json.dumps({"way": way, "curve": curve}), encoding="utf-8")


if __name__ == "__main__":
    main()
