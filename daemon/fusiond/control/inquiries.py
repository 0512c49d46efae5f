"""Inquiries of the coordinator about disputed and late operations, and its conclusions. No I/O.

Every node tells the submissions of its ranks. From that follows one sentence for all: which rank disagrees about
what, who is missing, or which link is late. Before something is ended because its time is up, it is found out where
the missing ranks are, which goes after the sentence, and all are asked once more.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from fusion_rt import wire
from fusion_rt.settings import Settings
from fusiond.control.questions import Questions
from fusiond.control.waiting import Subject, explain, stragglers
from fusiond.core.participants import Participants

_REMEMBERED = 1024  # warnings, so that none is given twice


@dataclass
class _Inquiry:
    """State of one inquiry.

    Attributes:
        asked: nodes have been asked, and have not all answered.
        waited: seconds, at most, as nodes have told.
        limit: seconds after which its time is up.
        hurried: nodes that do not answer are not waited for.
        ending: its time is up, and it is being found out where those are that are missing.
        where: that, once it is known.
    """

    asked: bool = False
    waited: float = 0.0
    limit: float = math.inf
    hurried: bool = False
    ending: bool = False
    where: str | None = None


class Inquirer(Protocol):
    """An object that has something found out."""

    def submitted(self, subject: Subject) -> Mapping[int, wire.Signature | None]:
        """Returns, by rank, the known submissions."""

    def conclude(self, subject: Subject, error: str, missing: Sequence[int]) -> None:
        """An inquiry is over.

        Args:
            error: why that fails which it was about; "" if it goes on.
            missing: the ranks that were missing when its time was up.
        """

    def warn(self, text: str) -> None:
        """Something is late, which people are to be told."""


class Inquiries:
    """All inquiries of one coordinator; iterating gives their subjects.

    Args:
        participants: shared with the engine, which keeps it up to date.
        settings: time-outs.
        questions: ask the nodes.
        owner: has it found out.
    """

    def __init__(
        self,
        participants: Participants,
        settings: Settings,
        questions: Questions,
        owner: Inquirer,
    ) -> None:
        self._participants = participants
        self._settings = settings
        self._questions = questions
        self._owner = owner
        self._inquiries: dict[Subject, _Inquiry] = {}
        self._warned: OrderedDict[Subject, None] = OrderedDict()  # the latest: every node that waits tells of it

    def __iter__(self) -> Iterator[Subject]:
        return iter(self._inquiries)

    def __contains__(self, subject: Subject) -> bool:
        return subject in self._inquiries

    def awaits_answers(self, subject: Subject) -> bool:
        """Tells whether nodes have been asked about something, and have not all answered."""
        inquiry = self._inquiries.get(subject)
        return inquiry is not None and inquiry.asked

    def inquire(self, subject: Subject, waited: float = 0.0, seconds: float = 0.0) -> None:
        """Asks all nodes of a process set about something, unless they are being asked already.

        Args:
            waited: seconds for which a node has waited for it.
            seconds: its own time-out, instead of the one of all operations.
        """
        inquiry = self._inquiries.setdefault(subject, _Inquiry())
        inquiry.waited = max(inquiry.waited, waited)
        inquiry.limit = seconds or self._settings.operation_timeout
        inquiry.hurried = seconds > 0
        if not inquiry.asked:
            inquiry.asked = True
            nodes = self._participants.members(subject[1].process_set).nodes
            self._questions.waiting(partial(self._told, subject, inquiry), subject[1], nodes, inquiry.hurried)

    def forget(self, subject: Subject) -> None:
        """It has been decided."""
        self._inquiries.pop(subject, None)

    def end(self) -> None:
        """All that is open is decided elsewhere."""
        self._inquiries.clear()

    def _told(self, subject: Subject, inquiry: _Inquiry, told: Mapping[int, wire.WaitingHere]) -> None:
        """All nodes have answered."""
        if self._inquiries.get(subject) is not inquiry:  # it has been decided
            return
        participants = self._participants
        members = participants.members(subject[1].process_set)
        awaited = participants.awaited(members)
        submitted = dict(self._owner.submitted(subject))
        traffic = {}
        for node, answer in told.items():
            for one in answer.waiting:
                if one.kind == subject[0]:
                    traffic[node] = one.traffic
                    submitted.update(
                        dict.fromkeys(one.submitted) | dict(zip(one.submitted, one.signatures, strict=False))
                    )
        late_links = stragglers(traffic)
        late_by_itself = inquiry.hurried and inquiry.waited > inquiry.limit

        def sentence(waited: float) -> str:
            topology = participants.topology
            text = explain(subject, submitted, awaited, topology, participants.departed, waited)
            silent = [f"{topology.describe_node(node)} did not answer" for node in members.nodes if node not in told]
            late = [one.describe(topology) for one in late_links]
            over = [f"its timeout of {inquiry.limit:g} s is over"] if late_by_itself else []
            return "; ".join([text, *(over + late + silent if text and waited else ())])

        missing = [rank for rank in awaited if rank not in submitted]
        waited = inquiry.waited
        late = waited > inquiry.limit
        if inquiry.where is not None and not missing:  # they have come while it was found out where they are
            inquiry.ending, inquiry.where, late = False, None, False
        error = sentence(waited if late else 0.0)
        if error and not (late and missing and inquiry.where is None):
            del self._inquiries[subject]
            self._owner.conclude(subject, error + (inquiry.where or ""), missing if late else ())
            return
        inquiry.asked, inquiry.waited = False, 0.0
        if error and not inquiry.ending:
            inquiry.ending = True
            self._questions.whereabouts(missing, partial(self._look_again, subject, inquiry, waited))
            return
        if not inquiry.ending:
            del self._inquiries[subject]
        if not error and waited > self._settings.stall_warning_time and subject not in self._warned:
            self._warned[subject] = None
            if len(self._warned) > _REMEMBERED:
                self._warned.popitem(last=False)
            text = sentence(waited)
            self._questions.whereabouts(missing, lambda where: self._owner.warn(text + where))
        self._owner.conclude(subject, "", ())

    def _look_again(self, subject: Subject, inquiry: _Inquiry, waited: float, where: str) -> None:
        """It is known where those are that are missing; they may have come meanwhile, and so it is asked once more."""
        if self._inquiries.get(subject) is inquiry:  # else it has been decided
            inquiry.where = where
            self.inquire(subject, waited, inquiry.limit if inquiry.hurried else 0.0)
