"""Simulates links: a message waits for its turn, travels, and arrives.

A node has one network card, with a queue in each direction. A message takes its length divided by the bandwidth in the
sender's, less what a burst lets pass at once; its first byte arrives after the latency, and from then on it takes its
turn in the receiver's, so late that it does not end before its last byte has come. So between two equal links a message
passes through both at the same time, as packets do; many senders to one receiver share its link, and a slow sender
takes little of a fast receiver's. Nothing is lost, and TCP's congestion control is ideal.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fusion_trace.simulate.model import HEAD_NBYTES, Link
from fusion_trace.simulate.simulator import Simulator


@dataclass(slots=True)
class Message:
    """A message on its way.

    Attributes:
        nbytes: of its payload; on the link its head is added.
        priority: smaller ones leave first, where that counts.
        then: called with `arguments` when its last byte has come.
        sent, arrived: seconds; when it was handed to the link, and when it had come.
        earliest: seconds; when its last byte is at the next card.
    """

    source: int
    target: int
    nbytes: int
    priority: int
    then: Callable[..., None]
    arguments: tuple[Any, ...]
    sent: float = 0.0
    arrived: float = 0.0
    earliest: float = 0.0


@dataclass(slots=True)
class Traffic:
    """Payload bytes and messages that a node has sent and received; `control` counts credit and the like."""

    sent: int = 0
    received: int = 0
    sent_messages: int = 0
    received_messages: int = 0
    control: int = 0


class _Card:
    """One direction of a network card, which carries one message at a time.

    Args:
        begun: called with a message and the time at which it will have passed (s), when its turn has come.
        ended: called with a message that has passed.
    """

    def __init__(
        self,
        simulator: Simulator,
        link: Link,
        begun: Callable[[Message, float], None],
        ended: Callable[[Message], None],
    ) -> None:
        self.byte = link.byte
        self._burst = link.burst * link.byte  # s
        self._paid = 0.0  # when everything that has passed would have passed without bursts
        self._by_priority = link.discipline == "priority"
        self._waiting: list[tuple[int, int, Message]] = []
        self._busy = False
        self._serial = 0
        self._simulator, self._begun, self._ended = simulator, begun, ended

    def put(self, message: Message) -> None:
        """Has a message wait for its turn."""
        self._serial += 1
        heapq.heappush(self._waiting, (message.priority if self._by_priority else 0, self._serial, message))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = bool(self._waiting)
        if self._busy:
            message = heapq.heappop(self._waiting)[2]
            now = self._simulator.now
            self._paid = max(self._paid, now - self._burst) + (message.nbytes + HEAD_NBYTES) * self.byte
            ends = max(now, self._paid, message.earliest)
            self._simulator.at(ends, self._pass, message)
            self._begun(message, ends)

    def _pass(self, message: Message) -> None:
        self._ended(message)
        self._next()


@dataclass
class Network:
    """All links.

    Args:
        watch: called with each message that has arrived, if it has a payload.

    Attributes:
        traffic: of each node.
    """

    simulator: Simulator
    links: tuple[Link, ...]
    watch: Callable[[Message], None] | None = None
    traffic: list[Traffic] = field(init=False)

    def __post_init__(self) -> None:
        self.traffic = [Traffic() for _ in self.links]
        self._up = [_Card(self.simulator, link, self._depart, lambda message: None) for link in self.links]
        self._down = [_Card(self.simulator, link, lambda message, ends: None, self._arrive) for link in self.links]

    def send(
        self, source: int, target: int, nbytes: int, priority: int, then: Callable[..., None], *arguments: Any
    ) -> None:
        """Sends a payload now. One of 0 bytes is a control message."""
        message = Message(source, target, nbytes, priority, then, arguments, sent=self.simulator.now)
        if nbytes:
            self.traffic[source].sent += nbytes
            self.traffic[source].sent_messages += 1
        else:
            self.traffic[source].control += 1
        self._up[source].put(message)

    def _depart(self, message: Message, departed: float) -> None:
        down = self._down[message.target]
        begins = max(self.simulator.now, departed - (message.nbytes + HEAD_NBYTES) * down.byte)
        latency = self.links[message.source].latency
        message.earliest = departed + latency
        self.simulator.at(begins + latency, down.put, message)

    def _arrive(self, message: Message) -> None:
        message.arrived = self.simulator.now
        if message.nbytes:
            self.traffic[message.target].received += message.nbytes
            self.traffic[message.target].received_messages += 1
            if self.watch is not None:
                self.watch(message)
        message.then(*message.arguments)
