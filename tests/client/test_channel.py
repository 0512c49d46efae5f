"""Operations under way: how they end, and threads that wait for them."""

from __future__ import annotations

import os
import re
import threading
import time

import msgspec
import pytest

from fusion_rt import wire
from fusion_rt.client import Client, channel
from fusion_rt.core.errors import FusionError, HorovodInternalError, WireError
from fusion_rt.host.arena import Segment
from tests.client.daemon import SUM, TIMEOUT_S, WELCOME, Daemon, failure


def test_a_failed_operation_leaves_the_others_alone(daemon: Daemon, client: Client) -> None:
    bad = client.submit("bad", SUM, inline=bytes(8))
    good = client.submit("good", SUM, inline=bytes(8))
    daemon.send(wire.Failed(bad.handle, "the ranks do not agree"))
    daemon.send(wire.Done(good.handle, b"87654321"))
    assert client.wait(good).inline == b"87654321"
    assert failure(client, bad) == "the ranks do not agree"


def test_a_failed_job_fails_everything(daemon: Daemon, client: Client) -> None:
    operations = [client.submit(name, SUM, inline=bytes(8)) for name in "xy"]
    daemon.send(wire.JobFailed("rank 0 died"))
    assert [failure(client, operation) for operation in operations] == ["rank 0 died"] * 2
    with pytest.raises(HorovodInternalError, match=r"^rank 0 died$"):
        client.submit("z", SUM, inline=bytes(8))


def test_a_daemon_that_is_killed(daemon: Daemon, client: Client) -> None:
    operation = client.submit("x", SUM, inline=bytes(8))
    daemon.sock.close()
    assert "the daemon of rank 1's node" in failure(client, operation)


def test_the_reason_is_read_when_the_daemon_is_gone_before_a_submission(daemon: Daemon, client: Client) -> None:
    daemon.send(wire.JobFailed("rank 0 died"))
    daemon.sock.close()
    with pytest.raises(HorovodInternalError, match=r"^rank 0 died$"):
        client.submit("x", SUM, inline=bytes(8))


def test_a_daemon_that_talks_nonsense(daemon: Daemon, client: Client) -> None:
    operation = client.submit("x", SUM, inline=bytes(8))
    daemon.sock.send(b"nonsense")
    with pytest.raises(WireError):
        client.wait(operation)
    daemon.send(WELCOME)
    with pytest.raises(FusionError, match="which was not asked for"):
        client.wait(operation)
    daemon.send(wire.Done(operation.handle, bytes(8)))
    client.wait(operation)


def test_a_result_of_its_own_is_a_private_mapping(daemon: Daemon, client: Client) -> None:
    operation = client.submit("x", wire.Signature("allgather", "uint8", (2, 4096)), place=(1, 0))
    segment = Segment.create(8192)
    segment.view[:3] = b"abc"
    daemon.send(wire.Done(operation.handle, None, (1, 1), 8192), os.dup(segment.fd))
    before = len(os.listdir("/proc/self/fd"))
    output = client.wait(operation).output
    assert output is not None
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert operation.sizes == (1, 1)
    output.view[0] = ord("x")
    assert bytes(output.view[:3]) == b"xbc"
    assert bytes(segment.view[:3]) == b"abc"
    output.close()
    segment.close()


def test_threads_may_wait_for_operations_of_their_own(daemon: Daemon, client: Client) -> None:
    operations = {name: client.submit(name, SUM, inline=bytes(8)) for name in "abcd"}
    results: dict[str, bytes | None] = {}

    def wait(name: str) -> None:
        results[name] = client.wait(operations[name]).inline

    threads = [threading.Thread(target=wait, args=name) for name in operations]
    for thread in threads:
        thread.start()
    for name in "dbca":
        daemon.send(wire.Done(operations[name].handle, name.encode()))
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert results == {name: name.encode() for name in operations}


def test_a_thread_is_woken_when_another_one_reads_its_answer(daemon: Daemon, client: Client) -> None:
    mine = client.submit("mine", SUM, inline=bytes(8))
    other = client.submit("other", SUM, inline=bytes(8))
    threads = [threading.Thread(target=client.wait, args=(operation,)) for operation in (other, mine)]
    threads[0].start()
    while not client.channel.reading:  # until it reads
        time.sleep(0)
    threads[1].start()
    daemon.send(wire.Done(mine.handle, bytes(8)))  # read by the first thread, which goes on waiting for its own
    threads[1].join(TIMEOUT_S)
    assert not threads[1].is_alive()
    assert threads[0].is_alive()
    daemon.send(wire.Done(other.handle, bytes(8)))
    threads[0].join(TIMEOUT_S)


def test_every_thread_that_waits_hears_that_the_client_has_left(daemon: Daemon, client: Client) -> None:
    """The one that reads the socket, and the one that waits for that one."""
    operations = [client.submit(name, SUM, inline=bytes(8)) for name in "ab"]
    errors: list[str] = []
    threads = [threading.Thread(target=lambda o=o: errors.append(failure(client, o))) for o in operations]
    for thread in threads:
        thread.start()
    while not (client.channel.reading and client.channel._waiting):
        time.sleep(0)
    client.leave()
    assert not client.channel.reading, "nobody may take what the daemon says to the next client on this connection"
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert errors == ["fusion_rt has been shut down on this rank"] * 2


def test_a_client_that_comes_back_waits_for_a_thread_that_still_reads_for_the_one_before(
    daemon: Daemon, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take what the daemon says to the new one."""
    operation = client.submit("x", SUM, inline=bytes(8))
    reads = threading.Thread(target=failure, args=(client, operation))
    reads.start()
    while not client.channel.reading:
        time.sleep(0)
    monkeypatch.setattr(channel, "_LOOK", 0.001)  # as if that thread had no processor for long
    client.leave()
    returned: list[Client] = []
    returns = threading.Thread(target=lambda: returned.append(Client("", "job", 1, TIMEOUT_S, client)))
    returns.start()
    message, fd = daemon.receive_with_descriptor()
    while not isinstance(message, wire.Hello):
        message, fd = daemon.receive_with_descriptor()
    os.close(fd)
    assert not client.channel.reading
    daemon.send(WELCOME)
    for thread in (reads, returns):
        thread.join(TIMEOUT_S)
    (after,) = returned
    after.close()


def test_an_answer_to_an_operation_that_has_failed_meanwhile_is_dropped(daemon: Daemon, client: Client) -> None:
    operation = client.submit("x", SUM, inline=bytes(8))
    client.channel.fail("over")
    segment = Segment.create(8192)
    before = len(os.listdir("/proc/self/fd"))
    daemon.send(wire.Done(operation.handle, None, (1, 1), 8192), os.dup(segment.fd))
    client.channel.read_available()
    assert len(os.listdir("/proc/self/fd")) == before
    segment.close()


def test_a_daemon_that_answers_is_waited_for_however_long_it_takes(daemon: Daemon) -> None:
    client = daemon.connect(msgspec.structs.replace(WELCOME, patience=1.5))
    operation = client.submit("x", SUM, inline=bytes(8))
    waiting = threading.Thread(target=client.wait, args=(operation,))
    waiting.start()
    assert isinstance(daemon.receive(), wire.Submit)
    for _ in range(3):
        assert daemon.receive() == wire.Ping()
        daemon.send(wire.Pong())
    daemon.send(wire.Done(operation.handle, bytes(8)))
    waiting.join(TIMEOUT_S)
    assert operation.error is None
    client.close()


def test_a_daemon_that_does_not_answer_is_given_up_by_who_waits_and_by_who_sends(daemon: Daemon) -> None:
    client = daemon.connect(msgspec.structs.replace(WELCOME, patience=1.0))
    sentence = f"the daemon of rank 1's node .*, pid {os.getpid()}. has not answered for 1 s: it is stopped"
    assert re.match(sentence, failure(client, client.submit("x", SUM, inline=bytes(8))))
    client.close()
    daemon.sock.close()
    client = daemon.connect(msgspec.structs.replace(WELCOME, patience=1.0))

    def fill() -> None:
        while True:  # until there is no room for more
            client.submit(None, SUM, inline=bytes(8))

    with pytest.raises(HorovodInternalError, match=sentence):
        fill()
    client.close()
