"""Gossip by clocks: every rank mixes with its neighbours of the same clock."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import numpy as np

from fusion_rt import algorithms
from fusion_rt.core import mixing
from fusiond.algorithms.home import Answer, Home, HomeAlgorithm, Passed, Send, Spec, Step
from fusiond.collectives.base import Array
from fusiond.core.contribution import Contribution

_BEGIN: Array = np.zeros(1, np.int64)
_NOTHING = memoryview(b"")


class Gossip(HomeAlgorithm[Spec]):
    """Each home sends what its worker posts to its neighbours' homes, and mixes when all parts of a clock are there.

    Of a rank that has left, its share of the weights goes to the rank itself. A rank that waits in another operation
    *passes* the clocks at which neighbours wait for it: its home does then what has to be done for the mean of all
    ranks to stay. `scratch`: the clock to be mixed next.
    """

    waits = True

    def __init__(self, spec: Spec, ranks: int) -> None:
        super().__init__(spec, ranks)
        self.graph = mixing.parse(spec.topology, ranks)  # type: ignore[attr-defined]  # all gossip has one

    def received(self, home: Home, part: Contribution) -> Iterator[Step]:
        if part.kind != "post" and part.clock < home.scratch.get("clock", _BEGIN)[0]:
            return  # of a rank that was taken for gone: nobody waits for it any more
        home.slots.setdefault(part.clock, {})[part.rank] = part
        if part.rank == home.rank:
            receivers = [rank for rank, _ in self.graph.outgoing(home.rank, part.clock) if rank in home.present]
            if part.kind == "post":
                yield self.outgoing(home, part, receivers)
            else:
                yield self.passing(home, part, receivers)
            senders = [rank for rank, _ in self.graph.incoming(home.rank, part.clock) if rank in home.present]
            if home.leads and (silent := set(senders).difference(receivers)):  # they do not hear how far this rank is
                yield Send(sorted(silent), "want", part.values[:0], part.clock, payload=_NOTHING)
        yield from self._mix(home)

    def without(self, home: Home, rank: int) -> Iterator[Step]:
        del rank
        yield from self._mix(home)

    def awaited(self, home: Home) -> list[int]:
        clock = next((clock for clock in sorted(home.slots) if home.rank in home.slots[clock]), None)
        if clock is None:
            return [home.rank]
        return [rank for rank, _ in self._incoming(home, clock) if rank not in home.slots[clock]]

    def _incoming(self, home: Home, clock: int) -> list[tuple[int, float]]:
        """Returns the neighbours of a clock whose values are there or are to come, with their weights."""
        graph, slot = self.graph.incoming(home.rank, clock), home.slots[clock]
        return [(rank, weight) for rank, weight in graph if rank in home.present or rank in slot]

    def _mix(self, home: Home) -> Iterator[Step]:
        for clock in sorted(home.slots):
            slot = home.slots[clock]
            incoming = self._incoming(home, clock)
            if home.rank in slot and all(rank in slot for rank, _ in incoming):
                home.scratch["clock"] = np.array([clock + 1])
                for late in [number for number in home.slots if number <= clock]:
                    del home.slots[late]
                own = slot.pop(home.rank)
                parts = [(slot[rank], weight) for rank, weight in incoming if slot[rank].kind == "mix"]
                if own.kind == "post":
                    yield self.mixed(home, own, parts)
                else:
                    self.passed(home, clock, parts)
                    yield Passed(own)
            elif home.rank in slot:
                return  # one clock after the other

    def own_weight(self, home: Home, parts: list[tuple[Contribution, float]]) -> float:
        """Returns the weight of the rank itself: the rest up to 1."""
        return 1.0 - sum(weight for _, weight in parts)

    def outgoing(self, home: Home, part: Contribution, receivers: list[int]) -> Send:
        """Returns the message to the neighbours."""
        del home
        return Send(receivers, "mix", part.values, part.clock)

    @abstractmethod
    def mixed(self, home: Home, own: Contribution, parts: list[tuple[Contribution, float]]) -> Answer:
        """Returns the answer to the worker; `parts`: those of its neighbours, with their weights."""

    def passing(self, home: Home, part: Contribution, receivers: list[int]) -> Send:
        """Returns the message to the neighbours when this rank passes: empty, so that each keeps this rank's share."""
        del home
        return Send(receivers, "pass", part.values, part.clock, payload=_NOTHING)

    def passed(self, home: Home, clock: int, parts: list[tuple[Contribution, float]]) -> None:
        """This rank has passed a clock, at which its neighbours have sent these parts."""


class DPSGD(Gossip[algorithms.DPSGD | algorithms.NoLoCo]):
    """x_i + (sum_j W_ij x_j - x_i), of which the worker gets the change, as it has taken a step meanwhile (arXiv
    1705.09056, algorithm 1)."""

    def mixed(self, home: Home, own: Contribution, parts: list[tuple[Contribution, float]]) -> Answer:
        kind = home.dtype.storage.type
        total: Array = own.values * kind(self.own_weight(home, parts))
        for part, weight in parts:
            total += kind(weight) * part.values
        total -= own.values
        home.version += 1
        return Answer(own, total, added=True)


class SGP(Gossip[algorithms.SGP]):
    """x and omega are pushed, and the worker has z = x / omega (arXiv 1811.10792, algorithm 1).

    `aux`: x and z as of the last mixing, and omega; the worker's own steps are what its z has changed by since. A rank
    that passes pushes and takes as any other, for else all of the others' weight would flow to it, and leaves the
    worker's z as it was. `early`: the weight that has come before the worker's first x.
    """

    def outgoing(self, home: Home, part: Contribution, receivers: list[int]) -> Send:
        x: Array = home.copy(part.values)
        if "x" in home.aux:
            x += home.aux["x"] - home.aux.get("z", home.dtype.storage.type(0))
        home.aux["x"] = x
        omega = home.aux.setdefault("omega", 1 + home.aux.pop("early", np.zeros(1)))
        return Send(receivers, "mix", x, part.clock, float(omega[0]))

    def mixed(self, home: Home, own: Contribution, parts: list[tuple[Contribution, float]]) -> Answer:
        self.passed(home, own.clock, parts)
        z: Array = home.aux["x"] / home.dtype.storage.type(home.aux["omega"][0])
        home.aux["z"] = z
        home.version += 1
        return Answer(own, z - own.values, added=True)

    def passing(self, home: Home, part: Contribution, receivers: list[int]) -> Send:
        if "omega" not in home.aux:
            return super().passing(home, part, receivers)
        return Send(receivers, "mix", home.aux["x"], part.clock, float(home.aux["omega"][0]))

    def passed(self, home: Home, clock: int, parts: list[tuple[Contribution, float]]) -> None:
        kind, aux = home.dtype.storage.type, home.aux
        name = "omega" if "omega" in aux else "early"  # its worker has not posted yet: it has nothing to push
        kept = self.kept(home, clock) if name == "omega" else 1.0
        x: Array = aux["x"] * kind(kept) if "x" in aux else np.zeros(home.elements, home.dtype.storage)
        omega: Array = aux[name] * kept if name in aux else np.zeros(1)
        for part, weight in parts:
            x += kind(weight) * part.values
            omega += weight * part.weight
        aux.update({"x": x, name: omega})

    def kept(self, home: Home, clock: int) -> float:
        """Returns the share of its own that a rank keeps: all that it does not push to anybody who is there."""
        return 1.0 - sum(weight for rank, weight in self.graph.outgoing(home.rank, clock) if rank in home.present)


class Choco(Gossip[algorithms.Choco]):
    """Neighbours get Q(x_i - x^_i), and the worker gamma (sum_j w_ij x^_j - x^_i) (arXiv 1902.00340, algorithm 2).

    `aux`: x^_i, and the weighted sum of the neighbours' x^_j, whatever their number; what a rank that has left said
    last stays in it; and x_i as of the last mixing. A rank that passes takes part with that, and `owed` is what its
    worker has not got of the changes.
    """

    def outgoing(self, home: Home, part: Contribution, receivers: list[int]) -> Send:
        home.aux["x"] = part.values + home.aux.get("owed", home.dtype.storage.type(0))
        return self._difference(home, part.clock, receivers)

    def passing(self, home: Home, part: Contribution, receivers: list[int]) -> Send:
        if "x" not in home.aux:
            return super().passing(home, part, receivers)
        return self._difference(home, part.clock, receivers)

    def _difference(self, home: Home, clock: int, receivers: list[int]) -> Send:
        """Sends Q(x_i - x^_i)."""
        assert home.codec is not None
        own = home.aux.setdefault("x_hat", np.zeros(home.elements, home.dtype.storage))
        payload, told = home.codec.tell(home.aux["x"] - own)
        own += told
        return Send(receivers, "mix", told, clock, payload=payload)

    def mixed(self, home: Home, own: Contribution, parts: list[tuple[Contribution, float]]) -> Answer:
        self.passed(home, own.clock, parts)
        home.version += 1
        return Answer(own, home.aux.pop("owed"), added=True)

    def passed(self, home: Home, clock: int, parts: list[tuple[Contribution, float]]) -> None:
        kind = home.dtype.storage.type
        neighbours = home.aux.setdefault("neighbours", np.zeros(home.elements, home.dtype.storage))
        for part, weight in parts:
            neighbours += kind(weight) * part.values
        if "x" in home.aux:  # else its worker has not posted yet
            share = kind(sum(weight for _, weight in self.graph.incoming(home.rank, clock)))
            change: Array = (neighbours - share * home.aux["x_hat"]) * kind(self.spec.gamma)
            home.aux["x"] += change
            home.aux["owed"] = change + home.aux["owed"] if "owed" in home.aux else change
