"""A worker without torch, so that a test can afford several: joins its job, adds up a number, and says what it saw.

Among that is what all processes of its host listen on, as a firewall in front of the host sees it.
"""

from __future__ import annotations

import json

import psutil

from fusion_rt.launchers import autostart, environment, rendezvous
from fusion_rt.settings import Settings
from fusion_rt.wire import Signature


def main() -> None:
    where = environment.detect()
    client, _ = autostart.join(where, Settings.from_env(), rendezvous.open_store)
    operation = client.submit("x", Signature("allreduce", "uint8", (1,)), inline=bytes([where.rank + 1]))
    total = client.wait(operation).inline
    sockets = psutil.net_connections("inet")
    listening = sorted({tuple(each.laddr) for each in sockets if each.status == psutil.CONN_LISTEN})
    found = {
        "rank": where.rank,
        "total": list(total or b""),
        "ranks": client.topology.ranks,
        "job": where.job,
        "listening": listening,
    }
    print(json.dumps(found), flush=True)
    client.close()


main()
