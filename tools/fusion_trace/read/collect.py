"""`fusion-trace collect` fetches the rings of a job from all its hosts.

One daemon of the job, on this host, is asked; it asks the daemons of the other hosts over their authenticated
connections. A ring goes on being written while it is fetched. So its header is read first and last, and what was
overwritten in between is left out: the file that is written here has only records that were there all the time.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from fusion_rt import wire
from fusion_rt.core.errors import FusionError
from fusion_rt.host.private_files import replacing
from fusion_rt.local.daemons import FoundDaemon, NoAnswer, ask, find
from fusion_rt.tracing.format import HEADER, HEADER_NBYTES, NAMES_NBYTES, RECORD, WRITERS, WRITTEN_AT
from fusion_rt.tracing.reader import RECORD_DTYPE, RECORDS_AT, Header, Records, TraceError, header_of

MOST_NBYTES = 4 << 30  # of a ring
_CAPACITY_AT = 16
Read = Callable[[int, int], bytes]  # offset, bytes; fewer at the end


@dataclass(frozen=True)
class Fetched:
    """A ring that was fetched, or `why_not`. `nbytes`: of the file."""

    node: int
    host: str
    name: str
    path: str
    records: int
    nbytes: int
    why_not: str = ""


def daemon_of(root: str, job: str) -> FoundDaemon:
    """Finds a daemon on this host to ask; of the only job that runs here, if none is named.

    Args:
        root: FUSION_RUNTIME_DIR.

    Raises:
        TraceError: there is none, or there are several jobs.
    """
    found = [each for each in find(root, job) if os.path.exists(each.socket_path)]
    jobs = [name for name, _ in groupby(found, key=lambda each: each.job)]
    if not found:
        which = f" of job {job!r}" if job else ""
        raise TraceError(
            f"no daemon{which} of this user runs on this host (in {root}); the rings of a job that has ended lie on "
            "each of its hosts, in the directory of traces, and can be copied from there"
        )
    if len(jobs) > 1:
        raise TraceError(f"several jobs run on this host ({', '.join(jobs)}): name one of them with --job")
    return found[0]


def collect(daemon: FoundDaemon, directory: str, timeout: float) -> Iterator[Fetched]:
    """Fetches all rings into a directory, one after the other.

    Args:
        directory: is made if it is not there.
        timeout: seconds for the daemon to answer.

    Raises:
        FusionError: the daemon does not answer, or the directory cannot be made.
    """
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
    except OSError as error:
        raise TraceError(f"{directory} cannot be made: {error.strerror}") from None
    try:
        _, told = ask(daemon, wire.JobRingsRequest(), timeout)
    except NoAnswer as error:
        raise TraceError(f"the daemon of node {daemon.node} of job {daemon.job!r}: {error}") from None
    for entry in told["nodes"]:
        node, host = int(entry["node"]), str(entry["host"])
        if entry["rings"] is None:
            yield Fetched(node, host, "", "", 0, 0, "its daemon does not answer, or is gone")
            continue
        if not entry["rings"]:
            yield Fetched(node, host, "", "", 0, 0, "nothing is recorded there")
        for ring in entry["rings"]:
            yield _one(daemon, node, host, str(ring["name"]), directory, timeout)


def _one(daemon: FoundDaemon, node: int, host: str, name: str, directory: str, timeout: float) -> Fetched:
    path = os.path.join(directory, os.path.basename(name))

    def read(offset: int, nbytes: int) -> bytes:
        try:
            _, told = ask(daemon, wire.JobRingRequest(node, name, offset, nbytes), timeout)
        except NoAnswer as error:
            raise TraceError(str(error)) from None
        if told["why_not"]:
            raise TraceError(str(told["why_not"]))
        return _decoded(told)

    try:
        data, records = fetch(read, name)
        with replacing(path) as file:
            file.write(data)
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror}") from None
    except FusionError as error:
        return Fetched(node, host, name, path, 0, 0, str(error))
    return Fetched(node, host, name, path, records, len(data))


def _decoded(told: dict[str, Any]) -> bytes:
    try:
        return base64.b64decode(told["data"], validate=True)
    except (binascii.Error, ValueError):
        raise TraceError("what the daemon answered is not base64") from None


def fetch(read: Read, name: str) -> tuple[bytes, int]:
    """Returns a ring, as a file that holds the records that were there all the time, and their number.

    Raises:
        TraceError: it is no ring, or `read` says so.
    """
    first = _whole(read, 0, HEADER_NBYTES)
    before = header_of(first, name)
    kept = min(before.capacity, before.written)
    if kept * RECORD.size > MOST_NBYTES:
        raise TraceError(f"it has {kept * RECORD.size} bytes of records, and at most {MOST_NBYTES} are fetched")
    data = _whole(read, RECORDS_AT, kept * RECORD.size)
    records = np.frombuffer(data[: len(data) // RECORD.size * RECORD.size], RECORD_DTYPE)
    last = _whole(read, 0, HEADER_NBYTES)
    # After the records: so that no record has a name that is not here.
    names = _whole(read, HEADER_NBYTES, min(header_of(last, name).names_nbytes, NAMES_NBYTES))
    sound = _untouched(records, before, header_of(last, name))
    return _file(last, names, sound, before.written), len(sound)


def _whole(read: Read, offset: int, nbytes: int) -> bytes:
    """Reads so many bytes, or all there are, in pieces."""
    pieces = []
    while nbytes > 0:
        piece = read(offset, min(nbytes, wire.MAX_RING_PIECE))
        if not piece:
            break
        pieces.append(piece)
        offset, nbytes = offset + len(piece), nbytes - len(piece)
    return b"".join(pieces)


def _untouched(records: Records, before: Header, after: Header) -> Records:
    """Returns the records between the two headers, the oldest first. `records`: by place."""
    if after.capacity != before.capacity:  # its disk is full, and it begins anew with fewer places
        return records[:0]
    oldest = max(0, before.written - before.capacity, after.written + WRITERS - before.capacity)
    places = np.arange(oldest, max(oldest, before.written)) % before.capacity
    sound: Records = records[places[places < len(records)]]
    return sound


def _file(header: bytes, names: bytes, records: Records, written: int) -> bytes:
    """Makes a ring of these records; its header says how many were ever written, so that the lost ones are counted.

    Place i % capacity of a ring has its record i: capacity has to be such that the last `len(records)` fit, with room
    for those that a reader leaves out because they may be being written.
    """
    capacity = max(1, len(records) + WRITERS)
    first = written - len(records)
    placed = np.zeros(capacity, RECORD_DTYPE)
    placed[np.arange(first, written) % capacity] = records
    head = bytearray(header.ljust(HEADER_NBYTES, b"\0")[:HEADER_NBYTES])
    head[_CAPACITY_AT : _CAPACITY_AT + 8] = capacity.to_bytes(8, "little")
    head[WRITTEN_AT : WRITTEN_AT + 8] = written.to_bytes(8, "little")
    assert len(head) == HEADER_NBYTES > HEADER.size
    return bytes(head) + names.ljust(NAMES_NBYTES, b"\0") + placed.tobytes()
