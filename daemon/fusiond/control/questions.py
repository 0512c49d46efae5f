"""What the nodes ask each other about what waits: which operations are under way, and where workers are. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from fusion_rt import wire
from fusion_rt.wire import OpKey
from fusiond.core.queries import Question, Rounds
from fusiond.operations.context import Context

PATIENCE = 3.0  # seconds for an answer: a worker has one to show its stacks, and a daemon may be busy
Answer = wire.Located | wire.WaitingHere
Answers = dict[int, Answer]  # by node


class Questions:
    """One node's questions, and its answers to those of others.

    Args:
        context: the engine's.
        pid: of this daemon.
        under_way: tells what is under way on this node.
        is_over: tells whether an operation is over here.
    """

    def __init__(
        self,
        context: Context,
        pid: int,
        under_way: Callable[[], Sequence[wire.Waiting]],
        is_over: Callable[[OpKey], bool],
    ) -> None:
        self._context = context
        self._pid = pid
        self._under_way = under_way
        self._is_over = is_over
        self._rounds: Rounds[Answer] = Rounds(self._send, context.outside.call_later, PATIENCE)

    def locate(
        self, ranks: Iterable[int], keys: Sequence[OpKey], then: Callable[[dict[int, wire.Located]], None]
    ) -> None:
        """Asks where ranks are, and which of these operations are over on their nodes; tells by node.

        Of each node so many ranks are asked about as a message tells of.
        """
        wanted = set(ranks)
        of_nodes = {
            node: tuple(sorted(wanted.intersection(local)))[: wire.MAX_LOCATED]
            for node, local in enumerate(self._context.topology.ranks)
            if wanted.intersection(local)
        }

        def told(answers: Answers) -> None:
            then({node: answer for node, answer in answers.items() if isinstance(answer, wire.Located)})

        keys = tuple(keys)[: wire.MAX_WAITING]
        self._rounds.ask({node: _locate(some, keys) for node, some in of_nodes.items()}, told)

    def waiting(self, then: Callable[[dict[int, wire.WaitingHere]], None]) -> None:
        """Asks all nodes what is under way there; tells by node."""

        def told(answers: Answers) -> None:
            then({node: answer for node, answer in answers.items() if isinstance(answer, wire.WaitingHere)})

        nodes = [self._context.node, *self._context.other_nodes()]
        self._rounds.ask(dict.fromkeys(nodes, wire.WaitingRequest), told)

    def handle(self, node: int, message: wire.PeerMessage) -> bool:
        """Takes a message of another node, or of this one. Returns whether it was for this."""
        if isinstance(message, wire.Locate):
            over = tuple(key for key in message.keys if self._is_over(key))
            local = set(self._context.topology.ranks[self._context.node])
            ranks = [rank for rank in message.ranks if rank in local]
            self._context.outside.locate(
                ranks, lambda found: self._send(node, wire.Located(message.serial, tuple(found), over))
            )
        elif isinstance(message, wire.WaitingRequest):
            under_way = self._under_way()
            told = tuple(under_way[: wire.MAX_WAITING])
            self._send(node, wire.WaitingHere(message.serial, self._pid, told, len(under_way) - len(told)))
        elif isinstance(message, (wire.Located, wire.WaitingHere)):
            if self._may_tell(node, message):
                self._rounds.answered(node, message.serial, message)
        else:
            return False
        return True

    def _may_tell(self, node: int, answer: Answer) -> bool:
        """Whether it is about ranks of its sender, as far as that can be said."""
        local = set(self._context.topology.ranks[node])
        if isinstance(answer, wire.Located):
            return all(found.rank in local for found in answer.found)
        return all(local.issuperset(waiting.submitted) for waiting in answer.waiting)

    def _send(self, node: int, message: wire.PeerMessage) -> None:
        if node == self._context.node:
            self.handle(node, message)
        else:
            self._context.outside.to_node(node, message)


def _locate(ranks: tuple[int, ...], keys: tuple[OpKey, ...]) -> Question:
    return lambda serial: wire.Locate(serial, ranks, keys)
