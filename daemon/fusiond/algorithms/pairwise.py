"""AD-PSGD: two neighbours average, atomically, while both compute."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from fusion_rt import algorithms
from fusiond.algorithms.home import Answer, Home, HomeAlgorithm, Send, Step, begin_anew
from fusiond.collectives.base import Array
from fusiond.core.contribution import Contribution

_NOBODY: Array = np.array([-1, -1])


class ADPSGD(HomeAlgorithm[algorithms.ADPSGD]):
    """Odd ranks are active, even ones passive (arXiv 1710.06952, section 3, and its appendix on deadlock).

    A worker is answered at once, with the others' changes since it last asked. An active home then asks one of its
    passive neighbours for their mean, unless it still waits for an earlier answer; the passive one moves to the mean in
    the moment in which it is asked, and answers with its move, of which the other makes the opposite. So
    both together stay what they were, whatever a codec makes of the numbers. Nobody waits for a worker, so a slow one
    holds up nobody. As one thread at a time is at a home, and an active one is changed by its own worker and by answers
    to its own question only, averaging is atomic.

    `value`: the worker's parameters as they were posted, with all changes since. `aux`: the changes that the worker has
    not got. `scratch`: whom an active one has asked at which clock.
    """

    def __init__(self, spec: algorithms.ADPSGD, ranks: int) -> None:
        super().__init__(spec, ranks)
        graph = spec.graph(ranks)
        self._partners = [graph.partners(rank) for rank in range(ranks)]

    def received(self, home: Home, part: Contribution) -> Iterator[Step]:
        if part.kind == "post":
            yield from self._posted(home, part)
        elif part.kind == "mean":
            if home.scratch.get("asked", _NOBODY).tolist() == [part.rank, part.clock]:  # else it was taken for gone
                del home.scratch["asked"]
                self._change(home, part.values)
        else:
            yield from self._average(home, part)

    def addressees(self, home: Home, part: Contribution | None) -> Collection[int]:
        if part is None or part.kind == "mean":
            return ()
        return self._partners[home.rank] if part.kind == "post" and home.rank % 2 else (part.rank,)

    def _posted(self, home: Home, part: Contribution) -> Iterator[Step]:
        assert home.value is not None
        changes = home.aux.get("changes")
        np.copyto(home.value, part.values)
        if changes is not None:
            home.value += changes
        yield Answer(part, home.zeros() if changes is None else changes, added=True)
        if changes is not None:  # which have been copied to where they go
            changes[:] = 0
        partners = [rank for rank in self._partners[home.rank] if rank in home.present]
        if home.rank % 2 and partners and "asked" not in home.scratch:
            asked = partners[part.clock % len(partners)]
            home.scratch["asked"] = np.array([asked, part.clock])
            payload, told = home.tell(home.value)
            yield Send([asked], "mix", told, part.clock, payload=payload)

    def _average(self, home: Home, part: Contribution) -> Iterator[Step]:
        """A passive home's part: both move to their mean."""
        assert home.value is not None
        half = np.subtract(home.value, part.values, out=home.empty())
        half /= home.dtype.storage.type(2)
        payload, told = home.tell(half)
        self._change(home, np.negative(told, out=home.empty()))
        yield Send([part.rank], "mean", told, part.clock, payload=payload)

    def _change(self, home: Home, change: Array) -> None:
        assert home.value is not None
        home.value += change
        home.version += 1
        if "changes" in home.aux:
            home.aux["changes"] += change
        else:
            home.aux["changes"] = home.copy(change)

    def without(self, home: Home, rank: int) -> Iterator[Step]:
        if home.scratch.get("asked", _NOBODY)[0] == rank:
            del home.scratch["asked"]
        return iter(())

    def reseeded(self, home: Home) -> None:
        begin_anew(self, home)

    def asked(self, home: Home, part: Contribution) -> Answer:
        return Answer(part, home.aux.get("changes", np.zeros(home.elements, home.dtype.storage)), added=True)
