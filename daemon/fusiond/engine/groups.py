"""Groups: process sets that only their members know, opened and closed by each of them. No I/O."""

from __future__ import annotations

from fusion_rt import wire
from fusion_rt.core.errors import FusionError
from fusiond.control.stalls import Stalls
from fusiond.core.dispatch import Handlers
from fusiond.engine.agreement import Agreement
from fusiond.operations.operation import NodeOperations
from fusiond.point_to_point.messaging import Messaging


class Groups:
    """The groups of one engine, whose other parts it uses."""

    def __init__(self, operations: NodeOperations, agreement: Agreement, stalls: Stalls, messages: Messaging) -> None:
        self._operations = operations
        self._context = operations.context
        self._participants = operations.context.participants
        self._agreement = agreement
        self._stalls = stalls
        self._messages = messages

    def worker_handlers(self) -> Handlers:
        """Returns the handlers of local workers' messages about groups."""
        return {
            wire.OpenGroup: lambda worker, message: self.open(worker.rank, message),
            wire.CloseGroup: lambda worker, message: self.close(worker.rank, message),
        }

    def open(self, rank: int, message: wire.OpenGroup) -> None:
        """A local rank opens a group."""
        try:
            self._participants.open_group(message.key, message.ranks, rank)
        except FusionError as error:
            self._operations.refuse(rank, message.handle, str(error))
        else:
            self._context.outside.to_worker(rank, wire.Done(message.handle))

    def close(self, rank: int, message: wire.CloseGroup) -> None:
        """A local rank closes a group: all that is not over needs it, and fails; so does what comes later."""
        id = message.group
        if id in self._participants and id in self._participants.groups:
            group = self._participants.groups[id]
            group.closed.add(rank)
            who = self._context.topology.describe([rank])
            for key in [key for key in self._operations.under_way if key.process_set == id]:
                self._operations.everywhere(key, f"{key.in_words} was under way when {who} closed the group")
            self._messages.close(id, rank)
            if group.closed >= set(self._participants.members(id).local):
                self._stalls.forget_group(id)
                self._agreement.remove_set(id)
        self._context.outside.to_worker(rank, wire.Done(message.handle))
