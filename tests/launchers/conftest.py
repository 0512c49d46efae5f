"""Launchers as people call them, and an OpenSSH server to launch over."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fusiond.processes import quiet

HERE = Path(__file__).parent
TIMEOUT_S = 180.0  # for a whole job, on however slow a machine
HOSTS = {"nodeA": "127.0.0.2", "nodeB": "127.0.0.3"}  # names that only ssh knows: all others would be taken for local


def run(*command: str | Path, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs a launcher to its end; if that does not come, ends it and everything in its session."""
    process = subprocess.Popen(
        [*map(str, command)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=cwd, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"{command[0]} did not end within {TIMEOUT_S:g} s:\n{out}\n{err}")
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def fusionrun() -> list[str]:
    return [sys.executable, "-m", "fusion_rt.runner"]


def horovodrun() -> list[str]:
    """The real one, which may be installed for another Python than the workers'."""
    found = shutil.which("horovodrun", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
    if found is None:
        pytest.skip("there is no horovodrun (pip install '.[horovod]', see docs/launchers.md)")
    with open(found) as script:
        return [script.readline().removeprefix("#!").strip(), str(HERE / "real_horovodrun.py")]


def torchrun() -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run"]


def mpirun() -> list[str]:
    if shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun (Debian: openmpi-bin)")
    return ["mpirun", "--allow-run-as-root", "--oversubscribe"]


def logs(directory: Path) -> dict[str, str]:
    """What daemons had to say, and which of them have left something else, when all of them have ended: they may do so
    a moment after their launcher."""
    for lock in directory.glob("*/lock"):
        with contextlib.suppress(FileNotFoundError), lock.open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)  # a daemon's until it ends, in whichever way
    found = {path.name: sorted(os.listdir(path)) for path in directory.iterdir()}
    texts = {name: quiet((directory / name / "log").read_text()) for name, files in found.items() if "log" in files}
    return {name: texts.get(name, "") for name, files in found.items() if files != ["log"] or texts[name]}


@dataclass(frozen=True)
class Sshd:
    """A running OpenSSH server, and what is needed to reach it.

    Attributes:
        directory: holds the keys `user` (which is let in) and `other` (which is not).
        ports: the usual one, one behind which every shell has something to say first, and one that lets nobody work.
    """

    directory: Path
    ports: tuple[int, int, int]

    def fusionrun(self, *command: str | Path, port: int = 0, key: str = "user", **environ: str) -> list[str]:
        """The command line that runs a command on both hosts."""
        flags = ["-H", ",".join(f"{name}:1" for name in HOSTS), "--network-interface", "lo"]
        reach = ["-p", str(self.ports[port]), "-i", str(self.directory / key)]
        return [*fusionrun(), *flags, *reach, *map(str, command)]

    @property
    def environ(self) -> dict[str, str]:
        """What makes `ssh` use the test's own configuration, and leave the person's known hosts alone."""
        return {"PATH": f"{self.directory}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if program is None or shutil.which("ssh-keygen") is None:
        pytest.skip("there is no OpenSSH server (Debian: openssh-server)")
    directory = tmp_path / "ssh"
    directory.mkdir(mode=0o700)
    for name in ("host", "user", "other"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)], check=True)
    (directory / "config").write_text(
        f"UserKnownHostsFile {directory}/known_hosts\n"
        + "".join(f"Host {name}\n  HostName {address}\n" for name, address in HOSTS.items())
    )
    wrapper = directory / "ssh"
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {directory}/config "$@"\n')
    wrapper.chmod(0o700)
    if os.getuid() == 0:
        os.makedirs("/run/sshd", exist_ok=True)  # where it goes for privilege separation; its service makes it at boot
    server, ports = _serve(program, directory)
    with server:
        try:
            yield Sshd(directory, ports)
        finally:
            server.terminate()
            server.communicate()


def _serve(program: str, directory: Path) -> tuple[subprocess.Popen[bytes], tuple[int, int, int]]:
    """An OpenSSH server, and the ports on which it listens. Others on this machine may take one before it does."""
    for _ in range(20):
        reserved = [socket.create_server(("127.0.0.2", 0)) for _ in range(3)]
        first, second, third = (each.getsockname()[1] for each in reserved)
        for each in reserved:
            each.close()
        _configure(directory, (first, second, third))
        server = subprocess.Popen([program, "-D", "-e", "-f", str(directory / "sshd_config")], stderr=subprocess.PIPE)
        assert server.stderr is not None
        said = [server.stderr.readline() for _ in range(3 * len(HOSTS))]
        if all(b"listening" in line for line in said):
            return server, (first, second, third)
        server.kill()
        said += server.communicate()[1].splitlines(keepends=True)
    pytest.fail(b"".join(said).decode())


def _configure(directory: Path, ports: tuple[int, int, int]) -> None:
    (directory / "sshd_config").write_text(
        "".join(f"ListenAddress {address}:{port}\n" for port in ports for address in HOSTS.values())
        + f"HostKey {directory}/host\nAuthorizedKeysFile {directory}/user.pub\nPidFile none\n"
        "StrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\n"
        f"Match LocalPort {ports[1]}\n"
        '  ForceCommand echo "Welcome to {{name}}"; echo "mind the gap" >&2; exec sh -c "$SSH_ORIGINAL_COMMAND"\n'
        f"Match LocalPort {ports[2]}\n"
        '  ForceCommand echo "This account is currently not available."; exit 1\n'
    )
