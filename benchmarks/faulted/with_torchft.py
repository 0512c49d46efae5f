"""A worker of `recovery` with torchft: a replica group of one process, which trains until it is killed."""

from __future__ import annotations

import socket
import sys
from datetime import timedelta
from typing import Any

from benchmarks.faulted import notes
from benchmarks.faulted.model import Training


def main() -> None:
    compute, timeout, address = float(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    # torchft tells its peers the name of its host, which all hosts of a netlab share.
    socket.gethostname = lambda: address
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    training = Training(compute)
    training.warm_up()
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])

    seconds = timedelta(seconds=timeout)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=seconds),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()},
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=seconds * 10,
    )
    training.forward = DistributedDataParallel(manager, training.model)
    optimizer = Optimizer(manager, training.optimizer)
    notebook = notes.Notebook()
    notebook.begins()
    while True:
        before = training.fingerprint()
        optimizer.zero_grad()
        training.loss(manager.current_step(), 0).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        notebook.step(manager.current_step(), manager.num_participants(), before, training.fingerprint())


if __name__ == "__main__":
    main()
