"""What the coordinator inquires about operations that are disputed or late, and what it makes of the reports. No I/O.

Every node reports what its ranks have submitted. From that follows one sentence for all: which rank disagrees about
what, who is missing, or which link is late. Before an operation is ended because its time is up, it is found out where
the missing ranks are, which goes after the sentence, and all are asked once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from fusion_rt import wire
from fusion_rt.settings import Settings
from fusion_rt.topology import Topology
from fusion_rt.wire import OpKey
from fusiond.control.waiting import stragglers
from fusiond.core.participants import Participants

Outgoing: TypeAlias = list[tuple[int, wire.PeerMessage]]

Locate: TypeAlias = Callable[[Sequence[int], Callable[[str], Outgoing]], Outgoing]
"""Finds out where ranks are, calls back with lines to go after a sentence, and sends what that returns, or returns it
at once."""


@dataclass
class _Inquiry:
    """What is found out about one operation.

    Attributes:
        reports: what ranks have submitted, by node; None while no node is asked.
        traffic: of the operation, by node.
        waited: seconds, at most, as nodes have told.
        ending: its time is up, and it is being found out where those are that are missing.
        where: that, once it is known.
    """

    reports: dict[int, Mapping[int, wire.Signature]] | None = None
    traffic: dict[int, Sequence[wire.Traffic]] = field(default_factory=dict)
    waited: float = 0.0
    ending: bool = False
    where: str | None = None


class Inquiries:
    """All inquiries of one coordinator; iterating gives the operations that they are about.

    Args:
        participants: shared with the engine, which keeps it up to date.
        settings: time-outs.
        warn: tells people that something is late.
        locate: see `Locate`.
        submitted: the signatures that the coordinator knows already of an operation, by rank.
        conclude: called at the end of an inquiry with the sentence why the operation fails, or "" if it goes on;
            returns what to send.
    """

    def __init__(
        self,
        participants: Participants,
        settings: Settings,
        warn: Callable[[str], None],
        locate: Locate,
        submitted: Callable[[OpKey], Mapping[int, wire.Signature]],
        conclude: Callable[[OpKey, str], Outgoing],
    ) -> None:
        self._participants = participants
        self._settings = settings
        self._warn = warn
        self._locate = locate
        self._submitted = submitted
        self._conclude = conclude
        self._inquiries: dict[OpKey, _Inquiry] = {}

    def __iter__(self) -> Iterator[OpKey]:
        return iter(self._inquiries)

    def __contains__(self, key: OpKey) -> bool:
        return key in self._inquiries

    def awaits_reports(self, key: OpKey) -> bool:
        """Whether nodes have been asked about an operation, and have not all answered."""
        inquiry = self._inquiries.get(key)
        return inquiry is not None and inquiry.reports is not None

    def inquire(self, key: OpKey, waited: float = 0.0) -> Outgoing:
        """Asks all nodes of an operation, unless they are being asked already.

        Args:
            waited: seconds for which a node has waited for it.
        """
        inquiry = self._inquiries.setdefault(key, _Inquiry())
        inquiry.waited = max(inquiry.waited, waited)
        if inquiry.reports is not None:
            return []
        inquiry.reports = {}
        return [(node, wire.Inquiry(key)) for node in self._participants.members(key.process_set).nodes]

    def report(self, node: int, report: wire.Report) -> Outgoing:
        """A node answers an inquiry."""
        key = report.key
        inquiry = self._inquiries.get(key)
        if inquiry is None or inquiry.reports is None:
            return []
        inquiry.reports[node] = report.signatures
        inquiry.traffic[node] = report.traffic
        if len(inquiry.reports) < len(self._participants.members(key.process_set).nodes):
            return []
        waited = inquiry.waited
        missing = self._missing(key, inquiry)
        late = waited > self._settings.operation_timeout
        if inquiry.where is not None and not missing:  # they have come while it was found out where they are
            inquiry.ending, inquiry.where, late = False, None, False
        error = self._explain(key, inquiry, waited if late else 0.0)
        if error and not (late and missing and inquiry.where is None):
            del self._inquiries[key]
            return self._conclude(key, error + (inquiry.where or ""))
        if not error and waited > self._settings.stall_warning_time:
            self.warn(self._explain(key, inquiry, waited), missing)
        inquiry.reports, inquiry.waited = None, 0.0
        inquiry.traffic.clear()
        if error and not inquiry.ending:
            inquiry.ending = True
            return self._locate(missing, partial(self._look_again, key, inquiry, waited))
        if not inquiry.ending:
            del self._inquiries[key]
        return self._conclude(key, "")

    def warn(self, text: str, missing: Sequence[int]) -> None:
        """Warns of something, with where the ranks are that it waits for."""

        def located(where: str) -> Outgoing:
            self._warn(text + where)
            return []

        self._locate(missing, located)

    def forget(self, key: OpKey) -> None:
        """An operation has been decided."""
        self._inquiries.pop(key, None)

    def _look_again(self, key: OpKey, inquiry: _Inquiry, waited: float, where: str) -> Outgoing:
        """It is known where those are that are missing; they may have come meanwhile, and so it is asked once more."""
        if self._inquiries.get(key) is not inquiry:  # it has been decided
            return []
        inquiry.where = where
        return self.inquire(key, waited)

    def _explain(self, key: OpKey, inquiry: _Inquiry, waited: float) -> str:
        known, awaited = self._known(key, inquiry), self._awaited(key)
        topology = self._participants.topology
        text = explain(key, known, awaited, topology, self._participants.departed, waited)
        late = stragglers(inquiry.traffic) if text and waited else ()
        return "; ".join([text, *(straggler.describe(topology) for straggler in late)])

    def _known(self, key: OpKey, inquiry: _Inquiry) -> dict[int, wire.Signature]:
        """What ranks have submitted, as far as nodes have told."""
        known = dict(self._submitted(key))
        for report in (inquiry.reports or {}).values():
            known.update(report)
        return known

    def _awaited(self, key: OpKey) -> list[int]:
        members = self._participants.members(key.process_set)
        return [rank for rank in members.set.ranks if self._participants.is_awaited(rank, members)]

    def _missing(self, key: OpKey, inquiry: _Inquiry) -> list[int]:
        """The ranks that an operation waits for."""
        known = self._known(key, inquiry)
        return [rank for rank in self._awaited(key) if rank not in known]


def explain(
    key: OpKey,
    submitted: Mapping[int, wire.Signature],
    awaited: Sequence[int],
    topology: Topology,
    departed: set[int],
    waited: float,
) -> str:
    """Why an operation fails: what the ranks submitted under its name, or which of them did not.

    Args:
        awaited: the ranks without which it cannot run.
        waited: seconds, or 0 while its time is not up.

    Returns: a sentence; empty when nothing is wrong, as far as that tells.
    """
    what = f"bucket {key.name} of plan {key.plan}" if key.plan else f"tensor {key.name!r}"
    by_signature: dict[wire.Signature, list[int]] = {}
    for rank in sorted(submitted):
        by_signature.setdefault(submitted[rank].common(), []).append(rank)
    if len(by_signature) > 1:
        shown = "; ".join(
            f"{topology.describe(ranks)}: {describe(submitted[ranks[0]])}" for ranks in by_signature.values()
        )
        return f"the ranks do not agree about {what}: {shown}. Every rank has to submit the same operation"
    missing = [rank for rank in awaited if rank not in submitted]
    gone = [rank for rank in missing if rank in departed]
    if gone:
        return f"{what} waits for {topology.describe(gone)}, which left the job without submitting it"
    if not waited:
        return ""
    if missing:
        return (
            f"{what} waited {waited:.0f} s for {topology.describe(missing)}, which did not submit it "
            f"(submitted by {topology.describe(submitted)})"
        )
    return f"{what} made no progress for {waited:.0f} s although every rank has submitted it"


def describe(signature: wire.Signature) -> str:
    """A signature in words: `allreduce sum float32 [4, 2]`."""
    words: list[str] = [signature.kind]
    if signature.kind in ("allreduce", "reducescatter"):
        words.append(signature.op)
    if signature.kind == "broadcast":
        words.append(f"from root {signature.root}")
    if signature.ranks:
        words.append(f"of the ranks {list(signature.ranks)}")
    if signature.parts:
        words.append(f"of {len(signature.parts)} tensors {[list(shape) for shape in signature.parts[:8]]}")
    if signature.dtype:
        words.append(f"{signature.dtype} {list(signature.shape)}")
    if (signature.prescale, signature.postscale) != (1.0, 1.0):
        words.append(f"scaled by {signature.prescale:g} before and {signature.postscale:g} after")
    if signature.codec != "dense":
        words.append(f"with {signature.codec}")
    return " ".join(words)
