"""Python processes that begin with modules imported: a test's daemons and workers start in milliseconds.

Importing torch, and what its optimizers import besides, takes each worker three seconds of a core; a daemon takes half
a second. So a *nursery*, a process that has imported it all and has a single thread, forks for every `popen` here. What
is forked has the arguments, environment, directory, network and descriptors that it is given, and ends as any
interpreter does. It differs from a fresh process in that modules were imported with the environment of the nursery, and
that all of them hash alike; tests of the command line, of starting, and of launchers have real processes. Where a
launcher has to start the workers, and how they start is not the point, it gets `interpreter` for `sys.executable`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import pickle
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import typer

from fusion_rt.local import elastic

ROOT = Path(__file__).resolve().parent.parent
DAEMON = (
    "fusiond.app.cli",
    "fusiond.app.daemon",
    "fusiond.engine.engine",
    "fusiond.workers.connections",
    "fusiond.host.thread_pool",
    "fusion_rt.client",
)
WORKER = (
    *DAEMON,
    "fusion_rt.torch",
    "fusion_rt.torch.elastic",
    "fusion_rt.c10d",  # which torch 2.4 does not find by its entry point
    "torch._dynamo",
    "sklearn.datasets",
    "tests.harness",
)
_LARGEST = 128 * 1024  # bytes of a request
_IN_NETWORK = ("ip", "netns", "exec")
_CLONE_NEWNET = 0x40000000
_MADV_COLLAPSE = 25
_HUGE_PAGE = 2 << 20  # bytes
_HIGH = 512  # descriptors from here on are nobody's yet
PARENT = "FUSION_TEST_PARENT"
_nurseries: dict[tuple[str, ...], Nursery] = {}


def popen(command: Sequence[str], modules: tuple[str, ...], **options: Any) -> subprocess.Popen[Any]:
    """As `subprocess.Popen`: forked if the command begins with `sys.executable` and has no flags but `-m` or `-c`,
    perhaps behind `ip netns exec NAME`, and looks for modules where the tests do.

    Args:
        modules: what is to be imported already: `DAEMON` or `WORKER`.
        options: `stdin`, `stdout`, `stderr`, `text`, `env`, `cwd` and `pass_fds`.
    """
    environment = options.get("env") or os.environ
    paths = set(environment.get("PYTHONPATH", "").split(os.pathsep))
    python = command[len(_IN_NETWORK) + 1 :] if tuple(command[: len(_IN_NETWORK)]) == _IN_NETWORK else command
    known = python[1] in ("-m", "-c") or not python[1].startswith("-")
    same = python[0] == sys.executable and known and paths <= set(_paths())
    if not same or not possible():
        return subprocess.Popen(command, **options)
    return _Forked(command, modules, **options)


def interpreter(modules: tuple[str, ...]) -> list[str]:
    """What a launcher is given instead of `sys.executable`, to have its workers forked: `tests/forked.py`, which stays
    the launcher's child, and passes signals on to the fork and its exit status back.

    The arguments of a worker are `-c CODE`, `-m MODULE` or a script, and its own. `os.getppid()` is none of the
    launcher's processes there; PARENT names the variable that has the right number.
    """
    if not possible():
        return [sys.executable]
    return [sys.executable, "-IS", str(ROOT / "tests" / "forked.py"), nursery(modules).address]


def possible() -> bool:
    """Whether this machine lets what is forked do all that a fresh process does."""
    return not os.path.exists("/dev/nvidiactl")  # CUDA does not outlive a fork


def _paths() -> list[str]:
    """Where modules are found."""
    return [str(ROOT), str(ROOT / "daemon"), str(ROOT / "tools"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]


class _Forked(subprocess.Popen[bytes]):
    def __init__(self, command: Sequence[str], modules: tuple[str, ...], **options: Any) -> None:
        self._modules = modules
        self._status = -1
        super().__init__(list(command), **options)

    def _execute_child(self, args: list[str], *options: Any) -> None:
        _, _, _, pass_fds, cwd, env = options[:6]
        pipes = options[9:15]
        streams = [pipes[0], pipes[3], pipes[5]]
        kept = {number: number if fd < 0 else fd for number, fd in enumerate(streams)} | {fd: fd for fd in pass_fds}
        network = f"/run/netns/{args[len(_IN_NETWORK)]}" if args[0] != sys.executable else ""
        python = args[args.index(sys.executable) :]
        self.pid, self._status = nursery(self._modules).fork(
            python[1:], network, dict(os.environ if env is None else env), os.fspath(cwd or os.getcwd()), kept
        )
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._wait(0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._status, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            data = os.read(self._status, 16)
            os.close(self._status)
            assert data, "the nursery has ended"
            self.returncode = int(data)
        return self.returncode


class Nursery:
    """A process that forks, as this one sees it. It ends with this one.

    Attributes:
        process: it.
        address: path of the socket where others than the tests' process ask it for a fork.
    """

    def __init__(self, modules: tuple[str, ...]) -> None:
        self._lock = threading.Lock()
        self._directory = tempfile.mkdtemp(prefix="frt", dir="/tmp")
        self.address = f"{self._directory}/forks"
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self.address)
            listener.listen(64)
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.forks", str(theirs.fileno()), str(listener.fileno()), *modules],
                pass_fds=[theirs.fileno(), listener.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, _paths())), "OMP_NUM_THREADS": "1"},
            )
        atexit.register(self._close)
        # A launcher that gets the address allows its workers a time to start, and imports are none of that.
        if not self._sock.recv(16):
            raise self._ended()

    def _close(self) -> None:
        self._sock.close()
        self.process.wait()
        shutil.rmtree(self._directory)

    @property
    def descriptors(self) -> set[int]:
        return {self._sock.fileno()}

    def fork(
        self,
        arguments: Sequence[str],
        network: str,
        environment: Mapping[str, str],
        directory: str,
        kept: Mapping[int, int],
    ) -> tuple[int, int]:
        """A new process.

        Args:
            arguments: of the interpreter.
            network: path of its network namespace; empty for this process's.
            kept: its descriptors, and what they are here.

        Returns:
            Its number, and where its exit status, or minus a signal, comes.
        """
        status, theirs = os.pipe()
        request = pickle.dumps((list(arguments), network, dict(environment), directory, list(kept)))
        try:
            with self._lock:
                socket.send_fds(self._sock, [request], [theirs, *kept.values()])
                answer = self._sock.recv(16)
        finally:
            os.close(theirs)
        if not answer:
            os.close(status)
            raise self._ended()
        return int(answer), status

    def _ended(self) -> RuntimeError:
        return RuntimeError(f"the process that forks has ended with status {self.process.wait()}")


def nursery(modules: tuple[str, ...]) -> Nursery:
    """The one that has these modules; the first call starts it."""
    if modules not in _nurseries:
        _nurseries[modules] = Nursery(modules)
    return _nurseries[modules]


def pids() -> set[int]:
    """Of the processes here that fork: no test has to end them."""
    return {each.process.pid for each in _nurseries.values()}


def descriptors() -> set[int]:
    """Of this process, by which it talks with them."""
    return {fd for each in _nurseries.values() for fd in each.descriptors}


# --- the process that forks -------------------------------------------------------------------------------------------


def _serve(sock: socket.socket, listener: socket.socket) -> list[str]:
    """Forks on demand until the other side is gone; in each child, returns the arguments of its interpreter.

    Whoever has come by the listener asks for one fork, which does not outlive the connection: `tests/forked.py` was
    killed, or its launcher was.
    """
    poll = select.poll()
    running: dict[int, tuple[int, int, int]] = {}  # by pidfd: the process, where its status goes, and the caller
    callers = {sock.fileno(): sock, listener.fileno(): listener}
    for fd in callers:
        poll.register(fd, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready in running:
                poll.unregister(ready)
                _tell_end(ready, *running.pop(ready)[:2])
                continue
            if ready == listener.fileno():
                caller, _ = listener.accept()
                callers[caller.fileno()] = caller
                poll.register(caller, select.POLLIN)
                continue
            caller = callers[ready]
            try:
                request, fds, _, _ = socket.recv_fds(caller, _LARGEST, 64)
            except ConnectionResetError:
                request, fds = b"", []
            if not request and caller is sock:
                raise SystemExit
            if not request:
                for pid in (pid for pid, _, by in running.values() if by == ready):
                    os.kill(pid, signal.SIGKILL)
                    with contextlib.suppress(ProcessLookupError):  # it had nobody in its session, or has none yet
                        os.killpg(pid, signal.SIGKILL)
                poll.unregister(ready)
                callers.pop(ready).close()
                continue
            pid = os.fork()
            if pid == 0:
                if caller is not sock:
                    os.setsid()
                for each in callers.values():
                    each.detach()  # `_become` closes them
                return _become(request, fds)
            for fd in fds[1:]:
                os.close(fd)
            pidfd = os.pidfd_open(pid)
            running[pidfd] = pid, fds[0], ready
            poll.register(pidfd, select.POLLIN)
            with contextlib.suppress(BrokenPipeError):  # the caller is gone, which is seen next
                caller.send(str(pid).encode())


def _tell_end(pidfd: int, pid: int, status: int) -> None:
    os.close(pidfd)
    with contextlib.suppress(BrokenPipeError):  # nobody wants to know
        os.write(status, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    os.close(status)


def _become(request: bytes, fds: list[int]) -> list[str]:
    """Makes this process the one that was asked for, as far as the system is concerned."""
    arguments: list[str]
    arguments, network, environment, directory, kept = pickle.loads(request)
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH) for fd in fds[1:]]
    os.closerange(3, _HIGH)
    for number, fd in zip(kept, high, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    if network and not os.path.samefile(network, "/proc/self/ns/net"):
        with open(network, "rb") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"network namespace {network} cannot be entered")
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    tempfile.tempdir = None  # the nursery's, if it has looked for one
    sys.path[1:1] = [
        path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path
    ]
    sys.orig_argv = [sys.executable, *arguments]
    elastic._forked = False  # it is no child of a worker
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    return arguments


def _run(arguments: list[str]) -> int:
    """What an interpreter does with its arguments; the exit status."""
    try:
        _execute(arguments)
        status = 0
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _execute(arguments: list[str]) -> None:
    how, *rest = arguments
    if how not in ("-m", "-c"):
        sys.argv = arguments
        sys.path[0] = os.path.dirname(os.path.abspath(how))
        runpy.run_path(how, run_name="__main__")
        return
    what, *rest = rest
    sys.argv = [how, *rest]
    sys.path[0] = os.getcwd() if how == "-m" else ""
    if how == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(what, "<string>", "exec"), main.__dict__)


def _move_to_huge_pages() -> None:
    """Has the kernel move this process's memory into huge pages.

    A fork copies the table of all pages, and takes it down when it ends. With pages of 4 KiB, which is what there is
    before Linux 6.1, that is two thirds of what a fork costs.
    """
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with open("/proc/self/maps") as file:
        places = [line.split() for line in file]
    for addresses, access, _, _, _, *name in places:
        low, high = (int(address, 16) for address in addresses.split("-"))
        low, high = -(-low // _HUGE_PAGE) * _HUGE_PAGE, high // _HUGE_PAGE * _HUGE_PAGE
        if "w" in access and name in ([], ["[heap]"]) and low < high:
            libc.madvise(low, high - low, _MADV_COLLAPSE)


def _main() -> NoReturn:
    sock, listener = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    for name in sys.argv[3:]:
        importlib.import_module(name)
    # typer imports what it parses with when it parses for the first time, which is most of a daemon's start.
    start = typer.main.get_command(sys.modules[DAEMON[0]].app).commands["start"]  # type: ignore[attr-defined]
    start.make_context("start", [], resilient_parsing=True)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch takes its operators apart, for 30 ms of each fork
    if threading.active_count() > 1:
        raise RuntimeError(f"a thread runs, which no fork would have: {threading.enumerate()}")
    gc.collect()
    _move_to_huge_pages()
    gc.freeze()  # what is there is shared with all children, as long as they do not look for garbage in it
    sock.send(b"ready")
    arguments = _serve(sock, listener)
    os._exit(_run(arguments))  # to take down all modules would take as long as to import them


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _main()
