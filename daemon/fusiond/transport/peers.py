"""What this node knows of each of its peers, and what people are told of its connections."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from fusion_rt import wire
from fusion_rt.bootstrap import Endpoint
from fusion_rt.clocks import ClockFilter
from fusiond.transport import delivery
from fusiond.transport.delivery import Incoming
from fusiond.transport.episodes import MANY, Break, Flapping, Slowness
from fusiond.transport.links import Link
from fusiond.transport.sending import Sending
from fusiond.transport.suspicion import Suspicion

_log = logging.getLogger("fusiond")
_SLOW = 2.0  # seconds without an acknowledgement, at least, after which a peer is called slow


@dataclass
class Peer:
    """Another node's daemon.

    Attributes:
        links: to it: the control connection, then those for payloads, once it has told their tokens.
        incoming: what has come on its connections to this node, in the same order.
        sending: what is on its way to it on connections for payloads.
        greeted: its `PeerHello` has come.
        leaving: it has said that it ends.
        lost: it was given up; what it sends is fenced, unless it is leaving: those are its last words.
        control_from: routing id under which its control messages come.
        clock: what is known of its clock; `asked_at`: `sent` of the last heartbeat to it.
        owed, owed_bytes: received since it was last sent an acknowledgement.
        owes_from: so many of these bytes are acknowledged without a message to ride on.
    """

    node: int
    host: str
    endpoint: Endpoint
    suspicion: Suspicion
    incoming: list[Incoming]
    sending: Sending
    owes_from: int = delivery.ACK_BYTES
    links: list[Link] = field(default_factory=list)
    flapping: Flapping = field(default_factory=Flapping)
    slowness: list[Slowness] = field(default_factory=list)
    greeted: bool = False
    leaving: bool = False
    lost: bool = False
    control_from: bytes = b""
    owed: int = 0
    owed_bytes: int = 0
    fenced: int = 0
    clock: ClockFilter = field(default_factory=ClockFilter)
    asked_at: int = 0
    sent_chunks: int = 0
    sent_bytes: int = 0
    received_chunks: int = 0
    received_bytes: int = 0

    @property
    def control(self) -> Link:
        """The connection for control messages."""
        return self.links[0]

    @property
    def connected(self) -> bool:
        """Whether it has greeted this node, and every connection to it has stood."""
        return self.greeted and len(self.links) == len(self.incoming) and all(link.stood for link in self.links)

    def number_of(self, serial: int, connection: int) -> int:
        """A number for a payload message, which both sides know; with one connection, the serial."""
        return (serial - 1) * (len(self.incoming) - 1) + connection

    def add_link(self, link: Link, heartbeat_interval: float, now: float) -> None:
        self.links.append(link)
        if link.number:
            self.sending.links.append(link)
        self.slowness.append(Slowness(max(_SLOW, 3 * heartbeat_interval), now))

    def limit(self, credit: int, acknowledged: int) -> None:
        """So many bytes may be under way on each payload connection (0: any number), and so many are received before
        they are acknowledged, at most. The peer does the same: each counts on what the other acknowledges."""
        self.sending.credit = credit
        self.owes_from = min(delivery.ACK_BYTES, acknowledged, credit // 3 if credit else delivery.ACK_BYTES)
        self.sending.unacknowledged = self.owes_from

    def control_frame(self, serial: int, message: bytes) -> bytes:
        """A control message to it, which carries all acknowledgements that it is owed."""
        if self.control.stands:
            self.owed = self.owed_bytes = 0
        return delivery.control_head(serial, [incoming.received for incoming in self.incoming]) + message

    def owes(self, nbytes: int) -> bool:
        """A message of that size, with its frames, has come from it: whether it is to be told so, if no other message
        tells it."""
        self.owed += 1
        self.owed_bytes += nbytes
        return self.owes_much

    @property
    def owes_much(self) -> bool:
        """Whether it is to be told what has come from it, since it may wait for that."""
        return self.owed >= delivery.ACK_MESSAGES or self.owed_bytes >= self.owes_from

    def overdue(self, now: float, most: float) -> str:
        """Why it is to be given up; empty if it is not. `most`: seconds that a connection may take to come back."""
        silence = self.suspicion.silence(now)
        if silence > self.suspicion.limit:
            return f"its daemon has been silent for {silence:.1f} s"
        for link in self.links:
            if link.down_since is not None and now - link.down_since > most:
                return f"its {link.name} broke and could not be made again within {most:g} s"
            if link.out.full:
                return (
                    f"it does not take what it is sent: {len(link.out)} messages ({link.out.nbytes / 2**20:.0f} MiB) "
                    f"on its {link.name} are not acknowledged"
                )
            if link.fruitless(now) > most:
                return f"its {link.name} breaks again and again, and nothing gets through it"
        if self.sending.full:
            return (
                f"it does not take what it is sent: {len(self.sending)} messages "
                f"({self.sending.nbytes / 2**20:.0f} MiB) wait for its payload connections"
            )
        return ""

    # --- what people are told -----------------------------------------------------------------------------------------

    def look_for_slowness(self, now: float) -> None:
        """Says, once an episode, that it does not take what is sent to it."""
        for link, slowness in zip(self.links, self.slowness, strict=True):
            if slowness.look(now, link.out.acknowledged, len(link.out)):
                _log.warning(
                    "node %d (host %s) is slow: %d messages (%.1f MiB) on its %s have been unacknowledged "
                    "for %.1f s; its daemon was last heard %.1f s ago",
                    self.node, self.host, len(link.out), link.out.nbytes / 2**20, link.name, now - slowness.since,
                    self.suspicion.silence(now),
                )  # fmt: skip

    def broke(self, link: Link, now: float) -> None:
        """Says so where it happens again and again, once an episode."""
        what = self.flapping.broke(now)
        if what is Break.BEGINS:
            _log.warning(
                "connections to node %d (host %s) break again and again: %d within a minute, the last one its %s. "
                "The network between the hosts is unstable",
                self.node, self.host, MANY, link.name,
            )  # fmt: skip
        elif what is Break.SINGLE:
            _log.info("the %s to node %d (host %s) broke and is made again", link.name, self.node, self.host)

    def came_back(self, link: Link, seconds: float) -> None:
        """A connection that had broken stands again."""
        level = logging.DEBUG if self.flapping.under_way else logging.WARNING
        _log.log(
            level,
            "the %s to node %d (host %s) broke, and stands again after %.2f s; %d messages were sent again so far",
            link.name, self.node, self.host, seconds, link.resent,
        )  # fmt: skip

    def figures(self) -> wire.LinkFigures:
        """What has gone to it and come from it."""
        return wire.LinkFigures(
            self.node,
            self.sent_bytes,
            self.received_bytes,
            sum(link.out.nbytes for link in self.links),
            sum(link.reconnections for link in self.links),
            self.lost,
        )

    def statistics(self, now: float) -> dict[str, object]:
        """For `fusiond status`; times in seconds, `unacknowledged` of what was sent to it."""
        return {
            "node": self.node,
            "host": self.host,
            "sent_chunks": self.sent_chunks,
            "sent_bytes": self.sent_bytes,
            "received_chunks": self.received_chunks,
            "received_bytes": self.received_bytes,
            "unacknowledged_messages": sum(len(link.out) for link in self.links),
            "unacknowledged_bytes": sum(link.out.nbytes for link in self.links),
            "waiting_messages": len(self.sending),
            "waiting_bytes": self.sending.nbytes,
            "overtaken": self.sending.overtaken,
            "reconnections": sum(link.reconnections for link in self.links),
            "resent": sum(link.resent for link in self.links),
            "repeated": sum(incoming.repeated for incoming in self.incoming),
            "flapping": self.flapping.episodes,
            "slow": sum(slowness.episodes for slowness in self.slowness),
            "lost": self.lost,
            "fenced": self.fenced,
            "silent_seconds": round(self.suspicion.silence(now), 3),
            "longest_silence_seconds": round(max(self.suspicion.longest, self.suspicion.silence(now)), 3),
            "timeout_seconds": round(self.suspicion.limit, 3),
        }
