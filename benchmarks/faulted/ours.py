"""A worker of `recovery` with fusion_rt: it trains in `hvd.elastic.run` until it is killed."""

from __future__ import annotations

import os
import sys
from typing import Any

import fusion_rt.torch as hvd
from benchmarks.faulted import notes
from benchmarks.faulted.model import Training
from fusion_rt.local import elastic


def main() -> None:
    compute, commit_every = float(sys.argv[1]), int(sys.argv[2])
    hvd.init()
    os.environ[notes.PLACE] = f"{os.environ['HOROVOD_HOSTNAME']}.{os.environ[elastic.SLOT]}"
    notebook = notes.Notebook()
    training = Training(compute)
    training.warm_up()
    optimizer = hvd.DistributedOptimizer(training.optimizer, named_parameters=training.model.named_parameters())
    state: Any = hvd.elastic.TorchState(training.model, optimizer, step=0)

    @hvd.elastic.run
    def train(state: Any) -> None:
        notebook.begins()
        while True:
            before = training.fingerprint()
            optimizer.zero_grad()
            training.loss(state.step, hvd.rank()).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            state.step += 1
            notebook.step(state.step, hvd.size(), before, training.fingerprint())
            if state.step % commit_every == 0:
                state.commit()

    train(state)


if __name__ == "__main__":
    main()
