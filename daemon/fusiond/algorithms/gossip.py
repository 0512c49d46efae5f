"""Gossip by clocks: every rank mixes with its neighbours of the same clock."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import numpy as np

from fusion_rt import algorithms, mixing
from fusion_rt.codecs.summing import SummingBucketCodec
from fusiond.algorithms.home import Answer, Home, HomeAlgorithm, Part, Send, Step, _Spec
from fusiond.collectives.base import Array

_BEGIN: Array = np.zeros(1, np.int64)


class Gossip(HomeAlgorithm[_Spec]):
    """Sends what a worker posts to its neighbours' homes, and mixes when everybody's of a clock is there.

    Of a rank that has left, its share of the weights goes to the rank itself. `scratch`: the clock to be mixed next.
    """

    def __init__(self, spec: _Spec, ranks: int) -> None:
        super().__init__(spec, ranks)
        self.graph = mixing.parse(spec.topology, ranks)  # type: ignore[attr-defined]  # all gossip has one

    def received(self, home: Home, part: Part) -> Iterator[Step]:
        if part.kind != "post" and part.clock < home.scratch.get("clock", _BEGIN)[0]:
            return  # of a rank that was taken for gone: nobody waits for it any more
        home.slots.setdefault(part.clock, {})[part.rank] = part
        if part.kind == "post":
            receivers = [rank for rank, _ in self.graph.outgoing(home.rank, part.clock) if rank in home.present]
            yield self.outgoing(home, part, receivers)
        yield from self._mix(home)

    def gone(self, home: Home, rank: int) -> Iterator[Step]:
        del rank
        yield from self._mix(home)

    def awaited(self, home: Home) -> list[int]:
        clock = next((clock for clock in sorted(home.slots) if home.rank in home.slots[clock]), None)
        if clock is None:
            return [home.rank]
        return [rank for rank, _ in self._incoming(home, clock) if rank not in home.slots[clock]]

    def _incoming(self, home: Home, clock: int) -> list[tuple[int, float]]:
        """Neighbours of a clock whose values are there or are to come, with their weights."""
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
                yield self.mixed(home, own, [(slot[rank], weight) for rank, weight in incoming])
                return  # a worker posts one clock after the other

    def own_weight(self, home: Home, parts: list[tuple[Part, float]]) -> float:
        """What is left of 1 for the rank itself."""
        return 1.0 - sum(weight for _, weight in parts)

    def outgoing(self, home: Home, part: Part, receivers: list[int]) -> Send:
        """What the neighbours get."""
        del home
        return Send(receivers, "mix", part.values, part.clock)

    @abstractmethod
    def mixed(self, home: Home, own: Part, parts: list[tuple[Part, float]]) -> Answer:
        """What the worker gets; `parts`: its neighbours', with their weights."""


class DPSGD(Gossip[algorithms.DPSGD]):
    """x_i + (sum_j W_ij x_j - x_i), of which the worker gets the change, as it has taken a step meanwhile (arXiv
    1705.09056, algorithm 1)."""

    def mixed(self, home: Home, own: Part, parts: list[tuple[Part, float]]) -> Answer:
        kind = home.dtype.storage.type
        total: Array = own.values * kind(self.own_weight(home, parts))
        for part, weight in parts:
            total += kind(weight) * part.values
        total -= own.values
        home.version += 1
        return Answer(own, total, added=True)


class SGP(Gossip[algorithms.SGP]):
    """x and omega are pushed, and the worker has z = x / omega (arXiv 1811.10792, algorithm 1).

    `aux`: x and z as of the last mixing, and omega; the worker's own steps are what its z has changed by since.
    """

    def outgoing(self, home: Home, part: Part, receivers: list[int]) -> Send:
        omega = home.aux.setdefault("omega", np.ones(1))
        x: Array = home.copy(part.values)
        if "x" in home.aux:
            x += home.aux["x"] - home.aux["z"]
        home.aux["x"] = x
        return Send(receivers, "mix", x, part.clock, float(omega[0]))

    def mixed(self, home: Home, own: Part, parts: list[tuple[Part, float]]) -> Answer:
        kind = home.dtype.storage.type
        kept = self.kept(home, own.clock)
        x: Array = home.aux["x"] * kind(kept)
        omega = home.aux["omega"] * kept
        for part, weight in parts:
            x += kind(weight) * part.values
            omega += weight * part.weight
        z: Array = x / kind(omega[0])
        home.aux.update(x=x, omega=omega, z=z)
        home.version += 1
        return Answer(own, z - own.values, added=True)

    def kept(self, home: Home, clock: int) -> float:
        """The share of its own that a rank keeps: what it does not push to anybody who is there."""
        return 1.0 - sum(weight for rank, weight in self.graph.outgoing(home.rank, clock) if rank in home.present)


class Choco(Gossip[algorithms.Choco]):
    """Neighbours get Q(x_i - x^_i), and the worker gamma (sum_j w_ij x^_j - x^_i) (arXiv 1902.00340, algorithm 2).

    `aux`: x^_i, and the weighted sum of the neighbours' x^_j, whatever their number; what a rank that has left said
    last stays in it.
    """

    def outgoing(self, home: Home, part: Part, receivers: list[int]) -> Send:
        codec = home.codec
        assert isinstance(codec, SummingBucketCodec)
        own = home.aux.setdefault("x_hat", np.zeros(home.elements, home.dtype.storage))
        portion = codec.contribute(part.values - own)
        payload = codec.pack(portion, 0, home.elements)
        told: Array = np.zeros(home.elements, home.dtype.storage)
        codec.write(portion, [told], 1.0, 1)
        own += told
        return Send(receivers, "mix", told, part.clock, payload=payload)

    def mixed(self, home: Home, own: Part, parts: list[tuple[Part, float]]) -> Answer:
        kind = home.dtype.storage.type
        neighbours = home.aux.setdefault("neighbours", np.zeros(home.elements, home.dtype.storage))
        for part, weight in parts:
            neighbours += kind(weight) * part.values
        share = kind(sum(weight for _, weight in self.graph.incoming(home.rank, own.clock)))
        change: Array = (neighbours - share * home.aux["x_hat"]) * kind(self.spec.gamma)
        home.version += 1
        return Answer(own, change, added=True)
