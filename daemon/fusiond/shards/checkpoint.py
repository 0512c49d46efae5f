"""The saved state of a node's homes and clients, which can be loaded into them or into those of a later plan."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np

from fusion_rt.codecs import BucketCodec
from fusion_rt.core.errors import FusionError, WireError
from fusiond.buckets.plans import PlanState
from fusiond.collectives.base import Array
from fusiond.operations.thread_work import Act
from fusiond.shards.history import state_of
from fusiond.shards.hosted_home import HostedHome
from fusiond.shards.messages import open_codec
from fusiond.shards.node import ThisNode
from fusiond.shards.push_pull import PushPullClient, PushPullClients, under_way
from fusiond.shards.server import HomeServer

_Entries: TypeAlias = dict[str, Array]
Then: TypeAlias = Callable[[BaseException | None], None]
"""Called in the event loop, with the exception if something has failed."""


def group_of(state: PlanState) -> tuple[int, str]:
    """Returns the process set and the group of a plan."""
    return state.plan.process_set, state.plan.group


class Checkpoints:
    """Saves and loads state; keeps a loaded state for a plan that is not active yet.

    Args:
        here: this node.
        clients, server: whose state it is.
    """

    def __init__(self, here: ThisNode, clients: PushPullClients, server: HomeServer) -> None:
        self._here = here
        self._clients = clients
        self._server = server
        self._loaded: dict[tuple[int, str], dict[str, Array]] = {}  # by process set and group

    def save(self, plan: int, into: dict[str, Array], then: Then) -> None:
        """Has a thread copy the state of a plan's homes, and what its workers have not sent. No thread may be at work
        for the plan now; none will be before all is copied.

        Args:
            into: gets the copies. The keys begin with `home:BUCKET:RANK:` and `sender:BUCKET:RANK:`.
            then: gets the exception if that fails.
        """
        homes = [hosted for hosted in self._server if hosted.plan.plan.id == plan]
        clients = [client for client in self._clients if client.plan.plan.id == plan]

        def copy() -> None:
            for hosted in homes:
                prefix = f"home:{hosted.bucket.index}:{hosted.home.rank}"
                into.update((f"{prefix}:{key}", value) for key, value in _home_state(hosted).items())
            for client in clients:
                prefix = f"sender:{client.bucket.index}:{client.rank}"
                into.update((f"{prefix}:{key}", value) for key, value in _client_state(client).items())

        if homes or clients:
            self._server.at_all(plan, homes, copy, then)
        else:
            then(None)

    def keep(self, process_set: int, group: str, state: dict[str, Array]) -> None:
        """Keeps a loaded state, which changes no more, for the next plan of a group."""
        self._loaded[process_set, group] = state

    def begin(self, plan: PlanState, then: Then) -> None:
        """Loads the state kept for a plan, if there is one, into it, as it becomes active: see `restore`."""
        loaded = self._loaded.pop(group_of(plan), None)
        if loaded is not None:
            self.restore(plan, loaded, then)

    def remove_set(self, process_set: int) -> None:
        """Forgets what was kept for the plans of a process set."""
        self._loaded = {key: state for key, state in self._loaded.items() if key[0] != process_set}

    def restore(self, plan: PlanState, state: Mapping[str, Array], then: Then) -> None:
        """Loads a saved state, whose arrays become those of homes, into an active plan. A thread opens and loads
        codecs, and nothing is taken in at the plan's homes meanwhile.

        Args:
            then: called in the event loop, with a `FusionError` if the state is of other buckets, or damaged, or
                something is under way. Nothing has changed then.
        """
        try:
            homes, clients = self._owners(plan, state)
        except FusionError as error:
            then(error)
            return
        of_homes: list[HomeCodecs] = []
        of_clients: list[BucketCodec | None] = []

        def load() -> None:
            of_homes.extend(_codecs_of(hosted, entries) for hosted, entries in homes)
            of_clients.extend(_codec_of(client, entries) for client, _, entries in clients)

        def loaded(error: BaseException | None) -> None:
            # They may have posted meanwhile.
            error = error or next((under_way(one) for one, _, _ in clients if one.busy or one.queued), None)
            if error is None:
                for (client, (clock, version), _), codec in zip(clients, of_clients, strict=True):
                    client.clock, client.version, client.codec = clock, version, codec
                for (hosted, entries), of_codecs in zip(homes, of_homes, strict=True):
                    hosted.closed = True
                    work = partial(_restore_home, hosted, entries, of_codecs)
                    self._server.when_free(hosted, partial(self._server.at, hosted, work, math.inf))  # as for a seed
            then(error)

        of_plan = [hosted for hosted in self._server if hosted.plan is plan]
        alone = partial(self._server.at_all, plan.plan.id, of_plan, load, loaded)
        self._here.work.when_quiet(plan.plan.id, alone)

    def _owners(
        self, plan: PlanState, state: Mapping[str, Array]
    ) -> tuple[list[tuple[HostedHome, _Entries]], list[tuple[PushPullClient, list[int], _Entries]]]:
        """Returns the homes of a saved state with their entries, and the clients with their counts and what is of
        their codecs. Raises `WireError` for a state that cannot be loaded now."""
        homes: list[tuple[HostedHome, _Entries]] = []
        clients: list[tuple[PushPullClient, list[int], _Entries]] = []
        for (kind, bucket, rank), entries in _by_owner(state).items():
            address = (plan.plan.id, bucket, rank)
            hosted, client = self._server.get(address), self._clients.get(address)
            if kind == "home" and hosted is not None:
                _check_home(hosted, entries)
                homes.append((hosted, entries))
            elif kind == "sender" and client is not None:
                counts = _counts(entries.pop("counts", None), 2, f"rank {rank} in bucket {bucket}")
                if client.busy or client.queued:
                    raise under_way(client)
                clients.append((client, counts, entries))
            else:
                raise WireError(f"the saved state is of another job: it has the {kind} of bucket {bucket}, rank {rank}")
        return homes, clients


@dataclass
class HomeCodecs:
    """Codecs of a home, as they are restored: its `own`, and of its `answers`, as `HostedHome.encoders`."""

    own: BucketCodec | None = None
    answers: dict[tuple[int, bool], BucketCodec] = field(default_factory=dict)


def _codec_of(client: PushPullClient, entries: _Entries) -> BucketCodec | None:
    """Returns the codec with which a client goes on, if it had one. Raises `FusionError`."""
    moved = entries.pop("moved", None) is not None  # from other buckets, and so not all that this one's codec has
    if not entries:
        return None
    codec = client.opened()
    codec.load_state_dict({key.removeprefix("codec/"): value for key, value in entries.items()}, partial=moved)
    return codec


def _codecs_of(hosted: HostedHome, entries: _Entries) -> HomeCodecs:
    """Takes what codecs remembered out of a home's saved entries, and returns these codecs. Raises `FusionError`.

    What is left out of them is zeros: see `_home_state`.
    """
    taken: dict[str, _Entries] = {}
    for key in [key for key in entries if key.startswith(("codec/", "answers/"))]:
        owner, name = _owner_of(key)
        taken.setdefault(owner, {})[name] = entries.pop(key)
    found = HomeCodecs()
    plan, bucket, home = hosted.plan, hosted.bucket, hosted.home
    for owner, state in taken.items():
        if owner == "codec" and home.codec is not None:
            found.own = opened = open_codec(plan, bucket, home.rank, remembers=False)
        elif (to := _ADDRESSEES.match(owner)) and -1 <= int(to[1]) < home.ranks:
            opened = open_codec(plan, bucket, home.ranks, remembers=to[2] == "added")
            found.answers[int(to[1]), to[2] == "added"] = opened
        else:
            raise WireError(f"the saved state has the codec {owner!r} of bucket {bucket.index}, which has none")
        opened.load_state_dict(opened.state_dict() | state)
    return found


_ADDRESSEES = re.compile(r"answers/(-?\d{1,9})/(added|whole)$")


def _owner_of(key: str) -> tuple[str, str]:
    """Returns the name of a codec in a home's saved state, and that of its entry."""
    parts = key.split("/", 1 if key.startswith("codec/") else 3)
    return "/".join(parts[:-1]), parts[-1]


def _client_state(client: PushPullClient) -> dict[str, Array]:
    state: dict[str, Array] = {"counts": np.array([client.clock, client.version], np.int64)}
    if client.codec is not None:
        state |= {f"codec/{key}": value for key, value in client.codec.state_dict().items()}
    return state


def _home_state(hosted: HostedHome) -> dict[str, Array]:
    """Returns the state of a home: `codec/KEY` is of its own codec, `answers/RANK/added/KEY` (or `whole`) of those of
    what it sends. What ranks have been told is not in it: a rank that goes on from a checkpoint says what it has."""
    home = hosted.home
    state: dict[str, Array] = {
        "version": np.array([home.version], np.int64),
        "done": np.array([home.done[rank] for rank in range(home.ranks)], np.int64),
    }
    if home.codec is not None:
        state |= {f"codec/{key}": value for key, value in _remembered(home.codec)}
    for (position, added), codec in hosted.encoders.items():
        prefix = f"answers/{position}/{'added' if added else 'whole'}"
        state |= {f"{prefix}/{key}": value for key, value in _remembered(codec)}
    return state | state_of(home)


def _remembered(codec: BucketCodec) -> Iterator[tuple[str, Array]]:
    """Yields what a codec remembers, but for zeros: the residuals of one that has none."""
    return ((key, value) for key, value in codec.state_dict().items() if value.any())


def _restore_home(hosted: HostedHome, entries: Mapping[str, Array], of_codecs: HomeCodecs) -> list[Act]:
    home = hosted.home
    value = entries.get("value")
    if value is not None:
        value = value.astype(home.dtype.storage)
        if home.rank < 0:
            hosted.begin(value)
        else:
            home.value = value
    home.version = int(entries["version"][0])
    home.done = dict(enumerate(int(count) for count in entries["done"]))
    home.aux = {key.removeprefix("aux/"): v for key, v in entries.items() if key.startswith("aux/")}
    home.scratch.clear()
    optimizer = {key.removeprefix("optimizer/"): v for key, v in entries.items() if key.startswith("optimizer/")}
    if home.optimizer is not None:
        home.optimizer.load(optimizer)
    home.codec = of_codecs.own or home.codec
    hosted.encoders = of_codecs.answers
    hosted.was_set()
    return [partial(setattr, hosted, "closed", False)]


def _by_owner(state: Mapping[str, Array]) -> dict[tuple[str, int, int], dict[str, Array]]:
    """Returns the entries of a saved state by the kind, bucket and rank of their owner. Raises `WireError`."""
    found: dict[tuple[str, int, int], dict[str, Array]] = {}
    for key, value in state.items():
        kind, of, whose, name = (*key.split(":", 3), "", "", "")[:4]
        if not name or not of.isdecimal() or not whose.removeprefix("-").isdecimal():
            raise WireError(f"{key!r} cannot be in a saved state; it is damaged, or of another program")
        found.setdefault((kind, int(of), int(whose)), {})[name] = value
    return found


def _counts(saved: Array | None, how_many: int, of: str) -> list[int]:
    """Returns so many saved numbers. Raises `WireError` if they are something else."""
    if saved is None or saved.shape != (how_many,) or saved.dtype != np.int64:
        raise WireError(f"the saved state does not have the {how_many} counts of {of}")
    if not all(0 <= count < 2**48 for count in saved.tolist()):
        raise WireError(f"the saved state has the counts {saved.tolist()} of {of}, which cannot be")
    return [int(count) for count in saved]


def _check_home(hosted: HostedHome, entries: Mapping[str, Array]) -> None:
    """Raises `WireError` unless a home can go on from this."""
    home, of = hosted.home, f"the home of bucket {hosted.bucket.index}"
    _counts(entries.get("version"), 1, of)
    _counts(entries.get("done"), home.ranks, of)
    value = entries.get("value")
    if value is not None and value.shape != (home.elements,):
        raise WireError(f"bucket {hosted.bucket.index} has {home.elements} elements, and {value.size} were saved")
    for key, array in entries.items():
        kind, _, name = key.partition("/")
        known = key in ("version", "done", "value") or (name and kind in ("aux", "optimizer", "codec", "answers"))
        if not known or array.dtype.kind not in "iuf":
            raise WireError(f"{key!r} of {of} cannot be in a saved state; it is damaged, or of another program")
