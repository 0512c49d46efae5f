"""A worker that joins its job without torch, and tells what its daemons have measured."""

from __future__ import annotations

import os
from dataclasses import dataclass

from fusion_rt.settings import Settings


@dataclass(frozen=True)
class MeasuredLinks:
    """The links of a job.

    Attributes:
        worst: latency (s) and seconds a byte of the worst one.
        ring: the same of a ring in a measured order; None: the worst link is in it.
    """

    worst: tuple[float, float]
    ring: tuple[float, float] | None


def measured_links() -> MeasuredLinks:
    """Joins the job of `fusionrun` that this process is a worker of, and leaves it; all workers have to.

    Raises:
        FusionError: the job did not come up.
    """
    from fusion_rt.client.client import Client  # brings numpy along, which the launcher need not wait for

    environ, settings = os.environ, Settings.from_env()
    client = Client(
        environ["FUSION_SOCKET"], environ["FUSION_JOB_ID"], int(environ["HOROVOD_RANK"]), settings.start_timeout
    )
    welcome = client.welcome
    client.close()
    return MeasuredLinks((welcome.latency, welcome.seconds_per_byte), welcome.ring)
