"""The ring of a daemon, and records of its engine and mesh that take more than a line.

The names are those that workers use: `bucket 3` for the bucket "3" of a plan.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from fusion_rt import algorithms, wire
from fusion_rt.core.dtypes import DTYPES
from fusion_rt.host import bootstrap
from fusion_rt.settings import Settings
from fusion_rt.tracing import files
from fusion_rt.tracing.format import NOBODY, Kind, Role
from fusion_rt.tracing.recorder import Instrument, Owner, Record, Recorder, open_recorder
from fusion_rt.wire import OpKey

Job: TypeAlias = Callable[[], None]
PUSH_PULL = "PUSH_PULL"  # the operation of a plan whose contributions are answered one by one
_log = logging.getLogger("fusiond")


class Trace:
    """A daemon's `Instrument`, which writes to its ring, and removes the rings of the oldest jobs.

    Where nothing is to be recorded, or cannot be, there is no ring until `recorder` makes one.
    """

    record: Record

    def __init__(self, config: bootstrap.DaemonConfig, settings: Settings) -> None:
        try:
            files.begin_job(settings.trace_root(), config.job)
        except OSError as error:
            _log.warning("records of earlier jobs in %s cannot be removed: %s", settings.trace_root(), error.strerror)
        node, hosts = config.node, config.topology.hosts
        self._owner = Owner(config.job, Role.DAEMON, node, node, len(hosts), hosts[node])
        self._nbytes = settings.trace_buffer
        self._directory = bootstrap.job_directory(settings.runtime_root(), config.job, config.node, config.serial)
        self._use(open_recorder(settings, self._owner, _log.warning))

    def recorder(self) -> Recorder:
        """Returns the ring; if there is none yet, makes one without a name, which ends with this process.

        Raises:
            OSError: it cannot be made.
        """
        if not isinstance(self._instrument, Recorder):
            recorder = Recorder(os.path.join(self._directory, self._owner.file_name), self._owner, self._nbytes)
            os.unlink(recorder.path)
            self._use(recorder)
            return recorder
        return self._instrument

    def number(self, text: str) -> int:
        """See `Instrument`."""
        return self._instrument.number(text)

    def close(self) -> None:
        """Ends recording."""
        self._instrument.close()
        self.record = self._instrument.record

    def _use(self, instrument: Instrument) -> None:
        self._instrument = instrument
        self.record = instrument.record


class About(NamedTuple):
    """An operation, or a bucket's home, as records have it."""

    name: str = ""
    clock: int = 0
    plan: int = 0


def about_key(key: OpKey) -> About:
    """Returns an operation as records have it."""
    return About(f"bucket {key.name}" if key.plan else key.name, key.clock, key.plan)


def about(message: wire.Chunk | wire.Piece | wire.Probe) -> About:
    """Returns the operation or home that a message with a payload belongs to."""
    if isinstance(message, wire.Chunk):
        return about_key(message.key)
    if isinstance(message, wire.Piece):
        return About(f"bucket {message.bucket}", message.clock, message.plan)
    return About()


def record_plan(trace: Instrument, plan: wire.Plan) -> None:
    """Records a plan, its buckets, and the tensors in them."""
    trace.record(Kind.PLAN, plan.group, plan.nbytes, trace.number(_operation(plan)), plan.id, len(plan.buckets))
    for bucket in plan.buckets:
        itemsize = DTYPES[bucket.dtype].itemsize
        trace.record(Kind.BUCKET, f"bucket {bucket.index}", bucket.numel * itemsize, 0, plan.id, bucket.index)
        for tensor in bucket.tensors:
            shape = trace.number(f"{bucket.dtype} {list(tensor.shape)}")
            trace.record(Kind.MEMBER, tensor.name, tensor.numel * itemsize, shape, plan.id, bucket.index)


def record_tensor(trace: Instrument, name: str, signature: wire.Signature) -> None:
    """Records a tensor outside a plan: its dtype and shape, and its operation in Horovod's words."""
    kind = signature.kind
    text = "JOIN" if kind == "join" else "BARRIER"  # there are other operations without data, which Horovod has not
    if signature.dtype:
        op = "ADASUM" if signature.op == "adasum" and kind == "allreduce" else kind.upper()
        text = f"{op} {signature.dtype} {list(signature.shape)}"
    trace.record(Kind.TENSOR, name, 0, trace.number(text))


def _operation(plan: wire.Plan) -> str:
    """Returns a plan's operation in Horovod's words, or `PUSH_PULL`, which Horovod has not."""
    op = "ADASUM" if plan.reduction.op == "adasum" else "ALLREDUCE"
    if algorithms.parse(plan.reduction.algorithm).at_homes:
        op = PUSH_PULL
    return f"{op} (process set {plan.process_set})" if plan.process_set else op


def recorded_jobs(
    jobs: Iterable[Job], trace: Instrument, what: About, nbytes: int, peer: int = NOBODY
) -> Sequence[Job]:
    """Returns jobs that reduce, each recorded by the thread that runs it. `nbytes`: read by all of them together;
    `peer`: the node whose chunk it is."""
    jobs = tuple(jobs)
    return [partial(_do, job, trace, what, nbytes // len(jobs), peer) for job in jobs]


def _do(job: Job, trace: Instrument, what: About, nbytes: int, peer: int) -> None:
    trace.record(Kind.REDUCE_BEGIN, what.name, nbytes, what.clock, what.plan, 0, peer)
    job()
    trace.record(Kind.REDUCE_END, what.name, nbytes, what.clock, what.plan, 0, peer)
