"""The daemon's words about itself: status, figures and log."""

from __future__ import annotations

import heapq
import logging
import os
import resource
import sys
import time
from operator import attrgetter
from typing import TYPE_CHECKING

from fusion_rt import __version__, wire
from fusion_rt.host import bootstrap
from fusion_rt.settings import Settings
from fusion_rt.tracing import resident_memory
from fusiond.host.log_writer import LogWriter
from fusiond.membership.epoch import Membership

if TYPE_CHECKING:
    from fusiond.engine.engine import Engine
    from fusiond.transport.mesh import Mesh


def state_of(failure: str, membership: Membership) -> str:
    """Returns the state of a daemon in one word."""
    return "failed" if failure else "running" if membership.started else "starting"


def role_of(config: bootstrap.DaemonConfig, settings: Settings) -> str:
    """Returns the role of a node: `worker`, `shard`, or `worker and shard` where shard hosts were named."""
    if not config.topology.ranks[config.node]:
        return "shard"
    is_shard = bool(settings.shard_hosts) and config.node in config.topology.homes(settings.shard_hosts)
    return "worker and shard" if is_shard else "worker"


def identity(
    config: bootstrap.DaemonConfig, settings: Settings, membership: Membership, failure: str, began: float
) -> dict[str, object]:
    """Returns a daemon's identity, workers and used resources; `began`: its start by the monotonic clock (s)."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    topology = config.topology
    return {
        "version": __version__,
        "job": config.job,
        "pid": os.getpid(),
        "node": config.node,
        "host": topology.hosts[config.node],
        "nodes": len(topology.hosts),
        "size": topology.size,
        "role": role_of(config, settings),
        "ranks": list(membership.local),
        "joined": sorted(membership.joined),
        "left": sorted(membership.left),
        "formation": wire.formation_of(membership.epoch),
        "epoch": membership.epoch % wire.EPOCHS_OF_A_FORMATION,
        "state": state_of(failure, membership),
        "failure": failure,
        "uptime_seconds": round(time.monotonic() - began, 3),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 3),
    }


def figures(
    asked: wire.FiguresRequest, engine: Engine, mesh: Mesh | None, membership: Membership, failure: str, began: float
) -> wire.Figures:
    """Returns a daemon's present figures, as it was asked; `began`: its start by the monotonic clock (s)."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    operations, nbytes, under_way = engine.counts()
    dense, packed = engine.sent_bytes()
    staleness = engine.homes.meters.version_lag
    ranks = [wire.RankFigures(rank, each.steps, each.parts, each.late) for rank, each in engine.progress.items()]
    links = () if mesh is None else mesh.figures()
    return wire.Figures(
        asked.serial,
        os.getpid(),
        state_of(failure, membership),
        failure[: wire.MAX_LINE],
        time.monotonic() - began,
        usage.ru_utime + usage.ru_stime,
        resident_memory.nbytes(),
        operations,
        nbytes,
        under_way,
        dense,
        packed,
        staleness.count,
        staleness.mean,
        tuple(heapq.nlargest(asked.ranks, ranks, key=attrgetter("late_seconds"))),
        tuple(heapq.nlargest(asked.links, links, key=attrgetter("lost", "sent_bytes"))),
        max(len(ranks) - asked.ranks, 0),
        max(len(links) - asked.links, 0),
    )


def configure_logging(level: str, timestamp: bool) -> None:
    """Logs to standard error, one line a message, from `level` on; `timestamp`: each begins with the time."""
    names = {"TRACE": "DEBUG", "FATAL": "CRITICAL"}
    logging.basicConfig(
        handlers=[LogWriter(sys.stderr.fileno())],
        level=names.get(level, level),
        format=("%(asctime)s " if timestamp else "") + "fusiond[%(process)d] %(levelname)s: %(message)s",
    )
