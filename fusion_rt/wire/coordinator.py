"""Messages of the mesh to and from the coordinator, about operations and plans."""

from __future__ import annotations

from typing import Literal

import msgspec

from fusion_rt.wire.basics import Count, Name, Rank, Text
from fusion_rt.wire.operations import OpKey, Signature
from fusion_rt.wire.plans import Plan, Proposal


class Request(msgspec.Struct, tag="request", array_like=True):
    """To the coordinator: all local workers have submitted this operation, with these signatures and splits by rank."""

    key: OpKey
    signatures: dict[Rank, Signature]
    splits: dict[Rank, tuple[Count, ...]]


class Verdict(msgspec.Struct, tag="verdict", array_like=True):
    """From the coordinator: the ranks agree, the operation may start.

    Attributes:
        rows: first dimension of every rank's tensor by position in the process set; for a join, the last to join and
            the first clock after it.
        splits: every rank's, likewise. Both are empty for an operation that was approved before.
        signature: of the operation that the others run, for a node all of whose ranks have joined.
    """

    key: OpKey
    rows: tuple[Count, ...] = ()
    splits: tuple[tuple[Count, ...], ...] = ()
    signature: Signature | None = None


class PlanRequest(msgspec.Struct, tag="plan_request", array_like=True):
    """To the coordinator: one rank's proposal of a plan."""

    rank: Rank
    proposal: Proposal


class PlanRequestAlike(msgspec.Struct, tag="plan_request_alike", array_like=True):
    """To the coordinator: a rank proposes the same plan as `like`, another rank of its node, has before."""

    rank: Rank
    process_set: Count
    group: Name
    clock: Count
    like: Rank


class PlanVerdict(msgspec.Struct, tag="plan_verdict", array_like=True):
    """From the coordinator: the plan of a group, or why its proposals do not fit together."""

    process_set: Count
    group: Name
    clock: Count
    plan: Plan | None = None
    error: Text = ""


class Mismatch(msgspec.Struct, tag="mismatch", array_like=True):
    """To the coordinator: the ranks do not agree about this, or wait for some that do not submit it.

    Attributes:
        kind, key: as in `Waiting`.
        waited: seconds.
    """

    key: OpKey
    waited: float = 0.0
    kind: Literal["operation", "plan"] = "operation"


class OpFailed(msgspec.Struct, tag="op_failed", array_like=True):
    """One operation fails on all ranks; `missing`: those that had not submitted it when its time was up."""

    key: OpKey
    error: Text
    missing: tuple[Rank, ...] = ()
