"""Runs a cell on the ranks of a job, and reports its results."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch

import fusion_rt.torch as hvd
from tests.meetings import cells, reference, scripts
from tests.meetings.cells import Cell
from tests.meetings.scripts import Run


@dataclass(frozen=True)
class Report:
    """The result of a cell on one rank.

    Attributes:
        refused: the sentence, if it was refused.
        weights: after the script, flat.
        agreed: after `hvd.consensus`, flat.
        quality: the loss of that model on points that no rank has trained with.
        complaints: of the script.
    """

    refused: str = ""
    weights: Any = None
    agreed: Any = None
    quality: float = float("nan")
    complaints: tuple[str, ...] = ()


class Real(Run):
    """A rank of fusion_rt."""

    def __init__(self, cell: Cell) -> None:
        self.rank, self.size, self._cell = hvd.rank(), hvd.size(), cell

    def wrap(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module, passes: int = 1) -> Any:
        wrapped = hvd.DistributedOptimizer(
            optimizer,
            model.named_parameters(),
            compression=cells.CODECS[self._cell.codec],
            backward_passes_per_step=passes,
            algorithm=cells.ALGORITHMS[self._cell.algorithm],
            overlap=self._cell.overlap,
        )
        if self._cell.algorithm == "collaborative":
            wrapped.samples = scripts.BATCH
        return wrapped

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


def run(cell: Cell) -> Report:
    """Runs the cell's script. A `ValueError` of the product is a refusal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            training = scripts.SCRIPTS[cell.script].body(Real(cell))
        except ValueError as error:
            return Report(refused=str(error) or type(error).__name__)
        if cell.overlap != "none":
            training.optimizer.synchronize_parameters()
        weights = reference.flat(training.model)
        hvd.consensus(training.optimizer)
        agreed = reference.flat(training.model)
        quality = scripts.quality(training.model)
    return Report("", weights.numpy(), agreed.numpy(), quality, tuple(training.complaints))
