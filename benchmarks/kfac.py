"""Loss by steps with K-FAC, LARS and LAMB beside SGD, each at its best learning rate.

    python -m benchmarks.kfac
    python -m benchmarks.kfac --seeds 1 --steps 10

Two workers train the net of `examples/digits.py` with 128 images a step on each. The best rate of a sweep is the one
with the lowest mean loss of the last ten steps, over all seeds.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.common import arguments as shared
from benchmarks.common import launch, results
from benchmarks.common.results import Measure, Record
from benchmarks.common.tables import Table

NAME = "kfac"
RESULTS = results.RESULTS / "kfac.json"
SGD, KFAC, LARS, LAMB = "SGD", "SGD with K-FAC", "LARS", "LAMB"
RATES = {
    SGD: (0.03, 0.1, 0.3),
    KFAC: (0.03, 0.1, 0.3),
    LARS: (1.0, 3.0, 10.0),
    LAMB: (0.003, 0.01, 0.03),
}
STEPS = "steps to the loss"
LEVELS = (0.5, 0.2, 0.1)
BATCH = 128  # on each rank


def curve(method: str, rate: float, seed: int, steps: int) -> list[float]:
    """Trains; returns the mean loss of all ranks in each step."""
    import torch
    import torch.nn.functional as F

    import fusion_rt.torch as hvd
    from examples import digits
    from fusion_rt.torch import kfac, large_batch

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    images, labels = digits.load()[0].tensors
    model = digits.make_model()
    optimizer: Any
    if method == LARS:
        optimizer = large_batch.LARS(model.parameters(), rate)
    elif method == LAMB:
        optimizer = large_batch.LAMB(model.parameters(), rate)
    else:
        optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    preconditioner = kfac.KFAC(model, lr=rate) if method == KFAC else None
    generator = torch.Generator().manual_seed(seed * hvd.size() + hvd.rank())
    losses = []
    for _ in range(steps):
        chosen = torch.randint(len(images), (BATCH,), generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[chosen]), labels[chosen])
        loss.backward()  # type: ignore[no-untyped-call]
        if preconditioner is not None:
            preconditioner.step()
        optimizer.step()
        losses.append(float(hvd.allreduce(loss.detach(), name="loss")))
    if preconditioner is not None:
        preconditioner.remove()
    return losses


def worker(seeds: int, steps: int) -> None:
    """Trains with all methods, rates and seeds on each rank; rank 0 prints the curves."""
    import fusion_rt.torch as hvd

    hvd.init()
    found: dict[str, dict[str, list[list[float]]]] = {}
    for method, rates in RATES.items():
        for rate in rates:
            curves = [curve(method, rate, seed, steps) for seed in range(seeds)]
            found.setdefault(method, {})[f"{rate:g}"] = curves
    if hvd.rank() == 0:
        launch.tell(found)


def best(of_rates: dict[str, list[list[float]]]) -> tuple[str, list[list[float]]]:
    """Returns the best learning rate of a method, and its curves."""

    def last(curves: list[list[float]]) -> float:
        value = statistics.fmean(loss for each in curves for loss in each[-10:])
        return value if value == value else float("inf")

    return min(of_rates.items(), key=lambda item: last(item[1]))


def steps_to(level: float, losses: list[float]) -> float:
    """Returns the number of steps after which the mean of three losses is at most so high; infinite if it never is."""
    for end in range(3, len(losses) + 1):
        if statistics.fmean(losses[end - 3 : end]) <= level:
            return end
    return float("inf")


def record(found: dict[str, Any], begun: tuple[Any, str]) -> Record:
    """Makes the record of the curves."""
    chosen = {method: best(of_rates) for method, of_rates in found.items()}
    measures = []
    for level in LEVELS:
        samples = {method: [steps_to(level, each) for each in curves] for method, (_, curves) in chosen.items()}
        if all(value != float("inf") for values in samples.values() for value in values):
            measures.append(Measure(f"{STEPS} {level:g}", "", samples, peer=SGD, portable=True))
    details = {
        method: {"rate": rate, "curves": [results.rounded(each) for each in curves]}
        for method, (rate, curves) in chosen.items()
    }
    return Record({"ranks": 2, "batch": 2 * BATCH}, measures, begun[0], begun[1], results.command_line(), details)


def table(record: Record) -> Table:
    """Makes a table with a row for each method."""
    made = Table(["", "learning rate", *(f"steps to a loss of {level:g}" for level in LEVELS), "loss in the end"])
    for method, of_method in record.details.items():
        cells = []
        for level in LEVELS:
            middle = statistics.median(steps_to(level, each) for each in of_method["curves"])
            cells.append("never" if middle == float("inf") else f"{middle:.0f}")
        end = statistics.median(statistics.fmean(each[-10:]) for each in of_method["curves"])
        made.add(method, of_method["rate"], *cells, f"{end:.3f}")
    return made


def main() -> None:
    """Runs what the command line asks for."""
    parser = shared.parser(NAME, __doc__)
    parser.add_argument("--seeds", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="of each run (%(default)s)")
    shared.add_out(parser, RESULTS)
    shared.add_worker(parser)
    options = parser.parse_args()
    if options.worker:
        worker(options.seeds, options.steps)
        return
    begun = results.begin()
    arguments = ["-m", "benchmarks.kfac", "--worker", "--seeds", str(options.seeds), "--steps", str(options.steps)]
    made = record(launch.fusionrun(2, arguments), begun)
    results.keep(options.out, NAME, made)
    table(made).show()


if __name__ == "__main__":
    main()
