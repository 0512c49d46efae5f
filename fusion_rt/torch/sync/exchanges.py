"""Exchanges that a loss leaves unfinished, where the ranks that are left go on in their loops.

An *exchange* is all that optimizers exchange at one time: in a backward pass, or in a `step()`. All ranks that train by
one script have the same exchanges in the same order, and here they have numbers. When a rank is lost, some of the
others may have the results of the last one, and some not: no rank completes the next before all have given their part
to it, so they are at most one apart. Then the first number that no rank has completed, and those begun after it, are
*left out* on all ranks: parameters and optimizers stay as they are. A rank that is one behind is healed before
(`elastic`), and when its script comes to a number that is left out, it exchanges nothing.

There are no numbers outside of `elastic.run`'s function, where `exchanges.survive` is None.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from fusion_rt.core.errors import HorovodInternalError, StepGivenUp
from fusion_rt.torch.sync.step_schedule import Outcome, Schedule


class Exchange:
    """An exchange that has begun.

    Args:
        number: in the order of a rank's script, from 1 on.
        parts: of the optimizers that take part.

    Attributes:
        is_done: it has ended well, or was left out.
        known: by part the outcome of the results on other ranks, where this one has been healed.
    """

    def __init__(self, number: int, parts: Sequence[Schedule]) -> None:
        self.number = number
        self.parts = tuple(parts)
        self.is_done = False
        self.known: dict[Schedule, Outcome] = {}


class Exchanges:
    """The exchanges of this rank since all ranks were known to be at the same place of their scripts.

    Attributes:
        survive: called after a loss, with the error and the exchange that failed; has the membership changed and the
            ranks agree when it returns. It raises `HorovodInternalError` if this rank's function has to be left. None
            where ranks do not survive in place.
        begun, completed: numbers of the last exchange that has begun, and of the last before which all have ended.
        left_out: no rank exchanges anything up to this number.
        last: the parts of the last one that has ended well.
        is_uncertain: numbers may not mean the same on all ranks.
        generation: how many losses were survived.
        dropped: how many exchanges of gradients were left out; it only grows, as `taken` does.
        taken: how many have ended well, or are known from other ranks.
    """

    def __init__(self) -> None:
        self.survive: Callable[[HorovodInternalError, Exchange], None] | None = None
        self._running = False
        self.dropped = self.taken = 0
        self.restart()

    def restart(self) -> None:
        """Counts anew, where all ranks are at the same place of their scripts, and nothing is under way."""
        self.begun = self.completed = self.left_out = self.generation = 0
        self.last: tuple[Schedule, ...] = ()
        self.is_uncertain = False
        self.under_way: deque[Exchange] = deque()

    def run(self, parts: Sequence[Schedule], exchange: Callable[[], object]) -> None:
        """Calls a function that exchanges, and has the parts note it if it was left out (`Schedule.note_left_out`).

        Raises:
            HorovodInternalError: it failed, on all ranks, and this rank cannot go on in its function.
        """
        if self.survive is None or self._running:
            exchange()
            return
        begun = self.begin(parts)
        left_out = self.is_left_out(begun)
        if not left_out:
            self._running = True
            try:
                exchange()
            except StepGivenUp:
                self.note_given_up()
                raise
            except HorovodInternalError as error:
                self.lose(begun, error)
                left_out = True
            finally:
                self._running = False
        self.end(begun)
        if left_out and any(not part.local and part not in begun.known for part in begun.parts):
            self.dropped += 1
        else:
            self.taken += 1
        if left_out:
            for part in begun.parts:
                if part in begun.known:
                    part.note_known(begun.known[part])
                else:
                    part.note_left_out()
        else:
            self.last = begun.parts

    def begin(self, parts: Sequence[Schedule]) -> Exchange:
        """Begins an exchange, which the caller has to `end` or `lose`."""
        self.begun += 1
        begun = Exchange(self.begun, parts)
        if self.survive is not None:
            self.under_way.append(begun)
        return begun

    def is_left_out(self, exchange: Exchange) -> bool:
        """Tells whether all ranks leave an exchange out, so that nothing is to be sent."""
        return exchange.number <= self.left_out

    @property
    def next_is_left_out(self) -> bool:
        """True if all ranks leave out the exchange that begins next."""
        return self.begun < self.left_out

    def end(self, exchange: Exchange) -> None:
        """Notes that an exchange has ended well, or was left out."""
        exchange.is_done = True
        while self.under_way and self.under_way[0].is_done:
            self.completed = self.under_way.popleft().number

    def lose(self, exchange: Exchange, error: HorovodInternalError) -> None:
        """Survives the loss that an exchange has failed by; then it is left out, or healed.

        Raises:
            HorovodInternalError: this rank cannot go on in its function.
        """
        if self.survive is None or not all(part.survives for part in exchange.parts):
            raise error
        self.survive(error, exchange)
        self.end(exchange)

    def note_given_up(self) -> None:
        """Notes that a rank has given a step up: until the next commit it is not known which numbers mean the same."""
        self.is_uncertain = True


exchanges = Exchanges()
"""Those of this process."""
