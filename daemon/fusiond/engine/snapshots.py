"""Snapshots of the homes on this node, on disk: what a new job goes on from when the host of a shard was lost.

A file for each group of parameters and node, replaced as a whole, so that there is always one that is complete. Workers
save nothing here: with the first answer they get what the homes have.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from functools import partial

import numpy as np

from fusion_rt import wire
from fusion_rt.core.errors import FusionError
from fusion_rt.local import array_codec
from fusion_rt.settings import Settings
from fusiond.buckets.plans import Plans
from fusiond.collectives.base import Array
from fusiond.core.effects import Effects
from fusiond.shards import ParameterService

_PLAN = "plan"  # the entry that says of which plan a file is
SLOW_S = 60.0  # seconds after which it is said that the file system does not answer


class SnapshotError(FusionError):
    """A snapshot cannot be used, or not be written."""


class Snapshots:
    """The files of one node.

    Args:
        settings: the directory, which is made if it is not there, and whether homes begin with what is in it.
        node: whose they are.
        plans, homes: of this node.
        outside: writes beside the event loop.
    """

    def __init__(self, settings: Settings, node: int, plans: Plans, homes: ParameterService, outside: Effects) -> None:
        self._directory = settings.snapshot_directory
        self._restores = settings.snapshot_restore
        self._node = node
        self._plans, self._homes, self._outside = plans, homes, outside
        self._under_way: dict[str, object] = {}  # what looks after each file that is being written

    def take(self) -> None:
        """Writes what the homes here have, beside the event loop. What goes wrong is a warning: training goes on."""
        for state in self._plans:
            if state.at_homes:
                self._homes.when_quiet(state.plan.id, partial(self._take, state.plan))

    def _take(self, plan: wire.Plan) -> None:
        path = self.path(plan)
        if path in self._under_way:
            return  # the file system has not answered since the last one
        state = {key: value for key, value in self._homes.save(plan.id).items() if key.startswith("home:")}

        def written(error: BaseException | None) -> None:
            del self._under_way[path]
            if error is not None:
                self._outside.warn(str(error))

        def look() -> None:
            if self._under_way.get(path) is look:
                self._outside.warn(
                    f"the snapshot {path} is not written after {SLOW_S:g} s, because its file system does not answer; "
                    "training goes on, and no other one is begun before that"
                )

        if state:
            self._under_way[path] = look
            self._outside.call_later(SLOW_S, look)
            self._outside.run_on_files(partial(self.write, plan, state), written)

    def restore(self, plan: wire.Plan) -> None:
        """Lets the homes of a plan begin with what was written, if that was asked for. Raises `SnapshotError`."""
        if self._restores:
            self._homes.load(plan.process_set, plan.group, self.read(plan))

    def path(self, plan: wire.Plan) -> str:
        """Returns the path of the file of a plan's group."""
        name = hashlib.blake2b(f"{plan.process_set} {plan.group}".encode(), digest_size=6).hexdigest()
        return os.path.join(self._directory, f"{name}.node{self._node}.snapshot")

    def write(self, plan: wire.Plan, state: dict[str, Array]) -> None:
        """Replaces a group's file. Raises `SnapshotError` where that is not possible; then the one before is left."""
        arrays = {**state, _PLAN: _fingerprint(plan)}
        data = np.empty(array_codec.nbytes_of(arrays), np.uint8)
        array_codec.write(arrays, data)
        path = self.path(plan)
        try:
            os.makedirs(self._directory, exist_ok=True)
            _write_new(f"{path}.new", data.data)
            os.replace(f"{path}.new", path)
        except OSError as error:
            raise SnapshotError(
                f"no snapshot could be written to {path}: {error.strerror}; the one before is left"
            ) from error

    def read(self, plan: wire.Plan) -> dict[str, Array]:
        """Returns what a group's file has; nothing if there is none.

        Raises:
            SnapshotError: the file is damaged, or of other parameters or another number of nodes.
        """
        path = self.path(plan)
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
                    raise FusionError(
                        f"it belongs to user {status.st_uid} or can be written by others, and is not believed"
                    )
                arrays = array_codec.read(np.frombuffer(file.read(), np.uint8))
        except FileNotFoundError:
            return {}
        except (OSError, FusionError) as error:
            raise SnapshotError(f"the snapshot {path} cannot be read: {error}") from error
        found = arrays.pop(_PLAN, None)
        if found is None or not np.array_equal(found, _fingerprint(plan)):
            raise SnapshotError(
                f"the snapshot {path} is of other parameters, another algorithm, or other hosts with shards; use it "
                "with a job like the one that it was written by, or remove it"
            )
        return {key: value.copy() for key, value in arrays.items()}


def _write_new(path: str, data: memoryview) -> None:
    """Writes a file, through no link that somebody else has left there; what could not be written whole is removed.

    Raises:
        OSError: there is no room for it, or no right to.
    """
    with suppress(FileNotFoundError):
        os.unlink(path)  # of a daemon that was killed while it wrote, or a link
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        os.unlink(path)  # on a full disk, its part would be in the way of the next one
        raise


def _fingerprint(plan: wire.Plan) -> Array:
    """Returns a fingerprint of the buckets of a plan, and of where their homes are."""
    text = repr((plan.buckets, plan.homes, plan.reduction.algorithm, plan.reduction.optimizer))
    fingerprint: Array = np.frombuffer(hashlib.blake2b(text.encode(), digest_size=16).digest(), np.uint8)
    return fingerprint
