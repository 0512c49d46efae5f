"""The barrier that names the missing members: every member reports to the first one, which answers when all have.

It is made of messages, as gloo's is, and has gloo's sentences: scripts and torch's tests look for its words.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

import torch

from fusion_rt.c10d.failing import CollectiveError
from fusion_rt.c10d.membership import JoinedGroup
from fusion_rt.c10d.submission import AwaitedMessage, SentMessage, Submission
from fusion_rt.c10d.work import FusionWork

TAGS = 1 << 47  # from here on; scripts have those below


class MonitoredBarriers:
    """The barriers of one group, which all members have to come to equally often.

    Args:
        opened: the group.
    """

    def __init__(self, opened: JoinedGroup) -> None:
        self._opened = opened
        self._tags = count(TAGS, 2)

    def meet(self, seconds: float, name_all: bool) -> None:
        """Returns when all members have come.

        Args:
            seconds: how long the first member waits for the others, and these for its answer.
            name_all: the error on the first member names all that are missing, and not only the first of them.

        Raises:
            CollectiveError: not all members have come in time, or the first one has not said that they have.
        """
        tag, mine = next(self._tags), self._opened.rank
        if seconds <= 0:
            raise CollectiveError(f"Rank {mine} timed out in monitoredBarrier after {1000 * seconds:g} ms.")
        others = range(1, self._opened.size)
        if mine == 0:
            awaited = {position: self._awaited(position, tag, seconds) for position in others}
            missing = self._missing(awaited.items(), name_all)
            if missing:
                who = f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
                raise CollectiveError(f"{who} failed to pass monitoredBarrier in {1000 * seconds:g} ms")
            self._wait(self._sent(position, tag + 1, seconds) for position in others)
            return
        try:
            self._wait([self._sent(0, tag, seconds), self._awaited(0, tag + 1, seconds)])
        except CollectiveError as error:
            if self._is_over:
                raise
            raise CollectiveError(
                f"Rank {mine} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
                f"from rank 0: {error}. The error of rank 0 names the missing ranks."
            ) from error

    @property
    def _is_over(self) -> bool:
        """True if the job has failed, which names the missing."""
        return self._opened.here.client.channel.failure is not None

    def _missing(self, awaited: Iterable[tuple[int, Submission]], name_all: bool) -> list[int]:
        """Returns the members that have not come in time."""
        found = []
        for position, part in awaited:
            try:
                self._wait([part])
            except CollectiveError:
                if self._is_over:
                    raise
                found.append(position)
                if not name_all:
                    break
        return found

    def _sent(self, position: int, tag: int, seconds: float) -> Submission:
        group = self._opened
        return SentMessage(group.here, group.id, group.ranks[position], tag, _nothing(), seconds)

    def _awaited(self, position: int, tag: int, seconds: float) -> Submission:
        group = self._opened
        return AwaitedMessage(group.here, group.id, group.ranks[position], tag, _nothing(), seconds)

    def _wait(self, parts: Iterable[Submission]) -> None:
        FusionWork(self._opened.completer, "monitored_barrier", list(parts), []).wait()


def _nothing() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)
