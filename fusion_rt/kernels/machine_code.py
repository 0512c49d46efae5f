"""Kernels as machine code: kept on disk, loaded without Numba, compiled by another process when they are missing.

Importing Numba and letting it load a kernel from its own cache took 0.75 s and made a process 125 MB larger, 48 MB of
it anonymous; this takes 0.05 s and 50 MB, nearly all of it file pages of LLVM's library. Compiling (about 2 s) in a
process of its own also leaves the interpreter of the daemon free meanwhile.

A file is named after everything its contents depend on: the kernels' source, the version of the compiler, and the
processor. So a cache is never stale, and hosts that differ may share one.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from fusion_rt.core import dtypes
from fusion_rt.core.errors import FusionError
from fusion_rt.host import python_children
from fusion_rt.host.private_files import replacing

SUM, PRODUCT, MIN, MAX = range(4)

# What a reduction is asked to do: op, numbers of sources and of outputs, elements, divisor; prescale, postscale; and
# then the addresses of the sources and the outputs. One block, because each argument of a call costs 0.1 µs.
REQUEST = struct.Struct("5q2d")
REQUEST_WORDS = REQUEST.size // 8

# What the kernel that goes through other processes' memory is asked (`ordinary`): which place failed, as it leaves it;
# the addresses of the reduction's kernel (0: a copy), of process_vm_readv and of process_vm_writev; bytes, bytes of a
# block, bytes of an element; numbers of sources and of outputs; the addresses of the reduction's request and of the
# scratch memory, a block for each source; then words for two iovecs, two that are unused, and a pid (0: this process)
# and an address of each source and each output.
VECTORS, UNUSED, PLACES = 11, 15, 17

_HERE = Path(__file__).parent
_PARTS = (
    "_kernels.py",
    "_selection.py",
    "_coding.py",
    "_quantisation.py",
    "_low_rank.py",
    "_cosines.py",
    "_ordinary.py",
    "llvm/codes.py",
    "llvm/lanes.py",
    "llvm/memory.py",
    "llvm/vectors.py",
)
_SOURCES = (Path(__file__), *(_HERE / part for part in _PARTS), Path(dtypes.__file__))
_COMPILER = "fusion_rt.kernels._kernels"
_COMPILE_TIMEOUT_S = 300.0
_DIGEST_BYTES = 32
_NAMED = 3  # kernels, in a message
_MADV_DONTNEED = 4  # as in <sys/mman.h>

_log = logging.getLogger(__name__)


class KernelError(FusionError, RuntimeError):
    """A kernel could not be compiled on this host."""


class MachineCode:
    """The kernels of this process. Any number of threads may use it.

    Args:
        folders: where compiled kernels are looked for, in this order; a new one is written to the first that can be
            written. With none, or none that is writable, every process compiles its kernels.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._lock = threading.Lock()
        self._engines: dict[str, Any] = {}  # by kernel; each owns the memory that its kernel lies in
        self._addresses: dict[str, int] = {}
        self._compiled = 0

    def address(self, kernel: str) -> int:
        """Returns where the kernel's function begins. Loads or compiles it the first time; raises `KernelError`."""
        if kernel not in self._addresses:
            self.prepare([kernel])
        return self._addresses[kernel]

    def has(self, kernel: str) -> bool:
        """Says whether `address` would answer at once."""
        return kernel in self._addresses

    def prepare(self, kernels: Iterable[str]) -> None:
        """Loads these kernels, and compiles in one go the ones that have to be.

        Raises:
            KernelError: the compiler failed; the text has its message.
        """
        wanted = [kernel for kernel in dict.fromkeys(kernels) if kernel not in self._addresses]
        if not wanted:
            return  # without the lock, which may be held for seconds by a thread that compiles others
        with self._lock:
            missing = []
            for kernel in wanted:
                if kernel in self._addresses:
                    continue
                code = self._read(kernel)
                if code is None:
                    missing.append(kernel)
                else:
                    self.link(kernel, code)
            if missing:
                _log.warning(
                    "this installation compiles %d kernels for their first use, which takes seconds (%s)",
                    len(missing),
                    ", ".join(missing[:_NAMED]) + (", ..." if len(missing) > _NAMED else ""),
                )
                for kernel, code in _compile(missing):
                    self._write(kernel, code)
                    self.link(kernel, code)
                    self._compiled += 1
            _unload_pages_of("libllvmlite")

    def statistics(self) -> dict[str, int]:
        """Counts the kernels that this process had `compiled`, and those that it `loaded` from disk."""
        return {"compiled": self._compiled, "loaded": len(self._addresses) - self._compiled}

    def link(self, kernel: str, code: bytes) -> None:
        """Puts an object file with the function `kernel` into this process."""
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine()
        # Sections refer to each other by 32 bits, and LLVM aborts the process when it has put them further apart: it
        # maps them one by one, which large arenas may leave only small holes for. llvmlite's memory manager maps once.
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine, use_lmm=True)
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        self._engines[kernel] = engine
        self._addresses[kernel] = engine.get_function_address(kernel)

    @cached_property
    def _key(self) -> str:
        import llvmlite.binding  # only a process that runs kernels pays for it

        depends_on = (
            llvmlite.__version__,  # each release of Numba requires its own; to ask for Numba's takes 20 ms
            llvmlite.binding.get_process_triple(),
            llvmlite.binding.get_host_cpu_name(),
            llvmlite.binding.get_host_cpu_features().flatten(),
            *(source.read_text(encoding="utf-8") for source in _SOURCES),
        )
        return hashlib.sha256("\0".join(depends_on).encode()).hexdigest()[:20]

    def _file(self, folder: Path, kernel: str) -> Path:
        return folder / f"{kernel}-{self._key}.o"

    def _read(self, kernel: str) -> bytes | None:
        for folder in self._folders:
            path = self._file(folder, kernel)
            try:
                with path.open("rb") as file:  # of one file, whatever is put in its place meanwhile
                    status, contents = os.fstat(file.fileno()), file.read()
            except OSError:
                continue  # not there, or not for us; then it is compiled
            if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
                _log.warning("%s is not used as machine code: other users could have written it", path)
                continue
            digest, code = contents[:_DIGEST_BYTES], contents[_DIGEST_BYTES:]
            if hashlib.sha256(code).digest() == digest:
                return code
            _log.warning("%s is damaged and will be replaced", path)
        return None

    def _write(self, kernel: str, code: bytes) -> None:
        reasons = []
        for folder in self._folders:
            try:
                folder.mkdir(mode=0o755, parents=True, exist_ok=True)
                with replacing(str(self._file(folder, kernel)), mode=0o644) as file:
                    file.write(hashlib.sha256(code).digest() + code)
                return
            except OSError as error:
                reasons.append(str(error))
        _log.warning("the kernel %s is compiled anew in every process: %s", kernel, "; ".join(reasons) or "no cache")


def cache_folders() -> list[Path]:
    """Beside the source, as Python does with byte code; and in the user's cache, when the package is read-only."""
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return [_HERE / "__pycache__", Path(user, "fusion_rt")]


def _unload_pages_of(library: str) -> None:
    """Takes pages of a library that were only read out of this process; they are read again if they are needed again.

    LLVM's library is 50 MB of the daemon's memory, for the moment in which it links a kernel. Pages that differ from
    the file (relocated ones) stay. Does nothing where /proc does not say which those are.
    """
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
    begin = end = 0
    try:
        with open("/proc/self/smaps", encoding="utf-8") as maps:
            for line in maps:
                field, _, rest = line.partition(" ")
                if not field.endswith(":"):
                    begin, end = (int(edge, 16) for edge in field.split("-")) if library in rest else (0, 0)
                elif field == "Anonymous:" and end and int(rest.split()[0]) == 0:
                    libc.madvise(begin, end - begin, _MADV_DONTNEED)
    except OSError:
        return


def write_record(stream: BinaryIO, kernel: str, code: bytes) -> None:
    """Writes the compiler's answer for each kernel: its name, the length of the code, and the code."""
    stream.write(f"{kernel} {len(code)}\n".encode() + code)


def _records(output: bytes) -> Iterator[tuple[str, bytes]]:
    while output:
        header, _, rest = output.partition(b"\n")
        kernel, length = header.decode().split()
        yield kernel, rest[: int(length)]
        output = rest[int(length) :]


def _compile(kernels: list[str]) -> list[tuple[str, bytes]]:
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    _log.info("compiling %s", ", ".join(kernels))
    try:
        done = subprocess.run(
            [sys.executable, "-m", _COMPILER, *kernels],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd=python_children.DIRECTORY,
            env={**environment, "PYTHONPATH": path},
            timeout=_COMPILE_TIMEOUT_S,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip()
        raise KernelError(f"Numba could not compile {', '.join(kernels)} on this host: {said}") from error
    except OSError as error:
        raise KernelError(f"the compiler of kernels could not be started: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise KernelError(f"compiling {', '.join(kernels)} took more than {_COMPILE_TIMEOUT_S:.0f} s") from error
    return list(_records(done.stdout))
