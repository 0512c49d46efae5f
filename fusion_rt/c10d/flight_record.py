"""The last operations of this process, as torch's FlightRecorder has those of NCCL and gloo, for torch's own analyser.

Of an operation its shapes, the time and the script's frames are kept; their names are looked up only for a dump. A dump
has the form of torch's, version 2.10 (`FlightRecorder.hpp`), and says things as the analyser
(`torch.distributed.flight_recorder`) can compare them between ranks: sizes that may differ by rank are left out, or
added up.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import stat
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import gather_traceback, symbolize_tracebacks
from torch.distributed import (  # type: ignore[attr-defined]
    DistNetworkError,
    DistStoreError,
    PrefixStore,
    Store,
    TCPStore,
)

from fusion_rt.c10d.submission import Submission
from fusion_rt.core.errors import FusionError
from fusion_rt.host.private_files import open_private, replacing

VERSION = "2.10"
BUFFER_SIZE = 2000
"""Operations that are kept where dumps are wanted, and `TORCH_FR_BUFFER_SIZE` says nothing: as many as torch keeps."""
_PLACES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_DEFAULT = "~/.cache/torch/comm_lib_trace_rank_"
_WAIT = timedelta(hours=1)  # of one question to the store
_ANSWER_S = 10.0  # for the store to answer; on the host of a rank that has been lost, perhaps, which does not any more
_END_S = 30.0  # for a thread to end; it may be writing, on a busy machine
_END = b"\0"  # ends the thread that reads the pipe

_OWN = os.path.dirname(os.path.abspath(__file__))
# The analyser refuses names of backends that it does not know, and gives names that begin with "nccl" a meaning.
_PREFIX = "gloo"
_DTYPES = {
    torch.float64: "Double",
    torch.float32: "Float",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int64: "Long",
    torch.int32: "Int",
    torch.int16: "Short",
    torch.int8: "Char",
    torch.uint8: "Byte",
    torch.bool: "Bool",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}
_About = tuple[torch.Size, torch.dtype]  # of a tensor
_Sizes = list[list[int]]


class FlightRecorder:
    """The last operations of this process's groups.

    Args:
        size: how many are kept; 0: none are recorded.

    Attributes:
        size: as given.
        failed: called once for each operation that has failed, by whoever has seen it.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.failed: Callable[[], None] = lambda: None
        self._numbers = count()
        self._group_numbers = count()
        self._kept: deque[RecordedOperation] = deque(maxlen=size)
        self._open: set[RecordedGroup] = set()

    def open_group(self, name: str, ranks: Sequence[int]) -> RecordedGroup:
        """Returns the recorder of a group's operations; `ranks`: of its members in the job, by position."""
        group = RecordedGroup(self, next(self._group_numbers), name, ranks)
        self._open.add(group)
        return group

    def close_group(self, group: RecordedGroup) -> None:
        """Forgets a group as soon as none of its operations is kept any more."""
        self._open.discard(group)

    def keep(self, operation: RecordedOperation) -> None:
        """Keeps an operation in the place of the oldest one."""
        operation.number = next(self._numbers)
        self._kept.append(operation)

    def dump(self) -> dict[str, Any]:
        """Returns the record in the form of torch's dumps, which the analyser reads pickled."""
        kept = [one for one in self._kept.copy() if one.source is not None]
        threads = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = symbolize_tracebacks([one.traceback for one in kept])
        entries = [one.entry(each, threads) for one, each in zip(kept, frames, strict=True)]
        groups = {*self._open.copy(), *(one.group for one in kept)}
        ranks = {group.name: (group.description, sorted(group.ranks)) for group in groups}
        ranks |= {one.group_name: (one.group.description, one.members) for one in kept}
        config = {
            name: {"name": name, "desc": description, "ranks": str(members)}
            for name, (description, members) in ranks.items()
        }
        return {
            "version": VERSION,
            "comm_lib_version": "fusion_rt",
            "pg_config": config,
            "pg_status": {str(group.number): group.status(kept) for group in groups},
            "entries": entries,
        }


class RecordedGroup:
    """A process group, as its operations are recorded.

    Attributes:
        number: of the group in this process.
        name: c10d's.
        description: the script's.
        ranks: of the members in the job, by position.
        seconds: time-out of operations.
    """

    def __init__(self, recorder: FlightRecorder, number: int, name: str, ranks: Sequence[int]) -> None:
        self.number = number
        self.name = name
        self.description = "undefined"
        self.ranks = ranks
        self.seconds = 0.0
        self._recorder = recorder
        self._on = recorder.size > 0
        self._collectives = 0
        self._messages: dict[tuple[int, int], int] = {}

    def record(
        self,
        title: str,
        parts: Sequence[Submission],
        given: Iterable[Any],
        taken: Iterable[Any],
    ) -> RecordedOperation | None:
        """Records a collective operation, as soon as it is under way. Returns None if nothing is recorded.

        Args:
            title: of the operation.
            parts: the works that it consists of.
            given, taken: tensors that this rank gives, and gets; or lists of them.
        """
        if not self._on:
            return None
        self._collectives += 1
        operation = RecordedOperation(self, title, parts, _about(given), _about(taken))
        operation.sequence = self._collectives
        self._recorder.keep(operation)
        return operation

    def record_message(
        self, title: str, part: Submission, tensor: torch.Tensor, source: int | None, target: int
    ) -> RecordedOperation | None:
        """Records a message from one member to another; `source`, `target`: their positions, None for whoever sends."""
        if not self._on:
            return None
        about = _about([tensor])
        operation = RecordedOperation(self, title, [part], about, about)
        operation.source, operation.target = source, target
        if source is not None:
            operation.sequence = self.next_message(source, target)
        self._recorder.keep(operation)
        return operation

    def next_message(self, source: int, target: int) -> int:
        """Returns the number of a message among all from one member to another."""
        number = self._messages[source, target] = self._messages.get((source, target), 0) + 1
        return number

    def failed(self) -> None:
        """Says that an operation of the group has failed."""
        self._recorder.failed()

    def close(self) -> None:
        """Says that the group has no further operations."""
        self._recorder.close_group(self)

    def status(self, kept: Iterable[RecordedOperation]) -> dict[str, int]:
        """Returns how far the group is."""
        ended = [one.sequence for one in kept if one.group is self and one.target < 0 and one.is_completed]
        return {
            "last_enqueued_collective": self._collectives or -1,
            "last_started_collective": -1,
            "last_completed_collective": max(ended, default=-1),
        }


class RecordedOperation:
    """An operation that was recorded when it began. It keeps no tensors.

    Attributes:
        group: whose operation it is.
        number: among all of this process.
        sequence: number among the group's collectives, or among the messages from one member to another.
        source, target: positions of the members between whom a message goes, -1 in a collective; the source is None as
            long as a message may come from any member.
        traceback: the script's frames.
    """

    __slots__ = (
        "_began",
        "_ended",
        "_failed",
        "_given",
        "_parts",
        "_taken",
        "_thread",
        "_title",
        "group",
        "number",
        "sequence",
        "source",
        "target",
        "traceback",
    )

    def __init__(
        self, group: RecordedGroup, title: str, parts: Sequence[Submission], given: list[Any], taken: list[Any]
    ) -> None:
        self.group = group
        self.number = self.sequence = 0
        self.source: int | None = -1
        self.target = -1
        self.traceback = gather_traceback(True, False, False)
        self._title = title
        self._parts = parts
        self._given, self._taken = given, taken
        self._thread = threading.get_ident()
        self._began = time.time_ns()
        self._ended = 0
        self._failed = False

    def end(self, failed: bool, source: int | None = None) -> None:
        """Says that the operation has ended; `source`: position of the member that has sent the received data."""
        self._ended = time.time_ns()
        self._parts = ()
        if self.source is None and source is not None:
            self.sequence = self.group.next_message(source, self.target)
            self.source = source
        if failed:
            self._failed = True
            self.group.failed()

    @property
    def is_completed(self) -> bool:
        """True once the operation has ended well, which its script need not have seen."""
        return not self._failed and all(part.done and part.error is None for part in self._parts)

    @property
    def members(self) -> list[int]:
        """Ranks in the job, in ascending order, that take part."""
        if self.source is None or self.target < 0:
            return sorted(self.group.ranks)
        return sorted({self.group.ranks[self.source], self.group.ranks[self.target]})

    @property
    def group_name(self) -> str:
        """Name of the group for the analyser, which takes an operation for one of all members: so the messages from one
        member to another have a group of their own."""
        if self.source is None or self.target < 0:
            return self.group.name
        ranks = self.group.ranks
        return f"{self.group.name}:{ranks[self.source]}->{ranks[self.target]}"

    def entry(self, frames: Iterable[dict[str, Any]], threads: dict[int | None, str]) -> dict[str, Any]:
        """Returns the operation as an entry of a dump; `threads`: names of those that run, by identity."""
        name, given, taken = self._as_analysed()
        message = self.target >= 0
        completed = self.is_completed
        ended = self._ended or None
        return {
            "record_id": self.number,
            "pg_id": self.group.number,
            "process_group": (self.group_name, self.group.description),
            "collective_seq_id": self.sequence,
            "p2p_seq_id": self.sequence if message else 0,
            "op_id": self.sequence,
            "profiling_name": f"{_PREFIX}:{name}",
            "time_created_ns": self._began,
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": ended if completed else None,
            "input_sizes": given,
            "input_dtypes": _dtypes(self._given or self._taken),
            "output_sizes": taken,
            "output_dtypes": _dtypes(self._taken or self._given),
            "state": "completed" if completed else "scheduled",
            "retired": ended is not None,
            "timeout_ms": round(1000 * self.group.seconds),
            "is_p2p": message,
            "thread_id": str(self._thread),
            "thread_name": threads.get(self._thread, ""),
            "frames": [frame for frame in frames if os.path.dirname(frame["filename"]) != _OWN],
        }

    def _as_analysed(self) -> tuple[str, _Sizes, _Sizes]:
        """Returns the name that the analyser has for the operation, and the sizes that it expects with it."""
        title, given, taken = self._title, self._given, self._taken
        if self.target >= 0:
            return self._message_name(), _sizes(given), _sizes(taken)
        if title == "all_reduce_coalesced":
            title = "allreduce_coalesced"
        elif title == "all_to_all":  # adds up all inputs and outputs, of each one's first tensor
            return title, _added(given), _added(taken)
        elif title == "reduce_scatter":
            return _scattered(given, taken)
        elif title in ("all_gather", "all_gather_coalesced"):
            return _gathered(given, taken)
        elif title == "gather":
            return title, _sizes(given), [_stacked(one) for one in taken if isinstance(one, list) and one]
        return title, _sizes(given), _sizes(taken)

    def _message_name(self) -> str:
        ranks, members = self.group.ranks, self.members
        source, target = (members.index(ranks[position]) for position in (self.source or 0, self.target))
        return f"send {source}->{target}" if self._title == "send" else f"recv {target}<-{source}"


def _about(tensors: Iterable[Any]) -> list[Any]:
    """Returns shape and type of tensors, in lists as they are."""
    return [_about(one) if isinstance(one, (list, tuple)) else (one.shape, one.dtype) for one in tensors]


def _flat(about: Iterable[Any]) -> list[_About]:
    return [each for one in about for each in (_flat(one) if isinstance(one, list) else (one,))]


def _dtypes(about: list[Any]) -> list[str]:
    return [_DTYPES.get(dtype, str(dtype).removeprefix("torch.").capitalize()) for _, dtype in _flat(about)]


def _sizes(about: list[Any]) -> _Sizes:
    return [list(shape) for shape, _ in _flat(about)]


def _added(about: list[Any]) -> _Sizes:
    return [[sum(prod(shape) for shape, _ in _flat(about))]]


def _stacked(alike: Sequence[Any]) -> list[int]:
    """Returns the size of tensors of one size, put on top of each other."""
    return [len(alike), *alike[0][0]]


def _scattered(given: list[Any], taken: list[Any]) -> tuple[str, _Sizes, _Sizes]:
    if len(given) == len(taken):
        name = "_reduce_scatter_base" if len(given) == 1 else "reduce_scatter_tensor_coalesced"
        return name, _sizes(given), _sizes(taken)
    if len({shape for shape, _ in given}) == 1:
        return "reduce_scatter", [_stacked(given)], _sizes(taken)
    return "reduce_scatter_v", _sizes(given), [[]]


def _gathered(given: list[Any], taken: list[Any]) -> tuple[str, _Sizes, _Sizes]:
    if not isinstance(taken[0], list):
        name = "_all_gather_base" if len(given) == 1 else "all_gather_into_tensor_coalesced"
        return name, _sizes(given), _sizes(taken)
    if len(given) > 1:
        by_tensor = zip(*taken, strict=True)
        return "all_gather_into_tensor_coalesced", _sizes(given), [_stacked(each) for each in by_tensor]
    members = _flat(taken)
    if len({shape for shape, _ in members}) == 1:
        return "all_gather", _sizes(given), [_stacked(members)]
    return "all_gather_v", [[]], _added(taken)


class FlightDumps:
    """Writes this process's records.

    Args:
        store: of the group of all.
        membership: text that no other membership of a job has, since a store may outlive one.
        rank, size: of this worker in the job.

    Attributes:
        recorder: records operations, as many as torch's variables say; none if they say nothing.
    """

    def __init__(self, store: Store, membership: str, rank: int, size: int) -> None:
        self._place, pipe = _value(_PLACES), os.environ.get(_PIPE)
        self.recorder = FlightRecorder(_buffer_size(bool(self._place or pipe)))
        self._store = store
        self._scope = f"fusion/{membership}/flight"
        self._rank, self._size = rank, size
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()
        self._closed = False
        self._pipe = -1
        if not self.recorder.size:
            return
        if self._place:
            self.recorder.failed = self.write_everywhere
            self._listen_to_store(store)
        if pipe:
            self._listen_to_pipe(f"{pipe}{rank}.pipe")
        if self._threads:
            # A thread that is in torch's code when the interpreter ends may take the process down.
            atexit.register(self.close)

    def write(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Writes a dump, whole or not at all, and returns where.

        Args:
            path: of the file; None: where torch's variables say, or torch's default place, with the rank behind it.

        Raises:
            FusionError: nothing is recorded.
            OSError: the file cannot be written.
        """
        if not self.recorder.size:
            raise FusionError(f"nothing is recorded: set {_SIZES[0]} to a number of operations, or {_PLACES[0]} to "
                              "where dumps go, before the process group is made")  # fmt: skip
        whole = Path(path or f"{os.path.expanduser(self._place or _DEFAULT)}{self._rank}")
        with self._lock:
            whole.parent.mkdir(parents=True, exist_ok=True)
            with replacing(str(whole)) as file:  # torch's place is in /tmp, where others can plant links
                pickle.dump(self.recorder.dump(), file, protocol=2)  # torch's
        return whole

    def write_everywhere(self) -> None:
        """Writes a dump if torch's variables say where; the first call of the job has all ranks write theirs."""
        if not self._place:
            return
        try:
            self.write()
        except OSError as error:  # the operation's own error is more important
            warnings.warn(f"no flight record: {error}", stacklevel=2)
        self._ask_store(self._tell_all)

    def _tell_all(self) -> None:
        """Has all ranks write theirs, or waits until another one has: this one may serve the store, and be about to
        end."""
        told = f"{self._scope}.told"
        if self._store.add(f"{self._scope}.failures", 1) == 1:
            for rank in range(self._size):
                self._store.set(f"{self._scope}.{rank}", "write")
            self._store.set(told, "")
        self._store.wait([told], timedelta(seconds=_ANSWER_S))

    @staticmethod
    def _ask_store(ask: Callable[[], object]) -> None:
        """Calls a function that asks the store, whose host may be gone, and then perhaps does not answer."""

        def call() -> None:
            with contextlib.suppress(RuntimeError):  # the store is gone, and whoever served it
                ask()

        asking = threading.Thread(target=call, name="fusion-flight-word", daemon=True)
        asking.start()
        asking.join(_ANSWER_S)

    def close(self) -> None:
        """Ends the threads, once they have done their work."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self._pipe >= 0:
            os.write(self._pipe, _END)
        if self._threads:
            self._ask_store(lambda: self._store.compare_set(f"{self._scope}.{self._rank}", "", "end"))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_END_S)

    def _start(self, name: str, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    # --- whoever asks -------------------------------------------------------------------------------------------------

    def _listen_to_store(self, store: Store) -> None:
        underlying = store
        while isinstance(underlying, PrefixStore):
            underlying = underlying.underlying_store
        # Other stores are asked again and again during a wait; before torch 2.8 they cannot be waited for beside
        # others that use them.
        if isinstance(underlying, TCPStore) and hasattr(store, "clone"):
            self._start("fusion-flight-store", self._await_word, store.clone())

    def _await_word(self, store: Store) -> None:
        """Writes a dump as soon as some rank asks for it."""
        key = f"{self._scope}.{self._rank}"
        while True:
            try:
                store.wait([key], _WAIT)
                word = store.get(key)
            except DistNetworkError:  # the store is gone: its server has left
                return
            except DistStoreError:  # nothing has happened for so long
                continue
            if word == b"write":
                self.write()
            return

    def _listen_to_pipe(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISFIFO(os.lstat(path).st_mode):
                os.unlink(path)
        os.mkfifo(path, 0o600)
        self._pipe = open_private(path, flags=os.O_RDWR)  # for writing too: so it has no end
        self._start("fusion-flight-pipe", self._await_byte, path)

    def _await_byte(self, path: str) -> None:
        """Writes a dump after each write to the pipe."""
        ended = False
        while not ended:
            read = os.read(self._pipe, 4096)
            ended = _END in read
            if read.strip(_END):
                self.write()
        os.close(self._pipe)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _value(names: tuple[str, ...]) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _buffer_size(wanted: bool) -> int:
    """Returns how many operations are kept; `wanted`: the script's environment says where dumps go."""
    text = _value(_SIZES)
    try:
        return max(0, int(text or (BUFFER_SIZE if wanted else 0)))
    except ValueError:
        raise FusionError(f"{' or '.join(_SIZES)} has to be a number of operations, not {text!r}") from None
