"""A change is tried in a copy of the tree, by a process that has imported torch already and forks for each.

Whatever the change makes the tests leave is ended and removed: processes carry a word in their environment, and files
in /dev/shm are nobody's once these have ended.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.mutants import plugin

MARK = "FUSION_MUTANTS_MARK"
IMPORTED = (
    *("torch", "torch._dynamo", "numpy", "numba", "llvmlite.binding", "sklearn", "msgspec", "zmq"),
    *("hypothesis", "pytest", "psutil"),
)
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"  # torch imports our backend with itself, unless this says no
_END_S = 20.0  # for what was killed to be gone
_NO_TESTS = 5  # exit status of pytest: those that were chosen are there no more


class Verdict(NamedTuple):
    """What became of a change."""

    outcome: str  # "found", "timeout" or "survived"
    by: str  # the test that failed; empty if none did
    seconds: float
    output: str  # the end of what pytest printed


class KeptKernels:
    """Machine code of the kernels that a change leaves as they were.

    A file of machine code is named after the source of all kernels (`fusion_rt.kernels.machine_code`), so that any
    change would have all of them compiled, for a minute. But those of other parts are the same: they get the new name.

    Args:
        folder: a copy of the tree.
        environment: of a process that imports from it.
    """

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder, self._environment = folder, environment
        self._kept = folder / "fusion_rt" / "kernels" / "__pycache__"
        self._parts: dict[str, list[str]] = {}  # kernels, by file; those of `_kernels.py` are all others
        self._key = ""

    def keep(self, module: str) -> None:
        """Gives machine code its new name, after a module was changed."""
        if not module.startswith("fusion_rt/kernels/_"):
            return
        if not self._parts:
            raise RuntimeError("kernels are prepared before any is changed")
        new, part = self._asked(_KEY), Path(module).name
        if new == self._key:
            return  # nothing is changed
        others = {kernel for name, kernels in self._parts.items() if name != part for kernel in kernels}
        named = {kernel for kernels in self._parts.values() for kernel in kernels}
        for code in self._kept.glob(f"*-{self._key}.o"):
            kernel = code.name.removesuffix(f"-{self._key}.o")
            if kernel in others or (kernel not in named and part != "_kernels.py"):
                os.link(code, self._kept / f"{kernel}-{new}.o")

    def prepare(self, module: str) -> None:
        """Compiles what is there of other versions, before a first change of kernels."""
        if module.startswith("fusion_rt/kernels/_") and not self._parts:
            self._key, self._parts = self._asked(_PREPARE)

    def forget(self) -> None:
        """Removes machine code of changes."""
        for code in self._kept.glob("*.o") if self._key else ():
            if not code.name.endswith(f"-{self._key}.o"):
                code.unlink()

    def _asked(self, script: str) -> Any:
        command = [sys.executable, "-c", script]
        return json.loads(
            subprocess.run(
                command, cwd=self._folder, env=self._environment, stdout=subprocess.PIPE, text=True, check=True
            ).stdout
        )


_KEY = """
import json
from fusion_rt.kernels.machine_code import MachineCode
print(json.dumps(MachineCode([])._key))
"""
_PREPARE = """
import json
from pathlib import Path
from fusion_rt.kernels import _kernels
from fusion_rt.kernels.machine_code import MachineCode, cache_folders
code = MachineCode(cache_folders())
code.prepare({path.stem.rpartition("-")[0] for path in cache_folders()[0].glob("*.o")})
parts = {}
for name, kernel in _kernels._NAMED.items():
    parts.setdefault(Path(kernel.__code__.co_filename).name, []).append(name)
print(json.dumps([code._key, parts]))
"""


class Copy:
    """A copy of the tree, and the process that tries changes in it.

    Args:
        root: the tree.
        folder: where the copy is; what is there is brought up to date.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self._folder = folder
        copy_tree(root, folder)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(folder / part) for part in ("", "daemon", "tools")),
            "OMP_NUM_THREADS": "1",
            _AUTOLOAD: "0",
        }
        self._kernels = KeptKernels(folder, environment)
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.trial"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        """Ends the process."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()

    def attempt(
        self, module: str, code: str, files: Sequence[str], tests: Sequence[str], known: Sequence[str], limit: float
    ) -> Verdict:
        """Puts `code` into a module, and runs tests until one fails.

        Args:
            files: where the tests are.
            tests: their names, in the order in which they run; unknown ones run before them.
            known: the names of all tests that were there when tests were chosen.
            limit: seconds.
        """
        verdict = self._attempt(module, code, files, tests, known, limit)
        if verdict.outcome == "found" and not verdict.by:  # before the first test: because of the change?
            before = (self._folder / module).read_text(encoding="utf-8")
            unchanged = self._attempt(module, before, files, tests, known, limit)
            if unchanged.outcome != "survived":
                raise RuntimeError(f"these tests do not pass without a change either:\n{unchanged.output}")
            verdict = verdict._replace(by="the start of pytest")
        return verdict

    def _attempt(
        self, module: str, code: str, files: Sequence[str], tests: Sequence[str], known: Sequence[str], limit: float
    ) -> Verdict:
        path = self._folder / module
        self._kernels.prepare(module)
        status, before = path.stat(), path.read_bytes()
        try:
            path.write_text(code, encoding="utf-8")
            _forget(path)
            self._kernels.keep(module)
            return self._run(files, tests, known, limit)
        finally:
            self._kernels.forget()
            path.write_bytes(before)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            _forget(path)

    def _run(self, files: Sequence[str], tests: Sequence[str], known: Sequence[str], limit: float) -> Verdict:
        word = secrets.token_hex(8)
        plan, found, output = (self._folder.parent / f"{self._folder.name}.{end}" for end in ("plan", "found", "log"))
        plan.write_text(json.dumps({"tests": list(tests), "known": list(known)}), encoding="utf-8")
        found.unlink(missing_ok=True)
        shm = _shm()
        request = {
            "arguments": ["-p", "tests.mutants.plugin", *files],
            "environment": {plugin.TRY: str(plan), plugin.FOUND: str(found), MARK: word},
            "output": str(output),
            "limit": limit,
        }
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        began = time.monotonic()
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        status = json.loads(self._server.stdout.readline())
        seconds = time.monotonic() - began
        _end(word)
        _remove_shm(shm)
        by = found.read_text(encoding="utf-8") if found.exists() else ""
        text = output.read_text(encoding="utf-8", errors="replace")[-4000:]
        if status is None:
            return Verdict("timeout", by, seconds, text)
        if status in (0, _NO_TESTS):
            return Verdict("survived", "", seconds, text)
        return Verdict("found", by, seconds, text)


def copy_tree(root: Path, folder: Path) -> None:
    """Copies a tree, or what git does not ignore of it. What has not changed stays, with kernels as machine code."""
    wanted = _files(root)
    for name in wanted:
        source, target = root / name, folder / name
        if not target.exists() or source.read_bytes() != target.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            _forget(target)
    for name in _files(folder) - wanted:
        (folder / name).unlink()
        _forget(folder / name)
    for code in (root / "fusion_rt" / "kernels" / "__pycache__").glob("*.o"):
        if not (target := folder / code.relative_to(root)).exists():
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(code, target)


def _files(root: Path) -> set[str]:
    if (root / ".git").exists():
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        names = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True).stdout.split("\0")
        return {name for name in names if name and (root / name).is_file()}
    files = (file for file in root.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return {str(file.relative_to(root)) for file in files}


def _forget(path: Path) -> None:
    """Removes a module's byte code: Python takes it for current when the second and the size are the same."""
    for file in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        file.unlink()


def _end(word: str) -> None:
    """Ends all processes that descend from an attempt."""
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline:
        left = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.environ().get(MARK) == word and process.status() != psutil.STATUS_ZOMBIE:
                    left.append(process)
        if not left:
            return
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1.0)


def _shm() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def _remove_shm(before: set[str]) -> None:
    """Removes files that came into /dev/shm meanwhile, and that no process has mapped any more."""
    new = {name for name in _shm() - before if os.stat(f"/dev/shm/{name}").st_uid == os.geteuid()}
    for process in psutil.process_iter() if new else ():
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace")
            new = {name for name in new if f"/dev/shm/{name}" not in maps}
    for name in new:
        Path("/dev/shm", name).unlink(missing_ok=True)


def _serve() -> None:
    for module in IMPORTED:
        importlib.import_module(module)
    assert not any(name.partition(".")[0] in ("fusion_rt", "fusiond") for name in sys.modules)
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _test(request)
        print(json.dumps(_wait(pid, request["limit"])), flush=True)


def _wait(pid: int, limit: float) -> int | None:
    process = os.pidfd_open(pid)
    ended = select.select([process], [], [], limit)[0]
    os.close(process)
    status = os.waitpid(pid, 0)[1] if ended else None
    with contextlib.suppress(ProcessLookupError):  # it has left nobody
        os.killpg(pid, signal.SIGKILL)
    if status is not None:
        return os.waitstatus_to_exitcode(status)
    os.waitpid(pid, 0)
    return None


def _test(request: dict[str, Any]) -> None:
    status = 1
    try:
        os.setsid()
        os.environ.update(request["environment"])
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        import pytest

        del os.environ[_AUTOLOAD]
        for backend in importlib.metadata.entry_points(group="torch.backends"):
            backend.load()()
        options = [
            "-q",
            "-x",
            "--tb=short",
            "-W",
            "ignore::pytest.PytestAssertRewriteWarning",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-p",
            "no:randomly",
        ]
        status = int(pytest.main([*options, *request["arguments"]]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
