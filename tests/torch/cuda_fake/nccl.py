"""A made-up NCCL for the made-up GPU: each operation runs on a stream of its own, and gloo moves what it is given."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tests.torch.cuda_fake.streams import FakeStream, Gpus, Marker


class FakeWork:
    """Stands for an operation's work."""

    def __init__(self, gpus: Gpus, end: Marker) -> None:
        self._gpus, self._end = gpus, end

    def wait(self) -> None:
        """Has the current stream wait."""
        self._gpus.current_stream().queue.append(self._end)

    def is_completed(self) -> bool:
        self._gpus.tick(asked=True)
        return self._end.reached


class MadeUpNccl:
    """Combines on a stream of its own, which waits for the current one, as NCCL does. What is under way when it is
    aborted ends, and leaves whatever there is."""

    class Options:
        _timeout: timedelta

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, options._timeout)
        self._stream = FakeStream()

    def _queued(self, run: Callable[..., Any], *tensors: Any) -> FakeWork:
        gpus, inner = FakeStream.gpus, [tensor.inner for tensor in tensors]

        def combine() -> None:
            gloo = self._gloo
            try:
                if gloo is not None:
                    run(gloo, *inner).wait()
            except RuntimeError:
                self._gloo = None  # another rank has ended it: NCCL would wait until this one does, too

        self._stream.wait_stream(gpus.current_stream())
        with gpus.stream(self._stream):
            gpus.queue(combine)
        return FakeWork(gpus, self._stream.mark())

    def allreduce(self, tensors: Any, options: Any) -> FakeWork:
        return self._queued(lambda gloo, tensor: gloo.allreduce([tensor], options), *tensors)

    def reduce(self, tensors: Any, options: Any) -> FakeWork:
        return self._queued(lambda gloo, tensor: gloo.reduce([tensor], options), *tensors)

    def _reduce_scatter_base(self, output: Any, given: Any, options: Any) -> FakeWork:
        return self._queued(lambda gloo, to, source: gloo._reduce_scatter_base(to, source, options), output, given)

    def _allgather_base(self, output: Any, given: Any, options: Any) -> FakeWork:
        return self._queued(lambda gloo, to, source: gloo._allgather_base(to, source, options), output, given)

    def shutdown(self) -> None:
        self._gloo = None

    abort = shutdown
