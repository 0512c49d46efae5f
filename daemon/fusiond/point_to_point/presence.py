"""The ranks that can send to each other, and receive: ranks leave, are lost, and close groups."""

from __future__ import annotations

from fusion_rt.wire import ANYBODY
from fusiond.operations.operation import NodeOperations
from fusiond.point_to_point.calls import ReceiveCall


class Presence:
    """The ranks that are there, as one engine sees them.

    Args:
        operations: the engine's.
    """

    def __init__(self, operations: NodeOperations) -> None:
        self._topology = operations.context.topology
        self._participants = operations.context.participants
        self._operations = operations

    def why_not(self, rank: int, group: int, other: int, sends: bool) -> str:
        """Returns why a rank can send nothing to another one of a group, or receive nothing from it; empty if it can.

        Messages that another one sent before it closed the group may still be received.
        """
        if self._operations.failure:
            return self._operations.failure
        opened = self._participants.groups.get(group)
        if group not in self._participants:
            return f"there is no group {group}" if opened is None else f"group {opened.key!r} has been closed"
        ranks = self._participants.members(group).set.ranks
        for member in (rank, other):
            if member not in ranks and member != ANYBODY:
                return f"rank {member} is not in group {group}"
            if opened is not None and member in opened.closed and (sends or member == rank):
                return f"rank {member} has closed group {opened.key!r}"
        return ""

    def why_gone(self, rank: int) -> str:
        """Returns that a rank has left, or is lost, as a sentence; empty if it is there."""
        participants = self._participants
        if rank not in participants.departed:
            return ""
        who = self._topology.describe([rank])
        return f"{who} is lost ({participants.lost[rank]})" if rank in participants.lost else f"{who} has left the job"

    def has_left(self, rank: int) -> bool:
        """Returns whether a rank has left in good order."""
        return rank in self._participants.departed and rank not in self._participants.lost

    def why_nothing_comes(self, call: ReceiveCall) -> str:
        """Returns why nothing will be sent that a receive takes; empty if it may."""
        if call.group not in self._participants:
            return "the group is closed"
        if call.other != ANYBODY:
            opened = self._participants.groups.get(call.group)
            if opened is not None and call.other in opened.closed:
                return f"rank {call.other} has closed group {opened.key!r}"
            return self.why_gone(call.other)
        others = [rank for rank in self._participants.members(call.group).set.ranks if rank != call.rank]
        if any(rank not in self._participants.departed for rank in others):
            return ""
        return "all other ranks of the group have left the job"
