"""A worker whose host is short of memory waits for operations that will give some back, and fails if none will."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from fusion_rt import wire
from fusion_rt.client import Client, Operation
from fusion_rt.client import client as client_module
from fusion_rt.client.channel import Completion
from fusion_rt.core.errors import ArenaShortage, HorovodInternalError
from fusion_rt.host import arena
from fusion_rt.host.arena import LEAST_LEFT, Region
from fusion_rt.local import packets
from tests.client.daemon import Daemon

MIB = 1 << 20
SIZE = 8 * MIB
GROUP = "a group"
KEPT = 256 * MIB  # of the host's memory, as long as operations will give some back
SUM = wire.Signature("allreduce", "float32", (SIZE // 4,), process_set=wire.group_id(GROUP))


class Host:
    """A host with so many bytes for the worker's arena, of which another process takes some."""

    def __init__(self, client: Client, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._client = client
        self.nbytes = nbytes
        self.looks = 0
        monkeypatch.setattr(arena, "available_memory", self._available)
        monkeypatch.setattr(client_module, "_OTHERS", 0.05)

    def _available(self) -> tuple[int, str]:
        self.looks += 1
        return self.nbytes - self._client.arena.statistics()["nbytes"], "/sys/fs/cgroup/job"


class Answers(threading.Thread):
    """The daemon, which answers all but the operations of a group: these end when the test says so."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__()
        self._daemon = daemon
        self.dropped: list[int] = []

    def run(self) -> None:
        while True:
            data, descriptor = packets.receive(self._daemon.sock)
            if not data:
                return
            message = wire.decode_worker_message(data)
            if isinstance(message, wire.AddSegment):
                os.close(descriptor)
            elif isinstance(message, wire.DropSegment):
                self.dropped.append(message.segment)
            elif isinstance(message, (wire.StatisticsRequest, wire.OpenGroup)):
                self._daemon.send(wire.Done(message.handle, b"{}"))

    def end(self, handle: int) -> None:
        self._daemon.send(wire.Done(handle))


@pytest.fixture
def answers(daemon: Daemon, client: Client) -> Iterator[Answers]:
    thread = Answers(daemon)
    thread.start()
    client.open_group(GROUP, (0, 1))
    yield thread
    daemon.sock.shutdown(socket.SHUT_RD)
    thread.join()


def lend(client: Client, region: Region) -> Operation:
    """Submits an operation that gives a region back when it ends."""
    completion = Completion(release=lambda _: client.arena.free(region), lent=region.nbytes)
    return client.submit_in_group(SUM, place=(region.segment, region.offset), completion=completion)


def on_warning(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> list[str]:
    """Has something done when a warning is given; returns the list of them."""
    said: list[str] = []

    def emit(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        act()
        return True

    monkeypatch.setattr(client_module._log, "filters", [emit])
    return said


def test_an_allocation_waits_for_an_operation_and_takes_what_that_gives_back(
    client: Client, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    Host(client, KEPT + 2 * SIZE, monkeypatch)
    first, second = client.allocate(SIZE), client.allocate(SIZE)
    under_way = [lend(client, first), lend(client, second)]
    said = on_warning(monkeypatch, lambda: answers.end(under_way[1].handle))
    third = client.allocate(SIZE)
    assert under_way[1].done
    assert not under_way[0].done
    assert third.segment == second.segment
    (warning,) = said
    assert warning.startswith("rank 1 waits for shared memory: 8388608 bytes of shared memory cannot be allocated")
    assert "(256 MiB of memory are left within the limit of the control group /sys/fs/cgroup/job)" in warning
    assert "2 of them give 16 MiB back" in warning


def test_one_shortage_is_warned_of_once(client: Client, answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    Host(client, KEPT + SIZE, monkeypatch)
    under_way = [lend(client, client.allocate(SIZE))]
    said = on_warning(monkeypatch, lambda: answers.end(under_way[-1].handle))
    under_way.append(lend(client, client.allocate(SIZE)))
    assert len(said) == 1
    answers.end(under_way[-1].handle)
    under_way.append(lend(client, client.allocate(SIZE)))
    assert len(said) == 1
    monkeypatch.setattr(client_module, "_ONE_SHORTAGE", -1.0)
    client.allocate(SIZE)
    assert len(said) == 2


def test_with_nothing_under_way_that_gives_memory_back_it_is_an_error(
    client: Client, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    Host(client, LEAST_LEFT + SIZE, monkeypatch)
    region = client.allocate(SIZE)  # with none, all but a little may be taken
    client.submit_in_group(SUM, place=(region.segment, region.offset))  # its result will be there
    said = on_warning(monkeypatch, lambda: None)
    with pytest.raises(ArenaShortage, match=r"8388608 bytes .* \(32 MiB of memory are left .*; no operation under way "
                                            "on rank 1 will give memory back"):  # fmt: skip
        client.allocate(SIZE)
    assert said == []
    client.arena.free(region)
    assert client.allocate(SIZE).segment == region.segment


def test_memory_of_another_process_is_taken_when_it_has_come_back(
    client: Client, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(client, LEAST_LEFT, monkeypatch)
    monkeypatch.setattr(client_module, "_OTHERS", 60.0)
    monkeypatch.setattr(client_module.gc, "collect", lambda: setattr(host, "nbytes", LEAST_LEFT + SIZE))
    assert client.allocate(SIZE).nbytes == SIZE


def test_unused_segments_of_other_sizes_are_given_up_first(
    client: Client, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    Host(client, LEAST_LEFT + 2 * SIZE, monkeypatch)
    unused = client.allocate(SIZE)
    client.arena.free(unused)
    larger = client.allocate(2 * SIZE)
    assert answers.dropped == [unused.segment]  # and the daemon has answered after that
    assert larger.nbytes == 2 * SIZE


def test_results_that_have_come_are_taken_if_that_gives_memory_back(
    client: Client, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    Host(client, LEAST_LEFT + SIZE, monkeypatch)
    held = client.allocate(SIZE)
    client.settle = lambda: client.arena.free(held)
    assert client.allocate(SIZE).segment == held.segment


def test_a_plan_gets_its_memory_as_well(client: Client, answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    Host(client, KEPT + 2 * SIZE, monkeypatch)
    lend(client, client.allocate(SIZE))
    region = client.allocate(SIZE)
    operation = lend(client, region)
    on_warning(monkeypatch, lambda: answers.end(operation.handle))
    _, segment = client.plan_segment(wire.Plan(1, "optimizer.1", 0, wire.Reduction(), (), SIZE))
    assert segment.nbytes == SIZE
    assert answers.dropped == [region.segment]


def test_the_other_workers_of_a_node_are_left_as_much_as_this_one_has_lent(
    client: Client, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_LEFT", 0)
    Host(client, 6 * SIZE, monkeypatch)
    under_way: list[Operation] = []
    most: list[int] = []

    def note() -> None:
        most.append(client.arena.statistics()["nbytes"])
        answers.end(under_way[0].handle)

    on_warning(monkeypatch, note)
    for _ in range(4):
        under_way.append(lend(client, client.allocate(SIZE)))
    assert most == [3 * SIZE]  # of six, and there are two workers


def test_a_job_that_fails_ends_the_wait(
    daemon: Daemon, client: Client, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    Host(client, KEPT + SIZE, monkeypatch)
    lend(client, client.allocate(SIZE))
    on_warning(monkeypatch, lambda: daemon.send(wire.JobFailed("rank 0 died")))
    with pytest.raises(HorovodInternalError, match="rank 0 died"):
        client.allocate(SIZE)
