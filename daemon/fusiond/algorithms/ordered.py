"""Shards that have to agree which contributions an update is made of.

A worker waits for all its buckets. If each home chose for itself whom it leaves behind, two of them could wait for
ranks that wait for the other one. So the home of the plan's first bucket decides, and gives orders, which all homes
carry out, itself included, as soon as they have the parts of an order.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np

from fusiond.algorithms.home import Home, HomeAlgorithm, Spec, Step, Tell
from fusiond.core.contribution import Contribution

LATE, UPDATE = 0, 1
"""Kinds of orders: contributions that come too late for their update; those that make up an update."""
IN_TIME = 1
"""The slot of contributions to the next update, at the first home."""


class Ordered(HomeAlgorithm[Spec]):
    """Shards that follow orders, which name contributions by rank and clock. Updates are made as they were ordered.

    `slots`: 0 has parts that wait for an order. `scratch`: how many updates were ordered, and made.
    """

    waits = True
    answers_all = True
    tells = True

    def received(self, home: Home, part: Contribution) -> Iterator[Step]:
        if part.kind == "told":
            home.orders.append((part.clock, tuple(part.values.tolist())))
        else:
            home.slots.setdefault(0, {})[part.rank] = part
            if home.leads:
                yield from self.decide(home, part)
        yield from self.follow(home)

    def nothing(self, home: Home, part: Contribution) -> Iterator[Step]:
        return self.received(home, part)

    def decide(self, home: Home, part: Contribution) -> Iterator[Step]:
        """Decides, at the first home, on the effects of a contribution."""
        slot = home.slots.setdefault(IN_TIME, {})
        slot[part.rank] = part
        if self.ready(home, slot):
            yield self.order_update(home)

    @abstractmethod
    def ready(self, home: Home, slot: dict[int, Contribution]) -> bool:
        """Returns, at the first home, whether the waiting parts make up an update."""

    @abstractmethod
    def update(self, home: Home, parts: Sequence[Contribution]) -> Iterator[Step]:
        """Makes an update of these contributions, and answers them."""

    def carry(self, home: Home, part: Contribution) -> Iterator[Step]:
        """A contribution is late; its sender is answered."""
        raise NotImplementedError

    def without(self, home: Home, rank: int) -> Iterator[Step]:
        del rank
        if (slot := home.slots.get(IN_TIME)) and self.ready(home, slot):
            yield self.order_update(home)
        yield from self.follow(home)

    def order_update(self, home: Home) -> Step:
        """Orders an update of the parts that have come in time."""
        return self.order(home, UPDATE, [part for _, part in sorted(home.slots.pop(IN_TIME).items())])

    def order(self, home: Home, kind: int, parts: Sequence[Contribution]) -> Step:
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
                if missing & (home.present | home.joined) or (kind == UPDATE and number != counts[1]):
                    continue
                home.orders.remove(order)
                for part in here:
                    del came[part.rank]
                given = [part for part in here if part.samples]
                if kind == LATE:
                    for part in given:
                        yield from self.carry(home, part)
                elif given:  # else all of them have left, or have no gradient
                    yield from self.update(home, given)
                yield from [self.asked(home, part) for part in here if not part.samples]
                counts[1] += kind == UPDATE
                done = True
