"""Files of the snapshots of one node: one for each group of parameters and number, written as a whole or not at all.

The directory may be on a disk that all hosts share. Then a daemon that was cut off may still be writing there when
another one has taken its place. So a daemon first puts a token of its own into a file, and looks for it whenever it is
about to change anything. One that was replaced finds another token, and leaves all as it is.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress

import numpy as np

from fusion_rt import wire
from fusion_rt.core.errors import FusionError
from fusion_rt.host.private_files import replacing
from fusion_rt.local import array_codec
from fusiond.collectives.base import Array

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

    def read(self, plan: wire.Plan, number: int) -> dict[str, Array]:
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


def _fingerprint(plan: wire.Plan) -> Array:
    """Returns a fingerprint of the buckets of a plan, and of where their homes are."""
    text = repr((plan.buckets, plan.homes, plan.reduction.algorithm, plan.reduction.optimizer))
    fingerprint: Array = np.frombuffer(hashlib.blake2b(text.encode(), digest_size=16).digest(), np.uint8)
    return fingerprint
