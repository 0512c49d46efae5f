"""Jobs in which both backends of torch.distributed are up on every rank: fusion_rt's, and gloo."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.common import launch
from benchmarks.common.results import Setting

OURS, GLOO = "fusion", "gloo"


@contextlib.contextmanager
def both_backends() -> Iterator[dict[str, Any]]:
    """Yields a group of all ranks for each backend, by its name; ends both."""
    import torch
    import torch.distributed as dist

    import fusion_rt.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    launch.process_group(hvd, OURS)
    yield {OURS: dist.group.WORLD, GLOO: dist.new_group(backend=GLOO)}
    dist.destroy_process_group()
    hvd.shutdown()


def run(setting: Setting, command: Sequence[str]) -> Any:
    """Runs the workers of a setting with this command; returns the result of rank 0."""
    hosts, ranks = int(setting["hosts"]), int(setting["ranks"])
    if hosts == 1:
        return launch.fusionrun(ranks, command)
    rate, variables = setting["rate"], {"FUSION_ENCRYPTION": str(setting["encryption"])}
    limit = None if rate == "unshaped" else str(rate)
    return launch.on_hosts(hosts, limit, command, per_host=ranks // hosts, variables=variables)
