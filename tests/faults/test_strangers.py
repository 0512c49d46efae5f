"""Strangers on the network: what they can take from a job in memory and descriptors, before they have shown a key."""

from __future__ import annotations

import os
import re
import resource
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from fusion_rt.host.bootstrap import Endpoint, PeerTable, encode_line
from fusiond.transport import reception
from tests.faults.jobs import ProxiedDaemons, Workers
from tests.fusiond.processes import TIMEOUT_S, Daemons

MakeDaemons = Callable[..., Daemons]
MakeProxied = Callable[..., ProxiedDaemons]
COUNT = 1000  # elements of a step
MIB = 1 << 20
pytestmark = pytest.mark.multiprocess


def memory(process: subprocess.Popen[bytes]) -> int:
    """The most resident memory that a process has had, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
    assert found
    return 1024 * int(found[1])


def descriptors(process: subprocess.Popen[bytes]) -> int:
    return len(os.listdir(f"/proc/{process.pid}/fd"))


# --- memory -----------------------------------------------------------------------------------------------------------

STRANGERS = 8


def greeting(mechanism: bytes) -> bytes:
    """How ZMTP 3 begins."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


def send_long_command(port: int, mechanism: bytes, nbytes: int) -> socket.socket:
    """Greets, announces a command of the handshake and sends all but its last byte, as far as that is taken."""
    sock = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
    sock.settimeout(2.0)
    with suppress(OSError):  # it is refused in the middle
        sock.sendall(greeting(mechanism) + b"\x06" + struct.pack(">Q", nbytes))
        piece = b"x" * MIB
        for start in range(0, nbytes - 1, MIB):
            sock.sendall(piece[: nbytes - 1 - start])
    return sock


def test_who_has_shown_no_key_gets_little_memory_for_his_messages(daemons: MakeDaemons) -> None:
    job = daemons(1, 1, FUSION_ENCRYPTION="all").start()
    workers = Workers(job.join(), COUNT, range(2))
    workers.go_on()
    process, target = job.processes[1], job.endpoints[1]
    before = memory(process)
    with ExitStack() as stack:
        for _ in range(STRANGERS):
            stack.enter_context(send_long_command(target.control_port, b"CURVE", 40 * MIB))
        assert memory(process) < before + 8 * MIB
        for _ in range(STRANGERS):  # a chunk and what it may grow by when it is coded
            stack.enter_context(send_long_command(target.payload_port, b"PLAIN", 2 * MIB))
        assert memory(process) < before + (8 + 3 * STRANGERS) * MIB
        workers.go_on()
    workers.stop()
    assert (workers.errors, workers.wrong) == ({}, [])


# --- descriptors ------------------------------------------------------------------------------------------------------

CROWD = """
import os, resource, selectors, socket, sys
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
ports, count = [int(word) for word in sys.argv[1:3]], int(sys.argv[3])
selector, number = selectors.DefaultSelector(), 0
while True:
    for _ in range(min(50, count - len(selector.get_map()))):
        number += 1
        sock = socket.socket()
        sock.bind((f"127.0.1.{number % 5}", 0))
        sock.settimeout(5)
        try:
            sock.connect(("127.0.0.1", ports[number % 2]))
        except OSError:
            sock.close()
        else:
            selector.register(sock, selectors.EVENT_READ)
    if number >= count:
        print(number, flush=True)
    for key, _ in selector.select(0.1):
        try:
            data = key.fileobj.recv(4096)
        except OSError:
            data = b""
        if not data:
            selector.unregister(key.fileobj)
            key.fileobj.close()
"""


def test_a_thousand_connections_of_strangers_leave_the_job_its_descriptors(daemons: MakeDaemons) -> None:
    """They come again whenever they are thrown out, from several hosts, and say nothing."""
    job = daemons(1, 1, FUSION_HEARTBEAT_TIMEOUT="60s").start()
    clients = job.join()
    workers = Workers(clients, COUNT, range(2))
    workers.go_on()
    process, target = job.processes[1], job.endpoints[1]
    usual = descriptors(process)
    most = usual + 2 * (reception._STRANGERS + 4) + 20  # at both ports; and what the job itself opens meanwhile
    room = usual + 500
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (room, room))
    command = [sys.executable, "-I", "-c", CROWD, str(target.control_port), str(target.payload_port), "1000"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/") as crowd:
        try:
            assert crowd.stdout is not None
            assert int(crowd.stdout.readline()) >= 1000
            deadline = time.monotonic() + TIMEOUT_S
            while descriptors(process) > most:
                assert time.monotonic() < deadline, (descriptors(process), most)
                time.sleep(0.02)
            workers.go_on()
            status = job.status(1)
            assert status["mesh"]["strangers"] >= 500
            assert status["workers"]["not_accepted"] == 0
        finally:
            crowd.kill()
            crowd.stdout.read()
    workers.stop()
    assert (workers.errors, workers.wrong) == ({}, [])
    assert descriptors(process) <= most


def crowd_at(endpoint: Endpoint, source: str, nbytes: int) -> Iterator[socket.socket]:
    """300 connections from one address to the port for payloads, each with a command of the handshake but for its last
    byte; those that are thrown out on the way stay open at this end."""
    said = greeting(b"CURVE") + b"\x06" + struct.pack(">Q", nbytes) + bytes(nbytes - 1)
    for _ in range(300):
        sock = socket.create_connection(("127.0.0.1", endpoint.payload_port), TIMEOUT_S, (source, 0))
        sock.settimeout(TIMEOUT_S)
        with suppress(OSError):
            sock.sendall(said)
        yield sock


def accepted_at(port: int) -> int:
    """How many of a port's connections a process has (those that wait for it have no inode)."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] in ("01", "08") and row[9] != "0" for row in rows)


def has_room_for(strangers: int, process: subprocess.Popen[bytes], endpoint: Endpoint, source: str) -> None:
    """Fails where one host's strangers take more connections than so many, or it more than 128 MiB, the half of which
    is what a daemon takes for itself while it starts."""
    before, port = memory(process), endpoint.payload_port
    crowd = []
    try:
        for sock in crowd_at(endpoint, source, 2 * MIB):
            crowd.append(sock)
        deadline = time.monotonic() + TIMEOUT_S
        while accepted_at(port) > strangers:
            assert time.monotonic() < deadline, (accepted_at(port), memory(process) - before)
            time.sleep(0.02)
        assert memory(process) < before + 128 * MIB
    finally:
        for sock in crowd:
            sock.close()


def test_a_daemon_without_peers_has_as_little_room_for_strangers(daemons: MakeDaemons) -> None:
    """It may wait for the slowest host for minutes, with its ports bound."""
    job = daemons(1, 1, FUSION_ENCRYPTION="all").start(tell_peers=False)
    has_room_for(reception._STRANGERS_OF_HOST, job.processes[0], job.endpoints[0], "127.0.5.1")


def test_room_for_strangers_does_not_grow_with_the_number_of_hosts(daemons: MakeDaemons) -> None:
    """The other 127 hosts have not come; each may connect from its own address."""
    job = daemons(*[1] * 128, FUSION_ENCRYPTION="all")
    process = job.launch(0)
    endpoint = job.answer_of(process)
    assert isinstance(endpoint, Endpoint)
    away = [replace(endpoint, node=node, address=f"127.0.6.{node}") for node in range(1, 128)]
    assert process.stdin is not None
    process.stdin.write(encode_line(PeerTable((endpoint, *away))))
    process.stdin.flush()
    job.processes = [process]
    job.wait_until(lambda status: "mesh" in status)
    has_room_for(reception._STRANGERS_OF_HOST, process, endpoint, "127.0.5.1")


def test_a_connection_for_which_there_is_no_descriptor_is_made_later(proxied: MakeProxied) -> None:
    job = proxied(1, FUSION_HEARTBEAT_TIMEOUT="60s").start()
    workers = Workers(job.join(), COUNT, range(2))
    workers.go_on()
    pid = job.processes[0].pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE, (8, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    for proxy in (job.control, job.payload):
        proxy.reset()
    deadline = time.monotonic() + TIMEOUT_S
    while "can be made for now: Too many open files" not in job.log(0):
        assert time.monotonic() < deadline, job.log(0)
        time.sleep(0.02)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    workers.go_on()
    workers.stop()
    assert (workers.errors, workers.wrong) == ({}, [])
    assert "Traceback" not in job.log(0)
