"""Questions that go to several nodes, and their answers. No I/O.

A node that does not answer in time is left out of the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from fusion_rt import wire
from fusiond.core.dispatch import Handlers
from fusiond.core.effects import Correspondence

Answer = TypeVar("Answer")
Question: TypeAlias = Callable[[int], wire.PeerMessage]  # made of its serial number


@dataclass
class _Asked(Generic[Answer]):
    nodes: set[int]
    then: Callable[[dict[int, Answer]], None]
    answers: dict[int, Answer] = field(default_factory=dict)


class Rounds(Generic[Answer]):
    """Questions of one node, and the answers so far.

    Args:
        here: this node.
        outside: sends messages to other nodes.
        handlers: of the questions and answers, which this node gives itself, too.
        patience: seconds for the answers.
    """

    def __init__(self, here: int, outside: Correspondence, handlers: Handlers, patience: float) -> None:
        self._here = here
        self._outside = outside
        self._handlers = handlers
        self._patience = patience
        self._asked: dict[int, _Asked[Answer]] = {}
        self._serial = 0

    def ask(
        self, questions: Mapping[int, Question], then: Callable[[dict[int, Answer]], None], hurried: bool = True
    ) -> None:
        """Asks nodes; calls `then` with the answers by node, once all have come or, if `hurried`, the time is up."""
        self._serial += 1
        serial = self._serial
        self._asked[serial] = _Asked(set(questions), then)
        if hurried:
            self._outside.call_later(self._patience, lambda: self._finish(serial))
        for node, question in questions.items():
            self.send(node, question(serial))
        if not questions:
            self._finish(serial)

    def send(self, node: int, message: wire.PeerMessage) -> None:
        """Sends a question or an answer to a node, which may be this one: then it is handled at once."""
        if node == self._here:
            self._handlers[type(message)](node, message)
        else:
            self._outside.to_node(node, message)

    def answered(self, node: int, serial: int, answer: Answer) -> None:
        """Takes in an answer; drops one that is too late, or to nothing that was asked."""
        asked = self._asked.get(serial)
        if asked is None or node not in asked.nodes:
            return
        asked.nodes.discard(node)
        asked.answers[node] = answer
        if not asked.nodes:
            self._finish(serial)

    def _finish(self, serial: int) -> None:
        asked = self._asked.pop(serial, None)
        if asked is not None:
            asked.then(asked.answers)
