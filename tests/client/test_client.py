"""What a worker asks its daemon for, and leaving, with a daemon that says what the test wants it to say."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest

from fusion_rt import wire
from fusion_rt.client import Client, terms
from fusion_rt.client.channel import Completion
from fusion_rt.core.errors import HorovodInternalError
from fusion_rt.core.topology import ProcessSet
from fusion_rt.host.arena import Segment
from fusion_rt.local import packets
from tests.client.daemon import SUM, TIMEOUT_S, Daemon, failure

# --- operations -------------------------------------------------------------------------------------------------------


def test_an_operation_is_submitted_once_and_completed(daemon: Daemon, client: Client) -> None:
    operation = client.submit("x", SUM, inline=b"12345678")
    assert daemon.receive() == wire.Submit(operation.handle, "x", 0, SUM, None, b"12345678")
    assert not client.poll(operation)
    daemon.send(wire.Done(operation.handle, b"87654321"))
    assert client.poll(operation)
    assert client.wait(operation).inline == b"87654321"


def test_the_clock_counts_operations_of_a_name(daemon: Daemon, client: Client) -> None:
    for name, clock in [("x", 0), ("x", 1), ("y", 0), ("x", 2), ("y", 1)]:
        operation = client.submit(name, SUM, inline=bytes(8))
        submitted = daemon.receive()
        assert isinstance(submitted, wire.Submit)
        assert (submitted.name, submitted.clock) == (name, clock)
        daemon.send(wire.Done(operation.handle, bytes(8)))
        client.wait(operation)


def test_names_of_a_process_set_are_forgotten_when_it_is_removed(daemon: Daemon, client: Client) -> None:
    client.process_sets[3] = ProcessSet(3, (0, 1))
    in_the_set = wire.Signature("barrier", process_set=3)
    first = client.submit("x", in_the_set)
    for handle in (first.handle, first.handle + 1):
        daemon.send(wire.Done(handle))
    client.remove_process_set(3)
    client.submit("x", in_the_set)
    clocks = [submit.clock for submit in (daemon.receive() for _ in range(3)) if isinstance(submit, wire.Submit)]
    assert clocks == [0, 0, 0]  # of "x", of the removal, and of "x"


def test_a_name_can_be_under_way_once(daemon: Daemon, client: Client) -> None:
    first = client.submit("x", SUM, inline=bytes(8))
    with pytest.raises(ValueError, match=r"'x' was submitted on rank 1 while an earlier one"):
        client.submit("x", SUM, inline=bytes(8))
    daemon.send(wire.Failed(first.handle, "no"))
    assert failure(client, first) == "no"
    second = client.submit("x", SUM, inline=bytes(8))
    daemon.send(wire.Done(second.handle, bytes(8)))
    client.submit("x", SUM, inline=bytes(8))  # nobody has waited for the second, but it has ended


def test_operations_without_a_name_are_paired_by_order(daemon: Daemon, client: Client) -> None:
    operations = [client.submit(None, SUM, inline=bytes(8)) for _ in range(3)]
    submitted = [daemon.receive() for _ in operations]
    assert [(s.name, s.clock) for s in submitted if isinstance(s, wire.Submit)] == [
        ("allreduce.noname", 0),
        ("allreduce.noname", 1),
        ("allreduce.noname", 2),
    ]
    for operation in reversed(operations):
        daemon.send(wire.Done(operation.handle, bytes(8)))
    for operation in operations:
        client.wait(operation)


def test_a_proposal_is_answered_with_a_plan(daemon: Daemon, client: Client) -> None:
    proposal = wire.Proposal("opt", 0, 0, wire.Reduction(), (wire.TensorSpec("w", "float32", (4,)),))
    operation = client.propose(proposal)
    assert daemon.receive() == wire.Propose(operation.handle, proposal)
    plan = wire.Plan(1, "opt", 0, wire.Reduction(), (), 64)
    daemon.send(wire.Planned(operation.handle, plan))
    assert client.wait(operation).plan == plan
    segment_id, segment = client.plan_segment(plan)
    offered, fd = daemon.receive_with_descriptor()
    assert offered == wire.AddSegment(segment_id, 64, 1)
    theirs = Segment.open(fd, 64)
    segment.view[3] = 9
    assert theirs.view[3] == 9
    theirs.close()
    ready = client.channel.ready("opt.0", 1, 0, terms())
    assert daemon.receive() == wire.Ready(ready.handle, 1, 0, 0)


def test_regions_of_the_arena_are_shared_with_the_daemon(daemon: Daemon, client: Client) -> None:
    region = client.allocate(8)
    np.frombuffer(region.view, np.float32)[:2] = [1.5, 2.5]
    offered, fd = daemon.receive_with_descriptor()
    assert isinstance(offered, wire.AddSegment)
    theirs = Segment.open(fd, offered.nbytes)
    assert offered.segment == region.segment
    np.testing.assert_array_equal(np.frombuffer(theirs.view, np.float32)[:2], [1.5, 2.5])
    theirs.close()
    client.arena.drop_segment(region.segment)
    assert daemon.receive() == wire.DropSegment(region.segment)


# --- leaving ----------------------------------------------------------------------------------------------------------


def test_a_client_that_leaves_says_so(daemon: Daemon) -> None:
    client = daemon.connect()
    operation = client.submit("x", SUM, inline=bytes(8))
    client.close("it raised ValueError")
    assert isinstance(daemon.receive(), wire.Submit)
    assert daemon.receive() == wire.Bye("it raised ValueError")
    assert packets.receive(daemon.sock) == (b"", -1)
    assert "has been shut down on this rank" in failure(client, operation)
    with pytest.raises(HorovodInternalError, match="has been shut down"):
        client.submit("y", SUM, inline=bytes(8))


def test_leaving_after_the_daemon_is_no_error(daemon: Daemon) -> None:
    client = daemon.connect()
    daemon.sock.close()
    client.close()


def test_leaving_wakes_a_thread_that_waits(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    client = daemon.connect()
    operation = client.submit("x", SUM, inline=bytes(8))
    failures: list[str] = []
    reads = threading.Event()
    receive = packets.receive

    def announced(sock: socket.socket, flags: int = 0) -> tuple[bytes, int]:
        reads.set()  # and then the interpreter is this thread's until the system call gives it away
        return receive(sock, flags)

    monkeypatch.setattr(packets, "receive", announced)
    thread = threading.Thread(target=lambda: failures.append(failure(client, operation)))
    thread.start()
    assert reads.wait(TIMEOUT_S)
    client.close()
    thread.join(TIMEOUT_S)
    assert failures == ["fusion_rt has been shut down on this rank"]


def test_a_forked_child_does_not_say_goodbye(daemon: Daemon, client: Client) -> None:
    client._pid += 1  # as a child sees it
    client.close()
    assert packets.receive(daemon.sock) == (b"", -1)


def test_an_abandoned_connection_cannot_be_used(client: Client) -> None:
    client.abandon()
    with pytest.raises(HorovodInternalError, match="belongs to the parent of this forked process"):
        client.submit("x", SUM, inline=bytes(8))


def test_a_worker_that_leaves_with_answers_unread_still_says_bye(daemon: Daemon) -> None:
    client = daemon.connect()
    operation = client.submit("t", SUM, inline=bytes(8))
    assert isinstance(daemon.receive(), wire.Submit)
    daemon.send(wire.Done(operation.handle, bytes(8)))
    client.close()
    assert daemon.receive() == wire.Bye("")


# --- messages ---------------------------------------------------------------------------------------------------------


def test_a_small_message_needs_no_answer_but_every_so_often(daemon: Daemon, client: Client) -> None:
    handles = []
    for number in range(70):
        operation = client.messages.send_to(0, 0, 5, inline=b"abcd")
        sent = daemon.receive()
        assert isinstance(sent, wire.SendTo)
        assert (sent.clock, sent.rank, sent.tag, sent.inline) == (number, 0, 5, b"abcd")
        assert operation.done == (sent.handle == 0)
        handles.append(sent.handle)
        if sent.handle and len(handles) < 40:
            daemon.send(wire.Done(sent.handle))
    assert [number for number, handle in enumerate(handles) if handle] == [31, *range(63, 70)]
    for handle in handles[63:]:
        daemon.send(wire.Done(handle))
    client.wait(operation)
    assert client.messages.send_to(0, 0, 5, inline=b"abcd").done


def test_messages_are_counted_by_group_and_rank_from_any_thread(daemon: Daemon, client: Client) -> None:
    def send(group: int) -> None:
        for _ in range(100):
            client.messages.send_to(group, 0, 0, place=(1, 0), nbytes=4)

    threads = [threading.Thread(target=send, args=(group,)) for group in (0, 0, 3)]
    for thread in threads:
        thread.start()
    received = [daemon.receive() for _ in range(300)]
    for thread in threads:
        thread.join()
    clocks: dict[int, list[int]] = {0: [], 3: []}
    for sent in received:
        assert isinstance(sent, wire.SendTo)
        clocks[sent.group].append(sent.clock)
    assert sorted(clocks[0]) == list(range(200))
    assert clocks[3] == list(range(100))


def test_a_receive_tells_who_sent_what(daemon: Daemon, client: Client) -> None:
    operation = client.messages.receive_from(0, None, 3, 8, completion=Completion(seconds=2.5))
    assert daemon.receive() == wire.ReceiveFrom(operation.handle, 0, wire.ANYBODY, 3, 0, 8, None, 2.5)
    daemon.send(wire.Done(operation.handle, b"abc", (0, 3)))
    assert client.wait(operation).inline == b"abc"
    assert operation.sizes == (0, 3)
