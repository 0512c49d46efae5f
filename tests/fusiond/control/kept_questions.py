"""A coordinator by itself: what it asks is kept until the test answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from fusion_rt import wire
from fusion_rt.settings import Settings
from fusiond.control.negotiation import Coordinator, Outgoing
from fusiond.control.questions import Questions
from fusiond.control.waiting import Kind
from fusiond.core.participants import Participants

Submitted = Mapping[int, wire.Signature | None]  # by rank


class KeptQuestions:
    """In place of a coordinator's `Questions`; nobody knows where ranks are.

    Attributes:
        asked: keys and nodes.
        warnings: what people were told.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[wire.OpKey, tuple[int, ...]]] = []
        self.warnings: list[str] = []
        self._then: list[Callable[[dict[int, wire.WaitingHere]], None]] = []
        self._sent: Outgoing = []

    def coordinator(self, participants: Participants, settings: Settings) -> Coordinator:
        return Coordinator(participants, settings, cast(Questions, self), self)

    def send(self, messages: Outgoing) -> None:
        self._sent += messages

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def waiting(
        self,
        then: Callable[[dict[int, wire.WaitingHere]], None],
        key: wire.OpKey,
        nodes: Sequence[int],
        hurried: bool = False,
    ) -> None:
        self.asked.append((key, tuple(nodes)))
        self._then.append(then)

    def whereabouts(self, ranks: Sequence[int], then: Callable[[str], None]) -> None:
        then("")

    def answer(self, *nodes: Submitted, kind: Kind = "operation") -> Outgoing:
        """What follows from the answers to the question that was asked first: what each node's ranks have submitted."""
        key, asked = self.asked.pop(0)
        told = {}
        for node, submitted in zip(asked, nodes, strict=True):
            signatures = tuple(signature for signature in submitted.values() if signature is not None)
            one = wire.Waiting(kind, key, "", 1.0, tuple(submitted), signatures=signatures)
            told[node] = wire.WaitingHere(1, 0, (one,) if submitted else ())
        self._sent.clear()
        self._then.pop(0)(told)
        return list(self._sent)
