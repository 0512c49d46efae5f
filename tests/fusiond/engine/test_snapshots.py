"""Snapshots of shards: a new job goes on from where another one was."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from fusion_rt import wire
from fusion_rt.host.private_files import replacing
from fusiond.app.daemon_effects import DaemonEffects
from fusiond.engine.snapshots import SLOW_S, SnapshotError, SnapshotFiles
from fusiond.host.file_work import FileWork
from fusiond.host.loop import EventLoop
from fusiond.host.thread_pool import KernelPool
from fusiond.workers.stack_reader import StackReader
from tests.fusiond.algorithms.training import Workers
from tests.fusiond.simulation import SimulatedJob

DIM, RATE = 30, 0.05
START = np.random.default_rng(1).standard_normal(DIM)
ADAM = wire.OptimizerSpec("Adam", (json.dumps({"betas": [0.8, 0.9]}),))


def train(directory: Path, steps: range, restore: bool, layout: tuple[int, ...] = (1, 1)) -> Workers:
    job = SimulatedJob(layout, snapshot_directory=str(directory), snapshot_restore=restore)
    workers = Workers(layout, "asp", START, RATE, ADAM, job=job)
    for step in steps:
        for rank in job.ranks:
            workers.post(rank, np.sin(np.arange(DIM) + rank + step))
            workers.collect(rank)
    return workers


def take(workers: Workers) -> None:
    for node in workers.job.nodes:
        node.engine.snapshots.take()
    workers.job.settle()


def test_a_new_job_goes_on_from_the_snapshot_bit_by_bit(tmp_path: Path) -> None:
    whole = train(tmp_path / "none", range(20), restore=False)
    take(train(tmp_path, range(10), restore=False))
    rest = train(tmp_path, range(10, 20), restore=True)  # its first rank seeds, in vain
    assert (rest.home() == whole.home()).all()
    assert (rest.x[0] == whole.x[0]).all()


def test_a_snapshot_is_read_beside_the_event_loop(tmp_path: Path) -> None:
    first = train(tmp_path, range(10), restore=False)
    take(first)
    job = SimulatedJob((1, 1), snapshot_directory=str(tmp_path), snapshot_restore=True)
    job.files_answer = False
    second = Workers((1, 1), "asp", START, RATE, ADAM, job=job)
    assert len(job.waiting_for_files) == 2, "one for each node"
    assert not second.are_seeded(), "homes take nothing in before they have the snapshot"
    job.files_answer = True
    for begin in job.waiting_for_files:
        begin()
    job.settle()
    assert second.are_seeded()
    for workers in (first, second):
        workers.post(0, np.ones(DIM))
        workers.collect(0)
    assert (second.home() == first.home()).all()


def numbers(directory: Path, node: int) -> list[int]:
    """Returns the numbers of a node's snapshots."""
    return sorted(int(path.name.split(".")[2]) for path in directory.glob(f"*.node{node}.*.snapshot"))


def test_a_snapshot_is_kept_until_all_nodes_have_the_next_one(tmp_path: Path) -> None:
    workers = train(tmp_path, range(3), restore=False)
    seen: list[int] = []
    for _ in range(4):
        take(workers)
        assert numbers(tmp_path, 0) == numbers(tmp_path, 1)
        assert set(seen[-1:]) <= set(numbers(tmp_path, 0)), "the one before is there"
        seen.append(numbers(tmp_path, 0)[-1])
        assert len(numbers(tmp_path, 0)) <= 2
        workers.post(0, np.ones(DIM))
    assert seen == sorted(set(seen))
    assert all(path.suffix in (".snapshot", ".owner") for path in tmp_path.iterdir())


@pytest.mark.parametrize("killed_after", range(2))
def test_a_job_that_is_killed_while_some_nodes_have_written_goes_on_from_what_all_have(
    tmp_path: Path, killed_after: int
) -> None:
    workers = train(tmp_path, range(5), restore=False)
    take(workers)
    whole = train(tmp_path / "none", range(10), restore=False)
    workers.post(0, np.ones(DIM))
    workers.collect(0)
    workers.job.files_answer = False
    take(workers)
    assert len(workers.job.waiting_for_files) == 2
    workers.job.waiting_for_files[killed_after]()
    take(workers)
    assert len(workers.job.waiting_for_files) == 2, "nothing else is written before all nodes have this"
    assert numbers(tmp_path, 0) != numbers(tmp_path, 1)
    rest = train(tmp_path, range(5, 10), restore=True)
    assert (rest.home() == whole.home()).all()


def test_nothing_is_written_of_shards_that_have_not_begun(tmp_path: Path) -> None:
    workers = train(tmp_path, range(1), restore=False)
    for node in workers.job.nodes:
        for hosted in node.engine.homes._server:
            hosted.home.value = None
    take(workers)
    assert [numbers(tmp_path, node) for node in (0, 1)].count([]) >= 1


def test_nodes_that_have_no_snapshot_in_common_do_not_begin(tmp_path: Path) -> None:
    take(train(tmp_path, range(3), restore=False))
    for path in tmp_path.glob("*.node1.*"):
        path.unlink()
    job = SimulatedJob((1, 1), snapshot_directory=str(tmp_path), snapshot_restore=True)
    with pytest.raises(AssertionError):
        Workers((1, 1), "asp", START, RATE, ADAM, job=job)
    sentences = [node.failure for node in job.nodes if node.failure]
    assert len(sentences) == 1
    assert "that all hosts with shards have: rank 0 (host host0) has " in sentences[0]
    assert "rank 1 (host host1) has none; restore the missing ones" in sentences[0]


def test_a_job_without_a_snapshot_begins_with_the_first_rank(tmp_path: Path) -> None:
    assert (train(tmp_path, range(0), restore=True).home() == START).all()


@pytest.mark.parametrize("what", ["damaged", "of another layout"])
def test_a_snapshot_that_does_not_fit_ends_the_job_with_a_sentence(tmp_path: Path, what: str) -> None:
    take(train(tmp_path, range(3), restore=False))
    if what == "damaged":
        for path in tmp_path.iterdir():
            path.write_bytes(path.read_bytes()[:50])
        layout: tuple[int, ...] = (1, 1)
        why = "cannot be read"
    else:
        layout, why = (2,), "is of other parameters, another algorithm, or other hosts"
    job = SimulatedJob(layout, snapshot_directory=str(tmp_path), snapshot_restore=True)
    with pytest.raises(AssertionError):
        Workers(layout, "asp", START, RATE, ADAM, job=job)
    assert any(why in node.failure for node in job.nodes)


def test_a_directory_that_cannot_be_written_to_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    workers = train(tmp_path / "file", range(1), restore=False)
    take(workers)
    assert workers.job.warnings
    assert any("no snapshot could be written" in warning for warning in workers.job.warnings)


def test_a_file_system_that_does_not_answer_is_told_once_and_asked_once(tmp_path: Path) -> None:
    workers = train(tmp_path, range(3), restore=False)
    job = workers.job
    job.files_answer = False
    for _ in range(3):
        take(workers)
    assert [path.name for path in tmp_path.iterdir()] == []
    assert len(job.waiting_for_files) == 2, "one for each node"
    workers.post(0, np.ones(DIM))
    workers.collect(0)
    job.pass_time(SLOW_S + 1)
    assert len(job.warnings) == 2
    assert all("its file system does not answer; training goes on" in warning for warning in job.warnings)
    job.files_answer = True
    for begin in job.waiting_for_files:
        begin()
    job.settle()
    late = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    take(workers)
    assert late != {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    job.pass_time(SLOW_S + 1)
    assert len(job.warnings) == 2


def test_a_disk_that_blocks_holds_neither_the_loop_nor_the_kernel_threads_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda fd: answers.wait())
    loop = EventLoop()
    pool = KernelPool(loop, 1)
    files = FileWork(loop)
    effects = DaemonEffects(loop, None, cast(StackReader, None), {}, files, lambda: None)
    effects.begin(cast(Any, None), pool, cast(Any, None))
    ended: list[str] = []

    def write() -> None:
        with replacing(str(tmp_path / "file")) as file:
            os.fsync(file.fileno())

    def ends(what: str) -> Callable[[BaseException | None], None]:
        def then(error: BaseException | None) -> None:
            assert error is None
            ended.append(what)
            loop.stop()

        return then

    effects.run_on_files(write, ends("file"))
    effects.run_jobs([lambda: None], ends("kernel"))
    loop.run()
    assert ended == ["kernel"]
    pool.close()
    files.close()
    loop.close()
    answers.set()


PLAN = wire.Plan(1, "model", 0, wire.Reduction(), (), 0)


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def test_a_daemon_whose_place_another_one_has_taken_changes_nothing_there(tmp_path: Path) -> None:
    """A host that was cut off, and goes on, beside its successor on a disk that both share."""
    cut_off, successor = (SnapshotFiles(str(tmp_path), 0) for _ in range(2))
    for number in (1, 2):
        cut_off.write(PLAN, number, {"x": np.full(3, number)}, keep=number - 1)
    successor.write(PLAN, 3, {"x": np.full(3, 30)}, keep=2)
    before = content(tmp_path)
    for number, keep in ((3, 2), (4, 3)):
        with pytest.raises(SnapshotError, match=r"node 0 writes no snapshots to .* another daemon has taken its place"):
            cut_off.write(PLAN, number, {"x": np.full(3, 4)}, keep=keep)
    assert content(tmp_path) == before
    successor.write(PLAN, 4, {"x": np.full(3, 40)}, keep=3)
    assert successor.read(PLAN, 4)["x"].tolist() == [40, 40, 40]
    assert successor.numbers(PLAN) == (3, 4)


def test_a_write_that_a_slow_disk_has_held_up_does_not_replace_the_successors_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_off, successor = (SnapshotFiles(str(tmp_path), 0) for _ in range(2))
    cut_off.write(PLAN, 1, {"x": np.full(3, 1)}, keep=0)

    def slow(fd: int) -> None:
        monkeypatch.undo()
        successor.write(PLAN, 2, {"x": np.full(3, 20)}, keep=1)

    monkeypatch.setattr(os, "fsync", slow)
    with pytest.raises(SnapshotError, match="another daemon has taken its place"):
        cut_off.write(PLAN, 2, {"x": np.full(3, 2)}, keep=1)
    assert successor.read(PLAN, 2)["x"].tolist() == [20, 20, 20]
    assert not [name for name in content(tmp_path) if name.endswith(".new")]
