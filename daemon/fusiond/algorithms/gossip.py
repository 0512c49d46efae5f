"""Gossip by clocks: every rank mixes with its neighbours of the same clock."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator
from typing import TypeVar

import numpy as np

from fusion_rt import algorithms
from fusion_rt.core import scratch
from fusiond.algorithms.home import Answer, Home, HomeAlgorithm, Passed, Send, Step, begin_anew
from fusiond.collectives.base import Array
from fusiond.core.contribution import Contribution

_BEGIN: Array = np.zeros(1, np.int64)
_NOTHING = memoryview(b"")
_COPY = "x_hat/"
_Parts = list[tuple[Contribution, float]]  # of neighbours, with their weights
_Spec = TypeVar("_Spec", bound=algorithms.OnGraph)


class Gossip(HomeAlgorithm[_Spec]):
    """Each home sends its worker's posts to its neighbours' homes, and mixes when all parts of a clock are there.

    Whoever waits, joins or leaves, the mean of all that take part stays: a rank gives away what its neighbours get, as
    they get it. One that has left or joined is left out. One that waits in another operation *passes* the clocks at
    which neighbours wait for it: its home then does its part. `scratch`: the clock to be mixed next.
    """

    waits = True

    def __init__(self, spec: _Spec, ranks: int) -> None:
        super().__init__(spec, ranks)
        self.graph = spec.graph(ranks)

    def received(self, home: Home, part: Contribution) -> Iterator[Step]:
        if part.kind != "post" and part.clock < home.scratch.get("clock", _BEGIN)[0]:
            self.late(home, part)
            return
        before = any(clock < part.clock and home.rank in slot for clock, slot in home.slots.items())
        home.slots.setdefault(part.clock, {})[part.rank] = part
        if part.rank == home.rank and not before:  # else when the clock that this rank has passed is over
            yield from self._begin(home, part)
        yield from self._mix(home)

    def _begin(self, home: Home, own: Contribution) -> Iterator[Step]:
        """Begins the clock of this rank's own part: its neighbours are sent their shares."""
        receivers = [rank for rank, _ in self.graph.outgoing(home.rank, own.clock) if rank in home.present]
        yield self.outgoing(home, own, receivers) if own.kind == "post" else self.passing(home, own, receivers)
        senders = [rank for rank, _ in self.graph.incoming(home.rank, own.clock) if rank in home.present]
        if home.leads and (silent := set(senders).difference(receivers)):  # they do not hear how far this rank is
            yield Send(sorted(silent), "want", own.values[:0], own.clock, payload=_NOTHING)

    def addressees(self, home: Home, part: Contribution | None) -> Collection[int]:
        if part is None or part.rank != home.rank or part.kind not in ("post", "pass"):
            return ()
        return [rank for rank, _ in self.graph.outgoing(home.rank, part.clock)]

    def without(self, home: Home, rank: int) -> Iterator[Step]:
        del rank
        yield from self._mix(home)

    def reseeded(self, home: Home) -> None:
        begin_anew(self, home)

    def asked(self, home: Home, part: Contribution) -> Answer:
        return Answer(part, np.zeros(home.elements, home.dtype.storage), added=True)

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
                for early in sorted(number for number in home.slots if number < clock):  # of before a join
                    for part in home.slots.pop(early).values():
                        self.late(home, part)
                del home.slots[clock]
                own = slot.pop(home.rank)
                parts = [(slot[rank], weight) for rank, weight in incoming if slot[rank].kind in ("mix", "whole")]
                if own.kind == "post":
                    home.version += 1
                    yield self.mixed(home, own, parts)
                else:
                    self.passed(home, parts)
                    yield Passed(own)
                if following := [number for number in home.slots if home.rank in home.slots[number]]:
                    yield from self._begin(home, home.slots[following[0]][home.rank])
            elif home.rank in slot:
                return  # one clock after the other

    @abstractmethod
    def outgoing(self, home: Home, part: Contribution, receivers: list[int]) -> Send:
        """Returns the message to the neighbours with the worker's post."""

    @abstractmethod
    def mixed(self, home: Home, own: Contribution, parts: _Parts) -> Answer:
        """Returns the answer to the worker; `parts`: those of its neighbours."""

    @abstractmethod
    def passing(self, home: Home, part: Contribution, receivers: list[int]) -> Send:
        """Returns the message to the neighbours when this rank passes."""

    @abstractmethod
    def passed(self, home: Home, parts: _Parts) -> None:
        """This rank has passed a clock, at which its neighbours have sent these parts."""

    def late(self, home: Home, part: Contribution) -> None:
        """A part has come, or is left over, for a clock that is over: its sender, or this rank, was taken for gone."""
        del home, part


class Averaging(Gossip[algorithms.OnGraph]):
    """x_i + sum_j W_ij (x_j - x_i) with a symmetric W, of which the worker gets the change, as it has taken a step
    meanwhile (arXiv 1705.09056, algorithm 1).

    i gives j the same as j gives i, but for the sign. So an edge may be left out at any clock, if both do: a rank that
    passes sends an empty message, and takes nothing. Homes keep nothing. With a codec, x are its roundings:
    `scratch` has the rank's own, `told`, until they are mixed.
    """

    keeps_value = False

    def outgoing(self, home: Home, part: Contribution, receivers: list[int]) -> Send:
        payload, told = home.tell(part.values)
        if payload is not None:
            home.scratch["told"] = told
        return Send(receivers, "mix", told, part.clock, payload=payload)

    def mixed(self, home: Home, own: Contribution, parts: _Parts) -> Answer:
        told = home.scratch.pop("told", own.values)
        change, difference = home.zeros(), home.empty()
        for part, weight in parts:
            np.subtract(part.values, told, out=difference)
            difference *= home.dtype.storage.type(weight)
            change += difference
        return Answer(own, change, added=True)

    def passing(self, home: Home, part: Contribution, receivers: list[int]) -> Send:
        del home
        return Send(receivers, "pass", part.values, part.clock, payload=_NOTHING)

    def passed(self, home: Home, parts: _Parts) -> None:
        del home, parts


class PushSum(Gossip[algorithms.OnGraph]):
    """x and omega are pushed, and the worker has z = x / omega (arXiv 1811.10792, algorithm 1).

    The sums of x and of omega, over all homes and messages, stay as they are: what a rank sends leaves its own at once,
    and what comes is added, however late. That needs no agreement of ranks on who is there, and no matrix of which the
    rows sum to 1. Where they do, and all ranks take part, omega is 1, and the rule is that of D-PSGD.

    `value`: x. `aux`: omega; and z as the worker has it, if its rank has passed clocks since it was answered. The
    worker's own steps are the change of its z since. A rank that passes pushes and takes as any other, for else
    all of the others' weight would flow to it, and leaves the worker's z as it was.
    """

    def begun(self, home: Home) -> None:
        home.aux["omega"] = np.ones(1)

    def outgoing(self, home: Home, part: Contribution, receivers: list[int]) -> Send:
        assert home.value is not None
        known = home.aux.pop("z", None)  # to its worker
        home.value -= _z(home) if known is None else known
        home.value += part.values
        return self._push(home, part.clock, receivers)

    def passing(self, home: Home, part: Contribution, receivers: list[int]) -> Send:
        if "z" not in home.aux:
            home.aux["z"] = home.copy(_z(home))
        return self._push(home, part.clock, receivers)

    def _push(self, home: Home, clock: int, receivers: list[int]) -> Send:
        """Sends x and omega, and takes away the receivers' shares."""
        assert home.value is not None
        share = sum(weight for rank, weight in self.graph.outgoing(home.rank, clock) if rank in receivers)
        omega = float(home.aux["omega"][0])
        payload, told = home.tell(scratch.copied(home.value))
        home.value -= home.scaled(told, share)
        home.aux["omega"][0] = omega * (1.0 - share)
        return Send(receivers, "mix", told, clock, omega, payload)

    def mixed(self, home: Home, own: Contribution, parts: _Parts) -> Answer:
        self.passed(home, parts)
        home.aux.pop("z", None)
        change = _z(home)
        change -= own.values
        return Answer(own, change, added=True, weight=float(home.aux["omega"][0]))

    def passed(self, home: Home, parts: _Parts) -> None:
        for part, weight in parts:
            self._take(home, part, weight)

    def late(self, home: Home, part: Contribution) -> None:
        if part.kind == "mix":
            weight = dict(self.graph.incoming(home.rank, part.clock)).get(part.rank, 0.0)
            if "z" not in home.aux:
                home.aux["z"] = home.copy(_z(home))
            self._take(home, part, weight)

    def _take(self, home: Home, part: Contribution, weight: float) -> None:
        assert home.value is not None
        home.value += home.scaled(part.values, weight)
        home.aux["omega"][0] += weight * part.weight

    def asked(self, home: Home, part: Contribution) -> Answer:
        z = _z(home)
        return Answer(part, z - home.aux.get("z", z), added=True, weight=float(home.aux["omega"][0]))


def dpsgd(spec: algorithms.DPSGD, ranks: int) -> Averaging | PushSum:
    """Makes the algorithm of a D-PSGD: push-sum, where the graph is not symmetric."""
    return Averaging(spec, ranks) if spec.graph(ranks).symmetric else PushSum(spec, ranks)


def _z(home: Home) -> Array:
    """Returns x / omega, in scratch memory."""
    assert home.value is not None
    z: Array = np.divide(home.value, home.dtype.storage.type(home.aux["omega"][0]), out=home.empty())
    return z


class Choco(Gossip[algorithms.Choco]):
    """Neighbours get Q(x_i - x^_i), and the worker gamma sum_j w_ij (x^_j - x^_i) (arXiv 1902.00340, algorithm 2), with
    a gamma of its own for each range of elements that the codec treats alike.

    The first message of a home has all of x_i, which becomes x^_i, and so has the first one after a join: neighbours
    have the copy that the rank itself has, whatever they have heard before. Each neighbour's is kept by itself (the
    paper's code keeps their weighted sum), so that nothing stays of a rank that is left out.

    `value`: x_i as of the last mixing. `aux`: x^ of the rank and of each neighbour, by rank; and `owed`, what its
    worker has not got of the changes. A rank that passes takes part with x_i.
    """

    def returned(self, home: Home) -> None:
        home.aux = {key: value for key, value in home.aux.items() if not key.startswith(_COPY)}

    def outgoing(self, home: Home, part: Contribution, receivers: list[int]) -> Send:
        assert home.value is not None
        np.copyto(home.value, part.values)
        if "owed" in home.aux:
            home.value += home.aux["owed"]
        return self._difference(home, part.clock, receivers)

    def passing(self, home: Home, part: Contribution, receivers: list[int]) -> Send:
        return self._difference(home, part.clock, receivers)

    def _difference(self, home: Home, clock: int, receivers: list[int]) -> Send:
        """Sends Q(x_i - x^_i), or x_i."""
        assert home.value is not None
        name = _copy_of(home.rank)
        if name not in home.aux:
            home.aux[name] = home.copy(home.value)
            own = scratch.copied(home.value).view(np.uint8)  # while `tobytes` copies, no other thread does anything
            return Send(receivers, "whole", home.aux[name], clock, payload=own.data)
        payload, told = home.tell(np.subtract(home.value, home.aux[name], out=home.empty()))
        home.aux[name] += told
        return Send(receivers, "mix", told, clock, payload=payload)

    def mixed(self, home: Home, own: Contribution, parts: _Parts) -> Answer:
        self.passed(home, parts)
        return Answer(own, home.aux.pop("owed"), added=True)

    def passed(self, home: Home, parts: _Parts) -> None:
        assert home.value is not None
        change, difference = home.zeros(), home.empty()
        for part, weight in parts:
            name = _copy_of(part.rank)
            if part.kind == "whole":
                home.aux[name] = home.copy(part.values)
            else:
                home.aux[name] += part.values
            np.subtract(home.aux[name], home.aux[_copy_of(home.rank)], out=difference)
            difference *= home.dtype.storage.type(weight)
            change += difference
        assert home.codec is not None
        for low, high, contraction in home.codec.contractions():
            change[low:high] *= self.spec.gamma or self.spec.step(contraction, self.graph)
        home.value += change
        if "owed" in home.aux:
            change += home.aux["owed"]
        home.aux["owed"] = change

    def asked(self, home: Home, part: Contribution) -> Answer:
        return Answer(part, home.aux.get("owed", np.zeros(home.elements, home.dtype.storage)), added=True)


def _copy_of(rank: int) -> str:
    return f"{_COPY}{rank}"
