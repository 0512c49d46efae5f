"""Contributions that local workers wait for: told to whoever asks, and ended when their time is up."""

from __future__ import annotations

from fusion_rt import wire
from fusion_rt.wire import OpKey
from fusiond.buckets.plans import PlanState
from fusiond.shards.node import ThisNode
from fusiond.shards.push_pull import PushPullClient, PushPullClients
from fusiond.shards.server import HomeServer


class Waits:
    """The contributions of one node, and its homes.

    Args:
        here: this node.
        clients: of the workers that wait.
        server: the homes here.
    """

    def __init__(self, here: ThisNode, clients: PushPullClients, server: HomeServer) -> None:
        self._here = here
        self._clients = clients
        self._server = server

    def contributions(self) -> list[PushPullClient]:
        """Those whose answers workers wait for."""
        return [client for client in self._clients if client.is_awaited]

    def end(self, client: PushPullClient, why: str) -> None:
        """Tells a worker why it waits no longer, if no thread and no home is at its arena now."""
        if not client.busy and self._server.withdraw(client):
            client.failed = why
            self._clients.fail(client, client.release(), why)

    def under_way(self) -> list[wire.Waiting]:
        """Returns what local ranks wait for at homes, and what the homes here wait for."""
        now, describe = self._here.outside.clock(), self._here.topology.describe
        found = [
            _waiting(client.plan, client.bucket, client.home, now - client.since, submitted=(client.rank,))
            for client in self.contributions()
        ]
        for hosted in self._server:
            if awaits := self._server.awaited(hosted):
                note = (
                    "" if hosted.seeded else f"it has nothing to begin with, which has to come from {describe(awaits)}"
                )
                found.append(
                    _waiting(hosted.plan, hosted.bucket, hosted.home.rank, awaits=awaits, note=note[: wire.MAX_LINE])
                )
        return found


def key_of(state: PlanState, bucket: wire.Bucket, home: int) -> OpKey:
    """The key of what is told of a home; `home`: the position of its rank, or -1."""
    return OpKey(state.plan.process_set, state.plan.id, str(bucket.index), home + 1)


def _waiting(
    state: PlanState,
    bucket: wire.Bucket,
    home: int,
    seconds: float = 0.0,
    submitted: tuple[int, ...] = (),
    awaits: tuple[int, ...] = (),
    note: str = "",
) -> wire.Waiting:
    what = f"bucket {bucket.index} of {state.plan.group!r} at its home"
    if not state.plan.homes:
        what += f" with rank {state.members.set.ranks[home]}"
    key = key_of(state, bucket, home)
    return wire.Waiting("home", key, what[: wire.MAX_LINE], seconds, submitted, awaits, note=note)
