"""Groups between real daemons: every kind of operation, from the arena into it, and several threads of a worker."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from fusion_rt import wire
from fusion_rt.client import Client
from fusion_rt.client.channel import Completion
from fusion_rt.core.errors import HorovodInternalError
from tests.fusiond.processes import Daemons, kill, read_line, together

pytestmark = pytest.mark.multiprocess
ROWS = 30_000  # so that results are too long for messages


LOCK = threading.Lock()  # an arena is not thread-safe
nodes = pytest.mark.parametrize("sizes", [(2,), (1, 2)], ids=str)


@pytest.fixture
def job(daemons: Callable[..., Daemons], sizes: tuple[int, ...]) -> Daemons:
    job = daemons(*sizes).start()
    job.join()
    return job


class Member:
    """A client in the group of all ranks, opened under a key that nobody has used."""

    def __init__(self, client: Client, key: str, ranks: tuple[int, ...] = ()) -> None:
        self.client = client
        self.ranks = ranks or tuple(range(client.topology.size))
        self.position = self.ranks.index(client.rank)
        self.id = client.open_group(key, self.ranks)

    def run(
        self,
        kind: str,
        values: np.ndarray,  # type: ignore[type-arg]
        rows: int,
        splits: tuple[int, ...] = (),
        receives: tuple[int, ...] = (),
    ) -> np.ndarray:  # type: ignore[type-arg]
        """Runs an operation from one place in the arena into another; returns `rows` rows of float32."""
        client = self.client
        nbytes = rows * values[:1].nbytes
        with LOCK:
            source, target = client.allocate(values.nbytes), client.allocate(nbytes)
        np.frombuffer(source.view, np.float32)[: values.size] = values.reshape(-1)
        signature = wire.Signature(kind, "float32", values.shape, process_set=self.id)  # type: ignore[arg-type]
        operation = client.submit_in_group(
            signature, place=(source.segment, source.offset), into=(target.segment, target.offset),
            splits=splits, receives=receives,
        )  # fmt: skip
        client.wait(operation)
        assert operation.output is None
        assert operation.inline is None
        result = np.frombuffer(target.view[:nbytes], np.float32).copy()
        client.arena.free(source)
        client.arena.free(target)
        return result.reshape(rows, *values.shape[1:])


def tensor(rank: int, rows: int) -> np.ndarray:  # type: ignore[type-arg]
    """Whole numbers, so that sums are exact."""
    return np.random.default_rng(rank).integers(-9, 10, (rows, 2)).astype(np.float32)


def on_all(job: Daemons, key: str, action: Callable[[Member], None]) -> None:
    """All ranks open a group, and then do something in it."""
    members = {rank: Member(client, key) for rank, client in job.clients.items()}
    together({rank: lambda member=member: action(member) for rank, member in members.items()})  # type: ignore[misc]
    for member in members.values():
        member.client.close_group(member.id)


@nodes
def test_every_kind_writes_its_result_where_it_is_to_go(job: Daemons) -> None:
    size = job.topology.size
    equal = [tensor(rank, size * ROWS) for rank in range(size)]
    uneven = tuple(ROWS + 7 * rank for rank in range(size))

    def work(member: Member) -> None:
        rank = member.position
        for _ in range(2):
            np.testing.assert_array_equal(member.run("allreduce", equal[rank], size * ROWS), sum(equal))
            np.testing.assert_array_equal(member.run("broadcast", equal[rank], size * ROWS), equal[0])
            mine = equal[rank][: uneven[rank]]
            gathered = member.run("allgather", mine, sum(uneven), receives=uneven)
            np.testing.assert_array_equal(gathered, np.concatenate([equal[r][: uneven[r]] for r in range(size)]))
            parts = member.run("alltoall", equal[rank], size * ROWS, (ROWS,) * size, (ROWS,) * size)
            own = slice(rank * ROWS, (rank + 1) * ROWS)
            np.testing.assert_array_equal(parts, np.concatenate([tensor[own] for tensor in equal]))
            np.testing.assert_array_equal(member.run("reducescatter", equal[rank], ROWS), sum(equal)[own])
            member.client.wait(member.client.submit_in_group(wire.Signature("barrier", process_set=member.id)))

    on_all(job, "kinds", work)


@nodes
def test_threads_of_a_worker_use_groups_that_overlap(job: Daemons) -> None:
    size = job.topology.size
    groups = {"all": tuple(range(size)), "two": (0, 1), "last": (0, size - 1), "everybody": tuple(range(size))}
    members = {(key, rank): Member(job.clients[rank], key, ranks) for key, ranks in groups.items() for rank in ranks}

    def work(member: Member) -> None:
        values = tensor(member.client.rank, 500)
        expected = sum(tensor(rank, 500) for rank in member.ranks)
        for _ in range(50):
            np.testing.assert_array_equal(member.run("allreduce", values, 500), expected)

    together({index: lambda member=member: work(member) for index, member in enumerate(members.values())})  # type: ignore[misc]
    for member in members.values():
        member.client.close_group(member.id)


@nodes
def test_a_time_out_says_who_is_missing_on_all(job: Daemons) -> None:
    members = {rank: Member(client, "late") for rank, client in job.clients.items()}
    last = job.topology.size - 1

    def work(member: Member) -> tuple[str, tuple[int, ...]]:
        operation = member.client.submit_in_group(
            wire.Signature("barrier", process_set=member.id), completion=Completion(0.5)
        )
        with pytest.raises(HorovodInternalError) as failure:
            member.client.wait(operation)
        return str(failure.value), operation.missing

    early = {rank: member for rank, member in members.items() if rank != last}
    told = together({rank: lambda member=member: work(member) for rank, member in early.items()})  # type: ignore[misc]
    for text, missing in told.values():
        assert f"operation 0 of group 'late' waited 0.5 s for rank {last} (host " in text
        assert missing == (last,)
    assert "which did not submit it" in work(members[last])[0]
    together({rank: lambda member=member: barrier(member) for rank, member in members.items()})  # type: ignore[misc]


def barrier(member: Member) -> None:
    member.client.wait(member.client.submit_in_group(wire.Signature("barrier", process_set=member.id)))


def test_a_worker_that_is_killed_fails_its_groups(daemons: Callable[..., Daemons]) -> None:
    job = daemons(1, 1, 1).start()
    code = "client.open_group('hit', (0, 1, 2)); print('opened', flush=True); sys.stdin.readline()"
    lost = job.worker_process(2, code)
    job.join([0, 1])
    members = {rank: Member(job.clients[rank], "hit", (0, 1, 2)) for rank in (0, 1)}
    assert read_line(lost) == "opened"
    operations = [
        member.client.submit_in_group(wire.Signature("barrier", process_set=member.id)) for member in members.values()
    ]
    kill(lost)
    for member, operation in zip(members.values(), operations, strict=True):
        with pytest.raises(HorovodInternalError, match=r"rank 2 \(host .* died \(killed, or crashed\)"):
            member.client.wait(operation)
