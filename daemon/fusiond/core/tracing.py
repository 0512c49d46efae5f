"""What an engine and its mesh record, where it takes more than a line.

The names are those that workers use: `bucket 3` for the bucket "3" of a plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from fusion_rt import bootstrap, trace_files, wire
from fusion_rt.dtypes import DTYPES
from fusion_rt.settings import Settings
from fusion_rt.trace import Instrument, Owner, open_recorder
from fusion_rt.trace_format import Kind, Role
from fusion_rt.wire import OpKey

Job: TypeAlias = Callable[[], None]
_log = logging.getLogger("fusiond")


def open_ring(config: bootstrap.DaemonConfig, settings: Settings) -> Instrument:
    """A daemon's ring, in the place of those of jobs that were too long ago."""
    try:
        trace_files.begin_job(settings.trace_root(), config.job, settings.trace_jobs)
    except OSError as error:
        _log.warning("records of earlier jobs in %s cannot be removed: %s", settings.trace_root(), error.strerror)
    owner = Owner(config.job, Role.DAEMON, config.node, config.node, len(config.topology.hosts))
    return open_recorder(settings, owner, _log.warning)


class About(NamedTuple):
    """An operation, or a bucket's home, as records have it."""

    name: str = ""
    clock: int = 0
    plan: int = 0


def about_key(key: OpKey) -> About:
    """An operation."""
    return About(f"bucket {key.name}" if key.plan else key.name, key.clock, key.plan)


def about(message: wire.Chunk | wire.Piece | wire.Probe) -> About:
    """What a message with a payload is about."""
    if isinstance(message, wire.Chunk):
        return about_key(message.key)
    if isinstance(message, wire.Piece):
        return About(f"bucket {message.bucket}", message.clock, message.plan)
    return About()


def record_plan(trace: Instrument, plan: wire.Plan) -> None:
    """A plan, its buckets, and what is in them."""
    trace.record(Kind.PLAN, plan.group, plan.nbytes, 0, plan.id, len(plan.buckets))
    for bucket in plan.buckets:
        itemsize = DTYPES[bucket.dtype].itemsize
        trace.record(Kind.BUCKET, f"bucket {bucket.index}", bucket.numel * itemsize, 0, plan.id, bucket.index)
        for tensor in bucket.tensors:
            trace.record(Kind.MEMBER, tensor.name, tensor.numel * itemsize, 0, plan.id, bucket.index)


def recorded_jobs(jobs: Iterable[Job], trace: Instrument, what: About, nbytes: int) -> Sequence[Job]:
    """Jobs that reduce, each recorded by the thread that does it. `nbytes`: what all of them read."""
    jobs = tuple(jobs)
    return [partial(_do, job, trace, what, nbytes // len(jobs)) for job in jobs]


def _do(job: Job, trace: Instrument, what: About, nbytes: int) -> None:
    trace.record(Kind.REDUCE_BEGIN, what.name, nbytes, what.clock, what.plan)
    job()
    trace.record(Kind.REDUCE_END, what.name, nbytes, what.clock, what.plan)
