"""Chunks in columns are those that `chunks.of_link` joins link by link, whatever was recorded."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from fusion_rt.tracing.format import Kind, Role
from fusion_rt.tracing.reader import RECORD_DTYPE
from fusion_trace.read import chunks as joining
from fusion_trace.read.chunks import Chunk, ChunkColumns, of_link
from fusion_trace.read.job import JobTrace, Process
from fusion_trace.read.operations import operations
from fusion_trace.read.rows import NEVER, OF_LINKS, Row

NODES = 3


def rows_of(process: Process, name: int, clock: int, kinds: tuple[Kind, Kind], peer: int) -> list[Row]:
    its = process.records
    its = its[(its["name"] == name) & (its["clock"] == clock) & (its["peer"] == peer) & np.isin(its["kind"], kinds)]
    return [(int(r["kind"]), int(r["time"]), int(r["value"]), int(r["extra"]), int(r["peer"])) for r in its]


def one_by_one(trace: JobTrace, name: int, clock: int) -> list[Chunk]:
    """Returns the chunks of an operation, in no order."""
    found = []
    for source, sender in trace.daemons.items():
        for target, receiver in trace.daemons.items():
            out = rows_of(sender, name, clock, (Kind.QUEUED, Kind.SENT), target)
            into = rows_of(receiver, name, clock, (Kind.RECEIVED, Kind.TAKEN), source)
            found += of_link(source, target, out, into)
    return found


def daemon(node: int, generator: np.random.Generator, numbered: list[int]) -> Process:
    """Returns a daemon whose records come in any order, with numbers that come twice, are missing, or are right."""
    records = np.zeros(160, RECORD_DTYPE)
    records["time"] = np.sort(generator.integers(1, 10_000, len(records)))
    records["kind"] = generator.choice(OF_LINKS, len(records))
    records["name"], records["clock"] = generator.integers(1, 3, len(records)), generator.integers(0, 4, len(records))
    records["value"] = generator.integers(1, 100, len(records))
    records["peer"] = generator.integers(0, NODES, len(records))
    for kind, most in zip(OF_LINKS, numbered, strict=True):
        its = records["kind"] == kind
        records["extra"][its] = generator.integers(0 if most < 9 else 1, most + 1, int(its.sum()))
    return Process(Role.DAEMON, node, node, "a", 1, records, len(records), 0, ())


@pytest.mark.parametrize("numbered", [
    [0, 0, 0, 0], [1, 9, 9, 0], [0, 99, 99, 0], [0, 99, 99, 99], [1, 99, 99, 9], [0, 4, 4, 4], [0, 0, 99, 9],
    [0, 9, 9, 0], [0, 9, 0, 9],
])  # fmt: skip
@pytest.mark.parametrize("seed", range(4))
def test_chunks_are_joined_alike(numbered: list[int], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_RECORDS", (1 << 18, 100)[seed % 2])  # all at once, or a few operations
    generator = np.random.default_rng(seed)
    trace = JobTrace("x", tuple(daemon(node, generator, numbered) for node in range(NODES)), ("", "a", "b"), {})
    every = operations(trace)
    joined = 0
    for operation in every.values():
        name = trace.names.index(operation.key.name)
        assert Counter(operation.chunks) == Counter(one_by_one(trace, name, operation.key.clock))
        begins = [min(time for time in chunk[4:] if time is not None) for chunk in operation.chunks]
        assert begins == sorted(begins)
        joined += sum(chunk.sent is not None and chunk.received is not None for chunk in operation.chunks)
    assert sum(len(operation.chunks) for operation in every.values()) == len(every.chunks)
    assert joined or numbered[1] != numbered[2] or numbered[1] > 9  # else some numbers are the same by chance


def test_a_chunk_has_its_link_for_itself_once_those_before_it_have_come() -> None:
    """Three are handed to the link from 0 to 1 at once, and one when it is empty again. The last one never comes."""
    sent = np.array([0, 1, 2, 50, 60, 5], np.int64)
    received = np.array([10, 20, 30, 60, NEVER, 9], np.int64)
    target = np.array([1, 1, 1, 1, 1, 2])
    none = np.zeros(len(sent), np.int64)
    chunks = ChunkColumns(none, none, target, none, none, sent, sent, received, received)
    assert chunks.alone().tolist() == [0, 10, 20, 50, NEVER, 5]
