"""The peers of this node: their connections, whether they are alive and keep up, and messages about that to people.

A peer's heartbeats are sent by its event loop, so silence means that its loop, its host or the way there stands still.
How long is too long is learnt from the times between heartbeats (Hayashibara, Defago, Yared and Katayama: The phi
accrual failure detector, SRDS 2004). With these times taken as normally distributed,

    phi(t) = -log10 P(a heartbeat comes later than t after the last one)

and a peer is declared lost when phi reaches `PHI`: at the mean plus 7 standard deviations. That is never more than the
time-out that the settings name, and never less than half of it, nor than `INTERVALS` heartbeats: processes are
scheduled late, and links come back, in ways that no time between heartbeats tells of.

Time counts only while this loop runs (`AwakeClock`): after a pause of its own, a peer first has to be heard again.

Trouble that people should read of once, and not every time, is an *episode*: a connection breaks again and again
(`Flapping`), or its peer does not take its messages (`Slowness`).
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from statistics import NormalDist

from fusion_rt import wire
from fusion_rt.host.bootstrap import Endpoint
from fusiond.transport import delivery
from fusiond.transport.delivery import ReceiveWindow, Sending
from fusiond.transport.distance import Pipe
from fusiond.transport.links import Link
from fusiond.transport.sealing import AES

_log = logging.getLogger("fusiond")
PHI = 12.0  # at most one heartbeat in 10**12 comes that late
INTERVALS = 5  # heartbeats that are missed at least
_WINDOW = 100  # times between heartbeats that are remembered
_ENOUGH = 10  # and the first that mean something
_LEAST_DEVIATION = 0.25  # of an interval: a peer that was very regular may still be scheduled late
_DEVIATIONS = -NormalDist().inv_cdf(10**-PHI)
_SPAN = 60.0  # seconds in which breaks belong together
MANY = 3  # breaks that make an episode
_SLOW = 2.0  # seconds without an acknowledgement, at least, after which a peer is called slow


class AwakeClock:
    """Seconds in which this process's loop has run.

    Args:
        clock: seconds, from any origin.
        period: the loop asks for the time at least this often (s); an interval longer by more than another one is a
            pause.

    Attributes:
        paused: seconds that did not count, so far.
    """

    def __init__(self, clock: Callable[[], float], period: float) -> None:
        self._clock = clock
        self._period = period
        self._last = clock()
        self.paused = 0.0

    def __call__(self) -> float:
        now = self._clock()
        if now - self._last > 2 * self._period:
            self.paused += now - self._last - self._period
        self._last = now
        return now - self.paused


class Suspicion:
    """Suspicion of one peer, which is silent. All times are an `AwakeClock`'s, in seconds.

    Args:
        interval: between its heartbeats.
        most: silence after which it is declared lost in any case.
        now: it counts as heard.

    Attributes:
        limit: silence after which it is to be declared lost.
        longest: the longest silence so far that ended.
    """

    def __init__(self, interval: float, most: float, now: float) -> None:
        self._interval = interval
        self._most = most
        self._heard_at = now
        self._beat_at = math.nan
        self._times: deque[float] = deque(maxlen=_WINDOW)
        self.limit = most
        self.longest = 0.0

    def begin(self, now: float) -> None:
        """Begins to watch it: the time before counts neither as silence nor as one between heartbeats."""
        self._heard_at, self._beat_at = now, math.nan

    def heard(self, now: float) -> None:
        """Notes that anything has come from it."""
        silence = now - self._heard_at
        if silence > self.longest:
            self.longest = silence
        self._heard_at = now

    def beat(self, now: float) -> None:
        """Notes that a heartbeat has come from it."""
        if not math.isnan(self._beat_at):
            self._times.append(now - self._beat_at)
            if len(self._times) >= _ENOUGH:
                self.limit = self._learnt()
        self._beat_at = now

    def silence(self, now: float) -> float:
        """Returns the seconds since anything came from it."""
        return now - self._heard_at

    def _learnt(self) -> float:
        count = len(self._times)
        mean = sum(self._times) / count
        variance = sum((seconds - mean) ** 2 for seconds in self._times) / count
        deviation = max(math.sqrt(variance), _LEAST_DEVIATION * self._interval)
        least = max(INTERVALS * self._interval, self._most / 2)
        return min(self._most, max(mean + _DEVIATIONS * deviation, least))


class Break(Enum):
    """A break of a connection: one of its own, the one that begins an episode, or a further one of that."""

    SINGLE = "single"
    BEGINS = "begins"
    FURTHER = "further"


class Flapping:
    """Counts how often the connections to a peer break.

    Attributes:
        episodes: how often they began to break again and again.
        under_way: they did so at the last break.
    """

    def __init__(self) -> None:
        self._breaks: deque[float] = deque(maxlen=MANY)
        self.under_way = False
        self.episodes = 0

    def broke(self, now: float) -> Break:
        """Counts a break."""
        if self._breaks and now - self._breaks[-1] > _SPAN:
            self._breaks.clear()
            self.under_way = False
        self._breaks.append(now)
        if self.under_way:
            return Break.FURTHER
        if len(self._breaks) < MANY or now - self._breaks[0] > _SPAN:
            return Break.SINGLE
        self.under_way = True
        self.episodes += 1
        return Break.BEGINS


class Slowness:
    """Tells when a peer does not take its messages. Times are seconds from any origin.

    Args:
        after: seconds without an acknowledgement, while some are due, that make an episode.

    Attributes:
        episodes: how many there have been.
        since: when the last acknowledgement came, or nothing was due.
    """

    def __init__(self, after: float, now: float) -> None:
        self._after = after
        self._acknowledged = 0
        self._under_way = False
        self.since = now
        self.episodes = 0

    def look(self, now: float, acknowledged: int, due: int) -> bool:
        """Looks again, with the serial acknowledged last and how many are due. Returns whether an episode begins."""
        if not due or acknowledged != self._acknowledged:
            self._acknowledged = acknowledged
            self._under_way = False
            self.since = now
        elif not self._under_way and now - self.since > self._after:
            self._under_way = True
            self.episodes += 1
            return True
        return False


@dataclass
class Peer:
    """Another node's daemon.

    Attributes:
        id: as whom it is admitted; another daemon of the same node has another one.
        links: to it: the control connection, then those for payloads, once it has told their tokens.
        incoming: messages that have come on its connections to this node, in the same order.
        sending: payloads on their way to it.
        greeted: its `PeerHello` has come.
        leaving: it has said that it ends.
        hung_up: its process has closed the last control connection to this node, as the kernel does for one that died.
        lost: it was declared so; its messages are fenced, unless it is leaving: those are its last words.
        watched: it is sent heartbeats, which it answers, and given up when it is silent.
        control_from: routing id under which its control messages come.
        heard_on: descriptors of its connections to this node, by number.
        asked_at: `sent` of the last heartbeat to it.
        probed_bytes: of those sent, the ones that measured the link.
        owed, owed_bytes: received, with frames, since it was last sent an acknowledgement.
        owes_from: so many of these bytes are acknowledged without a message to ride on.
        cipher: of payloads to it.
        stride: largest number of connections that it may have in one direction.
        pipe: limits the bytes under way to it, where it is far.
    """

    node: int
    host: str
    id: int
    endpoint: Endpoint
    suspicion: Suspicion
    incoming: list[ReceiveWindow]
    sending: Sending
    owes_from: int = delivery.ACK_BYTES
    links: list[Link] = field(default_factory=list)
    flapping: Flapping = field(default_factory=Flapping)
    slowness: list[Slowness] = field(default_factory=list)
    greeted: bool = False
    leaving: bool = False
    hung_up: bool = False
    lost: bool = False
    watched: bool = False
    control_from: bytes = b""
    heard_on: dict[int, int] = field(default_factory=dict)
    owed: int = 0
    owed_bytes: int = 0
    fenced: int = 0
    asked_at: int = 0
    sent_chunks: int = 0
    sent_bytes: int = 0
    probed_bytes: int = 0
    received_chunks: int = 0
    received_bytes: int = 0
    cipher: int = AES
    stride: int = 1
    pipe: Pipe | None = None

    @property
    def control(self) -> Link:
        """The connection for control messages."""
        return self.links[0]

    @property
    def connected(self) -> bool:
        """True if it has greeted this node, and every connection to it has stood."""
        return self.greeted and len(self.links) == len(self.incoming) and all(link.stood for link in self.links)

    def number_of(self, serial: int, connection: int) -> int:
        """Returns a number for a payload message that both sides know."""
        return (serial - 1) * self.stride + connection

    def add_link(self, link: Link, heartbeat_interval: float, now: float) -> None:
        self.links.append(link)
        if link.number:
            self.sending.links.append(link)
        self.slowness.append(Slowness(max(_SLOW, 3 * heartbeat_interval), now))

    def limit(self, credit: int, acknowledged: int) -> None:
        """Limits the bytes under way on each payload connection (`credit`; 0: any number), and those that are received
        before they are acknowledged (`acknowledged`). The peer does the same, and each relies on the other's."""
        self.sending.credit = credit
        self.owes_from = min(delivery.ACK_BYTES, acknowledged, credit // 3 if credit else delivery.ACK_BYTES)
        self.sending.unacknowledged = self.owes_from

    def follow(self, now: float) -> None:
        """Lets as much be under way to a far peer as arrives there; called when it has acknowledged something."""
        assert self.pipe is not None
        under_way = sum(link.out.nbytes for link in self.sending.links)
        arrived = self.sent_bytes - self.sending.nbytes - under_way
        self.sending.credit = self.pipe.acknowledged(now, arrived, len(self.sending) > 0)

    def send(self, message: bytes) -> None:
        """Sends a control message, encoded, that has to arrive."""
        link = self.links[0]
        link.post(self._control_frame(link.out.serial + 1, message))

    def mention(self, message: wire.Heartbeat | wire.Ack) -> None:
        """Sends a control message that need not arrive."""
        self.links[0].send(self._control_frame(0, wire.encode(message)))

    def give_up(self, why: str) -> None:
        """Sends the last word; queued messages are dropped."""
        self.lost = True
        self.links[0].last_word(self._control_frame(0, wire.encode(wire.GivenUp(why))))
        self.sending.forget()
        for link in self.links[1:]:
            link.close()

    def _control_frame(self, serial: int, message: bytes) -> bytes:
        """Makes a control message to it of an encoded one, which carries all acknowledgements that it is owed."""
        if self.links[0].stands:
            self.owed = self.owed_bytes = 0
        return delivery.control_head(serial, [incoming.received for incoming in self.incoming]) + message

    def watch(self, now: float) -> None:
        """Watches it from now on."""
        self.watched = True
        self.suspicion.begin(now)
        for slowness in self.slowness:
            slowness.since = now

    @property
    def owes(self) -> bool:
        """True if it has not acknowledged everything, or a connection to it does not stand."""
        return len(self.sending) > 0 or any(len(link.out) or not link.stands for link in self.links)

    @property
    def owes_much(self) -> bool:
        """True if an acknowledgement is due to it, since it may wait for that."""
        return self.owed >= delivery.ACK_MESSAGES or self.owed_bytes >= self.owes_from

    def overdue(self, now: float, most: float) -> str:
        """Returns why it is declared lost now, or nothing. `most`: seconds that a connection may take to come back."""
        silence = self.suspicion.silence(now)
        if silence > self.suspicion.limit:
            return f"its daemon has been silent for {silence:.1f} s{self._trouble}"
        for link in self.links:
            if link.down_since is not None and now - link.down_since > most:
                return f"its {link.name} broke and could not be made again within {most:g} s{self._trouble}"
            if link.out.full:
                return _does_not_accept(len(link.out), link.out.nbytes, f"on its {link.name} are not acknowledged")
            if link.fruitless(now) > most:
                return f"its {link.name} breaks again and again, and nothing gets through it"
        if self.sending.full:
            return _does_not_accept(len(self.sending), self.sending.nbytes, "wait for its payload connections")
        return ""

    @property
    def _trouble(self) -> str:
        """The end of a sentence about why attempts to reach it fail; empty where there is no answer to them."""
        return f"; connections to it fail: {self.control.trouble}" if self.control.trouble else ""

    # --- messages to people -------------------------------------------------------------------------------------------

    def look_for_slowness(self, now: float) -> None:
        """Warns, once an episode, that it does not take the messages sent to it."""
        for link, slowness in zip(self.links, self.slowness, strict=True):
            if slowness.look(now, link.out.acknowledged, len(link.out)):
                self._warn_of_slowness(link, now, slowness.since)

    def _warn_of_slowness(self, link: Link, now: float, since: float) -> None:
        _log.warning(
            "node %d (host %s) is slow: %d messages (%.1f MiB) on its %s have been unacknowledged "
            "for %.1f s; its daemon was last heard %.1f s ago",
            self.node, self.host, len(link.out), link.out.nbytes / 2**20, link.name, now - since,
            self.suspicion.silence(now),
        )  # fmt: skip

    def broke(self, link: Link, now: float) -> None:
        """Logs a break; warns, once an episode, where connections break again and again."""
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
        """Logs that a connection that had broken stands again."""
        level = logging.DEBUG if self.flapping.under_way else logging.WARNING
        _log.log(
            level,
            "the %s to node %d (host %s) broke, and works again after %.2f s; %d messages were sent again so far",
            link.name, self.node, self.host, seconds, link.resent,
        )  # fmt: skip

    def figures(self) -> wire.LinkFigures:
        """Returns the figures of the traffic with it."""
        return wire.LinkFigures(
            self.node,
            self.sent_bytes,
            self.received_bytes,
            sum(link.out.nbytes for link in self.links),
            sum(link.reconnections for link in self.links),
            self.lost,
        )

    def statistics(self, now: float) -> dict[str, object]:
        """Returns figures for `fusiond status`; times in seconds, `unacknowledged` of the bytes sent to it."""
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
            "connections": len(self.links) - 1,
            "link_credit": self.sending.credit,
            "lost": self.lost,
            "fenced": self.fenced,
            "silent_seconds": round(self.suspicion.silence(now), 3),
            "longest_silence_seconds": round(max(self.suspicion.longest, self.suspicion.silence(now)), 3),
            "timeout_seconds": round(self.suspicion.limit, 3),
        }


def _does_not_accept(messages: int, nbytes: int, what: str) -> str:
    return f"it does not accept data: {messages} messages ({nbytes / 2**20:.0f} MiB) {what}"
