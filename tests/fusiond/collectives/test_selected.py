"""All-reduce of what workers have selected themselves: beside the same steps in which the daemons select, and with what
no worker of ours writes into a tray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from fusion_rt import codecs
from fusion_rt.codecs import CodecError
from fusion_rt.codecs.selecting import Selecting, SelectingBucketCodec
from fusion_rt.codecs.worker_selection import HEADER, SPOILED, Shape, Tray
from fusiond.buckets.worker_selection import Selected, selected
from fusiond.collectives.base import Reducer
from fusiond.collectives.owned import Compressed, Gathered, Owned
from fusiond.core.errors import RequestError
from tests.for_each import for_each
from tests.fusiond.collectives.group import Array, Group, GroupPort
from tests.fusiond.collectives.test_owned import ELEMENTS, INSIDE, LAYOUT, Job, gradients, kinds
from tests.kernels import reference

CODECS = [
    'topk(density=0.02, minimum=100, value="fp32")',
    "topk(density=0.02, minimum=800)",
    'topk(density=0.02, minimum=100, scope="tensor", value="int8")',
    "topk(density=0.01, minimum=100, warmup=3)",
]


class Worker:
    """Plain numpy in place of a GPU: the residual, and a tray."""

    def __init__(self, text: str) -> None:
        codec = codecs.parse(text)
        assert isinstance(codec, Selecting)
        opened = codec.open(LAYOUT)
        self.codec = codec
        shape = opened.tray()
        self.tray = Tray(shape, np.zeros(shape.nbytes, np.uint8))
        self.residual = np.zeros(ELEMENTS, np.float32)
        self.always = opened.dense.all_indices(0, ELEMENTS)
        self.step = 0

    def select(self, gradient: Array) -> None:
        residual, tray = self.residual, self.tray
        tray.clear()
        finite = np.isfinite(gradient)
        tray.verdict[0] = 0 if finite[self.always].all() else SPOILED
        gradient = self.given = np.where(finite, gradient, np.float32(0))
        residual[INSIDE] += gradient[INSIDE]
        for group, words, room in zip(self.codec.rules.groups(LAYOUT), tray.groups, tray.shape.rooms, strict=True):
            inside = np.concatenate([np.arange(*r, dtype=np.int32) for r in group.ranges])
            taken = inside[reference.largest(residual[inside], group.k(self.step, self.codec.warmup))]
            words[0], words[3] = len(taken), not finite[inside].all()
            words[HEADER : HEADER + len(taken)] = taken
            words[HEADER + room : HEADER + room + len(taken)] = residual[taken].view(np.int32)
            residual[taken] = 0
        tray.dense[:] = residual[self.always]
        residual[self.always] = 0

    def correct(self) -> None:
        indices, values, self.step, undone = self.tray.answered()
        self.residual[indices] += values
        if undone:
            self.residual[INSIDE] -= self.given[INSIDE]


class SelectedJob(Job):
    """A `Job` with workers that select on these nodes."""

    def __init__(self, kind: Callable[..., Compressed], nodes: int, codec: str, positions: Sequence[int]) -> None:
        super().__init__(kind, nodes, codec)
        self.workers = {position: Worker(codec) for position in positions}

    def exchange(self, port: GroupPort, values: Array) -> Compressed:
        codec, worker = self.codecs[port.position], self.workers.get(port.position)
        chosen = None if worker is None else Selected("the bucket", codec, worker.tray)
        return self.kind(port, self.reducer, codec, [values], [values], chosen)

    def step(self, gradients: Sequence[Array], chunk_bytes: int = 256, workers: int = 1) -> Array:
        self.steps += 1
        results = [gradient.copy() for gradient in gradients]
        for position, worker in self.workers.items():
            worker.select(gradients[position])
            results[position][:] = np.nan  # what is in the bucket's place does not matter
        group = Group(self.nodes, lambda port: self.exchange(port, results[port.position]), self.steps, chunk_bytes)
        group.may_send_last = True
        group.run()
        for worker in self.workers.values():
            worker.correct()
        assert len({values.tobytes() for values in results}) == 1
        return results[0]

    def residual(self) -> Array:
        total = super().residual()
        for worker in self.workers.values():
            total += worker.residual
        return total


@kinds
@pytest.mark.parametrize("positions", [(0, 1, 2), (1,)])
@pytest.mark.parametrize(("bad", "element"), [(0, 4000), (1, 4000), (1, 730)])  # 730 is always sent
def test_a_gradient_that_is_not_finite_spoils_one_step_whoever_selects(
    kind: Callable[..., Compressed], positions: Sequence[int], bad: int, element: int
) -> None:
    job = SelectedJob(kind, 3, CODECS[1], positions)
    job.step(gradients(3, 1))
    before = [worker.residual + as_array(job.codecs[at]) for at, worker in job.workers.items()]
    values = gradients(3, 2)
    values[bad][element] = np.inf
    result = job.step(values)
    assert np.isnan(result[INSIDE]).all()
    assert not result[760:800].any()  # padding
    after = [worker.residual + as_array(job.codecs[at]) for at, worker in job.workers.items()]
    assert np.allclose(after, before, rtol=0, atol=2e-6)
    assert np.isfinite(job.step(gradients(3, 3))).all()


def as_array(codec: SelectingBucketCodec) -> Array:
    """Returns the daemon's part of a residual."""
    if codec.corrections is None:
        return np.zeros(ELEMENTS, np.float32)
    indices, values = codec.corrections._pair
    array = np.zeros(ELEMENTS, np.float32)
    array[indices] = values
    return array


@kinds
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("nodes", "positions"), [(2, (0, 1)), (3, (1,)), (4, (0, 1, 2, 3))])
def test_steps_are_the_same_bit_by_bit_whoever_selects(
    kind: Callable[..., Compressed], codec: str, nodes: int, positions: Sequence[int]
) -> None:
    plain, job = Job(kind, nodes, codec), SelectedJob(kind, nodes, codec, positions)
    given, got = np.zeros(ELEMENTS), np.zeros(ELEMENTS)
    for step in range(66 if (nodes, codec) == (3, CODECS[1]) else 5):  # ranges are adapted every 64
        values = gradients(nodes, step)
        given += np.sum(values, axis=0, dtype=float)
        result = job.step(values)
        assert np.array_equal(result, plain.step(values)), step
        got += result
        assert all(worker.step == step + 1 for worker in job.workers.values())
    assert np.array_equal(job.residual(), plain.residual())
    assert job.codecs[0].statistics()["selected"] == plain.codecs[0].statistics()["selected"]
    assert np.allclose((got + job.residual())[INSIDE], given[INSIDE], atol=2e-3, rtol=0)


def test_corrections_that_find_no_room_wait_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shape, "corrections", property(lambda shape: 5))
    job = SelectedJob(Owned, 3, "topk(density=0.02, minimum=100)", range(3))
    given, got = np.zeros(ELEMENTS), np.zeros(ELEMENTS)
    for step in range(5):
        values = gradients(3, step)
        given += np.sum(values, axis=0, dtype=float)
        got += job.step(values)
        assert max(len(worker.tray.answered()[0]) for worker in job.workers.values()) == 5
    assert sum(codec.residual_norm() for codec in job.codecs) > 0
    assert np.allclose((got + job.residual())[INSIDE], given[INSIDE], atol=2e-4, rtol=0)


def test_a_daemon_selects_in_between() -> None:
    """Such as a substitute for a worker that has joined: what it keeps then comes with the next corrections."""
    job = SelectedJob(Owned, 2, CODECS[1], range(2))
    given, got = np.zeros(ELEMENTS), np.zeros(ELEMENTS)
    away = job.workers[1]
    for step in range(6):
        if step == 2:
            del job.workers[1]
        if step == 4:
            job.workers[1] = away
        values = gradients(2, step)
        given += np.sum(values, axis=0, dtype=float)
        got += job.step(values)
    job.workers[1] = away
    assert np.allclose((got + job.residual())[INSIDE], given[INSIDE], atol=2e-4, rtol=0)


@kinds
def test_what_a_failed_step_has_taken_comes_with_the_next_corrections(kind: Callable[..., Compressed]) -> None:
    job = SelectedJob(kind, 2, CODECS[1], range(2))
    values = gradients(2, 0)
    for position, worker in job.workers.items():
        worker.select(values[position])
    group = Group(2, lambda port: job.exchange(port, values[port.position].copy()), 0, 256)
    group.may_send_last = True
    for run in group.exchanges[0].jobs(1):
        run()
    group.exchanges[0].start()
    group.exchanges[0].abandon()
    Selected("the bucket", job.codecs[1], job.workers[1].tray).disown()  # which had not begun
    given = np.sum(values, axis=0, dtype=float)
    assert np.allclose(job.residual()[INSIDE], given[INSIDE], atol=1e-5, rtol=0)
    zeros = [np.zeros(ELEMENTS, np.float32)] * 2
    got = job.step(zeros)
    assert np.allclose((got + job.residual())[INSIDE], given[INSIDE], atol=1e-4, rtol=0)


def test_residuals_are_rescaled_wherever_they_are() -> None:
    plain, job = Job(Owned, 2, CODECS[1]), SelectedJob(Owned, 2, CODECS[1], [0])
    factors = [2.0, 0.5, 1.0, 0.25]
    for step in range(3):
        for codec in (*plain.codecs, *job.codecs):
            codec.scale_residual(factors)
        for span, factor in zip(LAYOUT.spans, factors, strict=True):
            job.workers[0].residual[span.start : span.end] *= np.float32(factor)
        values = gradients(2, step)
        assert np.array_equal(job.step(values), plain.step(values))


def harmed(index: int, word: int) -> Callable[[Tray], None]:
    def harm(tray: Tray) -> None:
        tray.groups[0][index] = word

    return harm


def swap(tray: Tray) -> None:
    tray.groups[0][HEADER : HEADER + 2] = tray.groups[0][HEADER : HEADER + 2][::-1].copy()


@for_each(
    ("harm", "why"),
    [
        (harmed(0, -1), "group 0 has -1 elements, with room for"),
        (harmed(0, 2**31 - 1), "group 0 has 2147483647 elements, with room for"),
        (harmed(HEADER, -1), "not ascending elements"),
        (harmed(HEADER + 1, ELEMENTS), "not ascending elements"),
        (harmed(HEADER, 730), "not ascending elements"),  # one that is always sent
        (swap, "not ascending elements"),
    ],
)
def test_what_is_no_selection_is_refused_and_changes_nothing(harm: Callable[[Tray], None], why: str) -> None:
    worker = Worker(CODECS[1].replace("800", "100"))
    codec: Any = worker.codec.open(LAYOUT)
    worker.select(gradients(1, 0)[0])
    harm(worker.tray)
    with pytest.raises(RequestError, match=f"bucket 3 of rank 7 was selected wrongly by its worker: .*{why}"):
        Selected("bucket 3 of rank 7", codec, worker.tray).contribute()
    with pytest.raises(CodecError, match=why):
        codec.disown(worker.tray)
    Selected("", codec, worker.tray).disown()  # of an operation that has failed anyway
    assert codec.step == 0
    assert codec.residual_norm() == 0


def test_trays_that_cannot_be_are_refused() -> None:
    codec = codecs.parse(CODECS[0]).open(LAYOUT)
    assert isinstance(codec, SelectingBucketCodec)
    nbytes = codec.tray().nbytes
    least = 4 * ELEMENTS
    fitting = -(-least // 64) * 64
    memory = np.zeros(fitting + nbytes, np.uint8)
    assert selected("it", codec, memory, fitting, least).tray.shape == codec.tray()
    for offset in (fitting + 1, fitting - 64, fitting + 64, 2**40):
        with pytest.raises(RequestError, match=f"it was selected by its worker into byte {offset} of a segment of"):
            selected("it", codec, memory, offset, least)
    for text, why in (
        ("int8", "takes whole gradients only"),
        ("randomk", "workers cannot select for the codec randomk"),
    ):
        with pytest.raises(RequestError, match=why):
            selected("it", codecs.parse(text).open(LAYOUT), memory, fitting, least)


def test_the_average_is_that_of_all() -> None:
    job = SelectedJob(Gathered, 3, CODECS[0], [0, 2])
    job.reducer = Reducer("sum", LAYOUT.dtype, divisor=3)
    plain = Job(Gathered, 3, CODECS[0], divisor=3)
    assert np.array_equal(job.step(gradients(3, 1)), plain.step(gradients(3, 1)))
