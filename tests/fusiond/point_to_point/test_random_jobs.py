"""Whatever ranks send and receive, in whatever order the network delivers it, and whoever gives up or leaves: each is
answered once, messages of a source and a tag come in the order in which they were sent, and nothing remains."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np

from fusion_rt import wire
from tests.for_each import for_each
from tests.fusiond.point_to_point.mail import Mail

LAYOUTS = ([2], [1, 1], [2, 1], [2, 2])
SIZES = (0, 8, 8, 5000, 9000, 100_000)
LARGEST = max(SIZES)


class Sent(NamedTuple):
    """A message. `number`: of all; its bytes follow from it."""

    source: int
    target: int
    tag: int
    number: int
    nbytes: int
    handle: int


class Wanted(NamedTuple):
    """A receive."""

    rank: int
    source: int
    tag: int
    handle: int


def text(number: int, nbytes: int) -> bytes:
    return np.random.default_rng(number).bytes(nbytes)


class RandomJob:
    """A job in which each rank does 40 things, and gives up some of them."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        chunk = self.choose.choice((4096, 1 << 17))
        self.mail = Mail(
            self.choose.choice(LAYOUTS),
            seed,
            connections=2,
            chunk_bytes=chunk,
            window_bytes=2 * chunk,
            operation_timeout=40.0,
        )
        self.sends: list[Sent] = []
        self.receives: list[Wanted] = []
        for rank in self.mail.job.ranks:
            for _ in range(40):
                act = self.choose.choice((self.send, self.receive))
                self.mail.job.later(rank, lambda rank=rank, act=act: act(rank))  # type: ignore[misc]

    def other(self, rank: int) -> int:
        return self.choose.choice([other for other in self.mail.job.ranks if other != rank])

    def seconds(self) -> float:
        return self.choose.choice((0.0, 0.0, 0.0, 2.0, 30.0))

    def send(self, rank: int) -> None:
        target, tag, nbytes, number = self.other(rank), self.choose.randrange(2), self.size(), len(self.sends)
        inline = nbytes <= wire.MAX_INLINE and self.choose.random() < 0.8
        handle = self.mail.send(rank, target, text(number, nbytes), tag, inline=inline, seconds=self.seconds())
        self.sends.append(Sent(rank, target, tag, number, nbytes, handle))

    def size(self) -> int:
        return self.choose.choice(SIZES)

    def receive(self, rank: int) -> None:
        source = self.choose.choice((wire.ANYBODY, self.other(rank), self.other(rank)))
        tag = self.choose.randrange(2)
        handle = self.mail.receive(rank, source, LARGEST, tag, seconds=self.seconds())
        self.receives.append(Wanted(rank, source, tag, handle))

    def run(self) -> None:
        """Lets time pass now and then, until all that waits has been given up."""
        job = self.mail.job
        while job.step():
            if self.choose.random() < 0.02:
                job.now += 1.5
                due = [timer for timer in job.timers if timer[0] <= job.now]
                job.timers = [timer for timer in job.timers if timer[0] > job.now]
                for _, callback in due:
                    callback()
        job.pass_time(45)

    def leave(self) -> None:
        """All ranks leave, which ends what is kept."""
        for rank in self.mail.job.ranks:
            self.mail.job.leave(rank)
        self.mail.job.settle()


def received(job: RandomJob) -> list[tuple[Wanted, int, bytes]]:
    """The receives that have got something, the source, and what it is."""
    found = []
    for wanted in job.receives:
        message, _ = job.mail.job.answer(wanted.rank, wanted.handle)  # exactly one
        if isinstance(message, wire.Done):
            found.append((wanted, *job.mail.received(wanted.rank, wanted.handle)))
    return found


@for_each("seed", range(40))
def test_each_is_answered_once_and_streams_keep_their_order(seed: int) -> None:
    job = RandomJob(seed)
    job.run()
    for sent in job.sends:
        job.mail.job.answer(sent.source, sent.handle)  # exactly one
    arrived: dict[tuple[int, int, int], list[bytes]] = {}
    for wanted, source, data in received(job):
        assert wanted.source in (source, wire.ANYBODY)
        arrived.setdefault((source, wanted.rank, wanted.tag), []).append(data)
    assert arrived
    for (source, target, tag), texts in arrived.items():
        left = (text(one.number, one.nbytes) for one in job.sends if one[:3] == (source, target, tag))
        assert all(data in left for data in texts)  # a subsequence: some sends were given up
    job.leave()
    job.mail.nothing_is_left()


@for_each("seed", range(20))
def test_without_time_outs_every_stream_is_received_from_its_beginning(seed: int) -> None:
    job = RandomJob(seed)
    job.seconds = lambda: 0.0  # type: ignore[method-assign]
    job.mail.job.settle()
    streams: dict[tuple[int, int, int], list[bytes]] = {}
    for sent in job.sends:
        streams.setdefault(sent[:3], []).append(text(sent.number, sent.nbytes))
    waiting = [wanted for wanted in job.receives if not job.mail.job.is_answered(wanted.rank, wanted.handle)]
    for wanted in job.receives:
        if wanted not in waiting:
            source, data = job.mail.received(wanted.rank, wanted.handle)
            assert data == streams[source, wanted.rank, wanted.tag].pop(0)
    for wanted in waiting:
        for (source, target, tag), left in streams.items():
            assert not left or (target, tag) != (wanted.rank, wanted.tag) or wanted.source not in (source, wire.ANYBODY)
    job.leave()
    job.mail.nothing_is_left()
