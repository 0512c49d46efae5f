"""The part of an engine that takes messages from one rank to another. No I/O.

A receive names its source and a tag, or takes a message of any source; the daemon of the rank that receives matches it
(`matching`). A message that came *inline*, of at most `wire.MAX_INLINE` bytes, travels at once, as far as the other
node has room for it (`limits`); its send is over when it is away. Any other one is announced, and its data follows when
a receive has taken it (`transfers`); its send is over when the receiver has the data, and both fail together. Between
ranks of a node it is copied once, from the memory of one to that of the other.

A message that is longer than the receive which takes it fails both. One that is shorter is received as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import cast

import numpy as np

from fusion_rt import wire
from fusion_rt.core.errors import FusionError, WireError
from fusion_rt.kernels import ordinary
from fusion_rt.kernels.ordinary import Operand, Remote, are_here
from fusion_rt.tracing.format import Kind
from fusion_rt.wire import ANYBODY, OpKey
from fusiond.collectives.base import split_jobs
from fusiond.control.questions import Questions
from fusiond.core.contribution import Array
from fusiond.core.deadlines import Deadlines
from fusiond.core.dispatch import Handlers
from fusiond.core.errors import RequestError
from fusiond.core.tracing import Job
from fusiond.operations.operation import NodeOperations
from fusiond.operations.starter import Starter
from fusiond.operations.thread_work import PLAIN_WORK
from fusiond.point_to_point.answers import Answers
from fusiond.point_to_point.calls import Call, Message, ReceiveCall, SendCall
from fusiond.point_to_point.limits import ANNOUNCED, Limits
from fusiond.point_to_point.matching import Mailbox
from fusiond.point_to_point.presence import Presence
from fusiond.point_to_point.reports import Reports
from fusiond.point_to_point.transfers import Transfers

_FEWEST = 1 << 20  # bytes that a thread copies, where several do


class Messaging:
    """The messages of one engine.

    Args:
        operations, starter, questions: the engine's. The starter knows how large chunks are.

    Attributes:
        completed: receives that are complete here; `completed_bytes`: their bytes.
    """

    def __init__(self, operations: NodeOperations, starter: Starter, questions: Questions) -> None:
        context = operations.context
        self.completed = 0
        self.completed_bytes = 0
        self._context = context
        self._work = operations.work
        self._presence = Presence(operations)
        self._answers = Answers(context.outside, context.trace)
        self._local = frozenset(context.topology.ranks[context.node])
        self._mailboxes: dict[tuple[int, int], Mailbox] = {}  # by group and rank
        self._sends: dict[OpKey, SendCall] = {}  # announced to other nodes
        self._messages: dict[OpKey, Message] = {}  # announced by other nodes
        self._limits = Limits()
        self._transfers = Transfers(context, starter, self)
        self._deadlines = Deadlines(context.outside, self)
        self.reports = Reports(context, self._answers, self, questions)

    # --- from the local workers ---------------------------------------------------------------------------------------

    def send(self, rank: int, asked: wire.SendTo, memory: Operand | None) -> None:
        """A worker sends a message; `memory` is its bytes (uint8), unless they are in its packet.

        Raises:
            RequestError: no worker of ours would send that.
        """
        inline = asked.inline
        if (memory is None) == (inline is None) or (inline is not None and len(inline) != asked.nbytes):
            raise RequestError(f"rank {rank} sends a message that is nowhere, or of another length than it says")
        if asked.rank == rank or (not asked.handle and inline is None):
            raise RequestError(f"rank {rank} sends a message to itself, or one in its memory and wants no answer")
        key = wire.message_key(asked.group, rank, asked.rank, asked.clock)
        about = key.name, key.clock
        trace = self._context.trace
        trace.record(Kind.READY, key.name, asked.nbytes, asked.clock, 0, 0, rank)
        if why := self._presence.why_not(rank, asked.group, asked.rank, sends=True) or self._presence.why_gone(
            asked.rank
        ):
            self._answers.refuse(rank, asked.handle, f"rank {rank} cannot send to rank {asked.rank}: {why}", about)
            return
        if inline is not None and self._at_once(rank, asked, key, inline):
            self._answers.done(rank, asked.handle, about)
            return
        if memory is None:
            assert inline is not None
            memory = np.frombuffer(inline, np.uint8)
        now = self._context.outside.clock()
        call = SendCall(
            rank, asked.handle, asked.group, asked.rank, asked.tag, asked.nbytes, about, now,
            memory=memory, key=key,
        )  # fmt: skip
        node = self._context.node if asked.rank in self._local else self._context.topology.node_of(asked.rank)
        if not self._limits.may_announce(node):
            why = f"{ANNOUNCED} messages that its node has announced there have not been received"
            self._answers.refuse(rank, asked.handle, f"rank {rank} cannot send to rank {asked.rank}: {why}", about)
            return
        self._begin(call, asked.seconds)
        if asked.rank not in self._local:
            call.node = node
            self._sends[key] = call
            self._context.outside.to_node(
                node, wire.MessageSent(asked.group, rank, asked.rank, asked.tag, asked.clock, asked.nbytes)
            )
            return
        call.message = Message(key, rank, asked.rank, asked.tag, asked.nbytes, send=call)
        self._arrived(call.message)

    def _at_once(self, rank: int, asked: wire.SendTo, key: OpKey, inline: bytes) -> bool:
        """Sends a small message; returns whether it is away, or has to wait where it is."""
        here = asked.rank in self._local
        node = self._context.node if here else self._context.topology.node_of(asked.rank)
        if not self._limits.may_send(node, len(inline)):
            return False
        if not here:
            self._context.outside.to_node(
                node, wire.MessageSent(asked.group, rank, asked.rank, asked.tag, asked.clock, len(inline), inline)
            )
            return True
        self._arrived(Message(key, rank, asked.rank, asked.tag, len(inline), data=inline))
        return True

    def receive(self, rank: int, asked: wire.ReceiveFrom, memory: Operand | None) -> None:
        """A worker receives a message, into `memory` (uint8) or the answer.

        Raises:
            RequestError: no worker of ours would ask for that.
        """
        if asked.rank == rank or (memory is None and asked.nbytes > wire.MAX_INLINE):
            raise RequestError(f"rank {rank} receives from itself, or {asked.nbytes} bytes into no memory")
        name = f"message to {rank}" if asked.rank == ANYBODY else f"message {asked.rank} to {rank}"
        now = self._context.outside.clock()
        call = ReceiveCall(
            rank, asked.handle, asked.group, asked.rank, asked.tag, asked.nbytes, (name, asked.clock), now,
            memory=memory,
        )  # fmt: skip
        self._context.trace.record(Kind.READY, name, asked.nbytes, asked.clock, 0, 0, rank)
        why = self._presence.why_not(rank, asked.group, asked.rank, sends=False)
        message = None if why else self._mailbox(asked.group, rank).receive(call)
        if not why and message is None and (why := self._presence.why_nothing_comes(call)):
            self._mailbox(asked.group, rank).withdraw(call)
        if why:
            text = f"{call.describe(self._context.topology)} is not possible: {why}"
            self._answers.refuse(rank, asked.handle, text, call.about)
            return
        self._begin(call, asked.seconds)
        if message is not None:
            self._deliver(message, call)

    def _begin(self, call: Call, seconds: float) -> None:
        self._answers.await_end(call)
        if seconds:
            call.until = call.since + seconds
            self._deadlines.add(call.until)

    # --- matching -----------------------------------------------------------------------------------------------------

    def _mailbox(self, group: int, rank: int) -> Mailbox:
        mailbox = self._mailboxes.get((group, rank))
        if mailbox is None:
            mailbox = self._mailboxes[group, rank] = Mailbox()
        return mailbox

    def _arrived(self, message: Message) -> None:
        """A message, or word of it, has come for a local rank."""
        call = self._mailbox(message.key.process_set, message.target).arrive(message)
        if call is not None:
            self._deliver(message, call)

    def _deliver(self, message: Message, call: ReceiveCall) -> None:
        """Gives a receive the message that it has taken."""
        message.receive, call.message = call, message
        if message.data is not None:
            self._taken(message)
        if message.nbytes > call.nbytes:
            topology = self._context.topology
            self._break(
                message,
                f"{topology.describe([message.source])} sent a message of {message.nbytes} bytes with tag "
                f"{message.tag}, and {topology.describe([call.rank])} receives no more than {call.nbytes}: sizes of a "
                "send and its receive have to be equal",
            )
            return
        into = None if call.memory is None else call.memory[: message.nbytes]
        if message.data is not None:
            if into is None:
                self._received(message)
            else:
                self._copy(message, np.frombuffer(message.data, np.uint8), into)
            return
        self._context.trace.record(Kind.RUN_BEGIN, call.about[0], message.nbytes, call.about[1])
        message.into = np.empty(message.nbytes, np.uint8) if into is None else into
        if message.send is not None:
            self._copy(message, message.send.memory, message.into)
            return
        message.accepted = True
        self._limits.settled_here(message.node)
        self._context.outside.to_node(message.node, wire.MessageAccepted(message.key))
        if isinstance(message.into, Remote):  # chunks are taken by the event loop, which does not wait for its pages
            message.into = np.empty(message.nbytes, np.uint8)
        self._transfers.receive(message, message.into)

    def whole(self, message: Message) -> None:
        """All chunks of a message have come."""
        call = message.receive
        assert call is not None
        assert message.into is not None
        if isinstance(call.memory, Remote):
            self._copy(message, message.into, call.memory[: message.nbytes])
        else:
            self._received(message)

    def _taken(self, message: Message) -> None:
        """A message that travelled at once does not wait here any more."""
        if message.node < 0:
            self._limits.granted(self._context.node, 1, message.nbytes)
        else:
            self._free(message.node, message.nbytes)

    def _free(self, node: int, nbytes: int) -> None:
        count, total = self._limits.taken(node, nbytes)
        if count:
            self._context.outside.to_node(node, wire.MessagesTaken(count, total))

    def _copy(self, message: Message, source: Operand, target: Operand) -> None:
        """Copies a message that is here to where its receive wants it, on threads if it is large."""
        at_once = are_here([source, target]) and message.nbytes <= PLAIN_WORK
        nbytes = 0 if at_once else math.inf
        message.working = not at_once
        self._work.do(0, self._copying(source, target), nbytes, partial(self._copied, message))

    def _copying(self, source: Operand, target: Operand) -> list[Job]:
        """Returns jobs that copy bytes."""
        threads = max(1, min(self._context.threads, len(source) // _FEWEST))
        return split_jobs(lambda low, end: ordinary.copy(source[low:end], [target[low:end]]), len(source), threads, 1)

    def _copied(self, message: Message, error: BaseException | None) -> None:
        message.working = False
        why = message.error or _why_not_copied(error)
        if why:
            self._break(message, why)
        else:
            self._received(message)

    # --- from the peers -----------------------------------------------------------------------------------------------

    def handlers(self) -> Handlers:
        """Returns the handlers of the peers' messages about messages of ranks."""
        return {
            wire.MessageSent: self._sent_elsewhere,
            wire.MessageAccepted: self._accepted,
            wire.MessageOver: self._over,
            wire.MessagesTaken: lambda node, word: self._limits.granted(node, word.count, word.nbytes),
            wire.MessageChunk: self._transfers.chunk,
            wire.MessageCredit: self._transfers.credit,
        }

    def _sent_elsewhere(self, node: int, sent: wire.MessageSent) -> None:
        """A rank of another node has sent something. Raises `FusionError` if it cannot have, or sends too much."""
        if sent.source not in self._context.topology.ranks[node] or sent.target not in self._local:
            raise WireError(f"rank {sent.source} is not there, or rank {sent.target} not here")
        key = wire.message_key(sent.group, sent.source, sent.target, sent.clock)
        message = Message(key, sent.source, sent.target, sent.tag, sent.nbytes, node, sent.data)
        if sent.data is not None:
            if len(sent.data) != sent.nbytes:
                raise WireError(f"a message of {sent.nbytes} bytes has {len(sent.data)}")
            self._limits.came(node, sent.nbytes)
        elif key in self._messages:
            raise WireError(f"{key.name} of clock {key.clock} was announced before")
        else:
            self._limits.announced(node)
            self._messages[key] = message
        why = self._presence.why_not(sent.target, sent.group, sent.source, sends=False) or self._presence.why_gone(
            sent.target
        )
        if not why:
            self._arrived(message)
        elif sent.data is not None:
            self._free(node, sent.nbytes)
        else:
            self._break(message, f"rank {sent.target} cannot receive from rank {sent.source}: {why}")

    def _accepted(self, node: int, word: wire.MessageAccepted) -> None:
        call = self._sends.get(word.key)
        if call is not None and call.node == node and not call.accepted:  # else it has been given up here
            self._settle(call)
            self._context.trace.record(Kind.RUN_BEGIN, word.key.name, call.nbytes, word.key.clock)
            if not isinstance(call.memory, Remote):
                self._transfers.send(call, call.memory)
                return
            memory = np.empty(call.nbytes, np.uint8)
            self._work.do(0, self._copying(call.memory, memory), math.inf, partial(self._read, call, memory))

    def _read(self, call: SendCall, memory: Array, error: BaseException | None) -> None:
        """A worker's own memory has been read, or not; the send may have failed meanwhile."""
        if self._sends.get(call.key) is not call:
            return
        if why := _why_not_copied(error):
            self.fail_call(call, f"{call.describe(self._context.topology)} failed: {why}")
        else:
            self._transfers.send(call, memory)

    def _over(self, node: int, word: wire.MessageOver) -> None:
        call, message = self._sends.get(word.key), self._messages.get(word.key)
        if call is not None and call.node == node:
            self._failed(call, word.error)
        elif message is not None and message.node == node:
            self._break(message, word.error, tell=False)

    # --- results ------------------------------------------------------------------------------------------------------

    def _received(self, message: Message) -> None:
        """A message is where its receive wants it."""
        call = message.receive
        assert call is not None
        self._messages.pop(message.key, None)
        inline = None
        if call.memory is None:
            inline = message.data if message.into is None else cast(Array, message.into).tobytes()
        if self._answers.end(call, inline, (message.source, message.nbytes)):
            self.completed += 1
            self.completed_bytes += message.nbytes
        call.message = None  # no circle: memory of workers is free as soon as it is not used
        if message.send is not None:
            self.sent(message.send)

    def sent(self, call: SendCall) -> None:
        """The memory of a send may be used again."""
        self._sends.pop(call.key, None)
        self._settle(call)
        call.message = None
        self._answers.end(call)

    def _settle(self, call: SendCall) -> None:
        """A send's message is not only announced any more."""
        if not call.accepted:
            call.accepted = True
            self._limits.settled_there(self._context.node if call.node < 0 else call.node)

    # --- failures -----------------------------------------------------------------------------------------------------

    def _failed(self, call: Call, error: str) -> None:
        """Tells a worker that its send or receive has failed, which nothing is left of then."""
        call.message = None
        if isinstance(call, SendCall):
            self._sends.pop(call.key, None)
            self._transfers.forget(call.key)
            self._settle(call)
        self._answers.fail(call, error)

    def fail_call(self, call: Call, error: str) -> None:
        """A send or receive fails, and so does its counterpart."""
        if call.message is not None:
            self._break(call.message, error)
            return
        if isinstance(call, SendCall):
            self._context.outside.to_node(call.node, wire.MessageOver(call.key, error))
        elif isinstance(call, ReceiveCall):
            self._mailbox(call.group, call.rank).withdraw(call)
        self._failed(call, error)

    def _break(self, message: Message, error: str, tell: bool = True) -> None:
        """A message fails at both ends; `tell`: the other node does not know it."""
        if message.working:
            message.error = message.error or error
            return
        if message.receive is None:
            self._unkeep(message)
        if self._messages.pop(message.key, None) is not None:
            self._transfers.forget(message.key)
            if not message.accepted:
                self._limits.settled_here(message.node)
            if tell:
                self._context.outside.to_node(message.node, wire.MessageOver(message.key, error))
        for call in (message.send, message.receive):
            if call is not None:
                self._failed(call, error)

    def _unkeep(self, message: Message) -> None:
        """A message that no receive has taken is not kept any more."""
        mailbox = self._mailbox(message.key.process_set, message.target)
        if message in mailbox:
            mailbox.drop(message)
            if message.data is not None:
                self._taken(message)

    def end_overdue(self, now: float) -> float:
        """Ends those that are due; returns when the next one is."""
        for call in self._answers:
            if call.until <= now:
                self.fail_call(call, self.reports.explain(call, call.until - call.since))
        return min((call.until for call in self._answers if call.until > now), default=math.inf)

    # --- membership ---------------------------------------------------------------------------------------------------

    def gone(self, ranks: Iterable[int], joined: bool = False) -> None:
        """These ranks have left, or are lost: what waits for them, or is theirs, fails. What they have sent, and what
        has come, may still be received. Ranks that have joined are there."""
        if joined:
            return
        gone = set(ranks)
        for call in self._answers:
            whose = call.rank
            if whose not in gone:
                whose = call.other if call.message is None else self._source_or_target(call, call.message)
                if call.message is not None and call.rank == call.message.target and self._presence.has_left(whose):
                    continue  # its daemon sends the data that it has taken from it, or says that it does not
            why = self._presence.why_gone(whose) if whose in gone else ""
            if not why and call.message is None and isinstance(call, ReceiveCall):
                why = self._presence.why_nothing_comes(call)
            if why:
                self.fail_call(call, f"{call.describe(self._context.topology)} failed: {why}")
        for (_, owner), mailbox in self._mailboxes.items():
            if owner in gone:
                self._empty(mailbox, self._presence.why_gone(owner))

    @staticmethod
    def _source_or_target(call: Call, message: Message) -> int:
        """Returns the rank at the other end of a message."""
        return message.source if call.rank == message.target else message.target

    def close(self, group: int, rank: int) -> None:
        """A local rank has closed a group: its messages under way there fail, and nothing more comes."""
        why = f"{self._context.topology.describe([rank])} has closed the group"
        for call in self._answers:
            if (call.group, call.rank) == (group, rank):
                self.fail_call(call, f"{call.describe(self._context.topology)} failed: {why}")
        mailbox = self._mailboxes.get((group, rank))
        if mailbox is not None:
            self._empty(mailbox, why)
            del self._mailboxes[group, rank]

    def _empty(self, mailbox: Mailbox, why: str) -> None:
        for message in list(mailbox.messages()):
            self._break(message, f"{message.key.name} with tag {message.tag} failed: {why}")

    def end(self, error: str) -> None:
        """Fails everything under way with this sentence."""
        for call in self._answers:
            self.fail_call(call, f"{call.describe(self._context.topology)} failed: {error}")

    def fail(self, error: str) -> None:
        """Forgets everything under way: the job cannot go on, for this reason."""
        self._answers.clear()
        self._sends.clear()
        self._messages.clear()
        self._mailboxes.clear()
        self._transfers.clear()
        self._limits = Limits()

    @property
    def idle(self) -> bool:
        """True if no local worker waits for a send or a receive."""
        return not self._answers

    @property
    def is_empty(self) -> bool:
        """True if nothing is kept either."""
        kept = self._sends or self._messages or any(self._mailboxes.values()) or not self._transfers.is_empty
        return self.idle and not kept and self._limits.are_clear

    def statistics(self) -> dict[str, object]:
        """Returns the sends and receives `under_way`, messages `kept` that nobody has received, those `completed`,
        their `bytes`, and chunks `dropped` because their messages were over."""
        return {
            "under_way": len(self._answers),
            "kept": sum(1 for mailbox in self._mailboxes.values() for _ in mailbox.messages()),
            "completed": self.completed,
            "bytes": self.completed_bytes,
            "dropped": self._transfers.dropped,
        }


def _why_not_copied(error: BaseException | None) -> str:
    """Returns why a job could not copy, as a sentence; empty if it could. Raises unexpected errors."""
    if error is not None and not isinstance(error, FusionError):
        raise error
    return "" if error is None else str(error)
