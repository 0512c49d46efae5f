"""AD-PSGD: two neighbours average, atomically, while both compute."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fusion_rt import algorithms
from fusion_rt.core import mixing
from fusiond.algorithms.home import Answer, Home, HomeAlgorithm, Send, Step
from fusiond.collectives.base import Array
from fusiond.core.contribution import Contribution

_NOBODY: Array = np.array([-1, -1])


class ADPSGD(HomeAlgorithm[algorithms.ADPSGD]):
    """Odd ranks are active, even ones passive (arXiv 1710.06952, section 3, and its appendix on deadlock).

    A worker is answered at once, with what others have changed since it last asked. An active home then asks one of its
    passive neighbours for their mean, unless it still waits for an earlier answer; the passive one takes the mean in
    the moment in which it is asked. Nobody waits for a worker, so a slow one holds up nobody. As one thread at a time
    is at a home, and an active one is changed by its own worker and by answers to its own question only, averaging is
    atomic.

    `value`: the worker's parameters as they were posted, with all changes since. `aux`: the changes that the worker has
    not got. `scratch`: what an active one has sent, and whom it asked at which clock.
    """

    def __init__(self, spec: algorithms.ADPSGD, ranks: int) -> None:
        super().__init__(spec, ranks)
        graph = mixing.parse(spec.topology, ranks)
        self._partners = [graph.partners(rank) for rank in range(ranks)]

    def received(self, home: Home, part: Contribution) -> Iterator[Step]:
        if part.kind == "post":
            yield from self._posted(home, part)
        elif part.kind == "mean":
            if home.scratch.get("asked", _NOBODY).tolist() == [part.rank, part.clock]:  # else it was taken for gone
                del home.scratch["asked"]
                self._change(home, part.values - home.scratch.pop("sent"))
        elif home.value is None:  # its worker has not posted yet: it is asked again when it has
            home.slots.setdefault(0, {})[part.rank] = part
        else:
            yield from self._average(home, part)

    def _posted(self, home: Home, part: Contribution) -> Iterator[Step]:
        changes = home.aux.pop("changes", None)
        home.value = home.copy(part.values)
        if changes is None:
            changes = np.zeros(home.elements, home.dtype.storage)
        else:
            home.value += changes
        yield Answer(part, changes, added=True)
        for waiting in home.slots.pop(0, {}).values():
            yield from self._average(home, waiting)
        partners = [rank for rank in self._partners[home.rank] if rank in home.present]
        if home.rank % 2 and partners and "sent" not in home.scratch:
            asked = partners[part.clock % len(partners)]
            home.scratch.update(sent=home.copy(home.value), asked=np.array([asked, part.clock]))
            yield Send([asked], "mix", home.scratch["sent"], part.clock)

    def _average(self, home: Home, part: Contribution) -> Iterator[Step]:
        """A passive home's part: both take the mean."""
        assert home.value is not None
        mean: Array = home.mean([home.value, part.values], 2)
        self._change(home, mean - home.value)
        yield Send([part.rank], "mean", mean, part.clock)

    def _change(self, home: Home, change: Array) -> None:
        assert home.value is not None
        home.value += change
        home.version += 1
        if "changes" in home.aux:
            home.aux["changes"] += change
        else:
            home.aux["changes"] = home.copy(change)

    def without(self, home: Home, rank: int) -> Iterator[Step]:
        home.slots.get(0, {}).pop(rank, None)
        if home.scratch.get("asked", _NOBODY)[0] == rank:
            del home.scratch["asked"], home.scratch["sent"]
        return iter(())
