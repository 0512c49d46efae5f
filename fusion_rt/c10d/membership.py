"""This worker's membership of a job, for `torch.distributed`: joined with its first process group, left with its last.

The process group of all workers joins the job. Under `fusionrun` that is its job; otherwise the workers meet in the
store that torch has opened, however the script was started, and each node's first one starts the daemon. Where
`hvd.init()` has joined already, or does afterwards, there is one job for both.

Every process group is a group of the daemon's, which only its members know. All of them have opened it before any of
them uses it: they count in the store. Groups end with the membership in which they were made: in an elastic job another
one follows, with groups of its own.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import DistNetworkError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from fusion_rt.c10d.completion import Completer
from fusion_rt.c10d.failing import CollectiveError, explained, heed
from fusion_rt.c10d.flight_record import FlightDumps
from fusion_rt.core.errors import FusionError, HorovodInternalError
from fusion_rt.host.bootstrap import make_private_directory
from fusion_rt.launchers import environment
from fusion_rt.launchers.entries import name_ranks
from fusion_rt.launchers.environment import Environment
from fusion_rt.launchers.meeting import Meeting
from fusion_rt.local import elastic
from fusion_rt.settings import Settings
from fusion_rt.torch.core import basics
from fusion_rt.torch.core.recording import ScriptSteps
from fusion_rt.torch.core.rendezvous import TorchStore
from fusion_rt.torch.core.runtime import Runtime, is_initialized, leave, runtime

_SCOPE = "fusion"  # first part of the keys in torch's store
_SLICE = 1.0  # seconds of one wait in a store, which cannot be ended


class Member:
    """This worker's membership, as process groups use it.

    Attributes:
        here: the membership.
        completer: completes futures.
        dumps: has the last operations, and writes them to a file.
        groups: those that are open.
    """

    def __init__(self, here: Runtime, joined: bool, store: Store) -> None:
        self.here = here
        self.completer = Completer(here.client.channel)
        membership = f"{here.client.job}/{here.client.welcome.epoch}"
        self.dumps = FlightDumps(store, membership, here.rank, here.size)
        self.groups: set[JoinedGroup] = set()
        self._steps = ScriptSteps(here.trace)
        self._joined = joined  # by this module, and not by hvd.init
        self._excepthook = sys.excepthook  # init_process_group puts another one around it

    def leave(self) -> None:
        """Leaves the job, if this module has joined it."""
        if getattr(sys.excepthook, "__qualname__", "").startswith(dist.init_process_group.__name__):
            sys.excepthook = self._excepthook
        self.dumps.close()
        self._steps.close()
        if self._joined and is_initialized() and runtime() is self.here:
            basics.shutdown() if self.here.where.socket else leave()
        self.completer.close()


class JoinedGroup:
    """A group of the daemon's that all its members have opened.

    Attributes:
        here: this worker's membership.
        completer: completes futures.
        recorder: has the last operations of all groups.
        id: of the group, in messages.
        rank: this worker's position in it.
        size: number of members.
        ranks: of the members in the job, by position.
        store: in which the members met.
    """

    def __init__(self, member: Member, id: int, rank: int, ranks: Sequence[int], store: Store, scope: str) -> None:
        self.here = member.here
        self.completer = member.completer
        self.recorder = member.dumps.recorder
        self.id = id
        self.rank = rank
        self.size = len(ranks)
        self.ranks = tuple(ranks)
        self.store = store
        self._scope = scope  # of this group's keys in the store
        self._member: Member | None = member
        member.groups.add(self)

    def store_for(self, purpose: str) -> Store:
        """Returns a store of this group's own, the same on all members."""
        return PrefixStore(f"{self._scope}.{purpose}", self.store)

    def open_among(self, name: str, positions: Sequence[int], timeout: timedelta) -> JoinedGroup:
        """Opens a group of some members, of which this worker is one, together with them. Raises as `open_group`."""
        if self._member is None:
            raise FusionError("the process group has been destroyed")
        ranks = [self.ranks[position] for position in positions]
        return _opened(self._member, self.store_for(name), name, list(positions).index(self.rank), ranks, timeout)

    def abort(self) -> None:
        """Ends the group as `close` does; where dumps are wanted, this rank and all others write theirs before."""
        if self._member is not None:
            self._member.dumps.write_everywhere()
        self.close()

    def close(self) -> None:
        """Ends the group; with the last one this worker leaves the job."""
        member, self._member = self._member, None
        if member is None:
            return
        client = self.here.client
        with contextlib.suppress(HorovodInternalError):  # the job has failed, and the group with it
            client.close_group(self.id)
        member.groups.discard(self)
        if not member.groups:
            _forget(member)
            member.leave()


_member: Member | None = None


def _forget(member: Member) -> None:
    global _member
    if _member is member:
        _member = None


def dump_flight_record(path: str | os.PathLike[str] | None = None) -> Path:
    """Writes the last operations of this process's groups to a file that torch's analyser reads, and returns its path.

    Args:
        path: of the file; None: where `TORCH_FR_DUMP_TEMP_FILE` says, else `~/.cache/torch/comm_lib_trace_rank_`, with
            the rank behind it.

    Raises:
        FusionError: this worker is in no process group of the backend fusion, or nothing is recorded: neither
            `TORCH_FR_BUFFER_SIZE` nor `TORCH_FR_DUMP_TEMP_FILE` was set when the group of all was made.
        OSError: the file cannot be written.
    """
    return _member_of_job().dumps.write(path)


def open_group(
    store: Store, name: str, rank: int, size: int, ranks: tuple[int, ...], timeout: timedelta
) -> JoinedGroup:
    """Opens a process group together with all its members, and joins the job first if this is the group of all.

    Args:
        store: of the group; its members alone use it.
        name: of the group, the same on all members.
        rank, size: of this worker in the group.
        ranks: of the members in the job, by position; empty: it is the group of all.
        timeout: for all members to come; to the group of all, they have HOROVOD_START_TIMEOUT at least.

    Raises:
        FusionError: not all members came in time, or this worker has another place in the job than the script says.
        CollectiveError: the job has failed meanwhile, or its membership in an elastic job.
    """
    member = _joined(store, rank, size, timeout) if not ranks else _member_of_job()
    try:
        return _opened(member, store, name, rank, ranks or tuple(range(size)), timeout)
    except BaseException:
        if not member.groups:
            _forget(member)
            member.leave()
            forget_name()
        raise


def _opened(
    member: Member, store: Store, name: str, rank: int, ranks: Sequence[int], timeout: timedelta
) -> JoinedGroup:
    """Opens a group together with its other members, as one of which this worker counts itself in the store."""
    client = member.here.client
    opening = Opening(store, f"{_SCOPE}/{client.job}/{client.welcome.epoch}/group", name, rank, ranks, timeout)
    try:
        client.check()
        key = heed(client, opening.agree)
        opened = JoinedGroup(member, client.open_group(f"{name}.{key}", ranks), rank, ranks, store, opening.scope)
        try:
            heed(client, opening.complete)
        except BaseException:
            opened.close()
            raise
    except CollectiveError:
        raise
    except HorovodInternalError as error:
        raise CollectiveError(explained(client.channel, str(error))) from None
    finally:
        opening.is_over = True
    return opened


class Opening:
    """The members of a group that open it, in the store. It waits for them; on a thread, so that somebody can look at
    the job meanwhile.

    Args:
        store, name, rank, ranks, timeout: see `open_group`.
        scope: of the keys of such groups.

    Attributes:
        scope: of this group's keys, once members have agreed.
        is_over: the answer is not waited for any more.
    """

    def __init__(
        self, store: Store, scope: str, name: str, rank: int, ranks: Sequence[int], timeout: timedelta
    ) -> None:
        self.scope = scope
        self.is_over = False
        self._store, self._name, self._rank, self._ranks, self._timeout = store, name, rank, ranks, timeout

    def agree(self) -> str:
        """Returns the first member's choice of a text that no other group has."""
        store, size = self._store, len(self._ranks)
        number = (store.add(f"{self.scope}.openings", 1) - 1) // size  # a store may outlive the group
        self.scope = f"{self.scope}.{number}"
        store.set(f"{self.scope}.{self._rank}", "coming")
        if self._rank == 0:
            store.set(f"{self.scope}.key", secrets.token_hex(8))
        self._await(f"{self.scope}.key")
        return store.get(f"{self.scope}.key").decode()

    def complete(self) -> None:
        """Returns when all members have opened it; for the first one, which may serve the store and end now, when all
        know that."""
        self.count("complete")
        self._await(f"{self.scope}.complete")
        self.count("known")
        if self._rank == 0:
            self._await(f"{self.scope}.known")

    def count(self, what: str) -> None:
        """Counts this member among those that have come so far; the last one sets the key."""
        if self._store.add(f"{self.scope}.{what}.members", 1) == len(self._ranks):
            self._store.set(f"{self.scope}.{what}", "yes")

    def _await(self, key: str) -> None:
        """Waits for a key, which the last member or the first one sets."""
        seconds = self._timeout.total_seconds()
        deadline = time.monotonic() + seconds
        while not self.is_over:
            began = time.monotonic()
            left = deadline - began
            try:
                self._store.wait([key], timedelta(seconds=max(min(left, _SLICE), 0.001)))
            except DistNetworkError:
                raise
            except RuntimeError as error:
                if left > _SLICE and time.monotonic() - began > _SLICE / 2:  # else it is no time-out
                    continue
                ranks, store = self._ranks, self._store
                missing = [ranks[at] for at in range(len(ranks)) if not store.check([f"{self.scope}.{at}"])]
                who = f"{name_ranks(missing)} did not come" if missing else "not all members got further"
                raise FusionError(f"process group {self._name!r} was not opened within {seconds:g} s: {who} "
                                  f"({str(error).partition(chr(10))[0]})") from None  # fmt: skip
            return


def _member_of_job() -> Member:
    if _member is None:
        raise FusionError("this worker is in no job: its process group of all workers has been destroyed, or is of "
                          "another backend; begin with init_process_group(\"fusion\")")  # fmt: skip
    return _member


def forget_name() -> None:
    """Has the next default group the name that it would have had if another one had not failed to come about: names
    are numbers, and have to be the same on ranks where none has failed."""
    if not dist.is_initialized():
        dist.distributed_c10d._world.group_count = 0


def check_place() -> None:
    """Raises `FusionError` if this worker's job is elastic, and it has not come to its training function."""
    agent = elastic.agent()
    if agent is not None and not agent.trains:
        raise FusionError(
            "this job of fusionrun is elastic, and a process group has the ranks of one membership of it: call "
            "fusion_rt.c10d.renew_process_group() or init_process_group in the function of hvd.elastic.run, or in a "
            "step of hvd.elastic.Manager, which make it anew after each change (docs/torch-distributed.md); or start "
            "the job without --min-np and --host-discovery-script"
        )


def _joined(store: Store, rank: int, size: int, timeout: timedelta) -> Member:
    """Returns this worker's membership of the job of all workers, which it joins if it has not yet."""
    global _member
    check_place()
    before = is_initialized()
    if not before:
        where = _place(rank, size)
        settings = Settings.from_env()
        # Time-outs of operations are given here too, and may be shorter than a daemon needs to start.
        settings = replace(settings, start_timeout=max(timeout.total_seconds(), settings.start_timeout))
        hosts, address = _server_of(store)
        basics.join(where, settings, open_store=lambda *_: TorchStore(store, hosts, address))
    here = runtime()
    if here.client.is_elastic:
        # A DDP module over a group of an earlier membership may be in a circle of references, and does not expect the
        # backward passes of the next one: it would take part in them.
        gc.collect()
    if (here.rank, here.size) != (rank, size):
        raise FusionError(
            f"this worker is rank {here.rank} of {here.size} in the job that hvd.init() has joined, and rank {rank} of "
            f"{size} for init_process_group; give both the same places, or call only one of them"
        )
    _member = Member(here, not before, store)
    return _member


def _place(rank: int, size: int) -> Environment:
    """Returns this worker's place: that of `fusionrun`, if the script says the same, or one in a job that meets in the
    store."""
    found, secret = _started()
    if found is not None and found.socket and (found.rank, found.size) == (rank, size):
        return found
    meeting = Meeting("script", (), _SCOPE, _this_host(), socket.gethostname(), secret=secret)
    return Environment(rank, size, -1, "torch", meeting=meeting)


def _started() -> tuple[Environment | None, bytes]:
    """Returns the values of the launcher's variables, if they are complete, and the secret of the job."""
    try:
        found = environment.detect()
    except FusionError:  # variables of torch's are enough for torch
        found = None
    secret = os.environ.get("FUSION_JOB_SECRET", "").encode("utf-8", "surrogateescape")
    return found, (found.meeting.secret if found is not None and found.meeting is not None else secret)


def _this_host() -> str:
    """Returns a key that is the same for workers that can share a daemon, and for no others: the running kernel, the
    user, the namespaces of network and processes, and the directory in which daemons listen."""
    root = os.path.abspath(Settings.from_env().runtime_root())
    make_private_directory(root)
    about = os.stat(root)
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        parts = [file.read().strip(), str(os.getuid()), f"{about.st_dev}:{about.st_ino}"]
    parts += [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid")]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def _server_of(store: Store) -> tuple[list[str], str]:
    """Returns the hosts that serve a store, as far as it tells, and its address for people."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return [store.host], f"{store.host}:{store.port}"
    master = os.environ.get("MASTER_ADDR", "")
    return [master] if master else [], f"a {type(store).__name__}"
