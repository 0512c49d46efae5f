"""Runs a cell on the ranks of a job, and reports its results."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import fusion_rt.torch as hvd
from tests.meetings import cells, scripts
from tests.meetings.cells import Cell
from tests.meetings.scripts import Run

EVEN = ("allreduce", "bsp", "local_sgd", "diloco")  # all ranks take the same number of steps (docs/algorithms.md)


@dataclass(frozen=True)
class Report:
    """The result of a cell on one rank.

    Attributes:
        refused: the sentence, if it was refused.
        weights: after the script, flat.
        agreed: after `hvd.consensus`, flat.
        quality: the loss of that model on points that no rank has trained with.
        complaints: of the script.
        notes: numbers for the judge of a property, by name.
        node: on which this rank is.
        counted: what this node's daemon has counted of compression (`hvd.compression_stats`).
        residual: what this node's codecs have not sent, by parameter, flat; where that is judged.
    """

    refused: str = ""
    weights: Any = None
    agreed: Any = None
    quality: float = float("nan")
    complaints: tuple[str, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)
    node: int = 0
    counted: Mapping[str, float] = field(default_factory=dict)
    residual: Mapping[str, Any] = field(default_factory=dict)


class Real(Run):
    """A rank of fusion_rt."""

    def __init__(self, cell: Cell) -> None:
        self.rank, self.size, self._cell = hvd.rank(), hvd.size(), cell
        self.optimizer, self.rates = cell.optimizer, cell.rates
        self.even = cell.algorithm.partition(",")[0] in EVEN
        self._wrapped: list[Any] = []

    def wrap(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module, passes: int = 1) -> Any:
        wrapped = hvd.DistributedOptimizer(
            optimizer,
            model.named_parameters(),
            compression=cells.CODECS[self._cell.codec],
            backward_passes_per_step=passes,
            algorithm=self._cell.chosen,
            overlap=self._cell.overlap,
        )
        if self._cell.algorithm == "collaborative":
            wrapped.samples = scripts.BATCH
        self._wrapped.append(wrapped)
        return wrapped

    def leave(self) -> None:
        """Waits for what is under way after a refusal. In the next cell of this job it would count as a wait of this
        rank in another operation, and neighbours that are ahead would mix without it (docs/algorithms.md)."""
        for wrapped in self._wrapped:
            wrapped._schedule.discard()

    def backward(self, loss: torch.Tensor, optimizer: Any) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def barrier(self) -> None:
        hvd.barrier()

    def mean(self, value: float) -> float:
        return float(hvd.allreduce(torch.tensor(value, dtype=torch.float64)))

    def join(self) -> None:
        hvd.join()

    def reseed(self, optimizer: Any) -> None:
        optimizer.reseed()

    def synchronize(self, optimizer: Any) -> None:
        if self._cell.overlap != "none":
            optimizer.synchronize_parameters()

    def consensus(self, optimizer: Any) -> None:
        hvd.consensus(optimizer)


def run(cell: Cell) -> Report:
    """Runs the cell's script. A `ValueError` of the product is a refusal."""
    before = hvd.compression_stats() if cell.encodes else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rank = Real(cell)
        try:
            training = scripts.SCRIPTS[cell.script].body(rank)
        except ValueError as error:
            rank.leave()
            return Report(refused=str(error) or type(error).__name__)
        if cell.overlap != "none":
            training.optimizer.synchronize_parameters()
        weights = scripts.flat(training.model)
        hvd.consensus(training.optimizer)
        agreed = scripts.flat(training.model)
        quality = scripts.quality(training.model)
        residual = _residual(training) if "given" in training.notes else {}
    return Report(
        weights=weights.numpy(),
        agreed=agreed.numpy(),
        quality=quality,
        complaints=tuple(training.complaints),
        notes={name: value.numpy() for name, value in training.notes.items()},
        node=hvd.cross_rank(),
        counted=_counted(before) if cell.encodes else {},
        residual=residual,
    )


def _counted(before: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Returns what was counted of the optimizers that were made since."""
    found: Counter[str] = Counter()
    for name, counts in hvd.compression_stats().items():
        if name != "total" and name not in before:
            found.update(counts)
    return dict(found)


def _residual(training: scripts.Training) -> dict[str, Any]:
    """Returns the residual of this node, by parameter, flat. It lies in memory as the parameter does."""
    state = training.optimizer.state_dict()["fusion_rt"]["state"]
    marked = {
        key.partition(":residual/")[2]: torch.as_tensor(value) for key, value in state.items() if ":residual/" in key
    }
    return {
        name: marked[name].as_strided(parameter.shape, parameter.stride()).reshape(-1).double().numpy()
        for name, parameter in training.model.named_parameters()
    }
