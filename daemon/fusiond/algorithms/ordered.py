"""Shards whose homes have to agree which contributions an update is made of.

A worker waits for all its buckets. If each home chose for itself whom it leaves behind, two of them could wait for
ranks that wait for the other one. So the home of the plan's first bucket decides, and gives orders, which all homes
carry out, itself included, as soon as they have what an order is about.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np

from fusiond.algorithms.home import Home, Part, ShardAlgorithm, Step, Tell, _Spec

LATE, UPDATE = 0, 1
"""What an order is: contributions that come too late for their update; those that make up an update."""


class Ordered(ShardAlgorithm[_Spec]):
    """An order names contributions by rank and clock; updates are made in the order in which they were decided.

    `slots`: 0 has what has come and waits for an order. `scratch`: how many updates were ordered, and made.
    """

    def received(self, home: Home, part: Part) -> Iterator[Step]:
        if part.kind == "told":
            home.orders.append((part.clock, tuple(part.values.tolist())))
        else:
            home.slots.setdefault(0, {})[part.rank] = part
            if home.leads:
                yield from self.decide(home, part)
        yield from self.follow(home)

    def nothing(self, home: Home, part: Part) -> Iterator[Step]:
        return self.received(home, part)

    @abstractmethod
    def decide(self, home: Home, part: Part) -> Iterator[Step]:
        """At the first home: what follows from a contribution."""

    @abstractmethod
    def carry(self, home: Home, part: Part) -> None:
        """A contribution is late; its sender is answered."""

    def order(self, home: Home, kind: int, parts: Sequence[Part]) -> Step:
        """Gives an order, to this home and all others."""
        counts = home.scratch.setdefault("counts", np.zeros(2, np.int64))
        numbers = np.array([kind, *(number for part in parts for number in (part.rank, part.clock))], np.int64)
        home.orders.append((int(counts[0]), tuple(numbers.tolist())))
        counts[0] += kind == UPDATE
        return Tell(numbers, home.orders[-1][0])

    def follow(self, home: Home) -> Iterator[Step]:
        """Carries out the orders for which everything is here."""
        counts = home.scratch.setdefault("counts", np.zeros(2, np.int64))
        came = home.slots.setdefault(0, {})
        done = True
        while done:
            done = False
            for order in list(home.orders):
                number, (kind, *pairs) = order
                wanted = dict(zip(pairs[::2], pairs[1::2], strict=True))
                here = [came[rank] for rank, clock in wanted.items() if rank in came and came[rank].clock == clock]
                missing = wanted.keys() - {part.rank for part in here}
                if missing & home.present or (kind == UPDATE and number != counts[1]):
                    continue
                home.orders.remove(order)
                for part in here:
                    del came[part.rank]
                given = [part for part in here if part.samples]
                if kind == LATE:
                    for part in given:
                        self.carry(home, part)
                elif given:  # else all of them have left, or have no gradient
                    self.apply(home, self.combine(home, given), given)
                yield from [self.answer(home, part) for part in here]
                counts[1] += kind == UPDATE
                done = True
