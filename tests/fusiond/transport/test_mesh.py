"""Two nodes, or three, over loopback: who may connect, what they exchange, and what happens when one is lost."""

from __future__ import annotations

import os
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import zmq

from fusion_rt import wire
from fusion_rt.client import Client
from fusion_rt.core.errors import FusionError, HorovodInternalError
from fusion_rt.host.bootstrap import DaemonConfig, PeerTable, encode_line
from tests.fusiond.processes import NO_LIMITS, TIMEOUT_S, Daemons, kill, read_line

pytestmark = pytest.mark.multiprocess
MakeDaemons = Callable[..., Daemons]
SUM = wire.Signature("allreduce", "float32", (2,))
WAITING = """
print("joined", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def running(short_directory: Path) -> Iterator[Daemons]:
    """A job of two nodes with a worker each, for the tests that leave it running."""
    job = Daemons(short_directory, [1, 1]).start()
    job.join()
    yield job
    job.close()


def add(client: Client, name: str = "x") -> list[float]:
    """Adds (rank, 1) over all ranks."""
    operation = client.submit(name, SUM, inline=np.array([client.rank, 1], np.float32).tobytes())
    inline = client.wait(operation).inline
    assert inline is not None
    return np.frombuffer(inline, np.float32).tolist()


def exchange(client: Client) -> None:
    """Some of everything, against what it has to be."""
    size = client.topology.size
    everyone = np.arange(size, dtype=np.float32)
    for clock in range(3):
        for count in (3, 300_000):
            region = client.allocate(4 * count)
            array = np.frombuffer(region.view, np.float32)[:count]
            array[:] = client.rank + np.arange(count) % 7 + clock
            signature = wire.Signature("allreduce", "float32", (count,))
            client.wait(client.submit(f"sum {count}", signature, place=(region.segment, region.offset)))
            np.testing.assert_array_equal(array, everyone.sum() + size * (np.arange(count) % 7 + clock))
            del array
            client.arena.free(region)
    client.wait(client.submit(None, wire.Signature("barrier")))
    region = client.allocate(400_000)
    array = np.frombuffer(region.view, np.float32)[:100_000]
    array[:] = client.rank
    place = (region.segment, region.offset)
    gathered = client.wait(client.submit("gather", wire.Signature("allgather", "float32", (100_000,)), place=place))
    assert gathered.output is not None
    rows = np.frombuffer(gathered.output.view, np.float32).reshape(size, -1)
    np.testing.assert_array_equal(rows, np.repeat(everyone[:, None], 100_000, axis=1))
    client.wait(client.submit("from 1", wire.Signature("broadcast", "float32", (100_000,), root=1), place=place))
    assert (array == 1).all()
    splits = tuple(range(1, size + 1))
    rows = np.repeat(np.arange(size, dtype=np.int32) + 10 * client.rank, splits)
    signature = wire.Signature("alltoall", "int32", (len(rows),))
    exchanged = client.wait(client.submit("all", signature, inline=rows.tobytes(), splits=splits))
    assert exchanged.inline is not None
    np.testing.assert_array_equal(
        np.frombuffer(exchanged.inline, np.int32),
        np.repeat(np.arange(size) * 10 + client.rank, client.rank + 1),
    )


def error_of(client: Client, name: str = "x") -> str:
    with pytest.raises(HorovodInternalError) as raised:
        add(client, name)
    return str(raised.value)


# --- together ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "environment"),
    [
        ((2, 1), {}),
        ((1, 1), {"FUSION_ENCRYPTION": "all", "FUSION_CONNECTIONS": "2", "FUSION_IO_THREADS": "2"}),
        ((1, 2), {"FUSION_ENCRYPTION": "all", "FUSION_KERNEL_THREADS": "4", "FUSION_CONNECTIONS": "2"}),
        ((1, 1, 1), {"FUSION_CHUNK_BYTES": "4KiB", "FUSION_WINDOW_BYTES": "16KiB", "FUSION_CONNECTIONS": "3"}),
    ],
    ids=["plain payloads", "encrypted payloads", "encrypted by lanes", "small chunks on many connections"],
)
def test_everything_between_nodes(daemons: MakeDaemons, layout: tuple[int, ...], environment: dict[str, str]) -> None:
    job = daemons(*layout, **environment).start()
    job.join()
    assert job.on_clients(exchange) == dict.fromkeys(range(sum(layout)))
    for node in range(len(layout)):
        status = job.status(node)
        assert status["engine"]["under_way"] == 0
        assert status["mesh"]["refused"] == 0
        assert status["mesh"]["dropped"] == 0
        assert status["mesh"]["admitted"] >= len(layout) - 1
        for peer in status["mesh"]["peers"]:
            assert peer["received_bytes"] > 0
    for client in job.clients.values():
        client.close()
    assert [job.end(node) for node in range(len(layout))] == [0] * len(layout)


def test_a_node_that_hears_of_its_peers_later_is_waited_for(daemons: MakeDaemons) -> None:
    job = daemons(1, 1).start(tell_peers=False)
    job.tell(0)
    job.wait_until(
        lambda status: status["mesh"]["peers"] != []
    )  # it is connecting to a node that does not know its key
    job.tell(1)
    job.join()
    assert job.on_clients(add) == {0: [1, 2], 1: [1, 2]}


def test_the_links_are_measured_when_the_job_starts(running: Daemons) -> None:
    models = [
        (status["engine"]["latency_seconds"], status["engine"]["seconds_per_byte"])
        for status in (running.status(0), running.status(1))
    ]
    assert models[0] == models[1]
    assert 1e-6 < models[0][0] < 10  # s; loopback's, on a machine that is busy with other things
    assert 1e-12 <= models[0][1] < 1e-4


# --- strangers --------------------------------------------------------------------------------------------------------


def greet_as_zmtp(sock: socket.socket) -> None:
    """The greeting and handshake of a ZeroMQ DEALER without encryption."""
    sock.sendall(b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    sock.sendall(b"\x04" + bytes([len(ready)]) + ready)


def closes(sock: socket.socket) -> bool:
    """Whether the other end closes the connection."""
    sock.settimeout(TIMEOUT_S)
    with suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True


@pytest.mark.parametrize("mechanism", ["NULL", "PLAIN"])
def test_a_message_of_a_stranger_that_never_ends_takes_no_memory(running: Daemons, mechanism: str) -> None:
    """libzmq's limits count whole messages: frames that announce more of the same one would pile up without bound."""
    port, process = running.endpoints[0].payload_port, psutil.Process(running.processes[0].pid)
    before = process.memory_info().rss
    frame = b"\x03" + struct.pack(">Q", 1 << 20) + bytes(1 << 20)  # with more to come
    hello = b"\x05HELLO\x01f\x10" + os.urandom(16)
    with socket.create_connection(("127.0.0.1", port)) as sock:
        with suppress(ConnectionError):
            if mechanism == "NULL":
                greet_as_zmtp(sock)
            else:
                sock.sendall(b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"PLAIN".ljust(20, b"\0") + bytes(32))
                sock.sendall(b"\x04" + bytes([len(hello)]) + hello)
            for _ in range(200):
                sock.sendall(frame)
        assert closes(sock)
    assert process.memory_info().rss - before < 100 << 20
    assert running.on_clients(add) == {0: [1, 2], 1: [1, 2]}


def test_strangers_are_kept_out_and_the_job_goes_on(running: Daemons) -> None:
    job = running
    ours = job.endpoints[0]
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.linger = 0
    stranger.curve_serverkey = ours.public_key.encode()
    stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
    stranger.connect(f"tcp://127.0.0.1:{ours.control_port}")
    stranger.send(wire.encode(wire.Abort("I am nobody")))
    job.wait_until(lambda status: status["mesh"]["refused"] > 0)
    stranger.close()

    unknown = context.socket(zmq.DEALER)  # payloads are plain on loopback, but need a token
    unknown.linger = 0
    unknown.routing_id = unknown.plain_password = os.urandom(16)
    unknown.plain_username = b"fusion_rt"
    unknown.connect(f"tcp://127.0.0.1:{ours.payload_port}")
    chunk = wire.Chunk(wire.OpKey(0, 0, "x", 0), wire.digest(SUM), 0, 0, 1)
    unknown.send_multipart([wire.encode(chunk), bytes(8)])
    job.wait_until(lambda status: status["mesh"]["refused"] > 1)
    unknown.close()
    context.term()

    for port in (ours.control_port, ours.payload_port):
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(100))
            assert closes(sock)
    with socket.create_connection(("127.0.0.1", ours.payload_port)) as sock:
        with suppress(ConnectionError):
            greet_as_zmtp(sock)
            sock.sendall(b"\x02" + struct.pack(">Q", 8 << 30))  # a frame of 8 GiB is about to come
        assert closes(sock)
    half_open = [socket.create_connection(("127.0.0.1", ours.control_port)) for _ in range(50)]

    assert job.on_clients(add) == {0: [1, 2], 1: [1, 2]}
    assert job.status()["state"] == "running"
    for sock in half_open:
        sock.close()


def test_a_daemon_of_another_job_is_refused(daemons: MakeDaemons) -> None:
    job = daemons(1, 1)
    job.processes = [job.launch(0), job.launch_as(DaemonConfig("another", 1, job.topology))]
    for process in job.processes:
        job.endpoints.append(job.answer_of(process))  # type: ignore[arg-type]
    for node in (0, 1):
        job.tell(node)
    with pytest.raises(FusionError) as raised:
        job.join([0])
    assert (
        "node 1 (host host1) is lost: it says that it is (version, job, node, connections) (1, 'another', 1, 1), "
        in str(raised.value)
    )


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("FUSION_CONNECTIONS", "2", "FUSION_CONNECTIONS="),
        ("FUSION_CHUNK_BYTES", "64KiB", "FUSION_CHUNK_BYTES="),
        ("FUSION_WINDOW_BYTES", "1MiB", "FUSION_WINDOW_BYTES="),
        ("FUSION_DENSE_ROUTE", "doubling", "FUSION_DENSE_ROUTE="),
    ],
)
def test_daemons_with_different_settings_are_told_so(
    daemons: MakeDaemons, variable: str, value: str, sentence: str
) -> None:
    job = daemons(1, 1)
    job.processes.append(job.launch(0))
    job.environment[variable] = value
    job.processes.append(job.launch(1))
    job.endpoints = [job.answer_of(process) for process in job.processes]  # type: ignore[misc]
    for node in (0, 1):
        job.tell(node)
    with pytest.raises(FusionError, match=f"started with other settings than this host: {sentence}.* give all hosts"):
        job.join([0])


def test_a_table_of_peers_that_makes_no_sense_ends_the_daemon(daemons: MakeDaemons) -> None:
    job = daemons(1, 1).start(tell_peers=False)
    stdin = job.processes[0].stdin
    assert stdin is not None
    stdin.write(encode_line(PeerTable(tuple(job.endpoints[:1]))))
    stdin.flush()
    assert job.processes[0].wait(TIMEOUT_S) == 1
    assert "the table of peers does not name each of the 2 nodes once" in job.log(0)
    assert "Traceback" not in job.log(0)
    assert job.files(0) == set()


# --- losses -----------------------------------------------------------------------------------------------------------


def test_a_killed_daemon_is_named_on_the_other_nodes(daemons: MakeDaemons) -> None:
    job = daemons(1, 1, **NO_LIMITS).start()
    job.join()
    assert job.on_clients(add) == {0: [1, 2], 1: [1, 2]}
    operation = job.clients[0].submit("y", SUM, inline=bytes(8))
    kill(job.processes[1])
    with pytest.raises(HorovodInternalError, match=r"^node 1 \(host host1\) is lost: its connection was closed$"):
        job.clients[0].wait(operation)
    assert job.status(0)["state"] == "failed"
    assert "the daemon of rank 1's node" in error_of(job.clients[1], "y")
    assert job.end(0) == 1


def test_a_killed_worker_is_named_on_the_other_nodes(daemons: MakeDaemons) -> None:
    job = daemons(1, 1, **NO_LIMITS).start()
    victim = job.worker_process(1, WAITING)
    job.join([0])
    assert read_line(victim) == "joined"
    operation = job.clients[0].submit("x", SUM, inline=bytes(8))
    kill(victim)
    with pytest.raises(HorovodInternalError) as raised:
        job.clients[0].wait(operation)
    assert str(raised.value) == (
        f"rank 1 (host host1, pid {victim.pid}) died (killed, or crashed) without leaving the job"
    )


def test_a_daemon_that_stands_still_is_given_up(daemons: MakeDaemons) -> None:
    times = {"FUSION_HEARTBEAT_INTERVAL": "50ms", "FUSION_HEARTBEAT_TIMEOUT": "2s"}
    job = daemons(1, 1, **times).start()
    job.join()
    operation = job.clients[0].submit("x", SUM, inline=bytes(8))
    job.processes[1].send_signal(signal.SIGSTOP)
    with pytest.raises(
        HorovodInternalError, match=r"node 1 \(host host1\) is lost: its daemon has been silent for [\d.]+ s"
    ):
        job.clients[0].wait(operation)
    job.processes[1].send_signal(signal.SIGCONT)
    with pytest.raises(HorovodInternalError, match=r"node [01] \(host host[01]\) is lost"):
        add(job.clients[1])


def test_a_disagreement_between_nodes_is_told_on_both(running: Daemons) -> None:
    def disagree(client: Client) -> str:
        signature = wire.Signature("allreduce", "float32", (2 + client.rank,))
        try:
            client.wait(client.submit("x", signature, inline=bytes(4 * (2 + client.rank))))
        except HorovodInternalError as error:
            return str(error)
        return "no error"

    errors = set(running.on_clients(disagree).values())
    assert errors == {
        "the ranks do not agree about tensor 'x': rank 0 (host host0): allreduce sum float32 [2]; rank 1 (host host1): "
        "allreduce sum float32 [3]. Every rank has to submit the same operation"
    }
    assert running.on_clients(add) == {0: [1, 2], 1: [1, 2]}


def test_a_node_whose_peers_never_come_up_says_which(daemons: MakeDaemons) -> None:
    job = daemons(1, 1, HOROVOD_START_TIMEOUT="2s").start(tell_peers=False)
    with pytest.raises(FusionError, match=r"the job did not come up within 2 s: .*node.*1 \(host host1\)"):
        job.join([0])
    assert "Traceback" not in job.log(0)
    assert job.end(0) == 1


def test_a_worker_may_die_before_the_peers_are_known(daemons: MakeDaemons) -> None:
    job = daemons(1, 1).start(tell_peers=False)
    with job.connection() as sock:
        sock.send(wire.encode(wire.Hello(wire.PROTOCOL_VERSION, "test", 0, 1)))
        job.wait_until(lambda status: status["joined"] == [0])
    assert "rank 0" in job.wait_until(lambda status: status["state"] == "failed")["failure"]
    assert "Traceback" not in job.log(0)
