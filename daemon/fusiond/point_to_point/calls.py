"""The records of local ranks' requests, and of the messages that have come for them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Protocol

from fusion_rt import wire
from fusion_rt.core.topology import Topology
from fusion_rt.kernels.ordinary import Operand
from fusion_rt.wire import OpKey


class CallOwner(Protocol):
    """The messages of an engine, as the parts that deal with them see it."""

    def sent(self, call: SendCall) -> None:
        """The memory of a send may be used again."""

    def whole(self, message: Message) -> None:
        """All chunks of a message have come."""

    def fail_call(self, call: Call, error: str) -> None:
        """A send or receive fails, and so does the one that it is paired with."""


@dataclass(slots=True, eq=False)
class Call(ABC):
    """A send or a receive of a local rank that has not been answered.

    Attributes:
        rank, handle: of the worker's request.
        group: id of the process set.
        other: the rank at the other end; `wire.ANYBODY`: the first one that sends.
        tag, nbytes: of the message; of a receive, the most that it takes.
        about: for records; its name and clock.
        since: when it began (s); `until`: when it fails.
        message: the one that it sends to a rank of this node, or has received.
        warned: it has been told that it waits.
    """

    rank: int
    handle: int
    group: int
    other: int
    tag: int
    nbytes: int
    about: tuple[str, int]
    since: float
    until: float = math.inf
    message: Message | None = None
    warned: bool = False

    @abstractmethod
    def describe(self, topology: Topology) -> str:
        """Describes it for people."""


@dataclass(slots=True, eq=False)
class SendCall(Call):
    """A local rank's send.

    Attributes:
        memory: the message (uint8).
        key: of the message.
        node: to which it was announced; -1: it is for a rank of this one.
        accepted: that has asked for it.
    """

    memory: Operand = field(kw_only=True)
    key: OpKey = field(kw_only=True)
    node: int = -1
    accepted: bool = False

    def describe(self, topology: Topology) -> str:
        return (
            f"the send of {self.nbytes} bytes with tag {self.tag} from {topology.describe([self.rank])} to "
            f"{topology.describe([self.other])}{_in_group(self.group)}"
        )


@dataclass(slots=True, eq=False)
class ReceiveCall(Call):
    """A local rank's receive.

    Attributes:
        memory: where the message goes (uint8); None: into the answer.
        number: of its mailbox's receives, in order.
    """

    memory: Operand | None = field(kw_only=True)
    number: int = 0

    def describe(self, topology: Topology) -> str:
        source = "any rank" if self.other == wire.ANYBODY else topology.describe([self.other])
        return (
            f"the receive of {self.nbytes} bytes with tag {self.tag} on {topology.describe([self.rank])} from "
            f"{source}{_in_group(self.group)}"
        )


@dataclass(slots=True, eq=False)
class Message:
    """A message for a local rank.

    Attributes:
        key: its own; `node`: where it comes from, -1: this one.
        source, target, tag, nbytes: whose it is, for whom, and how long.
        data: all of it, if it has come already; or None.
        send: of a rank of this node, which is to be answered when the message is taken; or None.
        receive: the one that it goes to.
        into: where its bytes come together, if it has not come whole (uint8).
        accepted: its node has been told that it may come.
        working: a thread copies it; `error`: why it has failed meanwhile.
    """

    key: OpKey
    source: int
    target: int
    tag: int
    nbytes: int
    node: int = -1
    data: bytes | None = None
    send: SendCall | None = None
    receive: ReceiveCall | None = None
    into: Operand | None = None
    accepted: bool = False
    working: bool = False
    error: str = ""


def _in_group(group: int) -> str:
    return f" in group {group}" if group else ""
