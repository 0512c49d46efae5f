"""Files with the last operations, written when and where torch's variables say; nothing is recorded unless one is set.

Whoever fails has all ranks write theirs, also those that have not come to the operation, and compute or sleep: the
analyser needs them most. They hear of it in torch's store, in a thread of their own; it is there only where
`TORCH_FR_DUMP_TEMP_FILE` says that dumps are wanted.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import stat
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torch.distributed import (  # type: ignore[attr-defined]
    DistNetworkError,
    DistStoreError,
    PrefixStore,
    Store,
    TCPStore,
)

from fusion_rt.c10d.flight_record import BUFFER_SIZE, FlightRecorder
from fusion_rt.core.errors import FusionError
from fusion_rt.host.private_files import open_private, replacing

_PLACES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_DEFAULT = "~/.cache/torch/comm_lib_trace_rank_"
_WAIT = timedelta(hours=1)  # of one question to the store
_ANSWER_S = 10.0  # for the store to answer; on the host of a rank that has been lost, perhaps, which does not any more
_END_S = 30.0  # for a thread to end; it may be writing, on a busy machine
_END = b"\0"  # ends the thread that reads the pipe


class FlightDumps:
    """Writes what this process has recorded.

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
        """Ends the threads, once they have done what they were asked for."""
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
        # Other stores are asked again and again while somebody waits; before torch 2.8 they cannot be waited for beside
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
            except DistNetworkError:  # the store is gone: who serves it has left
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
        """Writes a dump whenever somebody has written to the pipe."""
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
