"""A worker of the elastic soak: it trains under `hvd.elastic.Manager` on integers, and checks each step by itself.

Its model is made of sums: what all ranks contribute in a step is subtracted, exactly, as these are integers in float64.

- `sums`: each rank gives `part` of its rank and the step, so that a step takes away what `total` says of the ranks
  there were;
- `seen`: each rank gives the number of times that a sample is in its batch, so that it says how often each sample
  counted;
- `votes`: whether a rank wants all to stop;
- `lossy`: floating-point numbers with momentum, which only have to be the same on all ranks.

A codec that has a residual sends only a part of the last ones, and the others whole. So no gradient of a step that is
left out may stay in a residual.

It tells of its steps in a file of its own in the folder of its first argument, a line of JSON each. It gets orders by
files there: `stop`; and of its place, `PLACE.hang` (seconds to hold the GIL), `PLACE.fail` (it raises), `PLACE.die`
(it is killed so many seconds after it has begun to give or get the state).
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fusion_rt.torch as hvd
from fusion_rt.local import elastic
from tests.faults.hanging import hold_gil
from tests.faults.jobs import part, total

SUMS = 20_000  # elements
LOSSY = 40_000
SAMPLES = 2_400  # of an epoch
BATCH = 4
COMMIT_EVERY = 10  # steps
METRIC_EVERY = 7
_BALLAST = 250_000  # elements that a newcomer gets, too
PERIOD = 1009  # of `part`
RESIDUALS = f"topk(density=0.05, minimum={LOSSY}, value='fp32')"


class Model(torch.nn.Module):
    """All parameters, which begin at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = torch.nn.Parameter(torch.zeros(SUMS, dtype=torch.float64))
        self.seen = torch.nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))
        self.votes = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.lossy = torch.nn.Parameter(torch.zeros(LOSSY))
        self.register_buffer("ballast", torch.zeros(_BALLAST))

    def gradients(self, rank: int, step: int, samples: torch.Tensor, stop: bool) -> dict[str, torch.Tensor]:
        """Returns what a rank contributes."""
        noise = torch.Generator().manual_seed(step * 1000 + rank)
        return {
            "sums": torch.from_numpy(part(rank, step, SUMS).astype(np.float64)),
            "seen": torch.bincount(samples, minlength=SAMPLES).double(),
            "votes": torch.tensor([float(stop)], dtype=torch.float64),
            "lossy": torch.randn(LOSSY, generator=noise),
        }


class Notebook:
    """The file in which a worker tells what it does."""

    def __init__(self, folder: Path, place: str) -> None:
        self.place = place
        self._file = (folder / f"{os.getpid()}.notes").open("a", encoding="utf-8", buffering=1)

    def say(self, what: str, **values: Any) -> None:
        agent = elastic.agent()
        about = {"what": what, "at": time.monotonic(), "pid": os.getpid(), "place": self.place}
        epoch = agent.epoch if agent is not None else 0
        self._file.write(json.dumps({**about, "epoch": epoch, **values}) + "\n")


class WatchedState(hvd.elastic.TorchState):
    """A state that tells when a membership epoch begins with it, and may die meanwhile."""

    def __init__(self, worker: Worker, *args: Any, **values: Any) -> None:
        self._worker = worker
        super().__init__(*args, **values)

    def sync(self) -> None:
        self._worker.notebook.say("syncs")
        if seconds := self._worker.order("die"):
            threading.Timer(float(seconds), os.kill, (os.getpid(), signal.SIGKILL)).start()
        super().sync()
        self._worker.notebook.say("synced", step=self.step, digest=self._worker.digest())


class Worker:
    """A worker.

    Args:
        folder: for notes and orders.
        pause: seconds between two steps.
        codec: of the gradients.
    """

    def __init__(self, folder: Path, pause: float, codec: str) -> None:
        self._folder, self._pause = folder, pause
        self.notebook = Notebook(folder, f"{os.environ['HOROVOD_HOSTNAME']}.{os.environ[elastic.SLOT]}")
        self._model = Model()
        model = self._model
        exact = {"params": [model.sums, model.seen, model.votes], "momentum": 0.0}
        optimizer = torch.optim.SGD([exact, {"params": [model.lossy], "momentum": 0.5}], lr=1.0)
        names = model.named_parameters()
        self._optimizer = hvd.DistributedOptimizer(optimizer, names, op=hvd.Sum, compression=codec)
        self._sampler = hvd.elastic.ElasticSampler(range(SAMPLES), seed=1)
        dataset: Any = range(SAMPLES)
        self._loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH, sampler=self._sampler)
        self._state: Any = WatchedState(
            self, model, self._optimizer, sampler=self._sampler, step=0, epoch=0, seen=torch.zeros(SAMPLES).double()
        )

    def run(self) -> None:
        """Trains until all are to stop."""
        state = self._state
        self.notebook.say("arrives")
        with hvd.elastic.Manager(state, commit_every=COMMIT_EVERY) as manager:
            while not self._is_over:
                for samples in manager.batches(self._loader):
                    with manager.step() as step:
                        self._take(samples, step)
                    if self._is_over:
                        break
                else:
                    self._end_epoch()
        sums = -self._model.sums.detach().numpy()
        periodic = bool(np.array_equal(sums, np.resize(sums[:PERIOD], SUMS)))
        self.notebook.say("ends", step=state.step, sums=sums[:PERIOD].tolist(), periodic=periodic, digest=self.digest())

    @property
    def _is_over(self) -> bool:
        return bool(self._model.votes.item())

    def _take(self, samples: torch.Tensor, step: Any) -> None:
        """Takes a step."""
        if seconds := self.order("hang"):
            hold_gil(float(seconds))
        if self.order("fail"):
            raise RuntimeError("this worker was told to fail")
        state, model = self._state, self._model
        rank, size, number = hvd.rank(), hvd.size(), state.step
        before = model.sums.detach().clone(), model.seen.detach().clone()
        given = model.gradients(rank, number, samples, (self._folder / "stop").exists())
        self._optimizer.zero_grad()
        torch.stack(
            [(parameter * given[name]).sum().double() for name, parameter in model.named_parameters()]
        ).sum().backward()
        self._optimizer.step()
        wrong = self._wrong(before, given, size, number, step.counts)
        state.step += step.counts
        self.notebook.say(
            "step", step=state.step, rank=rank, size=size, counts=step.counts, wrong=wrong, digest=self.digest()
        )
        time.sleep(self._pause)
        if number % METRIC_EVERY == 0:
            ranks = hvd.allreduce(torch.tensor(hvd.rank() + 1.0), op=hvd.Sum, name="metric").item()
            if ranks != hvd.size() * (hvd.size() + 1) / 2:
                self.notebook.say("wrong", wrong=f"the sum of ranks of {hvd.size()} is {ranks}")

    def _wrong(
        self, before: tuple[torch.Tensor, torch.Tensor], given: dict[str, torch.Tensor], size: int, number: int,
        counts: bool,
    ) -> str:  # fmt: skip
        """Returns what is wrong with a step, or nothing."""
        sums = (before[0] - self._model.sums.detach()).numpy()
        seen = before[1] - self._model.seen.detach()
        if not counts:
            return "" if not sums.any() and not seen.any() else "a step that does not count changed parameters"
        expected = total(range(size), number, SUMS)
        if not np.array_equal(sums, expected):
            differ = int((sums != expected).sum())
            return f"{differ} of {SUMS} sums over {size} ranks are wrong, the first one by {(sums - expected)[0]}"
        if seen.sum() != size * given["seen"].sum() or (seen < given["seen"]).any():
            return f"{seen.sum()} samples were seen by {size} ranks, and {given['seen'].sum()} by this one"
        return ""

    def _end_epoch(self) -> None:
        """Tells how often each sample of the epoch counted, and begins the next one."""
        state, seen = self._state, -self._model.seen.detach()
        often = seen - state.seen
        repeated = int((often - 1).clamp(min=0).sum())
        self.notebook.say("epoch", done=state.epoch, lost=int((often < 1).sum()), repeated=repeated)
        state.epoch += 1
        state.seen = seen.clone()
        self._sampler.set_epoch(state.epoch)

    def order(self, what: str) -> str:
        """Returns what the file of an order has, which is removed; nothing if there is none."""
        path = self._folder / f"{self.notebook.place}.{what}"
        if not path.exists():
            return ""
        text = path.read_text(encoding="utf-8")
        path.unlink()
        return text

    def digest(self) -> str:
        """Returns a digest of all parameters, and of the optimizer's state."""
        found = hashlib.blake2b(digest_size=8)
        momentum = self._optimizer.state[self._model.lossy].get("momentum_buffer")
        for tensor in (*self._model.parameters(), *([] if momentum is None else [momentum])):
            found.update(tensor.detach().numpy().tobytes())
        return found.hexdigest()


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    Worker(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]).run()


if __name__ == "__main__":
    main()
