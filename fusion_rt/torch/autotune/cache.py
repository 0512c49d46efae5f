"""Keeps the settings found for the next job on the same cluster with the same model: a JSON file for each of these."""

from __future__ import annotations

import hashlib
import math
import os
import stat
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from fusion_rt import wire
from fusion_rt.choice.candidates import Setting
from fusion_rt.host.private_files import replacing
from fusion_rt.wire.plans import TunedBytes, TunedThreads

VERSION = 1
_LARGEST = 64 * 1024  # bytes of a file


class Fingerprint(msgspec.Struct, frozen=True):
    """The hosts and gradients that a setting was found for.

    Attributes:
        slots: number of ranks on each host that takes part.
        bandwidth: of the worst link: the binary logarithm of its Gbit/s, rounded; 0 where there is none.
        gradients: hash of names, shapes and element types, and of how they are combined.
        keep_order: nothing was tuned that changes the order of additions.
    """

    slots: tuple[int, ...]
    bandwidth: int
    gradients: str
    keep_order: bool = False

    @classmethod
    def of(
        cls,
        slots: Sequence[int],
        seconds_per_byte: float,
        tensors: Sequence[wire.TensorSpec],
        reduction: wire.Reduction,
        keep_order: bool,
    ) -> Fingerprint:
        """Makes the fingerprint of hosts and gradients, whatever order these are in."""
        known = [(tensor.name, tensor.dtype, tensor.shape, tensor.together) for tensor in tensors]
        text = msgspec.json.encode((sorted(known), reduction))
        bandwidth = round(math.log2(8e-9 / seconds_per_byte)) if seconds_per_byte > 0 else 0
        return cls(tuple(slots), bandwidth, hashlib.sha256(text).hexdigest(), keep_order)

    @property
    def file_name(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:20] + ".json"


class _Found(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    threshold: Annotated[int, msgspec.Meta(ge=0, lt=2**48)]
    chunk_bytes: TunedBytes
    window_bytes: TunedBytes
    threads: TunedThreads
    exchange: wire.Route


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    fingerprint: Fingerprint
    setting: _Found
    score: float
    default_score: float


def directory(chosen: str) -> Path:
    """The directory of the files: the setting, or the user's cache."""
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "fusion_rt" / "autotune"


def load(folder: Path, fingerprint: Fingerprint) -> tuple[Setting, str] | None:
    """The setting that was found for this, and its file; None if there is none. Warns of a file that cannot be used."""
    path = folder / fingerprint.file_name
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
                raise ValueError("it is no file of this user's")
            data = file.read(_LARGEST + 1)
        if len(data) > _LARGEST:
            raise ValueError(f"it has more than {_LARGEST} bytes")
        found = msgspec.json.decode(data, type=_File)
        if found.version != VERSION or found.fingerprint != fingerprint:
            raise ValueError("it is of another version, or for other hosts or gradients")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:  # of msgspec, too
        warnings.warn(f"the tuning result in {path} is not used: {error}; remove the file", stacklevel=2)
        return None
    return Setting(**msgspec.structs.asdict(found.setting)), str(path)


def save(folder: Path, fingerprint: Fingerprint, setting: Setting, score: float, default_score: float) -> str:
    """Keeps a finding. Returns the file's path; empty if it cannot be written, which is warned of."""
    file = _File(
        VERSION,
        fingerprint,
        _Found(*(getattr(setting, name) for name in _Found.__struct_fields__)),
        score,
        default_score,
    )
    path = folder / fingerprint.file_name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(str(path)) as out:
            out.write(msgspec.json.format(msgspec.json.encode(file)) + b"\n")
    except OSError as error:
        warnings.warn(f"the tuning result cannot be kept in {folder}: {error}", stacklevel=2)
        return ""
    return str(path)
