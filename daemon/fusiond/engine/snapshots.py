"""Snapshots of homes on disk, which all nodes have: a new job goes on from them when the host of a shard was lost.

Nodes with homes tell each other which snapshots they have. The first of them says when all write the next one, and
which one all keep until then: the latest that all have written. So a job that is killed at any moment leaves one that
all nodes have, and the next job's first node says that all begin with that. Workers save nothing here: with the first
answer they get the values of the homes.

The directory may be on a disk that all hosts share. Then a daemon that was cut off may still be writing there when
another one has taken its place. So a daemon first puts a token of its own into a file, and looks for it whenever it is
about to change anything. One that was replaced finds another token, and leaves all as it is.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress

import numpy as np

from fusion_rt import wire
from fusion_rt.core.errors import FusionError
from fusion_rt.host.private_files import replacing
from fusion_rt.local import array_codec
from fusion_rt.local.saved_state import State
from fusiond.buckets.plans import PlanState
from fusiond.collectives.base import Array
from fusiond.core.dispatch import Handlers
from fusiond.engine.keeper import Keeper
from fusiond.operations.context import Context

SLOW_S = 60.0  # seconds after which it is said that the file system does not answer
_PLAN = "plan"  # the entry that says of which plan a file is


class SnapshotError(FusionError):
    """A snapshot cannot be used, or not be written."""


class SnapshotFiles:
    """The files of one node.

    Args:
        directory: where they are; it is made if it is not there.
        node: whose they are.
    """

    def __init__(self, directory: str, node: int) -> None:
        self._directory, self._node = directory, node
        self._token = secrets.token_hex(8)
        self._claimed: set[str] = set()  # prefixes

    def path(self, plan: wire.Plan, number: int) -> str:
        """Returns the path of a snapshot of a plan's group."""
        return os.path.join(self._directory, f"{self._prefix(plan)}{number}.snapshot")

    def numbers(self, plan: wire.Plan) -> tuple[int, ...]:
        """Returns the numbers of the snapshots of a plan's group. Raises `SnapshotError` if the directory cannot be
        read."""
        pattern = re.compile(rf"{re.escape(self._prefix(plan))}(\d{{1,15}})\.snapshot")
        try:
            names = os.listdir(self._directory)
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise SnapshotError(f"the snapshots in {self._directory} cannot be read: {error.strerror}") from error
        return tuple(sorted(int(found[1]) for name in names if (found := pattern.fullmatch(name))))

    def write(self, plan: wire.Plan, number: int, state: Mapping[str, Array], keep: int) -> None:
        """Writes a snapshot.

        Args:
            number: of this one.
            keep: number of the one that is kept besides; the others are removed. 0: all are kept.

        Raises:
            SnapshotError: that is not possible, or another daemon has taken this one's place. Kept snapshots are left.
        """
        arrays = {**state, _PLAN: _fingerprint(plan)}
        data = np.empty(array_codec.nbytes_of(arrays), np.uint8)
        array_codec.write(arrays, data)
        path = self.path(plan, number)
        try:
            os.makedirs(self._directory, exist_ok=True)
            self._claim(self._prefix(plan))
            self._check_claim(plan)
            for old in self.numbers(plan) if keep else ():
                if old != keep:
                    os.unlink(self.path(plan, old))
            with replacing(path, f"{path}.{self._token}.new") as file:
                file.write(data.data)
                file.flush()
                os.fsync(file.fileno())
                self._check_claim(plan)
        except OSError as error:
            raise SnapshotError(
                f"no snapshot could be written to {path}: {error.strerror}; the one before is left"
            ) from error

    def read(self, plan: wire.Plan, number: int) -> State:
        """Returns the contents of a snapshot.

        Raises:
            SnapshotError: the file is damaged, or of other parameters or another number of nodes.
        """
        path = self.path(plan, number)
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
                    raise FusionError(
                        f"it belongs to user {status.st_uid} or can be written by others, and is not believed"
                    )
                arrays = array_codec.read(np.frombuffer(file.read(), np.uint8))
        except (OSError, FusionError) as error:
            raise SnapshotError(f"the snapshot {path} cannot be read: {error}") from error
        found = arrays.pop(_PLAN, None)
        if found is None or not np.array_equal(found, _fingerprint(plan)):
            raise SnapshotError(
                f"the snapshot {path} is of other parameters, another algorithm, or other hosts with shards; use it "
                "with a job like the one that it was written by, or remove it"
            )
        return {key: value.copy() for key, value in arrays.items()}

    def _claim(self, prefix: str) -> None:
        """Takes the place of an earlier writer of files with this prefix, and removes its unfinished ones. Done
        once: a second claim says that this one has been replaced."""
        if prefix in self._claimed:
            return
        with replacing(os.path.join(self._directory, f"{prefix}owner")) as file:
            file.write(self._token.encode())
        self._claimed.add(prefix)
        for name in os.listdir(self._directory):
            if name.startswith(prefix) and name.endswith(".new"):
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(self._directory, name))

    def _check_claim(self, plan: wire.Plan) -> None:
        with open(os.path.join(self._directory, f"{self._prefix(plan)}owner"), "rb") as file:
            if file.read(64) != self._token.encode():
                raise SnapshotError(
                    f"node {self._node} writes no snapshots to {self._directory} any more: another daemon has taken "
                    "its place there since"
                )

    def _prefix(self, plan: wire.Plan) -> str:
        name = hashlib.blake2b(f"{plan.process_set} {plan.group}".encode(), digest_size=6).hexdigest()
        return f"{name}.node{self._node}."


class Snapshots:
    """One node's part in the snapshots.

    Args:
        context, keeper: of this node. The settings say where, and whether homes begin with the files there.
    """

    def __init__(self, context: Context, keeper: Keeper) -> None:
        self._context, self._keeper = context, keeper
        self._restores = context.settings.snapshot_restore
        self._files = SnapshotFiles(context.settings.snapshot_directory, context.node)
        self._held: dict[int, dict[int, tuple[int, ...]]] = {}  # numbers that nodes have, by plan and node
        self._unwritten: dict[int, set[int]] = {}  # nodes that have not written what was ordered, by plan
        self._under_way: set[int] = set()  # plans of which a file is being written here
        self._loading: set[int] = set()  # plans whose homes are being given what they begin with
        self._opened: set[int] = set()  # plans whose homes have what they begin with

    def handlers(self) -> Handlers:
        """Returns the handlers of the peers' messages about snapshots."""
        return {wire.SnapshotsHeld: self._heard, wire.SnapshotOrder: self._ordered}

    def open(self, state: PlanState) -> None:
        """The homes of a plan are there. If they are to begin with a snapshot, they take nothing in before that.

        Raises:
            SnapshotError: homes are to begin with that, and the directory cannot be read.
        """
        if not self._context.settings.snapshot_directory:
            return
        plan = state.plan
        self._held = {known: held for known, held in self._held.items() if known >= plan.id or self._state(known)}
        if self._restores:
            self._keeper.homes.hold(plan.id)
        if self._context.node in self._nodes(state):
            self._tell(state, self._numbers(plan))

    def _numbers(self, plan: wire.Plan) -> tuple[int, ...]:
        try:
            return self._files.numbers(plan)
        except SnapshotError as error:
            if self._restores:
                raise
            self._context.outside.warn(str(error))
            return ()

    def take(self) -> None:
        """Has all nodes write the values of their homes, if this is the first of them, and all have written the one
        before. A failure is a warning: training goes on."""
        for state in self._keeper.plans:
            if not state.at_homes:
                continue
            nodes, plan = self._nodes(state), state.plan.id
            if self._context.node != min(nodes) or not self._have_told(state) or self._unwritten.get(plan):
                continue
            if self._restores and plan not in self._opened:
                continue
            held = [self._held[plan][node] for node in nodes]
            # Numbers of other jobs, which some of these nodes may have been part of, are others.
            number = max(int(time.time()), 1 + max(max(numbers, default=0) for numbers in held))
            self._unwritten[plan] = set(nodes)
            self._order(state, wire.SnapshotOrder(plan, max(_common(held), default=0), number))

    def _state(self, plan: int) -> PlanState | None:
        return next((state for state in self._keeper.plans if state.plan.id == plan and state.at_homes), None)

    def _nodes(self, state: PlanState) -> set[int]:
        """Returns the nodes that have homes of a plan."""
        nodes = set(state.plan.homes) if state.spec.at_shards else set(state.members.nodes)
        return nodes - self._context.participants.lost_nodes or nodes

    def _have_told(self, state: PlanState) -> bool:
        return self._nodes(state) <= self._held.get(state.plan.id, {}).keys()

    # --- what nodes have ----------------------------------------------------------------------------------------------

    def _tell(self, state: PlanState, numbers: tuple[int, ...]) -> None:
        """Tells all nodes with homes of a plan the snapshots that this one has on disk."""
        self._send(state, wire.SnapshotsHeld(state.plan.id, numbers[-wire.MAX_SNAPSHOTS :]))

    def _heard(self, node: int, message: wire.SnapshotsHeld) -> None:
        self._held.setdefault(message.plan, {})[node] = message.numbers
        self._unwritten.get(message.plan, set()).discard(node)
        state = self._state(message.plan)
        if state is None or not self._restores or message.plan in self._opened or not self._have_told(state):
            return
        if self._context.node == min(self._nodes(state)):
            self._choose(state)

    def _choose(self, state: PlanState) -> None:
        """Says with which snapshot all homes begin: the latest that all nodes have; with none if there is none."""
        held = {node: self._held[state.plan.id][node] for node in sorted(self._nodes(state))}
        common = _common(list(held.values()))
        if not common and any(held.values()):
            topology = self._context.topology
            those = "; ".join(
                f"{topology.describe_node(node)} has {', '.join(map(str, numbers)) or 'none'}"
                for node, numbers in held.items()
            )
            self._context.outside.job_failed(
                f"there is no snapshot of {state.plan.group!r} in {self._context.settings.snapshot_directory} that "
                f"all hosts with shards have: {those}; restore the missing ones, or remove all of them to begin with "
                "the first rank's parameters"
            )
            return
        self._order(state, wire.SnapshotOrder(state.plan.id, max(common, default=0), 0))

    # --- orders -------------------------------------------------------------------------------------------------------

    def _order(self, state: PlanState, order: wire.SnapshotOrder) -> None:
        self._send(state, order)

    def _send(self, state: PlanState, message: wire.SnapshotsHeld | wire.SnapshotOrder) -> None:
        here = self._context.node
        for node in sorted(self._nodes(state) - {here}):
            self._context.outside.to_node(node, message)
        self.handlers()[type(message)](here, message)

    def _ordered(self, node: int, order: wire.SnapshotOrder) -> None:
        state = self._state(order.plan)
        if state is None:
            return  # it has been replaced
        if order.number:
            self._copy(state, order)
        elif order.plan not in self._opened:
            self._load(state, order.keep)

    def _load(self, state: PlanState, number: int) -> None:
        """Lets the homes of a plan begin with a snapshot; 0: with none."""
        plan = state.plan
        if not number:
            self._opened.add(plan.id)
            self._keeper.homes.release(plan.id)
            return
        if plan.id in self._loading:
            return
        self._loading.add(plan.id)
        found = State()

        def loaded(error: BaseException | None) -> None:
            self._loading.discard(plan.id)
            if error is None:
                self._opened.add(plan.id)
            elif isinstance(error, FusionError):
                self._context.outside.job_failed(f"node {self._context.node} (host {self._context.host}): {error}")
            else:
                raise error

        def read(error: BaseException | None) -> None:
            if error is None:
                self._keeper.load(state.group, found, False, loaded)
            else:
                loaded(error)

        self._context.outside.run_on_files(lambda: found.update(self._files.read(plan, number)), read)

    def _copy(self, state: PlanState, order: wire.SnapshotOrder) -> None:
        """Copies the values of a plan's homes here, and writes them, beside the event loop."""
        plan = state.plan.id
        if plan in self._under_way:
            return  # the first node is another one than before, and does not know
        self._under_way.add(plan)
        saved = State()

        def copied(error: BaseException | None) -> None:
            if error is not None:
                self._context.outside.warn(f"no snapshot is written: {error}")
            begun = [key.removesuffix("version") for key in saved if key.endswith(":-1:version")]
            if error is None and all(f"{shard}value" in saved for shard in begun):
                self._write(state, order, saved)
                return  # else the first rank's parameters have not come yet
            self._under_way.discard(plan)
            self._tell(state, self._held.get(plan, {}).get(self._context.node, ()))

        self._keeper.homes.save(plan, saved, copied, senders=False)

    def _write(self, state: PlanState, order: wire.SnapshotOrder, saved: Mapping[str, Array]) -> None:
        """Writes a snapshot of a plan."""
        plan, outside = state.plan, self._context.outside
        path = self._files.path(plan, order.number)
        numbers = [order.keep] if order.keep else []

        def write() -> None:
            self._files.write(plan, order.number, saved, order.keep)
            numbers[:] = self._files.numbers(plan)

        def written(error: BaseException | None) -> None:
            self._under_way.discard(plan.id)
            if error is not None:
                outside.warn(str(error))
            self._tell(state, tuple(numbers))

        def look() -> None:
            if plan.id in self._under_way:
                outside.warn(
                    f"the snapshot {path} is not written after {SLOW_S:g} s, because its file system does not answer; "
                    "training goes on, and no other one is begun before that"
                )

        outside.call_later(SLOW_S, look)
        outside.run_on_files(write, written)


def _common(held: list[tuple[int, ...]]) -> set[int]:
    """Returns the numbers that all nodes have."""
    return set(held[0]).intersection(*held[1:])


def _fingerprint(plan: wire.Plan) -> Array:
    """Returns a fingerprint of the buckets of a plan, and of where their homes are."""
    text = repr((plan.buckets, plan.homes, plan.reduction.algorithm, plan.reduction.optimizer))
    fingerprint: Array = np.frombuffer(hashlib.blake2b(text.encode(), digest_size=16).digest(), np.uint8)
    return fingerprint
