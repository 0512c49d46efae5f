"""Tables of training runs: algorithms, slow workers, slow networks, classical solvers, codecs."""

from __future__ import annotations

import math
from collections.abc import Callable

from benchmarks import algorithms, convergence, gossip, kfac, networks, solvers, straggler
from benchmarks.common import runs
from benchmarks.common.tables import Table
from benchmarks.report.measured import All, records

SLOW = ("1gbit", "100mbit", "1gbit, one link 100mbit")
SECONDS = 20.0  # duration of the shown runs beside a slow worker


def slow_worker(found: All) -> str:
    """Makes the table of pace and loss of each algorithm beside a slow worker, relative to bsp's."""
    made = straggler.durations(runs.of(record) for record in records(found, "straggler"))[SECONDS]
    columns = {"pace of all ranks / bsp": ("pace/bsp", 2), "of a fast rank / bsp": ("fast/bsp", 2),
               "loss, same time": ("loss/bsp", 3), "loss, same samples": ("at samples/bsp", 3)}  # fmt: skip
    table = Table(["", *columns])
    for name in made.families:
        rows = made.compared(name)
        cells = [straggler.middle(rows, key, digits).partition(" ")[0] for key, digits in columns.values()]
        table.add(f"`{straggler.FAMILIES[name].algorithm}`", *cells)
    return table.markdown()


def second_order(found: All) -> str:
    """Makes the table of steps to a loss with K-FAC, LARS and LAMB."""
    (record,) = records(found, "kfac")
    return kfac.table(record).markdown()


def slow_networks(found: All) -> str:
    """Makes the table of seconds until the loss, and the central server's relative to them."""
    (record,) = records(found, "networks")
    measured = record.details
    table = Table([f"seconds until a loss of {measured['loss']} (central server's / this)", *SLOW])
    for name in networks.METHODS:
        cells = []
        for network in SLOW:
            mine, central = (networks.seconds_to_loss(measured, network, each) for each in (name, networks.CENTRAL))
            cells.append("" if math.isnan(mine) else f"{mine:.0f} ({central / mine:.1f})")
        if any(cells):
            table.add(name, *cells)
    return table.markdown()


def losses(found: All) -> str:
    """Makes the table of the loss at the end with each algorithm."""
    made = algorithms.groups(runs.of(record) for record in records(found, "algorithms"))
    digits, gpt = (made[model, algorithms.MODELS[model][0]] for model in ("digits", "char-gpt"))
    table = Table(["", "rate", "digits, right", "char-GPT, test loss", "/ all-reduce"])
    reference = algorithms.mean(gpt["allreduce", 1.0], "test_loss")
    for name, (_, _, factor) in algorithms.ALGORITHMS.items():
        if (name, factor) in gpt and (name, factor) in digits:
            right = f"{algorithms.mean(digits[name, factor], 'accuracy'):.1%}"
            loss = algorithms.mean(gpt[name, factor], "test_loss")
            table.add(f"`{name}`", f"{factor:g}", right, f"{loss:.3f}", f"{loss / reference:.3f}")
    return table.markdown()


def classical(found: All) -> str:
    """Makes the table of the classical solvers, at both ratios of computation and communication."""
    made = solvers.groups(runs.of(record) for record in records(found, "solvers"))
    shown = {ratio: each for (ratio, _), each in made.items()}
    columns = []
    for ratio in ("high", "low"):
        what = f"{1000 * solvers.SETUPS[ratio].compute:g} ms of computation a step"
        columns += [f"{what}: steps/s", "loss at the end", f"s to loss {solvers.target(shown[ratio]):.2f}"]
    table = Table(["", *columns])
    for name in solvers.FAMILIES:
        row = [
            cell
            for ratio in ("high", "low")
            for cell in solvers.cells(shown[ratio][name], solvers.target(shown[ratio]))
        ]
        table.add(name, *row)
    return table.markdown()


def codecs(found: All) -> str:
    """Makes the table of loss, accuracy and bytes with each codec, relative to dense gradients, with ranges over
    seeds."""
    made = convergence.groups(runs.of(record) for record in records(found, "convergence"))
    shown = {model: made[model, steps] for model, (steps, _) in convergence.MODELS.items() if (model, steps) in made}
    whats = ("test loss / dense", "from", "to", "right", "bytes / dense", "seeds")
    table = Table(["", *(f"{model}: {what}" for model in shown for what in whats)])
    for codec in convergence.CODECS:
        row: list[str] = []
        for each in shown.values():
            row += _codec_cells(each, codec) if codec in each.codecs else [""] * len(whats)
        if any(row):
            table.add(codec, *row)
    return table.markdown()


def _codec_cells(each: convergence.Runs, codec: str) -> list[str]:
    """Formats the mean over seeds, and the range over seeds of the ratio to dense gradients of the same seed."""
    dense = {run["seed"]: run["curve"][-1][-1] for run in each.codecs["dense"]}
    shares = [run["curve"][-1][-1] / dense[run["seed"]] for run in each.codecs[codec] if run["seed"] in dense]
    loss, accuracy = each.loss(codec) / each.loss("dense"), each.accuracy(codec)
    diverges = math.isnan(loss)
    return [
        "diverges" if diverges else f"{loss:.3f}",
        "" if diverges else f"{min(shares):.3f}",
        "" if diverges else f"{max(shares):.3f}",
        "" if math.isnan(accuracy) else f"{accuracy:.1%}",
        f"{each.nbytes(codec) / each.nbytes('dense'):.1%}",
        str(len(each.codecs[codec])),
    ]


def mixing(found: All) -> str:
    """Makes the table of mixing without gradients."""
    (record,) = records(found, "gossip")
    return gossip.table(record).markdown()


TABLES: dict[str, Callable[[All], str]] = {
    "straggler": slow_worker,
    "networks": slow_networks,
    "gossip": mixing,
    "kfac": second_order,
    "algorithms": losses,
    "solvers": classical,
    "convergence": codecs,
}
